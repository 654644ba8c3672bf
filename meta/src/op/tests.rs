//! What each operation answers, and refuses.

use crate::fsck::check;
use crate::service::tests::{Fixture, USER};
use bytes::Bytes;
use chain::id::InodeId;
use rpc::Code;
use rpc::message::meta::*;

fn name(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

#[tokio::test]
async fn a_created_file_is_found_by_name_and_by_inode() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let attributes = &made.attributes;
    assert_eq!((attributes.kind, attributes.mode, attributes.links), (FileKind::File, 0o644, 1));
    assert_eq!((attributes.uid, attributes.gid, attributes.length), (USER, 100, 0));
    let layout = attributes.layout.unwrap();
    assert_eq!((layout.chains, layout.stripe, layout.chunk_size_bytes), (3, 3, 1 << 20));
    assert_eq!(f.lookup(ROOT, "a").await.unwrap(), made.attributes);
    assert_eq!(f.attributes(attributes.inode).await.unwrap(), made.attributes);
    assert!(f.attributes(ROOT).await.unwrap().modified_ns >= attributes.modified_ns);
    let other = f.create(ROOT, "b").await.unwrap().attributes;
    assert_ne!((other.inode, other.layout.unwrap().seed), (attributes.inode, layout.seed));
    f.is_sound().await;
}

#[tokio::test]
async fn creating_refuses_by_name_kind_and_table() {
    let f = Fixture::new().await;
    let file = f.create(ROOT, "file").await.unwrap().attributes.inode;
    f.mkdir(ROOT, "dir").await.unwrap();
    f.symlink(ROOT, "link", "file").await.unwrap();
    let mut exclusive = f.create_request(ROOT, "file");
    exclusive.exclusive = true;
    assert_eq!(f.run(&exclusive).await.unwrap_err().code, Code::Exists);
    assert_eq!(f.create(ROOT, "file").await.unwrap().attributes.inode, file);
    assert_eq!(f.create(ROOT, "dir").await.unwrap_err().code, Code::IsDirectory);
    assert_eq!(f.create(ROOT, "link").await.unwrap_err().code, Code::Exists);
    assert_eq!(f.mkdir(ROOT, "dir").await.unwrap_err().code, Code::Exists);
    assert_eq!(f.symlink(ROOT, "dir", "x").await.unwrap_err().code, Code::Exists);
    assert_eq!(f.create(file, "x").await.unwrap_err().code, Code::NotDirectory);
    assert_eq!(f.mkdir(InodeId::new(9999), "x").await.unwrap_err().code, Code::NotFound);
    for bad in ["", ".", "..", "a/b", "a\0"] {
        assert_eq!(f.create(ROOT, bad).await.unwrap_err().code, Code::InvalidName, "{bad:?}");
    }
    assert_eq!(f.create(ROOT, &"n".repeat(256)).await.unwrap_err().code, Code::NameTooLong);
    assert!(f.create(ROOT, &"n".repeat(255)).await.is_ok());
    assert_eq!(f.symlink(ROOT, "s", &"t".repeat(4096)).await.unwrap_err().code, Code::NameTooLong);
    f.publish_chains(0);
    assert_eq!(f.create(ROOT, "late").await.unwrap_err().code, Code::NoChainTable);
    f.is_sound().await;
}

#[tokio::test]
async fn names_are_bytes() {
    let f = Fixture::new().await;
    let raw = Bytes::from_static(&[0xff, 0xfe, b'x']);
    let request = Create { name: raw.clone(), ..f.create_request(ROOT, "") };
    f.run(&request).await.unwrap();
    let page = f.list(ROOT, 0, 10).await;
    assert_eq!(page.entries[0].name, raw);
}

#[tokio::test]
async fn removing_refuses_the_wrong_kind_and_full_directories() {
    let f = Fixture::new().await;
    let dir = f.mkdir(ROOT, "dir").await.unwrap().inode;
    f.create(dir, "in").await.unwrap();
    assert_eq!(f.remove(ROOT, "dir", true).await.unwrap_err().code, Code::NotEmpty);
    assert_eq!(f.remove(ROOT, "dir", false).await.unwrap_err().code, Code::IsDirectory);
    assert_eq!(f.remove(dir, "in", true).await.unwrap_err().code, Code::NotDirectory);
    assert_eq!(f.remove(dir, "no", false).await.unwrap_err().code, Code::NotFound);
    f.remove(dir, "in", false).await.unwrap();
    f.remove(ROOT, "dir", true).await.unwrap();
    assert_eq!(f.lookup(ROOT, "dir").await.unwrap_err().code, Code::NotFound);
    assert_eq!(f.attributes(dir).await.unwrap_err().code, Code::NotFound);
    assert_eq!(f.create(dir, "x").await.unwrap_err().code, Code::NotFound);
    let found = f.is_sound().await;
    assert_eq!((found.inodes, found.names, found.orphans), (2, 0, 1));
}

#[tokio::test]
async fn a_sticky_directory_protects_the_entries_of_others() {
    let f = Fixture::new().await;
    f.create(ROOT, "mine").await.unwrap();
    let caller = Caller { uid: USER + 1, ..f.caller() };
    let remove = Remove { caller, parent: ROOT, name: name("mine"), directory: false };
    assert_eq!(f.run(&remove).await.unwrap_err().code, Code::PermissionDenied);
    let caller = Caller { uid: USER + 1, ..f.caller() };
    let rename = Rename { caller, ..f.rename_request(ROOT, "mine", ROOT, "yours") };
    assert_eq!(f.run(&rename).await.unwrap_err().code, Code::PermissionDenied);
    f.remove(ROOT, "mine", false).await.unwrap();
}

#[tokio::test]
async fn a_set_group_id_directory_hands_its_group_down() {
    let f = Fixture::new().await;
    let dir = f.mkdir(ROOT, "dir").await.unwrap().inode;
    let set = SetAttributes { gid: Some(7), mode: Some(0o2775), ..f.set_request(dir) };
    f.run(&set).await.unwrap();
    let file = f.create(dir, "f").await.unwrap().attributes;
    let below = f.mkdir(dir, "d").await.unwrap();
    assert_eq!((file.gid, file.mode), (7, 0o644));
    assert_eq!((below.gid, below.mode), (7, 0o2755));
}

#[tokio::test]
async fn attributes_change_by_owner_or_root_only() {
    let f = Fixture::new().await;
    let file = f.create(ROOT, "a").await.unwrap().attributes.inode;
    let set = SetAttributes { mode: Some(0o6755), modified_ns: Some(5), ..f.set_request(file) };
    let done = f.run(&set).await.unwrap();
    assert_eq!((done.mode, done.modified_ns), (0o6755, 5));
    let set = SetAttributes { gid: Some(9), ..f.set_request(file) };
    assert_eq!(f.run(&set).await.unwrap().mode, 0o755, "the set-id bits go");
    let stranger = Caller { uid: USER + 1, ..f.caller() };
    let set = SetAttributes { caller: stranger, mode: Some(0), ..f.set_request(file) };
    assert_eq!(f.run(&set).await.unwrap_err().code, Code::PermissionDenied);
    let set = SetAttributes { uid: Some(0), ..f.set_request(file) };
    assert_eq!(f.run(&set).await.unwrap_err().code, Code::PermissionDenied);
    let root = Caller { uid: 0, ..f.caller() };
    let set = SetAttributes { caller: root, uid: Some(0), ..f.set_request(file) };
    assert_eq!(f.run(&set).await.unwrap().uid, 0);
}

#[tokio::test]
async fn a_symbolic_link_keeps_its_target() {
    let f = Fixture::new().await;
    let link = f.symlink(ROOT, "l", "a/../b").await.unwrap();
    assert_eq!((link.kind, link.length, link.mode), (FileKind::Symlink, 6, 0o777));
    let read = f.run(&ReadSymlink { inode: link.inode }).await.unwrap();
    assert_eq!(&read.target[..], b"a/../b");
    let file = f.create(ROOT, "f").await.unwrap().attributes.inode;
    let not_link = f.run(&ReadSymlink { inode: file }).await.unwrap_err();
    assert_eq!(not_link.code, Code::InvalidRequest);
    f.remove(ROOT, "l", false).await.unwrap();
    f.is_sound().await;
}

#[tokio::test]
async fn rename_replaces_what_posix_lets_it_replace() {
    let f = Fixture::new().await;
    let a = f.create(ROOT, "a").await.unwrap().attributes.inode;
    f.create(ROOT, "b").await.unwrap();
    let d = f.mkdir(ROOT, "d").await.unwrap().inode;
    f.mkdir(ROOT, "empty").await.unwrap();
    f.create(d, "in").await.unwrap();
    let no_replace = Rename { no_replace: true, ..f.rename_request(ROOT, "a", ROOT, "b") };
    assert_eq!(f.run(&no_replace).await.unwrap_err().code, Code::Exists);
    assert_eq!(f.rename(ROOT, "no", ROOT, "b").await.unwrap_err().code, Code::NotFound);
    assert_eq!(f.rename(ROOT, "a", ROOT, "d").await.unwrap_err().code, Code::IsDirectory);
    assert_eq!(f.rename(ROOT, "d", ROOT, "a").await.unwrap_err().code, Code::NotDirectory);
    assert_eq!(f.rename(ROOT, "empty", ROOT, "d").await.unwrap_err().code, Code::NotEmpty);
    f.rename(ROOT, "a", ROOT, "a").await.unwrap();
    f.rename(ROOT, "a", d, "b").await.unwrap();
    f.rename(d, "b", ROOT, "b").await.unwrap();
    assert_eq!(f.lookup(ROOT, "b").await.unwrap().inode, a);
    f.rename(ROOT, "d", ROOT, "empty").await.unwrap();
    assert_eq!(f.lookup(ROOT, "empty").await.unwrap().inode, d);
    let found = f.is_sound().await;
    assert_eq!((found.names, found.orphans), (3, 1));
}

#[tokio::test]
async fn a_directory_never_moves_below_itself() {
    let f = Fixture::new().await;
    let a = f.mkdir(ROOT, "a").await.unwrap().inode;
    let b = f.mkdir(a, "b").await.unwrap().inode;
    let c = f.mkdir(b, "c").await.unwrap().inode;
    assert_eq!(f.rename(ROOT, "a", a, "x").await.unwrap_err().code, Code::WouldLoop);
    assert_eq!(f.rename(ROOT, "a", c, "x").await.unwrap_err().code, Code::WouldLoop);
    f.rename(b, "c", ROOT, "c").await.unwrap();
    f.rename(ROOT, "a", c, "a").await.unwrap();
    assert_eq!(f.list(a, 0, 9).await.parent, c);
    f.is_sound().await;
}

#[tokio::test]
async fn the_length_follows_reports_and_truncations() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let file = made.attributes.inode;
    let report = |length, truncate_generation| ReportLength {
        length,
        truncate_generation,
        ..f.report_request(file, made.session)
    };
    assert_eq!(f.run(&report(100, 0)).await.unwrap().length, 100);
    assert_eq!(f.run(&report(50, 0)).await.unwrap().length, 100, "a report never shortens");
    let cut = f.truncate(file, 10).await.unwrap();
    assert_eq!((cut.length, cut.truncate_generation), (10, 1));
    assert_eq!(f.run(&report(90, 0)).await.unwrap().length, 10, "those writes were cut");
    assert_eq!(f.run(&report(20, 1)).await.unwrap().length, 20);
    let longer = f.truncate(file, 1 << 40).await.unwrap();
    assert_eq!((longer.length, longer.truncate_generation), (1 << 40, 1));
    assert_eq!(f.run(&report(1, 2)).await.unwrap_err().code, Code::InvalidRequest);
    assert_eq!(f.run(&report(1 << 63, 1)).await.unwrap_err().code, Code::TooLarge);
    assert_eq!(f.truncate(file, 1 << 63).await.unwrap_err().code, Code::TooLarge);
    assert_eq!(f.truncate(ROOT, 0).await.unwrap_err().code, Code::IsDirectory);
    f.run(&ReportLength { close: true, ..report(0, 1) }).await.unwrap();
    assert_eq!(f.run(&report(99, 1)).await.unwrap_err().code, Code::SessionEnded);
}

#[tokio::test]
async fn opening_refuses_what_is_no_file() {
    let f = Fixture::new().await;
    let made = f.create(ROOT, "a").await.unwrap();
    let file = made.attributes.inode;
    let open = |inode, write| Open { caller: f.caller(), inode, write };
    assert_eq!(f.run(&open(file, false)).await.unwrap().session, 0);
    let (one, two) =
        (f.run(&open(file, true)).await.unwrap(), f.run(&open(file, true)).await.unwrap());
    assert!(one.session != two.session && one.session > 0);
    assert_eq!(f.run(&open(ROOT, false)).await.unwrap_err().code, Code::IsDirectory);
    f.remove(ROOT, "a", false).await.unwrap();
    assert_eq!(f.run(&open(file, false)).await.unwrap_err().code, Code::NotFound);
    // What is open goes on.
    let report = ReportLength { length: 5, ..f.report_request(file, made.session) };
    let done = f.run(&report).await.unwrap();
    assert_eq!((done.length, done.links), (5, 0));
}

#[tokio::test]
async fn a_listing_shows_each_lasting_entry_once_whatever_else_happens() {
    let f = Fixture::new().await;
    for i in 0..200 {
        f.create(ROOT, &format!("keep{i}")).await.unwrap();
        f.create(ROOT, &format!("go{i}")).await.unwrap();
    }
    let (mut cookie, mut seen) = (0, vec![]);
    for round in 0.. {
        let page = f.list(ROOT, cookie, 7).await;
        assert!(page.entries.iter().all(|e| e.cookie > cookie));
        seen.extend(page.entries.iter().map(|e| String::from_utf8(e.name.to_vec()).unwrap()));
        for entry in &page.entries {
            assert_eq!(f.attributes(entry.attributes.inode).await.unwrap(), entry.attributes);
        }
        if page.end {
            break;
        }
        cookie = page.entries.last().unwrap().cookie;
        // Including the entry that the cookie came from.
        for removed in page.entries.iter().filter(|e| e.name.starts_with(b"go")) {
            f.run(&Remove {
                caller: f.caller(),
                parent: ROOT,
                name: removed.name.clone(),
                directory: false,
            })
            .await
            .unwrap();
        }
        f.create(ROOT, &format!("new{round}")).await.unwrap();
    }
    let mut kept: Vec<_> = seen.iter().filter(|n| n.starts_with("keep")).collect();
    assert_eq!(kept.len(), 200);
    kept.sort();
    kept.dedup();
    assert_eq!(kept.len(), 200);
    let file = f.lookup(ROOT, "keep0").await.unwrap().inode;
    let list = ReadDirectory { inode: file, cookie: 0, limit: 1 };
    assert_eq!(f.run(&list).await.unwrap_err().code, Code::NotDirectory);
    assert!(check(&f.store).await.unwrap().problems.is_empty());
}

#[tokio::test]
async fn the_file_system_counts_inodes_and_space() {
    let f = Fixture::new().await;
    f.create(ROOT, "a").await.unwrap();
    f.mkdir(ROOT, "d").await.unwrap();
    let stat = f.run(&StatFileSystem { inode: ROOT }).await.unwrap();
    assert_eq!((stat.inodes, stat.capacity_bytes, stat.free_bytes), (3, 1000, 900));
}
