//! The page that says whose disk this is, and the refusals when it is not ours.
//!
//! A wrong disk adopted silently serves another cluster's bytes; a wrong disk wiped is a loss.
//! So every open compares the identity and refuses with what to do, and nothing here deletes.
//!
//! `superblock`, 4096 bytes, little-endian:
//!
//! | at | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `LAMPYDSK` |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | zero |
//! | 16 | 8 | feature bits; an unknown one is refused |
//! | 24 | 8 | incarnation: opens for service |
//! | 32 | 4 | node id |
//! | 36 | 4 | 1 while an open is under way, else 0 |
//! | 40 | 16 | disk name, random |
//! | 56 | 8 | length of the cluster name |
//! | 64 | 253 | cluster name, UTF-8, zero behind it |
//! | 4092 | 4 | CRC32C of the bytes before |

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use chain::id::NodeId;
use thiserror::Error;

/// Size of the superblock and of the header page of the block file, in bytes.
pub(super) const PAGE: usize = 4096;

const MAGIC: &[u8; 8] = b"LAMPYDSK";
const FORMAT: u32 = 1;
const KNOWN_FEATURES: u64 = 0;
const MAX_CLUSTER: usize = 253;

/// Why a directory was not opened as a disk. Each message names the thing and the fix.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The directory is somebody else's.
    #[error(
        "{dir} is not empty and has no superblock: not a Lampyris disk; \
         give an empty directory, or empty this one yourself"
    )]
    NotOurs {
        /// The directory.
        dir: PathBuf,
    },
    /// The superblock does not parse.
    #[error(
        "{path}: damaged superblock ({detail}); the disk was not touched: restore the file, \
         or empty the directory yourself to let the target be filled from its peers"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        detail: String,
    },
    /// Written by a later program.
    #[error("{path}: {what} is newer than this program; run the version that wrote it, or newer")]
    Newer {
        /// The file.
        path: PathBuf,
        /// Which number.
        what: String,
    },
    /// A disk of another cluster or node.
    #[error(
        "{dir} belongs to {what} {found}, not {wanted}; \
         attach the right volume, or give this node an empty directory"
    )]
    Foreign {
        /// The directory.
        dir: PathBuf,
        /// `cluster` or `node`.
        what: &'static str,
        /// What the disk says.
        found: String,
        /// What this process was told.
        wanted: String,
    },
    /// A part of the disk is missing or comes from another disk or another time.
    #[error(
        "{path}: {detail}; the disk was not touched: put the matching part back, \
         or empty the directory yourself to let the target be filled from its peers"
    )]
    Mismatch {
        /// The part.
        path: PathBuf,
        /// What does not match.
        detail: String,
    },
    /// Another process has it.
    #[error("{dir} is in use by another process; stop that one first")]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
    /// The cluster name does not fit.
    #[error("cluster name of {0} bytes; it must have 1 to 253")]
    BadClusterName(usize),
    /// The operating system refused.
    #[error("{doing} {path}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The metadata store refused.
    #[error("open metadata {path}: {detail}")]
    Metadata {
        /// The directory of the store.
        path: PathBuf,
        /// Its message.
        detail: String,
    },
}

impl OpenError {
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }
}

/// Identity of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    pub(super) cluster: String,
    pub(super) node: NodeId,
    pub(super) disk: [u8; 16],
    /// 0 until the first open for service: nothing was ever stored.
    pub(super) incarnation: u64,
    /// Set from before the metadata gets the new incarnation until after.
    pub(super) is_opening: bool,
}

/// Why bytes are not a superblock.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ParseError {
    Damaged(&'static str),
    Newer(String),
}

impl Superblock {
    /// A new disk's identity, with a random name.
    pub(super) fn new(cluster: &str, node: NodeId) -> io::Result<Self> {
        let mut disk = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut disk)?;
        Ok(Self { cluster: cluster.to_owned(), node, disk, incarnation: 0, is_opening: false })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE);
        page.extend(MAGIC);
        page.extend(FORMAT.to_le_bytes());
        page.extend([0; 4]);
        page.extend(KNOWN_FEATURES.to_le_bytes());
        page.extend(self.incarnation.to_le_bytes());
        page.extend(self.node.get().to_le_bytes());
        page.extend(u32::from(self.is_opening).to_le_bytes());
        page.extend(self.disk);
        page.extend((self.cluster.len() as u64).to_le_bytes());
        page.extend(self.cluster.as_bytes());
        seal(page)
    }

    pub(super) fn decode(page: &[u8]) -> Result<Self, ParseError> {
        use ParseError::Damaged;
        let body = unseal(page, MAGIC).map_err(Damaged)?;
        let u32_at = |at: usize| super::record::u32_at(body, at).ok_or(Damaged("short"));
        let u64_at = |at: usize| super::record::u64_at(body, at).ok_or(Damaged("short"));
        let format = u32_at(8)?;
        if format > FORMAT {
            return Err(ParseError::Newer(format!("format version {format}")));
        }
        let unknown = u64_at(16)? & !KNOWN_FEATURES;
        if unknown != 0 {
            return Err(ParseError::Newer(format!("feature set {unknown:#x}")));
        }
        if format == 0 || u32_at(12)? != 0 {
            return Err(Damaged("reserved bytes are set"));
        }
        let is_opening = match u32_at(36)? {
            0 => false,
            1 => true,
            _ => return Err(Damaged("opening mark is neither 0 nor 1")),
        };
        let length = usize::try_from(u64_at(56)?).unwrap_or(usize::MAX);
        if !(1..=MAX_CLUSTER).contains(&length) {
            return Err(Damaged("length of the cluster name"));
        }
        let name = body.get(64..64 + length).ok_or(Damaged("short"))?;
        let cluster = std::str::from_utf8(name).map_err(|_| Damaged("cluster name"))?.to_owned();
        if body.get(64 + length..).is_none_or(|rest| rest.iter().any(|b| *b != 0)) {
            return Err(Damaged("bytes behind the cluster name"));
        }
        let disk = body.get(40..56).and_then(|b| b.try_into().ok()).ok_or(Damaged("short"))?;
        let node = NodeId::new(u32_at(32)?);
        Ok(Self { cluster, node, disk, incarnation: u64_at(24)?, is_opening })
    }

    /// Reads `dir/superblock`; `None` if there is none.
    pub(super) fn load(dir: &Path) -> Result<Option<Self>, OpenError> {
        let path = dir.join("superblock");
        let mut page = Vec::with_capacity(PAGE);
        match File::open(&path) {
            Ok(file) => file.take(PAGE as u64 + 1).read_to_end(&mut page),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => Err(e),
        }
        .map_err(OpenError::io("read", &path))?;
        Self::decode(&page).map(Some).map_err(|e| match e {
            ParseError::Damaged(detail) => OpenError::Damaged { path, detail: detail.to_owned() },
            ParseError::Newer(what) => OpenError::Newer { path, what },
        })
    }

    /// Writes `dir/superblock` so that a crash leaves the old or the new one, never a mixture.
    pub(super) fn store(&self, dir: &Path) -> Result<(), OpenError> {
        let new = dir.join("superblock.new");
        let path = dir.join("superblock");
        File::create(&new)
            .and_then(|mut file| {
                file.write_all(&self.encode())?;
                file.sync_all()
            })
            .map_err(OpenError::io("write", &new))?;
        fs::rename(&new, &path).map_err(OpenError::io("replace", &path))?;
        sync_dir(dir)
    }

    /// Refuses a disk of another cluster or node.
    pub(super) fn check(&self, dir: &Path, cluster: &str, node: NodeId) -> Result<(), OpenError> {
        let foreign = |what, found: String, wanted: String| OpenError::Foreign {
            dir: dir.to_owned(),
            what,
            found,
            wanted,
        };
        if self.cluster != cluster {
            return Err(foreign("cluster", self.cluster.clone(), cluster.to_owned()));
        }
        if self.node != node {
            return Err(foreign("node", self.node.to_string(), node.to_string()));
        }
        Ok(())
    }
}

/// Makes creations and renames in `dir` durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), OpenError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(OpenError::io("sync", dir))
}

/// Refuses cluster names that the superblock cannot hold.
pub(super) fn check_cluster_name(name: &str) -> Result<(), OpenError> {
    if (1..=MAX_CLUSTER).contains(&name.len()) {
        Ok(())
    } else {
        Err(OpenError::BadClusterName(name.len()))
    }
}

/// The first page of the block file: magic `LAMPYBLK`, zeros, the disk's name at 40, and a CRC.
pub(super) fn block_header(disk: [u8; 16]) -> Vec<u8> {
    let mut page = Vec::with_capacity(PAGE);
    page.extend(BLOCK_MAGIC);
    page.resize(40, 0);
    page.extend(disk);
    seal(page)
}

/// The disk's name from the first page of a block file.
pub(super) fn parse_block_header(page: &[u8]) -> Result<[u8; 16], &'static str> {
    let body = unseal(page, BLOCK_MAGIC)?;
    body.get(40..56).and_then(|b| b.try_into().ok()).ok_or("short")
}

const BLOCK_MAGIC: &[u8; 8] = b"LAMPYBLK";

/// Makes a page of it, with its checksum.
pub(super) fn seal(mut page: Vec<u8>) -> Vec<u8> {
    page.resize(PAGE - 4, 0);
    page.extend(crc32c::crc32c(&page).to_le_bytes());
    page
}

fn unseal<'a>(page: &'a [u8], magic: &[u8; 8]) -> Result<&'a [u8], &'static str> {
    if page.len() != PAGE {
        return Err("size is not 4096 bytes");
    }
    let (body, crc) = page.split_at(PAGE - 4);
    if !body.starts_with(magic) {
        return Err("wrong magic");
    }
    if super::record::u32_at(crc, 0) != Some(crc32c::crc32c(body)) {
        return Err("checksum mismatch");
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock {
            cluster: "train".to_owned(),
            node: NodeId::new(10_001),
            disk: [7; 16],
            incarnation: 3,
            is_opening: true,
        }
    }

    #[test]
    fn superblock_survives_encoding() {
        assert_eq!(Superblock::decode(&example().encode()), Ok(example()));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_detected() {
        let good = example().encode();
        for bit in 0..PAGE * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&bad).is_err(), "bit {bit}");
        }
        for cut in 0..PAGE {
            assert!(Superblock::decode(&good[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn newer_format_and_unknown_feature_are_told_from_damage() {
        let reseal = |at: usize| {
            let mut page = example().encode();
            page[at] = 9;
            page.truncate(PAGE - 4);
            Superblock::decode(&seal(page))
        };
        assert_eq!(reseal(8), Err(ParseError::Newer("format version 9".to_owned())));
        assert_eq!(reseal(16), Err(ParseError::Newer("feature set 0x9".to_owned())));
        assert_eq!(reseal(12), Err(ParseError::Damaged("reserved bytes are set")));
        assert_eq!(reseal(4000), Err(ParseError::Damaged("bytes behind the cluster name")));
    }

    #[test]
    fn block_header_survives_encoding_and_detects_every_flipped_bit() {
        let good = block_header([9; 16]);
        assert_eq!(parse_block_header(&good), Ok([9; 16]));
        for bit in 0..PAGE * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(parse_block_header(&bad).is_err(), "bit {bit}");
        }
    }
}
