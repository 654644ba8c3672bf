//! Checksums that tell which page of which chunk and version some bytes are.
//!
//! A page's stored checksum is CRC32C(domain ‖ page): the domain names target, chunk, page and
//! version, so bytes that are intact but in the wrong place, or of an older version, fail.
//! CRC is linear: the plain CRC of a page follows from the stored one without reading the page,
//! and CRCs of neighbours combine. So a chunk's checksum costs a few multiplications after an
//! update of one page, and never hashes bytes that were not verified.

use std::sync::LazyLock;

use chain::id::UpdateVersion;

use super::types::Place;

/// Granularity of verification, and alignment of block IO, in bytes.
pub(super) const PAGE_SIZE: usize = 4096;

/// The reflected Castagnoli polynomial, without its term x^32.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// CRC of what a page is: target, file, index, version and page number, little-endian.
pub(super) fn domain(place: Place, version: UpdateVersion, page: u64) -> u32 {
    let mut bytes = [0; 40];
    let fields =
        [place.target.get(), place.chunk.file.get(), place.chunk.index, version.get(), page];
    for (slot, field) in bytes.chunks_exact_mut(8).zip(fields) {
        slot.copy_from_slice(&field.to_le_bytes());
    }
    crc32c::crc32c(&bytes)
}

/// The stored checksum of a page.
pub(super) fn seal(domain: u32, page: &[u8]) -> u32 {
    crc32c::crc32c_append(domain, page)
}

/// The plain CRC of a page from its stored checksum.
pub(super) fn unseal(domain: u32, stored: u32) -> u32 {
    stored ^ multiply(domain, *PAGE_SHIFT)
}

/// CRC of `a ‖ b` from both CRCs and the length of b in bytes.
pub(super) fn combine(a: u32, b: u32, b_len: u64) -> u32 {
    multiply(a, shift(b_len)) ^ b
}

/// CRC of `a` from that of `a ‖ b`.
pub(super) fn strip(ab: u32, b: u32, b_len: u64) -> u32 {
    multiply(ab ^ b, unshift(b_len))
}

/// CRC of `len` zero bytes.
pub(super) fn zeros(len: u64) -> u32 {
    // The register starts and ends inverted: !0 goes through the zeros and is inverted.
    !multiply(!0, shift(len))
}

/// Combines the plain CRCs of whole pages.
pub(super) fn fold(pages: impl IntoIterator<Item = u32>) -> u32 {
    pages.into_iter().fold(0, |sum, page| multiply(sum, *PAGE_SHIFT) ^ page)
}

static PAGE_SHIFT: LazyLock<u32> = LazyLock::new(|| shift(PAGE_SIZE as u64));
/// x^(8·2^i) for each i.
static POWERS: LazyLock<[u32; 64]> = LazyLock::new(|| squares(ONE_BYTE));
/// Their inverses.
static INVERSES: LazyLock<[u32; 64]> = LazyLock::new(|| {
    // x · (P(x) − 1)/x = −1 = 1: the inverse of x is P without its constant term, shifted down.
    // Reflected, that is the polynomial shifted up, with x^31 (the term of x^32) set.
    let inverse_x = POLYNOMIAL << 1 | 1;
    let inverse_byte = (0..7).fold(inverse_x, |product, _| multiply(product, inverse_x));
    squares(inverse_byte)
});
/// x^8; in reflected form bit 31 is x^0.
const ONE_BYTE: u32 = 1 << 23;
const ONE: u32 = 1 << 31;

fn squares(base: u32) -> [u32; 64] {
    let mut power = base;
    std::array::from_fn(|_| {
        let this = power;
        power = multiply(power, power);
        this
    })
}

fn shift(bytes: u64) -> u32 {
    power(&POWERS, bytes)
}

fn unshift(bytes: u64) -> u32 {
    power(&INVERSES, bytes)
}

fn power(table: &[u32; 64], exponent: u64) -> u32 {
    table
        .iter()
        .enumerate()
        .filter(|(bit, _)| exponent >> bit & 1 == 1)
        .fold(ONE, |product, (_, factor)| multiply(product, *factor))
}

/// Product of two polynomials modulo the CRC's, in reflected form.
fn multiply(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut b = b;
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = b >> 1 ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    product
}

#[cfg(test)]
mod tests {
    use chain::id::{ChunkId, InodeId, TargetId};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn combine_and_strip_agree_with_hashing(
            a in prop::collection::vec(any::<u8>(), 0..9000),
            b in prop::collection::vec(any::<u8>(), 0..9000),
        ) {
            let (crc_a, crc_b) = (crc32c::crc32c(&a), crc32c::crc32c(&b));
            let joined = crc32c::crc32c(&[a, b.clone()].concat());
            prop_assert_eq!(combine(crc_a, crc_b, b.len() as u64), joined);
            prop_assert_eq!(strip(joined, crc_b, b.len() as u64), crc_a);
        }
    }

    #[test]
    fn zeros_agree_with_hashing() {
        for len in [0, 1, 7, 4096, 10_000] {
            assert_eq!(zeros(len), crc32c::crc32c(&vec![0; usize::try_from(len).unwrap()]));
        }
    }

    #[test]
    fn the_plain_checksum_follows_from_the_stored_one() {
        let chunk = ChunkId { file: InodeId::new(5), index: 6 };
        let place = Place { target: TargetId::new(4), chunk };
        let pages = [[1_u8; PAGE_SIZE], [2; PAGE_SIZE]];
        let plain = pages.iter().enumerate().map(|(i, page)| {
            let domain = domain(place, UpdateVersion::new(7), i as u64);
            unseal(domain, seal(domain, page))
        });
        assert_eq!(fold(plain), crc32c::crc32c(&pages.concat()));
    }

    #[test]
    fn each_field_of_the_domain_changes_the_checksum() {
        let place = |t, f, i| Place {
            target: TargetId::new(t),
            chunk: ChunkId { file: InodeId::new(f), index: i },
        };
        let v = UpdateVersion::new;
        let all = [
            domain(place(1, 1, 1), v(1), 1),
            domain(place(2, 1, 1), v(1), 1),
            domain(place(1, 2, 1), v(1), 1),
            domain(place(1, 1, 2), v(1), 1),
            domain(place(1, 1, 1), v(2), 1),
            domain(place(1, 1, 1), v(1), 2),
        ];
        let distinct: std::collections::BTreeSet<_> =
            all.iter().map(|d| seal(*d, &[0; PAGE_SIZE])).collect();
        assert_eq!(distinct.len(), all.len());
    }
}
