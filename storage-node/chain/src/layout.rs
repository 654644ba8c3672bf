//! Which chain holds a chunk: a specified permutation, equal in every process and for ever.
//!
//! The permutation is a Fisher–Yates shuffle of `0..chains` driven by SplitMix64 from the layout's
//! seed; bounded draws take the high 64 bits of a 128-bit product. Golden vectors pin it: a change
//! would make every stored file unreadable.

use crate::id::ChainId;

/// Where the chunks of a file live. Fixed when the file is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// The chain table that `chains` counts.
    pub table: u32,
    /// Chains that the table had at creation: chain ids `1..=chains`.
    pub chains: u32,
    /// How many different chains the file uses, at most `chains`.
    pub stripe: u32,
    /// Size of every chunk in bytes: a power of two.
    pub chunk_size_bytes: u32,
    /// Seed of the permutation.
    pub seed: u64,
}

/// Bounds of [`Layout::chunk_size_bytes`].
pub const CHUNK_SIZE_MIN_BYTES: u32 = 64 << 10;
/// See [`CHUNK_SIZE_MIN_BYTES`].
pub const CHUNK_SIZE_MAX_BYTES: u32 = 64 << 20;

/// Most chains that one table may have: bounds the work of one permutation.
pub const CHAINS_MAX: u32 = 1 << 20;

impl Layout {
    /// Whether the numbers can be used: read from a disk or a peer, they must pass this first.
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        self.stripe >= 1
            && self.stripe <= self.chains
            && self.chains <= CHAINS_MAX
            && self.chunk_size_bytes.is_power_of_two()
            && self.chunk_size_bytes >= CHUNK_SIZE_MIN_BYTES
            && self.chunk_size_bytes <= CHUNK_SIZE_MAX_BYTES
    }

    /// The chains of the file, in stripe order: chunk `i` lives on entry `i % stripe`.
    /// Empty for an invalid layout.
    #[must_use]
    pub fn stripe_chains(&self) -> Vec<ChainId> {
        if !self.is_valid() {
            return Vec::new();
        }
        let mut state = self.seed;
        let mut order: Vec<u32> = (1..=self.chains).collect();
        let count = order.len();
        for i in 0..(self.stripe as usize).min(count.saturating_sub(1)) {
            let left = (count - i) as u64;
            let draw = (u128::from(splitmix64(&mut state)) * u128::from(left)) >> 64;
            #[expect(
                clippy::cast_possible_truncation,
                reason = "below `left`, which was a `usize`"
            )]
            order.swap(i, i + draw as usize);
        }
        order.truncate(self.stripe as usize);
        order.into_iter().map(ChainId::new).collect()
    }
}

pub(crate) fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(chains: u32, stripe: u32, seed: u64) -> Layout {
        Layout { table: 1, chains, stripe, chunk_size_bytes: 1 << 20, seed }
    }

    fn raw(layout: &Layout) -> Vec<u32> {
        layout.stripe_chains().into_iter().map(ChainId::get).collect()
    }

    #[test]
    fn splitmix_matches_its_published_vector() {
        let mut state = 1_234_567;
        assert_eq!(splitmix64(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(splitmix64(&mut state), 3_203_168_211_198_807_973);
    }

    #[test]
    fn stripes_are_distinct_chains_of_the_table() {
        for seed in 0..200 {
            let mut chains = raw(&layout(9, 6, seed));
            assert_eq!(chains.len(), 6);
            chains.sort_unstable();
            chains.dedup();
            assert_eq!(chains.len(), 6);
            assert!(chains.iter().all(|c| (1..=9).contains(c)));
        }
    }

    #[test]
    fn every_chain_is_used_about_equally() {
        let mut count = [0u32; 8];
        for seed in 0..8_000 {
            for chain in raw(&layout(7, 2, seed)) {
                count[chain as usize] += 1;
            }
        }
        let expected = 16_000 / 7;
        assert!(count[1..].iter().all(|c| c.abs_diff(expected) < expected / 10), "{count:?}");
    }

    #[test]
    fn an_invalid_layout_names_no_chain() {
        assert!(layout(3, 4, 0).stripe_chains().is_empty());
        assert!(layout(0, 0, 0).stripe_chains().is_empty());
        assert!(Layout { chunk_size_bytes: 3 << 20, ..layout(3, 3, 0) }.stripe_chains().is_empty());
    }
}
