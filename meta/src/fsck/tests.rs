//! Each rule is broken once, behind the service's back, and the check says so.

use super::*;
use crate::schema::{PendingCut, cut_key, garbage_key, inode_key};
use crate::service::tests::Fixture;
use crate::txn::embedded::Embedded;

type Writes = <Embedded as Store>::Txn;

/// What the check says after `break_it` has changed a store with `/dir` and `/dir/file`.
async fn found(break_it: impl FnOnce(&mut Writes, [InodeId; 2], [Inode; 2])) -> Vec<String> {
    let f = Fixture::new().await;
    let dir = f.mkdir(ROOT, "dir").await.unwrap().inode;
    let file = f.create(dir, "file").await.unwrap().attributes.inode;
    f.is_sound().await;
    let mut txn = f.store.begin().await.unwrap();
    let mut inodes = Vec::new();
    for id in [dir, file] {
        let value = txn.get(&inode_key(id), Isolation::Snapshot).await.unwrap().unwrap();
        inodes.push(Inode::from_value(&inode_key(id), &value).unwrap());
    }
    break_it(&mut txn, [dir, file], inodes.try_into().unwrap());
    txn.commit().await.unwrap();
    check(&f.store).await.unwrap().problems
}

fn says(problems: &[String], parts: &[&str]) {
    assert_eq!(problems.len(), parts.len(), "{problems:?}");
    for part in parts {
        assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:?}");
    }
}

#[tokio::test]
async fn a_name_without_an_inode_and_a_wrong_count_are_found() {
    let problems = found(|txn, [_, file], _| txn.clear(&inode_key(file))).await;
    says(&problems, &["name file in", "the counter says 3 inodes, there are 2"]);
}

#[tokio::test]
async fn a_name_of_another_kind_or_place_is_found() {
    let wrong_kind = found(|txn, [dir, file], _| {
        let key = dentry_key(&HashKey::new(77), dir, b"file");
        txn.set(&key, &Dentry { inode: file, kind: FileKind::Symlink }.to_value());
    });
    says(&wrong_kind.await, &["another kind than its inode"]);
    let wrong_hash = found(|txn, [dir, file], _| {
        txn.clear(&dentry_key(&HashKey::new(77), dir, b"file"));
        let key = dentry_key(&HashKey::new(78), dir, b"file");
        txn.set(&key, &Dentry { inode: file, kind: FileKind::File }.to_value());
    });
    says(&wrong_hash.await, &["is not at its hash"]);
    let in_a_file = found(|txn, [dir, file], _| {
        txn.clear(&dentry_key(&HashKey::new(77), dir, b"file"));
        let key = dentry_key(&HashKey::new(77), file, b"file");
        txn.set(&key, &Dentry { inode: file, kind: FileKind::File }.to_value());
    });
    says(&in_a_file.await, &["which is no directory", "cannot be reached from the root"]);
}

#[tokio::test]
async fn wrong_links_parents_and_layouts_are_found() {
    let links = found(|txn, [_, file], [_, inode]| {
        txn.set(&inode_key(file), &Inode { links: 2, ..inode }.to_value());
    });
    says(&links.await, &["counts 2 links and has 1"]);
    let parent = found(|txn, [dir, file], [inode, _]| {
        txn.set(&inode_key(dir), &Inode { parent: file, ..inode }.to_value());
    });
    says(&parent.await, &["names parent"]);
    let layout = found(|txn, [_, file], [_, inode]| {
        txn.set(&inode_key(file), &Inode { layout: None, ..inode }.to_value());
    });
    says(&layout.await, &["wrong about a layout"]);
}

#[tokio::test]
async fn wrong_queues_are_found() {
    let mark = || schema::Mark {}.to_value();
    let named = found(|txn, [_, file], _| txn.set(&garbage_key(file), &mark()));
    says(&named.await, &["wrong about the queue"]);
    let unknown = found(|txn, _, _| txn.set(&garbage_key(InodeId::new(9)), &mark()));
    says(&unknown.await, &["is in the queue and does not exist"]);
    let cut = PendingCut { length: 1, truncate_generation: 0 };
    let not_as_long = found(|txn, [_, file], _| txn.set(&cut_key(file), &cut.to_value()));
    says(&not_as_long.await, &["is to be cut otherwise than it says"]);
}

#[tokio::test]
async fn a_directory_that_holds_itself_is_found() {
    let problems = found(|txn, [dir, _], [inode, _]| {
        txn.clear(&dentry_key(&HashKey::new(77), ROOT, b"dir"));
        let key = dentry_key(&HashKey::new(77), dir, b"dir");
        txn.set(&key, &Dentry { inode: dir, kind: FileKind::Directory }.to_value());
        txn.set(&inode_key(dir), &Inode { parent: dir, ..inode }.to_value());
    });
    says(&problems.await, &["cannot be reached", "cannot be reached"]);
}
