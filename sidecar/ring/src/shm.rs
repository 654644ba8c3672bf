//! Memory shared with a process that is not trusted: memfds whose size is sealed.
//!
//! Without the seals a peer could shrink the file under a mapping, and the next access would kill this process (SIGBUS).
//! So a region is sealed against any change of size before it is mapped, and one that comes from a peer is refused if
//! it is not. The bytes in it may change at any moment: they are copied out before they mean anything.
#![expect(unsafe_code, reason = "mapping shared memory and copying from and to it")]

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// Largest region that anything here maps: 16 GiB.
pub const REGION_MAX: usize = 16 << 30;

/// `statfs` type of the kernel's own tmpfs: memfds, but not those in huge pages, which fault when these run out.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Why memory could not be shared.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A system call failed.
    #[error("{doing}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the kernel answered.
        #[source]
        source: std::io::Error,
    },
    /// The size is zero or above the limit.
    #[error("region of {len} bytes, must be 1 to {max}")]
    Size {
        /// Size asked for or found.
        len: u64,
        /// Largest size allowed.
        max: u64,
    },
    /// The peer's descriptor is not a memfd sealed against a change of size.
    #[error("descriptor is not a memfd with seals against shrinking and growing")]
    NotSealed,
    /// An access outside the region, or not aligned.
    #[error("access of {len} bytes at {offset} outside a region of {size}")]
    Bounds {
        /// Start of the access.
        offset: usize,
        /// Its length.
        len: usize,
        /// The region's size.
        size: usize,
    },
}

fn io(doing: &'static str) -> impl Fn(Errno) -> ShmError {
    move |errno| ShmError::Io { doing, source: errno.into() }
}

/// A sealed memfd and its mapping, readable and writable.
#[derive(Debug)]
pub struct Region {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the region alone until drop; every access goes through raw copies or atomics.
unsafe impl Send for Region {}
// SAFETY: as above; concurrent copies race no more than the other process's accesses do, and no reference to plain bytes is made.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region of `len` bytes, zeroed; pages are allocated when first touched. `name` shows in `/proc/*/maps`.
    ///
    /// # Errors
    /// [`ShmError::Size`] or the kernel's error.
    pub fn create(name: &str, len: usize) -> Result<Self, ShmError> {
        check_len(len as u64, REGION_MAX)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(io("create memfd"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(io("size memfd"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(io("seal memfd"))?;
        Self::map(fd, len)
    }

    /// Maps a region that a peer sent, of at most `max_len` bytes.
    ///
    /// # Errors
    /// [`ShmError::NotSealed`], [`ShmError::Size`] or the kernel's error.
    pub fn open(fd: OwnedFd, max_len: usize) -> Result<Self, ShmError> {
        let kind = rustix::fs::fstatfs(&fd).map_err(io("stat shared memory"))?.f_type;
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| ShmError::NotSealed)?;
        #[allow(clippy::unnecessary_cast, reason = "the width differs between platforms")]
        if kind as i64 != TMPFS_MAGIC || !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(ShmError::NotSealed);
        }
        // Seals first: from here on the size cannot change.
        let stat = rustix::fs::fstat(&fd).map_err(io("stat shared memory"))?;
        let len = check_len(u64::try_from(stat.st_size).unwrap_or(0), max_len.min(REGION_MAX))?;
        Self::map(fd, len)
    }

    fn map(fd: OwnedFd, len: usize) -> Result<Self, ShmError> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of this program.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &fd, 0) }
            .map_err(io("map shared memory"))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io("map shared memory")(Errno::INVAL))?;
        Ok(Self { fd, base, len })
    }

    /// Size in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty region cannot be made.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memfd, to be sent to the peer.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Start of the mapping, valid for [`len`](Self::len) bytes while the region lives. The peer may change the bytes at any
    /// time: a slice over them is sound only if the peer is known to leave them alone meanwhile.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Copies `bytes` into the region at `offset`.
    ///
    /// # Errors
    /// [`ShmError::Bounds`].
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), ShmError> {
        let to = self.at(offset, bytes.len(), 1)?;
        // SAFETY: `at` proved that the range is inside the mapping; a live slice of ours cannot overlap it, none is ever made.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies out of the region at `offset` until `bytes` is full.
    ///
    /// # Errors
    /// [`ShmError::Bounds`].
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<(), ShmError> {
        let from = self.at(offset, bytes.len(), 1)?;
        // SAFETY: as in `copy_in`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Fills `len` bytes at `offset` with zeros.
    ///
    /// # Errors
    /// [`ShmError::Bounds`].
    pub fn zero(&self, offset: usize, len: usize) -> Result<(), ShmError> {
        let to = self.at(offset, len, 1)?;
        // SAFETY: `at` proved that the range is inside the mapping.
        unsafe { std::ptr::write_bytes(to, 0, len) };
        Ok(())
    }

    /// Allocates every page now, so that the memory is accounted to this process and no later access has to.
    ///
    /// # Errors
    /// The kernel's error, e.g. no memory.
    pub fn populate(&self) -> Result<(), ShmError> {
        let advice = rustix::mm::Advice::LinuxPopulateWrite;
        // SAFETY: the range is this region's own mapping; the advice keeps its content.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast::<c_void>(), self.len, advice) }
            .map_err(io("populate shared memory"))
    }

    /// A 32-bit field that both sides use. `offset` must be a multiple of 4.
    ///
    /// # Errors
    /// [`ShmError::Bounds`].
    pub fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32, ShmError> {
        let at = self.at(offset, 4, 4)?;
        // SAFETY: inside the mapping (page-aligned base), aligned, alive as long as `self`, and only ever used atomically here.
        Ok(unsafe { AtomicU32::from_ptr(at.cast()) })
    }

    /// A 64-bit field that both sides use. `offset` must be a multiple of 8.
    ///
    /// # Errors
    /// [`ShmError::Bounds`].
    pub fn atomic_u64(&self, offset: usize) -> Result<&AtomicU64, ShmError> {
        let at = self.at(offset, 8, 8)?;
        // SAFETY: as in `atomic_u32`.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    fn at(&self, offset: usize, len: usize, align: usize) -> Result<*mut u8, ShmError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(align) {
            return Err(ShmError::Bounds { offset, len, size: self.len });
        }
        // SAFETY: `offset` is at most the mapping's length, so the pointer stays in it or one past its end.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and nothing borrows from it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn check_len(len: u64, max: usize) -> Result<usize, ShmError> {
    match usize::try_from(len) {
        Ok(len) if len > 0 && len <= max => Ok(len),
        _ => Err(ShmError::Size { len, max: max as u64 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("t", flags).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn two_mappings_of_one_region_see_the_same_bytes() {
        let region = Region::create("t", 8192).unwrap();
        region.populate().unwrap();
        let twin = Region::open(region.fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        region.copy_in(4090, b"across pages").unwrap();
        let mut seen = [0; 12];
        twin.copy_out(4090, &mut seen).unwrap();
        assert_eq!(&seen, b"across pages");
        twin.zero(4091, 10).unwrap();
        region.copy_out(4090, &mut seen).unwrap();
        assert_eq!(&seen, b"a\0\0\0\0\0\0\0\0\0\0s");
        region.atomic_u32(8188).unwrap().store(7, std::sync::atomic::Ordering::Release);
        assert_eq!(twin.atomic_u32(8188).unwrap().load(std::sync::atomic::Ordering::Acquire), 7);
    }

    #[test]
    fn accesses_outside_or_misaligned_are_refused() {
        let region = Region::create("t", 4096).unwrap();
        assert!(region.copy_in(4096, b"").is_ok());
        assert!(matches!(region.copy_in(4096, b"x"), Err(ShmError::Bounds { .. })));
        assert!(matches!(region.copy_out(usize::MAX, &mut [0; 2]), Err(ShmError::Bounds { .. })));
        assert!(matches!(region.zero(1, 4096), Err(ShmError::Bounds { .. })));
        assert!(region.atomic_u32(2).is_err());
        assert!(region.atomic_u64(4092).is_err());
    }

    #[test]
    fn a_region_cannot_change_its_size() {
        let region = Region::create("t", 8192).unwrap();
        for len in [0, 4096, 16384] {
            assert_eq!(rustix::fs::ftruncate(region.fd(), len), Err(Errno::PERM), "to {len}");
        }
    }

    #[test]
    fn descriptors_that_could_shrink_are_refused() {
        let unsealed = memfd(4096, SealFlags::empty());
        assert!(matches!(Region::open(unsealed, 4096), Err(ShmError::NotSealed)));
        let growable = memfd(4096, SealFlags::SHRINK);
        assert!(matches!(Region::open(growable, 4096), Err(ShmError::NotSealed)));
        let file = tempfile_fd();
        assert!(matches!(Region::open(file, 4096), Err(ShmError::NotSealed)));
        let both = SealFlags::SHRINK | SealFlags::GROW;
        assert!(matches!(Region::open(memfd(0, both), 4096), Err(ShmError::Size { len: 0, .. })));
        assert!(matches!(Region::open(memfd(8192, both), 4096), Err(ShmError::Size { .. })));
        assert!(Region::open(memfd(4096, both), 4096).is_ok());
        let frozen = memfd(4096, both | SealFlags::WRITE);
        assert!(matches!(Region::open(frozen, 4096), Err(ShmError::Io { .. })));
    }

    fn tempfile_fd() -> OwnedFd {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR).unwrap()
    }
}
