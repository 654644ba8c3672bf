//! Page-aligned memory for O_DIRECT, without unsafe code.

use std::fmt;

use bytes::Bytes;

use super::checksum::PAGE_SIZE;

/// Zeroed memory that starts at a multiple of [`PAGE_SIZE`] and has a multiple of it as length.
pub(crate) struct AlignedBuf {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// `pages` pages of zeros.
    pub(crate) fn zeroed(pages: usize) -> Self {
        let len = pages * PAGE_SIZE;
        let memory = vec![0; len + PAGE_SIZE];
        // The vector never grows, so its memory stays where it is when the vector moves.
        let start = memory.as_ptr().addr().next_multiple_of(PAGE_SIZE) - memory.as_ptr().addr();
        Self { memory, start, len }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes, shared without a copy.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self.memory.get(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self.memory.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_of_the_asked_length() {
        for pages in [0, 1, 3, 16] {
            let buf = AlignedBuf::zeroed(pages);
            assert_eq!(buf.as_ref().as_ptr().addr() % PAGE_SIZE, 0);
            assert_eq!(buf.as_ref(), vec![0; pages * PAGE_SIZE]);
        }
    }
}
