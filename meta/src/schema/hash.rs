//! The keyed hash of names: SipHash-2-4. Keyed, so that nobody can make many names collide.

use super::COOKIE_MIN;

/// Key of the hash, one for each cluster, fixed for ever.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HashKey(u64, u64);

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(..)")
    }
}

impl HashKey {
    /// From the stored number.
    #[must_use]
    pub const fn new(raw: u128) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half of 128 bits")]
        Self(raw as u64, (raw >> 64) as u64)
    }

    /// The place of `name` in its directory: [`COOKIE_MIN`] to 2^63 − 1.
    #[must_use]
    pub fn cookie(&self, name: &[u8]) -> u64 {
        (self.hash(name) >> 1).max(COOKIE_MIN)
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        let mut v = [
            self.0 ^ 0x736f_6d65_7073_6575,
            self.1 ^ 0x646f_7261_6e64_6f6d,
            self.0 ^ 0x6c79_6765_6e65_7261,
            self.1 ^ 0x7465_6462_7974_6573,
        ];
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            absorb(&mut v, u64::from_le_bytes(*word));
        }
        let mut last = [0u8; 8];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        // Only the length modulo 256 goes in.
        absorb(&mut v, u64::from_le_bytes(last) | (bytes.len() as u64 & 0xff) << 56);
        v[2] ^= 0xff;
        (0..4).for_each(|_| round(&mut v));
        v[0] ^ v[1] ^ v[2] ^ v[3]
    }
}

fn absorb(v: &mut [u64; 4], word: u64) {
    v[3] ^= word;
    round(v);
    round(v);
    v[0] ^= word;
}

const fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_vector() {
        let key = HashKey(0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);
        let input: Vec<u8> = (0..15).collect();
        assert_eq!(key.hash(&input), 0xa129_ca61_49be_45e5);
        assert_eq!(key.hash(&[]), 0x726f_db47_dd0e_0e31);
    }

    #[test]
    fn a_cookie_fits_a_signed_offset() {
        let key = HashKey::new(7);
        let cookies = (0..1000u32).map(|i| key.cookie(&i.to_le_bytes()));
        assert!(cookies.into_iter().all(|c| (COOKIE_MIN..=i64::MAX as u64).contains(&c)));
    }
}
