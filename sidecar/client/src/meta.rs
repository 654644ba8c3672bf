//! Requests to the metadata service: numbered, so that a retry changes nothing twice, and retried until the deadline.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use chain::id::{ClientId, InodeId};
use rpc::Error;
use rpc::error::Retry;
use rpc::message::Request;
use rpc::message::meta::{
    Attributes, Caller, Create, DirectoryPage, FileSystemStat, GetAttributes, KeepSessions, Lookup,
    MakeDirectory, MakeSymlink, Open, Opened, ROOT, ReadDirectory, ReadSymlink, Remove, Rename,
    ReportLength, SetAttributes, StatFileSystem,
};

use crate::{Backoff, Client, Identity, Inner};

/// How often a client says that it is there; the service forgets one after two minutes of silence.
const KEEP_EVERY: Duration = Duration::from_secs(10);
/// How often the keeper looks whether its client is gone.
const IDLE: Duration = Duration::from_secs(1);

/// Numbers of this client's requests.
#[derive(Debug)]
pub(crate) struct Requests {
    client: ClientId,
    state: Mutex<Numbers>,
}

#[derive(Debug)]
struct Numbers {
    next: u64,
    /// Without an answer yet.
    open: BTreeSet<u64>,
}

/// A number in use; given back when the request has ended for good.
#[derive(Debug)]
pub(crate) struct Numbered<'a> {
    requests: &'a Requests,
    number: u64,
}

impl Requests {
    pub(crate) fn new(client: ClientId) -> Self {
        Self { client, state: Mutex::new(Numbers { next: 1, open: BTreeSet::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn number(&self) -> Numbered<'_> {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.open.insert(number);
        Numbered { requests: self, number }
    }

    /// Of a request that the service keeps no trace of.
    const fn unnumbered(&self, Identity { uid, gid }: Identity) -> Caller {
        Caller { client: self.client, request: 0, uid, gid }
    }

    /// Every request up to this one has ended.
    fn acknowledged(&self) -> u64 {
        let state = self.lock();
        state.open.first().copied().unwrap_or(state.next).saturating_sub(1)
    }
}

impl Numbered<'_> {
    pub(crate) const fn caller(&self, identity: Identity) -> Caller {
        let Identity { uid, gid } = identity;
        Caller { client: self.requests.client, request: self.number, uid, gid }
    }
}

impl Drop for Numbered<'_> {
    fn drop(&mut self) {
        self.requests.lock().open.remove(&self.number);
    }
}

/// A number that no other client has: the kernel's random bytes.
pub(crate) fn random_client_id() -> ClientId {
    let mut bytes = [0; 16];
    let source = std::fs::File::open("/dev/urandom");
    let read = source.and_then(|mut file| std::io::Read::read_exact(&mut file, &mut bytes));
    if read.is_err() {
        // Unique on this machine at least: when, and which process.
        let now = rpc::clock::boot_time().as_nanos();
        return ClientId::new(now << 64 | u128::from(std::process::id()));
    }
    ClientId::new(u128::from_le_bytes(bytes))
}

/// Keeps the client's sessions alive until it is gone.
pub(crate) async fn keep(client: Weak<Inner>) {
    let mut told = 0;
    let mut since = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(IDLE).await;
        let Some(inner) = client.upgrade() else { return };
        let acknowledged = inner.requests.acknowledged();
        // A client that never changed anything is not known to the service.
        let news = acknowledged != told || inner.buffers.has_sessions();
        if since.elapsed() < KEEP_EVERY || !news {
            continue;
        }
        since = tokio::time::Instant::now();
        let request = KeepSessions { client: inner.requests.client, acknowledged };
        match inner.meta_once(&request).await {
            Ok(()) => told = acknowledged,
            Err(error) => tracing::debug!(%error, "keep sessions"),
        }
    }
}

impl Inner {
    async fn meta_once<R: Request>(&self, request: &R) -> Result<R::Response, Error> {
        let (address, attempt) = (&self.options.manager, self.options.attempt);
        self.pool.call(address, request, Bytes::new(), attempt).await.map(|(done, _)| done)
    }

    /// Sends `request` until it is answered, or refused for good, or the deadline has passed.
    pub(crate) async fn meta<R: Request>(&self, request: &R) -> Result<R::Response, Error> {
        let mut backoff = Backoff::new(self.until());
        loop {
            match self.meta_once(request).await {
                Err(error) if error.code.retry() != Retry::Never => backoff.pause(error).await?,
                other => return other,
            }
        }
    }

    pub(crate) async fn report_length(&self, report: LengthReport) -> Result<Attributes, Error> {
        let number = self.requests.number();
        let LengthReport { identity, inode, session, length, truncate_generation, close } = report;
        let caller = number.caller(identity);
        let modified_ns = now_ns();
        self.meta(&ReportLength {
            caller,
            inode,
            session,
            length,
            truncate_generation,
            modified_ns,
            close,
        })
        .await
    }

    pub(crate) async fn open_session(
        &self,
        identity: Identity,
        inode: InodeId,
        write: bool,
    ) -> Result<Opened, Error> {
        if !write {
            let caller = self.requests.unnumbered(identity);
            return self.meta(&Open { caller, inode, write }).await;
        }
        let number = self.requests.number();
        self.meta(&Open { caller: number.caller(identity), inode, write }).await
    }

    pub(crate) async fn truncate_length(
        &self,
        identity: Identity,
        inode: InodeId,
        length: u64,
    ) -> Result<Attributes, Error> {
        let number = self.requests.number();
        let caller = number.caller(identity);
        self.meta(&rpc::message::meta::Truncate { caller, inode, length }).await
    }

    pub(crate) async fn attributes(&self, inode: InodeId) -> Result<Attributes, Error> {
        self.meta(&GetAttributes { inode }).await
    }

    pub(crate) async fn create_inode(
        &self,
        identity: Identity,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        exclusive: bool,
    ) -> Result<Opened, Error> {
        let number = self.requests.number();
        let (caller, name) = (number.caller(identity), Bytes::copy_from_slice(name));
        self.meta(&Create { caller, parent, name, mode, exclusive }).await
    }
}

/// What a writer says at fsync and close.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LengthReport {
    pub(crate) identity: Identity,
    pub(crate) inode: InodeId,
    pub(crate) session: u64,
    pub(crate) length: u64,
    pub(crate) truncate_generation: u64,
    pub(crate) close: bool,
}

/// Wall clock, for times that are only shown.
fn now_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

/// Which attributes to set; lengths go through [`Client::truncate`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributeChange {
    /// New permission bits.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New access time in nanoseconds since 1970.
    pub accessed_ns: Option<u64>,
    /// New modification time in nanoseconds since 1970.
    pub modified_ns: Option<u64>,
}

/// The namespace, by inode. Failures carry the service's code.
impl Client {
    /// Finds `name` in `parent`.
    pub async fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Attributes, Error> {
        let name = Bytes::copy_from_slice(name);
        let found = self.inner.meta(&Lookup { parent, name }).await?;
        Ok(self.inner.local_view(found))
    }

    /// Changes attributes.
    pub async fn set_attributes(
        &self,
        identity: Identity,
        inode: InodeId,
        change: AttributeChange,
    ) -> Result<Attributes, Error> {
        let number = self.inner.requests.number();
        let AttributeChange { mode, uid, gid, accessed_ns, modified_ns } = change;
        let caller = number.caller(identity);
        let request = SetAttributes { caller, inode, mode, uid, gid, accessed_ns, modified_ns };
        let changed = self.inner.meta(&request).await?;
        Ok(self.inner.local_view(changed))
    }

    /// Makes a directory.
    pub async fn make_directory(
        &self,
        identity: Identity,
        parent: InodeId,
        name: &[u8],
        mode: u32,
    ) -> Result<Attributes, Error> {
        let number = self.inner.requests.number();
        let (caller, name) = (number.caller(identity), Bytes::copy_from_slice(name));
        self.inner.meta(&MakeDirectory { caller, parent, name, mode }).await
    }

    /// Makes a symbolic link to `target`.
    pub async fn make_symlink(
        &self,
        identity: Identity,
        parent: InodeId,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attributes, Error> {
        let number = self.inner.requests.number();
        let (caller, name) = (number.caller(identity), Bytes::copy_from_slice(name));
        let target = Bytes::copy_from_slice(target);
        self.inner.meta(&MakeSymlink { caller, parent, name, target }).await
    }

    /// What the link points to.
    pub async fn read_symlink(&self, inode: InodeId) -> Result<Bytes, Error> {
        Ok(self.inner.meta(&ReadSymlink { inode }).await?.target)
    }

    /// Removes a name: of an empty directory if `directory`, else of a file or link.
    pub async fn remove(
        &self,
        identity: Identity,
        parent: InodeId,
        name: &[u8],
        directory: bool,
    ) -> Result<(), Error> {
        let number = self.inner.requests.number();
        let (caller, name) = (number.caller(identity), Bytes::copy_from_slice(name));
        self.inner.meta(&Remove { caller, parent, name, directory }).await
    }

    /// Renames `from` to `to`, each a directory and a name in it.
    pub async fn rename(
        &self,
        identity: Identity,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        no_replace: bool,
    ) -> Result<(), Error> {
        let number = self.inner.requests.number();
        let caller = number.caller(identity);
        self.inner
            .meta(&Rename {
                caller,
                parent: from.0,
                name: Bytes::copy_from_slice(from.1),
                new_parent: to.0,
                new_name: Bytes::copy_from_slice(to.1),
                no_replace,
            })
            .await
    }

    /// Names of a directory behind `cookie` (0 = from the start), at most `limit`.
    pub async fn read_directory(
        &self,
        inode: InodeId,
        cookie: u64,
        limit: u32,
    ) -> Result<DirectoryPage, Error> {
        let mut page = self.inner.meta(&ReadDirectory { inode, cookie, limit }).await?;
        for entry in &mut page.entries {
            entry.attributes = self.inner.local_view(entry.attributes.clone());
        }
        Ok(page)
    }

    /// Sizes of the file system.
    pub async fn stat_file_system(&self) -> Result<FileSystemStat, Error> {
        self.inner.meta(&StatFileSystem { inode: ROOT }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_acknowledged_when_all_before_it_have_ended() {
        let requests = Requests::new(ClientId::new(1));
        assert_eq!(requests.acknowledged(), 0);
        let (first, second) = (requests.number(), requests.number());
        assert_eq!((first.number, second.number), (1, 2));
        drop(second);
        assert_eq!(requests.acknowledged(), 0);
        drop(first);
        assert_eq!(requests.acknowledged(), 2);
    }

    #[test]
    fn client_ids_differ() {
        assert_ne!(random_client_id(), random_client_id());
    }
}
