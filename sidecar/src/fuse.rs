//! The FUSE front end: fuser's requests onto a [`FileSystem`], answered by tasks.
//!
//! A few threads read one shared descriptor and hand each request to the runtime, so that a slow one
//! holds nobody up. What a restarted process would not know is not kept: a file handle says only whether
//! the file was opened for writing, and lookup counts are ignored. A request that the kernel sends a second time, because the process that had read
//! it died, may have been carried out: operations that would then fail on their own success are
//! answered from what is there (`resent` below).
//!
//! fuser answers INTERRUPT with ENOSYS, so the kernel waits for the true answer of a request whose
//! caller was killed; the deadlines of the file systems below bound that wait.

use std::ffi::OsStr;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fuser::{
    BsdFileFlags, Config, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, Session, SessionACL, TimeOrNow, WriteFlags,
};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::resume::{self, Exchange, RESENT, ResumeError};
use crate::vfs::{Attr, Caller, Errno, FileSystem, IO_MAX, Kind, SetAttr};

/// Requests answered at once. Each may hold one message of [`IO_MAX`]; more wait in the kernel.
const MAX_IN_FLIGHT: usize = 64;
/// Background requests (read-ahead, asynchronous reads) that the kernel may send at once.
const MAX_BACKGROUND: u16 = 256;
/// How long attributes and names of a file system that changes are believed.
const TTL_MUTABLE: Duration = Duration::from_secs(1);
/// How long those of a dataset are believed: its objects have fixed identities.
const TTL_IMMUTABLE: Duration = Duration::from_secs(3600);
/// Names asked of a directory for one reply; more than fit into the kernel's buffer are cut.
const DIR_PAGE: u32 = 128;

/// Threads that read requests: they only parse and hand over.
#[must_use]
pub fn reader_threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8)
}

/// How a mount is served.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Whether names and contents never change below a mount: a dataset.
    pub immutable: bool,
    /// Threads that read requests.
    pub threads: usize,
}

/// A mount that is answered until its connection ends.
#[derive(Debug)]
pub struct Mounted {
    in_flight: Arc<Semaphore>,
    served: Arc<AtomicUsize>,
    /// Ends when the connection does.
    pub thread: std::thread::JoinHandle<io::Result<()>>,
}

impl Mounted {
    /// Takes no more requests: they wait in the kernel for the next process.
    pub fn close(&self) {
        self.in_flight.close();
    }

    /// Requests being answered now.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        MAX_IN_FLIGHT.saturating_sub(self.in_flight.available_permits())
    }

    /// Requests taken since the start.
    #[must_use]
    pub fn served(&self) -> usize {
        self.served.load(Ordering::Relaxed)
    }
}

/// A connection that has been negotiated, but that nobody serves yet.
pub struct Negotiated<F: FileSystem + ?Sized> {
    session: Session<Front<F>>,
    in_flight: Arc<Semaphore>,
    served: Arc<AtomicUsize>,
    device: OwnedFd,
    /// What was said; to be recorded before [`Negotiated::serve`].
    pub exchange: Exchange,
}

impl<F: FileSystem + ?Sized> std::fmt::Debug for Negotiated<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Negotiated").finish_non_exhaustive()
    }
}

/// Negotiates a connection, or goes on with a recorded one. Blocks for the kernel's first request.
///
/// # Errors
/// See [`ResumeError`].
pub fn negotiate<F: FileSystem + ?Sized>(
    files: Arc<F>,
    device: OwnedFd,
    recorded: Option<&Exchange>,
    options: Options,
    runtime: &Handle,
) -> Result<Negotiated<F>, ResumeError> {
    let request = match recorded {
        Some(exchange) => exchange.request.clone(),
        None => resume::read_init(&device)?,
    };
    let in_flight = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
    let served = Arc::new(AtomicUsize::new(0));
    let front = Front {
        files,
        options,
        runtime: runtime.clone(),
        in_flight: Arc::clone(&in_flight),
        served: Arc::clone(&served),
    };
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(options.threads);
    let (session, reply) = resume::negotiate(front, &request, config)?;
    if recorded.is_some_and(|exchange| exchange.reply != reply) {
        return Err(ResumeError::Renegotiated);
    }
    Ok(Negotiated { session, in_flight, served, device, exchange: Exchange { request, reply } })
}

impl<F: FileSystem + ?Sized> Negotiated<F> {
    /// Starts to answer; what a dead predecessor left unanswered comes first.
    ///
    /// # Errors
    /// See [`ResumeError`].
    pub fn serve(self) -> Result<Mounted, ResumeError> {
        let Self { session, in_flight, served, device, exchange } = self;
        resume::attach(&session, &device, &exchange.reply)?;
        drop(device);
        let thread = std::thread::Builder::new()
            .name("fuse".to_owned())
            .spawn(move || session.run())
            .map_err(|error| ResumeError::Io("start the FUSE thread", error))?;
        Ok(Mounted { in_flight, served, thread })
    }
}

/// What fuser calls.
struct Front<F: ?Sized> {
    files: Arc<F>,
    options: Options,
    runtime: Handle,
    in_flight: Arc<Semaphore>,
    served: Arc<AtomicUsize>,
}

impl<F: FileSystem + ?Sized> Front<F> {
    /// Runs `work` as a task once there is room for it, which holds back the reading of requests.
    fn spawn<W, Fut>(&self, work: W)
    where
        W: FnOnce(Arc<F>) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let room = Arc::clone(&self.in_flight).acquire_owned();
        let Ok(permit) = self.runtime.block_on(room) else { leave_unanswered() };
        self.served.fetch_add(1, Ordering::Relaxed);
        let work = work(Arc::clone(&self.files));
        self.runtime.spawn(async move {
            work.await;
            drop(permit);
        });
    }

    fn ttl(&self) -> Duration {
        if self.options.immutable { TTL_IMMUTABLE } else { TTL_MUTABLE }
    }
}

/// Keeps a request, and the thread that read it, until the process ends: then the kernel sends it to the next one.
/// Dropped, it would be answered with an error.
fn leave_unanswered() -> ! {
    loop {
        std::thread::park();
    }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

/// Whether the kernel sends this request again because a predecessor did not answer it.
fn resent(request: &Request) -> bool {
    request.unique().0 & RESENT != 0
}

fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error.0)
}

fn time(nanoseconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(nanoseconds)
}

fn nanoseconds(time: TimeOrNow) -> u64 {
    let time = match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    };
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
    }
}

fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size,
        blocks: attr.size.div_ceil(512),
        atime: time(attr.accessed_ns),
        mtime: time(attr.modified_ns),
        ctime: time(attr.changed_ns),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.kind),
        perm: u16::try_from(attr.mode & 0o7777).unwrap_or(0),
        nlink: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: attr.block_size,
        flags: 0,
    }
}

/// The handle of a file that was opened for writing, or not.
fn handle(write: bool) -> FileHandle {
    FileHandle(u64::from(write))
}

fn fopen_flags(keep_cache: bool) -> FopenFlags {
    if keep_cache { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() }
}

/// Answers an entry or an error.
fn entry(reply: ReplyEntry, ttl: Duration, found: Result<Attr, Errno>) {
    match found {
        Ok(attr) => reply.entry(&ttl, &file_attr(&attr), Generation(0)),
        Err(error) => reply.error(errno(error)),
    }
}

/// Answers success or an error.
fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

/// The outcome of something that may have been done before: then `already` is success.
fn done_before(done: Result<(), Errno>, resent: bool, already: Errno) -> Result<(), Errno> {
    match done {
        Err(error) if resent && error == already => Ok(()),
        other => other,
    }
}

impl<F: FileSystem + ?Sized> Filesystem for Front<F> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |nearest: u32| {
            io::Error::other(format!("the kernel's limit for a FUSE message is {nearest}"))
        };
        config.set_max_write(IO_MAX).map_err(refused)?;
        // The kernel offers its own read-ahead as the most; the node plugin raises it afterwards.
        if let Err(most) = config.set_max_readahead(IO_MAX) {
            config.set_max_readahead(most).map_err(refused)?;
        }
        config
            .set_max_background(MAX_BACKGROUND)
            .map_err(|_| io::Error::other("background requests"))?;
        let mut wanted = vec![InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_PARALLEL_DIROPS];
        if !self.options.immutable {
            wanted.push(InitFlags::FUSE_AUTO_INVAL_DATA);
        }
        for flag in wanted {
            // Older kernels do without.
            let _ = config.add_capabilities(flag);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (name, ttl) = (name.as_bytes().to_vec(), self.ttl());
        self.spawn(|files| async move {
            entry(reply, ttl, files.lookup(parent.0, &name).await);
        });
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let ttl = self.ttl();
        self.spawn(|files| async move {
            match files.getattr(ino.0).await {
                Ok(attr) => reply.attr(&ttl, &file_attr(&attr)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = SetAttr {
            size,
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            accessed_ns: atime.map(nanoseconds),
            modified_ns: mtime.map(nanoseconds),
        };
        let (caller, ttl) = (caller(request), self.ttl());
        self.spawn(|files| async move {
            match files.setattr(caller, ino.0, set).await {
                Ok(attr) => reply.attr(&ttl, &file_attr(&attr)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        self.spawn(|files| async move {
            match files.readlink(ino.0).await {
                Ok(target) => reply.data(&target),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (name, ttl, mode) = (name.as_bytes().to_vec(), self.ttl(), mode & !umask & 0o7777);
        let (caller, resent) = (caller(request), resent(request));
        self.spawn(|files| async move {
            let mut made = files.mkdir(caller, parent.0, &name, mode).await;
            if resent && made == Err(Errno::EEXIST) {
                made = files.lookup(parent.0, &name).await;
            }
            entry(reply, ttl, made);
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (name, caller, resent) = (name.as_bytes().to_vec(), caller(request), resent(request));
        self.spawn(|files| async move {
            let done = files.unlink(caller, parent.0, &name).await;
            empty(reply, done_before(done, resent, Errno::ENOENT));
        });
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (name, caller, resent) = (name.as_bytes().to_vec(), caller(request), resent(request));
        self.spawn(|files| async move {
            let done = files.rmdir(caller, parent.0, &name).await;
            empty(reply, done_before(done, resent, Errno::ENOENT));
        });
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let (name, ttl) = (link_name.as_bytes().to_vec(), self.ttl());
        let target = target.as_os_str().as_bytes().to_vec();
        let (caller, resent) = (caller(request), resent(request));
        self.spawn(|files| async move {
            let mut made = files.symlink(caller, parent.0, &name, &target).await;
            if resent && made == Err(Errno::EEXIST) {
                made = files.lookup(parent.0, &name).await;
            }
            entry(reply, ttl, made);
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let no_replace = flags.contains(RenameFlags::RENAME_NOREPLACE);
        if flags.intersects(RenameFlags::all() - RenameFlags::RENAME_NOREPLACE) {
            return reply.error(fuser::Errno::EINVAL);
        }
        let (name, newname) = (name.as_bytes().to_vec(), newname.as_bytes().to_vec());
        let (caller, resent) = (caller(request), resent(request));
        self.spawn(|files| async move {
            let (from, to) = ((parent.0, &name[..]), (newparent.0, &newname[..]));
            let done = files.rename(caller, from, to, no_replace).await;
            empty(reply, done_before(done, resent, Errno::ENOENT));
        });
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (caller, write) = (caller(request), flags.acc_mode() != OpenAccMode::O_RDONLY);
        self.spawn(|files| async move {
            match files.open(caller, ino.0, write).await {
                Ok(opened) => reply.opened(handle(write), fopen_flags(opened.keep_cache)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        // The one that is sent again may find the file that it made.
        let exclusive = flags & libc::O_EXCL != 0 && !resent(request);
        let (name, ttl, caller) = (name.as_bytes().to_vec(), self.ttl(), caller(request));
        let mode = mode & !umask & 0o7777;
        self.spawn(|files| async move {
            match files.create(caller, parent.0, &name, mode, exclusive).await {
                Ok(opened) => {
                    let (attr, flags) = (file_attr(&opened.attr), fopen_flags(opened.keep_cache));
                    reply.created(&ttl, &attr, Generation(0), handle(true), flags);
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.spawn(|files| async move {
            match files.read(ino.0, offset, size.min(IO_MAX)).await {
                Ok(bytes) => reply.data(&bytes),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (bytes, caller) = (Bytes::copy_from_slice(data), caller(request));
        self.spawn(|files| async move {
            let length = u32::try_from(bytes.len()).unwrap_or(0);
            match files.write(caller, ino.0, offset, bytes).await {
                Ok(()) => reply.written(length),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn flush(&self, _: &Request, ino: INodeNo, fh: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        if fh == handle(false) {
            // A failure is told to who wrote, not to a reader that closes first.
            return reply.ok();
        }
        self.spawn(|files| async move { empty(reply, files.flush(ino.0).await) });
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.spawn(|files| async move { empty(reply, files.fsync(ino.0).await) });
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        flags: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let write = flags.acc_mode() != OpenAccMode::O_RDONLY;
        self.spawn(|files| async move {
            files.release(ino.0, write).await;
            reply.ok();
        });
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.spawn(|files| async move {
            match fill_directory(&*files, ino.0, offset, &mut reply).await {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        // Names are durable when the metadata service has answered.
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.spawn(|files| async move {
            match files.statfs().await {
                Ok(sizes) => {
                    let (all, free) = (sizes.capacity_bytes / 4096, sizes.free_bytes / 4096);
                    reply.statfs(
                        all,
                        free,
                        free,
                        sizes.inodes,
                        u64::from(u32::MAX),
                        4096,
                        255,
                        4096,
                    );
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }
}

/// Offset behind `.`, behind `..`; an entry's own cookie comes after these, shifted past them.
const DOTS: u64 = 2;

async fn fill_directory<F: FileSystem + ?Sized>(
    files: &F,
    ino: u64,
    offset: u64,
    reply: &mut ReplyDirectory,
) -> Result<(), Errno> {
    let dots = [".", ".."].into_iter().zip(1..=DOTS).skip(usize::try_from(offset).unwrap_or(2));
    for (name, next) in dots {
        // The kernel knows the parent itself; the number here is only shown.
        if reply.add(INodeNo(ino), next, FileType::Directory, name) {
            return Ok(());
        }
    }
    let mut cookie = offset.saturating_sub(DOTS);
    loop {
        let page = files.readdir(ino, cookie, DIR_PAGE).await?;
        for entry in &page.entries {
            let (name, kind) = (OsStr::from_bytes(&entry.name), file_type(entry.attr.kind));
            // A cookie so large that it cannot be shifted would start the directory over.
            let next = entry.cookie.checked_add(DOTS).ok_or(Errno::EIO)?;
            if reply.add(INodeNo(entry.attr.ino), next, kind, name) {
                return Ok(());
            }
            cookie = entry.cookie;
        }
        if page.end || page.entries.is_empty() {
            return Ok(());
        }
    }
}
