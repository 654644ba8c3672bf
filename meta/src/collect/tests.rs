use super::*;
use crate::service::CLIENT_TIMEOUT;
use crate::service::tests::Fixture;
use rpc::message::meta::{ROOT, ReportLength};
use rpc::message::storage::ChunkLength;
use std::sync::Mutex;

/// Chunks in memory; `down` refuses everything.
#[derive(Clone, Default)]
struct Memory {
    chunks: Arc<Mutex<BTreeMap<(ChainId, ChunkId), u32>>>,
    down: Arc<Mutex<bool>>,
}

impl Memory {
    fn put(&self, layout: &Layout, file: InodeId, index: u64, length: u32) {
        let chains = layout.stripe_chains();
        let chain = chains[usize::try_from(index).unwrap() % chains.len()];
        self.chunks.lock().unwrap().insert((chain, ChunkId { file, index }), length);
    }

    fn count(&self) -> usize {
        self.chunks.lock().unwrap().len()
    }

    fn check(&self) -> Result<(), Error> {
        let down = *self.down.lock().unwrap();
        if down { Err(Error::new(Code::ChainUnavailable, "down")) } else { Ok(()) }
    }
}

impl Chunks for Memory {
    async fn query(&self, chain: ChainId, file: InodeId, from: u64) -> Result<FileChunks, Error> {
        self.check()?;
        let chunks = self.chunks.lock().unwrap();
        let of_file = chunks.iter().filter(|((c, id), _)| *c == chain && id.file == file);
        let all: Vec<ChunkLength> = of_file
            .map(|((_, id), length)| ChunkLength { index: id.index, length: *length })
            .collect();
        let last = all.last().cloned();
        let chunks = all.into_iter().filter(|c| c.index >= from).take(2).collect();
        Ok(FileChunks { chunks, last })
    }

    async fn remove(&self, chain: ChainId, chunk: ChunkId, _: u64, _: u32) -> Result<(), Error> {
        self.check()?;
        self.chunks.lock().unwrap().remove(&(chain, chunk));
        Ok(())
    }
}

#[tokio::test]
async fn a_removed_file_loses_its_chunks_and_then_its_inode() {
    let f = Fixture::new().await;
    let (gone, stays) = (f.create(ROOT, "a").await.unwrap(), f.create(ROOT, "b").await.unwrap());
    let memory = Memory::default();
    for made in [&gone, &stays] {
        let file = &made.attributes;
        (0..20).for_each(|i| memory.put(&file.layout.unwrap(), file.inode, i, 1));
        let report = f.report_request(file.inode, made.session);
        f.run(&ReportLength { close: true, ..report }).await.unwrap();
    }
    f.remove(ROOT, "a", false).await.unwrap();
    let mut collector = Collector::new(Arc::clone(&f.meta), memory.clone(), Duration::ZERO);
    *memory.down.lock().unwrap() = true;
    collector.round().await.unwrap();
    assert_eq!((memory.count(), f.is_sound().await.orphans), (40, 1));
    *memory.down.lock().unwrap() = false;
    collector.round().await.unwrap();
    assert_eq!(memory.count(), 20);
    assert_eq!(f.attributes(gone.attributes.inode).await.unwrap_err().code, Code::NotFound);
    let found = f.is_sound().await;
    assert_eq!((found.inodes, found.orphans), (2, 0));
}

#[tokio::test]
async fn an_open_file_keeps_its_chunks_until_it_is_closed() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let file = &made.attributes;
    let memory = Memory::default();
    memory.put(&file.layout.unwrap(), file.inode, 0, 1);
    f.remove(ROOT, "a", false).await.unwrap();
    let mut collector = Collector::new(Arc::clone(&f.meta), memory.clone(), Duration::ZERO);
    collector.round().await.unwrap();
    assert_eq!(memory.count(), 1);
    let report = f.report_request(file.inode, made.session);
    f.run(&ReportLength { close: true, ..report }).await.unwrap();
    collector.round().await.unwrap();
    assert_eq!((memory.count(), f.is_sound().await.orphans), (0, 0));
}

#[tokio::test]
async fn a_file_just_removed_stays_for_the_grace_period() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let report = f.report_request(made.attributes.inode, made.session);
    f.run(&ReportLength { close: true, ..report }).await.unwrap();
    f.remove(ROOT, "a", false).await.unwrap();
    let mut collector = Collector::new(Arc::clone(&f.meta), Memory::default(), GRACE);
    collector.round().await.unwrap();
    assert_eq!(f.is_sound().await.orphans, 1);
}

#[tokio::test]
async fn a_silent_client_loses_its_sessions_and_its_files_reach_as_far_as_written() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let file = &made.attributes;
    let memory = Memory::default();
    memory.put(&file.layout.unwrap(), file.inode, 0, 1 << 20);
    memory.put(&file.layout.unwrap(), file.inode, 4, 77);
    let collector = Collector::new(Arc::clone(&f.meta), memory.clone(), Duration::ZERO);
    let now = boot_time();
    assert_eq!(f.meta.silent_clients(now), []);
    let later = now + CLIENT_TIMEOUT + Duration::from_secs(1);
    assert_eq!(f.meta.silent_clients(later), [f.client]);
    *memory.down.lock().unwrap() = true;
    assert!(collector.prune(f.client).await.is_err(), "the length cannot be settled now");
    *memory.down.lock().unwrap() = false;
    collector.prune(f.client).await.unwrap();
    assert_eq!(f.lookup(ROOT, "a").await.unwrap().length, (4 << 20) + 77);
    let report = f.report_request(file.inode, made.session);
    assert_eq!(f.run(&report).await.unwrap_err().code, Code::SessionEnded);
    assert!(!collector.is_open(file.inode).await.unwrap());
}
