use super::*;
use crate::chunks::tests::Memory;
use crate::fsck::{Findings, check};
use crate::op::Operation;
use crate::txn::embedded::Embedded;
use crate::txn::unsure::Unsure;
use chain::id::{ChainId, NodeId, RoutingVersion};
use chain::table::Chain;
use rpc::message::manager::Routing;
use rpc::message::meta::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The user of most requests.
pub(crate) const USER: u32 = 1000;

/// A metadata service on a store of its own.
pub(crate) struct Fixture<S: Store = Embedded> {
    pub(crate) meta: Arc<Meta<S, Memory>>,
    pub(crate) store: S,
    pub(crate) chunks: Memory,
    publish: watch::Sender<Published>,
    next: Arc<AtomicU64>,
    pub(crate) client: ClientId,
    _dir: Arc<tempfile::TempDir>,
}

/// A routing table without servers.
pub(crate) fn published(chains: u32) -> Published {
    let target = |c: u32| NodeId::new(10_000 + c).target(0, 0);
    let routing = Routing {
        version: RoutingVersion::new(1),
        table: 1,
        chunk_size_bytes: 1 << 20,
        stripe: 0,
        chains: (1..=chains).map(|c| Chain::newborn(ChainId::new(c), &[target(c)])).collect(),
        nodes: vec![],
    };
    Published { routing: Arc::new(routing), space: (3000, 300), replicas: 3 }
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        Self::on(|store| store).await
    }
}

impl<S: Store> Fixture<S> {
    pub(crate) async fn on(wrap: impl FnOnce(Embedded) -> S) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let store = wrap(Embedded::open(dir.path()).unwrap());
        let (publish, receive) = watch::channel(published(3));
        let chunks = Memory::default();
        let meta = loop {
            match Meta::open(store.clone(), chunks.clone(), "test", 77, receive.clone()).await {
                Ok(meta) => break Arc::new(meta),
                Err(OpError::Txn(TxnError::UnknownResult)) => {}
                Err(error) => panic!("{error}"),
            }
        };
        let (next, client) = (Arc::new(AtomicU64::new(1)), ClientId::new(5));
        Self { meta, store, chunks, publish, next, client, _dir: dir }
    }

    pub(crate) fn publish_chains(&self, chains: u32) {
        self.publish.send_replace(published(chains));
    }

    pub(crate) fn caller(&self) -> Caller {
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        Caller { client: self.client, request, uid: USER, gid: 100 }
    }

    pub(crate) async fn run<R: Operation>(&self, request: &R) -> Result<R::Response, Error> {
        self.meta.execute(request).await
    }

    pub(crate) fn create_request(&self, parent: InodeId, name: &str) -> Create {
        let name = Bytes::copy_from_slice(name.as_bytes());
        Create { caller: self.caller(), parent, name, mode: 0o644, exclusive: false }
    }

    pub(crate) async fn create(&self, parent: InodeId, name: &str) -> Result<Opened, Error> {
        self.run(&self.create_request(parent, name)).await
    }

    pub(crate) async fn mkdir(&self, parent: InodeId, name: &str) -> Result<Attributes, Error> {
        let name = Bytes::copy_from_slice(name.as_bytes());
        self.run(&MakeDirectory { caller: self.caller(), parent, name, mode: 0o755 }).await
    }

    pub(crate) async fn symlink(
        &self,
        parent: InodeId,
        name: &str,
        target: &str,
    ) -> Result<Attributes, Error> {
        let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        let (name, target) = (bytes(name), bytes(target));
        self.run(&MakeSymlink { caller: self.caller(), parent, name, target }).await
    }

    pub(crate) async fn lookup(&self, parent: InodeId, name: &str) -> Result<Attributes, Error> {
        self.run(&Lookup { parent, name: Bytes::copy_from_slice(name.as_bytes()) }).await
    }

    pub(crate) async fn attributes(&self, inode: InodeId) -> Result<Attributes, Error> {
        self.run(&GetAttributes { inode }).await
    }

    pub(crate) fn set_request(&self, inode: InodeId) -> SetAttributes {
        SetAttributes {
            caller: self.caller(),
            inode,
            mode: None,
            uid: None,
            gid: None,
            accessed_ns: None,
            modified_ns: None,
        }
    }

    pub(crate) fn report_request(&self, inode: InodeId, session: u64) -> ReportLength {
        ReportLength {
            caller: self.caller(),
            inode,
            session,
            length: 0,
            truncate_generation: 0,
            modified_ns: 0,
            close: false,
        }
    }

    pub(crate) async fn truncate(&self, inode: InodeId, length: u64) -> Result<Attributes, Error> {
        self.run(&Truncate { caller: self.caller(), inode, length }).await
    }

    pub(crate) async fn remove(
        &self,
        parent: InodeId,
        name: &str,
        directory: bool,
    ) -> Result<(), Error> {
        let name = Bytes::copy_from_slice(name.as_bytes());
        self.run(&Remove { caller: self.caller(), parent, name, directory }).await
    }

    pub(crate) fn rename_request(
        &self,
        from: InodeId,
        name: &str,
        to: InodeId,
        new: &str,
    ) -> Rename {
        let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        Rename {
            caller: self.caller(),
            parent: from,
            name: bytes(name),
            new_parent: to,
            new_name: bytes(new),
            no_replace: false,
        }
    }

    pub(crate) async fn rename(
        &self,
        from: InodeId,
        name: &str,
        to: InodeId,
        new: &str,
    ) -> Result<(), Error> {
        self.run(&self.rename_request(from, name, to, new)).await
    }

    pub(crate) async fn list(&self, inode: InodeId, cookie: u64, limit: u32) -> DirectoryPage {
        self.run(&ReadDirectory { inode, cookie, limit }).await.unwrap()
    }

    pub(crate) async fn is_sound(&self) -> Findings {
        let found = check(&self.store).await.unwrap();
        assert_eq!(found.problems, Vec::<String>::new());
        found
    }
}

async fn names(f: &Fixture<impl Store>, inode: InodeId) -> BTreeSet<String> {
    let page = f.list(inode, 0, 1024).await;
    page.entries.iter().map(|e| String::from_utf8(e.name.to_vec()).unwrap()).collect()
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_and_changes_nothing() {
    let f = Fixture::new().await;
    let create = f.create_request(ROOT, "a");
    let first = f.run(&create).await.unwrap();
    f.rename(ROOT, "a", ROOT, "b").await.unwrap();
    assert_eq!(f.run(&create).await.unwrap(), first);
    assert_eq!(names(&f, ROOT).await, BTreeSet::from(["b".to_owned()]));
    let rename = f.rename_request(ROOT, "b", ROOT, "c");
    f.run(&rename).await.unwrap();
    f.create(ROOT, "b").await.unwrap();
    f.run(&rename).await.unwrap();
    assert_eq!(names(&f, ROOT).await, BTreeSet::from(["b".to_owned(), "c".to_owned()]));
    let reused = Truncate { caller: rename.caller, inode: first.attributes.inode, length: 0 };
    assert_eq!(f.run(&reused).await.unwrap_err().code, Code::InvalidRequest);
}

#[tokio::test]
async fn answers_are_kept_until_the_client_has_them() {
    let f = Fixture::new().await;
    let create = f.create_request(ROOT, "a");
    f.run(&create).await.unwrap();
    let key = answered_key(f.client, create.caller.request);
    let kept = async || {
        f.store.begin().await.unwrap().get(&key, Isolation::Snapshot).await.unwrap().is_some()
    };
    let keep = |acknowledged| KeepSessions { client: f.client, acknowledged };
    f.meta.keep_sessions(&keep(create.caller.request - 1)).await.unwrap();
    assert!(kept().await);
    f.meta.keep_sessions(&keep(create.caller.request)).await.unwrap();
    assert!(!kept().await);
}

/// A request that stood still on a broken connection while its retry, on a new one, was answered and acknowledged.
#[tokio::test]
async fn a_request_that_comes_after_its_end_was_acknowledged_is_refused() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let file = made.attributes.inode;
    // As an older build left the record.
    let mut txn = f.store.begin().await.unwrap();
    txn.set(&client_key(f.client), &schema::Mark {}.to_value());
    txn.commit().await.unwrap();
    let (cut, rename) = (f.caller(), f.rename_request(ROOT, "a", ROOT, "b"));
    let cut = Truncate { caller: cut, inode: file, length: 0 };
    let open = Open { caller: f.caller(), inode: file, write: true };
    // Its number is taken and its answer is outstanding.
    let running = f.report_request(file, made.session);
    f.run(&cut).await.unwrap();
    f.run(&rename).await.unwrap();
    f.run(&open).await.unwrap();
    let remove = Remove { caller: f.caller(), parent: ROOT, name: "b".into(), directory: false };
    let keep = |acknowledged| KeepSessions { client: f.client, acknowledged };
    f.meta.keep_sessions(&keep(open.caller.request)).await.unwrap();
    // One that was overtaken takes nothing back.
    f.meta.keep_sessions(&keep(1)).await.unwrap();

    let report = ReportLength { length: 4096, truncate_generation: 1, ..running };
    assert_eq!(f.run(&report).await.unwrap().length, 4096, "not acknowledged yet");
    f.rename(ROOT, "b", ROOT, "a").await.unwrap();
    let late =
        [f.run(&cut).await.map(drop), f.run(&rename).await.map(drop), f.run(&open).await.map(drop)];
    for outcome in late {
        let error = outcome.unwrap_err();
        assert_eq!(error.code, Code::InvalidRequest);
        assert!(error.message.contains("came late"), "{}", error.message);
    }
    let now = f.lookup(ROOT, "a").await.unwrap();
    assert_eq!((now.inode, now.length, now.truncate_generation), (file, 4096, 1));
    // A number behind it is free, also one that others overtook.
    assert_eq!(f.run(&remove).await.unwrap_err().code, Code::NotFound);
    f.is_sound().await;
}

#[tokio::test]
async fn a_request_that_never_ran_is_refused_once_its_client_has_given_up() {
    let f = Fixture::new().await;
    let file = f.create(ROOT, "a").await.unwrap().attributes.inode;
    let late = Truncate { caller: f.caller(), inode: file, length: 7 };
    let keep = KeepSessions { client: f.client, acknowledged: late.caller.request };
    f.meta.keep_sessions(&keep).await.unwrap();
    assert_eq!(f.run(&late).await.unwrap_err().code, Code::InvalidRequest);
    // Of a client that this service does not know, too.
    let stranger = Caller { client: ClientId::new(6), ..f.caller() };
    let keep = KeepSessions { client: stranger.client, acknowledged: stranger.request };
    f.meta.keep_sessions(&keep).await.unwrap();
    let late = Truncate { caller: stranger, ..late };
    assert_eq!(f.run(&late).await.unwrap_err().code, Code::InvalidRequest);
    assert_eq!(f.attributes(file).await.unwrap().length, 0);
}

#[tokio::test]
async fn an_unknown_commit_takes_effect_once() {
    for seed in 0..4 {
        let f = Fixture::on(|store| Unsure::new(store, seed)).await;
        let dir = f.mkdir(ROOT, "d").await.unwrap().inode;
        for i in 0..60 {
            let mut create = f.create_request(ROOT, &format!("f{i}"));
            create.exclusive = true;
            f.run(&create).await.unwrap();
            f.rename(ROOT, &format!("f{i}"), dir, &format!("g{i}")).await.unwrap();
            if i % 3 == 0 {
                f.remove(dir, &format!("g{i}"), false).await.unwrap();
            }
        }
        assert_eq!(names(&f, dir).await.len(), 40);
        let found = f.is_sound().await;
        assert_eq!((found.inodes, found.names, found.orphans), (62, 41, 20));
    }
}

#[tokio::test]
async fn inode_ids_are_never_used_again() {
    let f = Fixture::new().await;
    let mut seen = BTreeSet::new();
    for restart in 0..3 {
        let receive = f.publish.subscribe();
        let meta = Meta::open(f.store.clone(), f.chunks.clone(), "test", 1, receive).await.unwrap();
        for i in 0..20 {
            let create = f.create_request(ROOT, &format!("{restart}-{i}"));
            assert!(seen.insert(meta.execute(&create).await.unwrap().attributes.inode));
        }
    }
}

#[tokio::test]
async fn a_store_of_another_cluster_is_refused() {
    let f = Fixture::new().await;
    let other =
        Meta::open(f.store.clone(), f.chunks.clone(), "other", 1, f.publish.subscribe()).await;
    assert_eq!(
        other.unwrap_err().to_string(),
        "WrongCluster: the store belongs to cluster test, not other"
    );
}

#[tokio::test]
async fn a_damaged_value_names_its_key_and_stops_nothing_else() {
    let f = Fixture::new().await;
    let bad = f.create(ROOT, "bad").await.unwrap().attributes.inode;
    f.create(ROOT, "good").await.unwrap();
    let mut txn = f.store.begin().await.unwrap();
    txn.set(&schema::inode_key(bad), &[1, 9, 9]);
    txn.commit().await.unwrap();
    let error = f.attributes(bad).await.unwrap_err();
    assert_eq!(error.code, Code::Internal);
    assert!(error.message.contains("INOD"), "{}", error.message);
    f.lookup(ROOT, "good").await.unwrap();
    assert!(!check(&f.store).await.unwrap().problems.is_empty());
}

/// Creates, renames and removes by many at once in a few names, so that nearly all collide.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_renames_leaves_one_tree_and_a_serial_history() {
    let f = Arc::new(Fixture::new().await);
    let mut dirs = vec![ROOT];
    for i in 0..4 {
        dirs.push(f.mkdir(ROOT, &format!("d{i}")).await.unwrap().inode);
    }
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8u64 {
        let (f, dirs) = (Arc::clone(&f), dirs.clone());
        tasks.spawn(async move {
            let mut dice = crate::txn::conformance::Dice(task);
            let mut made = 0i64;
            for _ in 0..150 {
                let mut dir = || dirs[usize::try_from(dice.below(5)).unwrap()];
                let (from, to) = (dir(), dir());
                let (a, b) = (format!("d{}", dice.below(4)), format!("d{}", dice.below(4)));
                let result = match dice.below(5) {
                    0 => f.create(from, &format!("f{a}")).await.map(drop),
                    1 => f.remove(from, &format!("f{a}"), false).await,
                    2 => f.rename(from, &format!("f{a}"), to, &format!("f{b}")).await,
                    _ => f.rename(from, &a, to, &b).await,
                };
                match result {
                    Ok(()) => made += 1,
                    Err(error) => assert_ne!(error.code, Code::Internal, "{error}"),
                }
            }
            made
        });
    }
    let made: i64 = tasks.join_all().await.iter().sum();
    assert!(made > 100, "only {made} operations went through");
    f.is_sound().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_exclusive_creates_of_a_name_one_succeeds() {
    let f = Arc::new(Fixture::new().await);
    for round in 0..20 {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let mut create = f.create_request(ROOT, &format!("n{round}"));
            create.exclusive = true;
            let f = Arc::clone(&f);
            tasks.spawn(async move { f.run(&create).await });
        }
        let results = tasks.join_all().await;
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1);
        assert!(results.iter().flat_map(|r| r.as_ref().err()).all(|e| e.code == Code::Exists));
    }
    f.is_sound().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_is_never_removed_with_something_in_it() {
    let f = Arc::new(Fixture::new().await);
    for round in 0..50 {
        let name = format!("d{round}");
        let dir = f.mkdir(ROOT, &name).await.unwrap().inode;
        let (one, two) = (Arc::clone(&f), Arc::clone(&f));
        let create = tokio::spawn(async move { one.create(dir, "x").await });
        let remove = tokio::spawn(async move { two.remove(ROOT, &name, true).await });
        let outcome = (create.await.unwrap().is_ok(), remove.await.unwrap().is_ok());
        assert!(outcome == (true, false) || outcome == (false, true), "{outcome:?}");
    }
    f.is_sound().await;
}
