//! A stateless file system over one directory: what a server process does survives its death.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use sidecar::vfs::{
    Attr, Caller, DirEntry, DirPage, Errno, FileSystem, Kind, Opened, ROOT, SetAttr, StatFs,
};

/// Files of one directory, numbered by their own inode numbers; every answer takes `delay`. While there is a file `names`
/// beside the directory, questions about names and attributes wait; while there is one `bytes`, reads of the file `held` do.
#[derive(Debug)]
pub(crate) struct LocalFs {
    pub dir: PathBuf,
    pub delay: Duration,
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn errno(error: std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

impl LocalFs {
    fn path(&self, ino: u64) -> Result<PathBuf, Errno> {
        if ino == ROOT {
            return Ok(self.dir.clone());
        }
        let mut entries = fs::read_dir(&self.dir).map_err(errno)?.flatten();
        let found = entries.find(|entry| entry.metadata().is_ok_and(|data| data.ino() == ino));
        found.map(|entry| entry.path()).ok_or(Errno::ENOENT)
    }

    fn attr(&self, path: &std::path::Path) -> Result<Attr, Errno> {
        let data = fs::metadata(path).map_err(errno)?;
        let is_root = path == self.dir;
        Ok(Attr {
            ino: if is_root { ROOT } else { data.ino() },
            kind: if data.is_dir() { Kind::Directory } else { Kind::File },
            size: data.len(),
            mode: if is_root { 0o777 } else { data.mode() & 0o7777 },
            uid: data.uid(),
            gid: data.gid(),
            links: 1,
            accessed_ns: 0,
            modified_ns: 0,
            changed_ns: 0,
            block_size: 4096,
        })
    }

    fn named(&self, name: &[u8]) -> PathBuf {
        self.dir.join(String::from_utf8_lossy(name).as_ref())
    }

    async fn wait_while(&self, beside: &str) {
        while self.dir.with_file_name(beside).exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn pause(&self) {
        tokio::time::sleep(self.delay).await;
    }
}

#[async_trait::async_trait]
impl FileSystem for LocalFs {
    async fn lookup(&self, _: u64, name: &[u8]) -> Result<Attr, Errno> {
        self.wait_while("names").await;
        self.attr(&self.named(name))
    }

    async fn getattr(&self, ino: u64) -> Result<Attr, Errno> {
        self.wait_while("names").await;
        self.attr(&self.path(ino)?)
    }

    async fn setattr(&self, _: Caller, ino: u64, set: SetAttr) -> Result<Attr, Errno> {
        let path = self.path(ino)?;
        if let Some(size) = set.size {
            let file = OpenOptions::new().write(true).open(&path).map_err(errno)?;
            file.set_len(size).map_err(errno)?;
        }
        self.attr(&path)
    }

    async fn readdir(&self, _: u64, cookie: u64, _: u32) -> Result<DirPage, Errno> {
        let mut names: Vec<_> = fs::read_dir(&self.dir).map_err(errno)?.flatten().collect();
        names.sort_by_key(fs::DirEntry::file_name);
        let mut entries = Vec::new();
        for (name, cookie) in names.into_iter().zip(1..).skip(usize::try_from(cookie).unwrap()) {
            let attr = self.attr(&name.path())?;
            let name = name.file_name().into_encoded_bytes().into();
            entries.push(DirEntry { name, cookie, attr });
        }
        Ok(DirPage { entries, end: true })
    }

    async fn open(&self, _: Caller, ino: u64, _: bool) -> Result<Opened, Errno> {
        Ok(Opened { attr: self.attr(&self.path(ino)?)?, keep_cache: false })
    }

    async fn create(
        &self,
        _: Caller,
        _: u64,
        name: &[u8],
        _: u32,
        exclusive: bool,
    ) -> Result<Opened, Errno> {
        let path = self.named(name);
        let mut options = OpenOptions::new();
        options.write(true).create(true).create_new(exclusive);
        options.open(&path).map_err(errno)?;
        // The answer comes late: a death in between leaves a file that nobody was told of.
        self.pause().await;
        Ok(Opened { attr: self.attr(&path)?, keep_cache: false })
    }

    async fn read_parts(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<Bytes>, Errno> {
        self.pause().await;
        let path = self.path(ino)?;
        if path.ends_with("held") {
            self.wait_while("bytes").await;
        }
        let file = File::open(path).map_err(errno)?;
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        let mut count = 0;
        while let read @ 1.. =
            file.read_at(&mut bytes[count..], offset + count as u64).map_err(errno)?
        {
            count += read;
        }
        bytes.truncate(count);
        Ok(vec![bytes.into()])
    }

    async fn write(&self, _: Caller, ino: u64, offset: u64, bytes: Bytes) -> Result<(), Errno> {
        let file = OpenOptions::new().write(true).open(self.path(ino)?).map_err(errno)?;
        file.write_all_at(&bytes, offset).map_err(errno)?;
        self.pause().await;
        Ok(())
    }

    async fn flush(&self, _: u64) -> Result<(), Errno> {
        Ok(())
    }

    async fn fsync(&self, _: u64) -> Result<(), Errno> {
        Ok(())
    }

    async fn release(&self, _: u64, _: bool) {}

    async fn mkdir(&self, _: Caller, _: u64, _: &[u8], _: u32) -> Result<Attr, Errno> {
        Err(Errno::ENOSYS)
    }

    async fn unlink(&self, _: Caller, _: u64, name: &[u8]) -> Result<(), Errno> {
        fs::remove_file(self.named(name)).map_err(errno)
    }

    async fn rmdir(&self, _: Caller, _: u64, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    async fn rename(
        &self,
        _: Caller,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        _: bool,
    ) -> Result<(), Errno> {
        fs::rename(self.named(from.1), self.named(to.1)).map_err(errno)
    }

    async fn symlink(&self, _: Caller, _: u64, _: &[u8], _: &[u8]) -> Result<Attr, Errno> {
        Err(Errno::ENOSYS)
    }

    async fn readlink(&self, _: u64) -> Result<Bytes, Errno> {
        Err(Errno::EINVAL)
    }

    async fn statfs(&self) -> Result<StatFs, Errno> {
        Ok(StatFs { capacity_bytes: 1 << 30, free_bytes: 1 << 29, inodes: 1 })
    }
}
