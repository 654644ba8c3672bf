//! Directories that are not this engine's disk are refused, with what to do, and not changed.

use std::fs;

use super::*;

/// Checks that opening is refused with `wanted` in the message, and changes no file but the lock.
fn assert_refused(disk: &Disk, wanted: &str) {
    let list = || {
        let mut names: Vec<_> = fs::read_dir(disk.dir.path())
            .unwrap()
            .map(|e| e.unwrap())
            .filter(|e| e.file_name() != "lock")
            .map(|e| (e.file_name(), e.metadata().unwrap().len()))
            .collect();
        names.sort();
        names
    };
    let before = list();
    let message = disk.refusal();
    assert!(message.contains(wanted), "{message}");
    assert_eq!(list(), before);
}

#[test]
fn a_directory_with_other_files_is_refused() {
    let disk = Disk::new(IoMode::Auto);
    fs::write(disk.dir.path().join("thesis.tex"), "precious").unwrap();
    assert_refused(&disk, "not a Lampyris disk; give an empty directory");
}

#[test]
fn a_disk_of_another_cluster_or_node_is_refused() {
    let mut disk = Disk::new(IoMode::Auto);
    drop(disk.open());
    disk.options.cluster = "other".to_owned();
    assert_refused(&disk, "belongs to cluster train, not other");
    disk.options.cluster = "train".to_owned();
    disk.options.node = NodeId::new(10_002);
    assert_refused(&disk, "belongs to node 10001, not 10002");
}

#[test]
fn a_disk_in_use_is_refused() {
    let disk = Disk::new(IoMode::Auto);
    let _engine = disk.open();
    assert_refused(&disk, "in use by another process");
    assert!(matches!(verify(disk.dir.path()), Err(OpenError::InUse { .. })));
}

#[test]
fn a_damaged_superblock_is_refused() {
    let disk = Disk::new(IoMode::Auto);
    drop(disk.open());
    let path = disk.dir.path().join("superblock");
    let good = fs::read(&path).unwrap();
    fs::write(&path, &good[..1000]).unwrap();
    assert_refused(&disk, "damaged superblock (size is not 4096 bytes)");
    fs::write(&path, vec![0; 4096]).unwrap();
    assert_refused(&disk, "damaged superblock (wrong magic)");
}

#[test]
fn a_disk_with_a_missing_part_is_refused() {
    for (part, wanted) in [("meta", "metadata is missing"), ("blocks", "block file is missing")] {
        let disk = Disk::new(IoMode::Auto);
        drop(disk.open());
        fs::rename(disk.dir.path().join(part), disk.dir.path().join("elsewhere")).unwrap();
        assert_refused(&disk, wanted);
    }
}

#[test]
fn a_part_of_another_disk_is_refused() {
    for (part, wanted) in [
        ("meta", "metadata belongs to another disk"),
        ("blocks", "block file belongs to another disk"),
    ] {
        let (disk, other) = (Disk::new(IoMode::Auto), Disk::new(IoMode::Auto));
        drop((disk.open(), other.open()));
        let path = disk.dir.path().join(part);
        fs::rename(&path, disk.dir.path().join("elsewhere")).unwrap();
        fs::rename(other.dir.path().join(part), path).unwrap();
        let message = disk.refusal();
        assert!(message.contains(wanted), "{message}");
    }
}

#[tokio::test]
async fn a_cut_off_block_file_is_refused() {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    update(&engine, chunk(0), 1, write(0, "abc")).await;
    drop(engine);
    let blocks = File::options().write(true).open(disk.dir.path().join("blocks")).unwrap();
    blocks.set_len(64 * KIB).unwrap();
    let message = disk.refusal();
    assert!(message.contains("block file is cut off"), "{message}");
}

#[test]
fn an_old_copy_of_the_superblock_is_refused() {
    let disk = Disk::new(IoMode::Auto);
    drop(disk.open());
    let path = disk.dir.path().join("superblock");
    let old = fs::read(&path).unwrap();
    drop(disk.open());
    fs::write(&path, old).unwrap();
    assert_refused(&disk, "superblock is an old copy: incarnation 2, superblock 1");
}

#[test]
fn an_old_copy_of_the_metadata_is_refused() {
    let disk = Disk::new(IoMode::Auto);
    drop(disk.open());
    let path = disk.dir.path().join("superblock");
    let old = superblock::Superblock::load(disk.dir.path()).unwrap().unwrap();
    // What the superblock says after a second open that the metadata did not see.
    superblock::Superblock { incarnation: 2, ..old.clone() }.store(disk.dir.path()).unwrap();
    let message = disk.refusal();
    assert!(message.contains("metadata is an old copy: incarnation 1"), "{message}");
    // With the mark it is an open that was interrupted, and goes on.
    let half = superblock::Superblock { incarnation: 2, is_opening: true, ..old };
    fs::write(path, half.encode()).unwrap();
    assert_eq!(disk.open().state().incarnation, 2);
}

#[test]
fn unfinished_formatting_is_finished_by_the_next_open() {
    for parts in [&["meta", "blocks"][..], &["blocks"], &[]] {
        let disk = Disk::new(IoMode::Auto);
        drop(disk.open());
        let dir = disk.dir.path();
        let old = superblock::Superblock::load(dir).unwrap().unwrap();
        superblock::Superblock { incarnation: 0, ..old }.store(dir).unwrap();
        for part in parts {
            let path = dir.join(part);
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
        if parts.contains(&"meta") {
            assert_eq!(disk.open().state().incarnation, 1);
        } else {
            // Metadata of a later incarnation under a superblock that never served.
            assert_refused(&disk, "superblock is an old copy");
        }
    }
}
