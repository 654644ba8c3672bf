//! The seccomp profile of storage pods, installed where kubelet looks for Localhost profiles.
//!
//! Container runtimes' default profile refuses io_uring. Ours is that profile without capabilities,
//! plus the three io_uring calls, minus some that a storage server never makes. Pod security
//! *restricted* accepts it, since any Localhost profile is accepted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The profile's text.
pub const STORAGE_NODE: &str = include_str!("storage-node-seccomp.json");
/// Name of the profile for a pod's `localhostProfile`.
pub const STORAGE_NODE_NAME: &str = "lampyris/storage-node.json";

/// Writes the profile below `kubelet_dir`, whole or not at all, and returns its path.
///
/// # Errors
/// The file system's.
pub fn install(kubelet_dir: &Path) -> io::Result<PathBuf> {
    let path = kubelet_dir.join("seccomp").join(STORAGE_NODE_NAME);
    if fs::read_to_string(&path).is_ok_and(|text| text == STORAGE_NODE) {
        return Ok(path);
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let new = path.with_extension("json.new");
    fs::write(&new, STORAGE_NODE)?;
    fs::rename(&new, &path)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_allows_io_uring_and_denies_by_default() {
        let profile: serde_json::Value = serde_json::from_str(STORAGE_NODE).unwrap();
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        let allowed = profile["syscalls"][0]["names"].as_array().unwrap();
        for call in ["io_uring_setup", "io_uring_enter", "io_uring_register", "openat", "execve"] {
            assert!(allowed.iter().any(|name| name == call), "{call}");
        }
        for call in ["mount", "ptrace", "bpf", "keyctl", "unshare", "setns", "clone", "socket"] {
            assert!(!allowed.iter().any(|name| name == call), "{call}");
        }
    }

    #[test]
    fn installing_twice_leaves_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = install(dir.path()).unwrap();
        assert_eq!(install(dir.path()).unwrap(), path);
        assert_eq!(path, dir.path().join("seccomp/lampyris/storage-node.json"));
        assert_eq!(fs::read_to_string(&path).unwrap(), STORAGE_NODE);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
