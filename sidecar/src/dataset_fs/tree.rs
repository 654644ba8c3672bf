//! One listing as a tree of directories, looked up by number and by name.

use std::collections::{BTreeMap, HashMap};

use source::Object;

use crate::vfs::ROOT;

/// A directory's names by inode number, in this order, or an object.
#[derive(Debug)]
pub(super) enum Node {
    Directory(Vec<(u64, String)>),
    File(Object),
}

/// All inodes of one listing.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: HashMap<u64, Node>,
    children: HashMap<(u64, String), u64>,
    bytes: u64,
}

impl Tree {
    /// The tree of a listing that is sorted by path. An object whose path is also a directory loses its name to that.
    pub(super) fn new(objects: Vec<Object>) -> Self {
        let mut tree = Self { nodes: HashMap::new(), children: HashMap::new(), bytes: 0 };
        tree.nodes.insert(ROOT, Node::Directory(Vec::new()));
        let mut files = BTreeMap::new();
        for object in objects {
            files.insert(object.path.clone(), object);
        }
        for path in files.keys() {
            tree.add_parents(path);
        }
        for (path, object) in files {
            let (parent_path, name) = path.rsplit_once('/').unwrap_or(("", &path));
            let Some(parent) = tree.find(parent_path) else { continue };
            let seed = format!("{path}\0{}\0{}", object.identity, object.size);
            tree.bytes = tree.bytes.saturating_add(object.size);
            tree.add(parent, name, &seed, Node::File(object));
        }
        for node in tree.nodes.values_mut() {
            if let Node::Directory(names) = node {
                names.sort_unstable();
            }
        }
        tree
    }

    fn add_parents(&mut self, path: &str) {
        let mut parent = ROOT;
        for (at, _) in path.match_indices('/') {
            let (before, _) = path.split_at(at);
            let name = before.rsplit_once('/').map_or(before, |(_, name)| name);
            parent = match self.child(parent, name.as_bytes()) {
                Some(ino) => ino,
                None => self.add(parent, name, before, Node::Directory(Vec::new())),
            };
        }
    }

    /// Gives a node its number: a hash, or the next free one, the same for the same listing.
    fn add(&mut self, parent: u64, name: &str, seed: &str, node: Node) -> u64 {
        if let Some(taken) = self.child(parent, name.as_bytes()) {
            return taken;
        }
        let mut ino = hash(seed.as_bytes());
        while ino <= ROOT || self.nodes.contains_key(&ino) {
            ino = ino.wrapping_add(1) & HASH_MASK;
        }
        self.nodes.insert(ino, node);
        self.children.insert((parent, name.to_owned()), ino);
        if let Some(Node::Directory(names)) = self.nodes.get_mut(&parent) {
            names.push((ino, name.to_owned()));
        }
        ino
    }

    fn find(&self, path: &str) -> Option<u64> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(ROOT, |ino, name| self.child(ino, name.as_bytes()))
    }

    pub(super) fn node(&self, ino: u64) -> Option<&Node> {
        self.nodes.get(&ino)
    }

    pub(super) fn child(&self, parent: u64, name: &[u8]) -> Option<u64> {
        let name = std::str::from_utf8(name).ok()?;
        self.children.get(&(parent, name.to_owned())).copied()
    }

    /// Bytes of all objects, and the number of inodes.
    pub(super) fn totals(&self) -> (u64, u64) {
        (self.bytes, self.nodes.len() as u64)
    }
}

/// Numbers stay positive as an `i64`: some programs read directory offsets as one.
const HASH_MASK: u64 = u64::MAX >> 1;

/// FNV-1a with a final mix: fixed for ever, because a restart must find the same numbers.
fn hash(bytes: &[u8]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325u64;
    for byte in bytes {
        state = (state ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    state = (state ^ (state >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (state ^ (state >> 29)) & HASH_MASK
}
