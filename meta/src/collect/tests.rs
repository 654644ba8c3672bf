use super::*;
use crate::service::CLIENT_TIMEOUT;
use crate::service::tests::Fixture;
use rpc::Code;
use rpc::message::meta::{ROOT, ReportLength};

#[tokio::test]
async fn a_removed_file_loses_its_chunks_and_then_its_inode() {
    let f = Fixture::new().await;
    let (gone, stays) = (f.create(ROOT, "a").await.unwrap(), f.create(ROOT, "b").await.unwrap());
    let memory = f.chunks.clone();
    for made in [&gone, &stays] {
        let file = &made.attributes;
        (0..20).for_each(|i| memory.put(&file.layout.unwrap(), file.inode, i, 1));
        let report = f.report_request(file.inode, made.session);
        f.run(&ReportLength { close: true, ..report }).await.unwrap();
    }
    f.remove(ROOT, "a", false).await.unwrap();
    let mut collector = Collector::new(Arc::clone(&f.meta), Duration::ZERO);
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
    let memory = f.chunks.clone();
    memory.put(&file.layout.unwrap(), file.inode, 0, 1);
    f.remove(ROOT, "a", false).await.unwrap();
    let mut collector = Collector::new(Arc::clone(&f.meta), Duration::ZERO);
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
    let mut collector = Collector::new(Arc::clone(&f.meta), GRACE);
    collector.round().await.unwrap();
    assert_eq!(f.is_sound().await.orphans, 1);
}

#[tokio::test]
async fn a_silent_client_loses_its_sessions_and_its_files_reach_as_far_as_written() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let file = &made.attributes;
    let memory = f.chunks.clone();
    memory.put(&file.layout.unwrap(), file.inode, 0, 1 << 20);
    memory.put(&file.layout.unwrap(), file.inode, 4, 77);
    let collector = Collector::new(Arc::clone(&f.meta), Duration::ZERO);
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
