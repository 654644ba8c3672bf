//! What is kept: for each key some descriptors and a JSON object, within bounds.
//!
//! Descriptors close when their entry goes. Nothing here does any other IO.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde_json::Value;

/// Most entries: one per volume, 250 pods a node with four datasets each.
pub const MAX_ENTRIES: usize = 1000;
/// Longest key in bytes: a pod uid, a slash and a volume name are below 110.
pub const MAX_KEY_BYTES: usize = 256;
/// Longest metadata of one entry, as JSON text.
pub const MAX_META_BYTES: usize = 256 << 10;
/// All metadata together: bounds the memory of a process that must stay small.
pub const MAX_TOTAL_META_BYTES: usize = 16 << 20;
/// Most descriptors of one entry.
pub const MAX_ENTRY_DESCRIPTORS: usize = 4;

/// Why a request on the store was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StoreError {
    /// The key is empty or too long.
    #[error("key must have 1 to {MAX_KEY_BYTES} bytes")]
    BadKey,
    /// No such entry.
    #[error("no entry {0}")]
    NotFound(String),
    /// A new entry came without a descriptor.
    #[error("a new entry needs a descriptor")]
    NoDescriptor,
    /// A bound would be exceeded.
    #[error("the keeper is full: {0}")]
    Full(&'static str),
}

/// One kept entry.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The metadata as JSON text.
    pub meta: Arc<str>,
    /// The descriptors, in the order given.
    pub descriptors: Arc<[OwnedFd]>,
}

/// All kept entries.
#[derive(Debug, Default)]
pub struct Store {
    entries: BTreeMap<String, Entry>,
    meta_bytes: usize,
}

impl Store {
    /// Keeps an entry. An existing one gets the new metadata, and the new descriptors if there are any.
    ///
    /// # Errors
    /// See [`StoreError`]; the store is unchanged then.
    pub fn put(
        &mut self,
        key: &str,
        meta: &Value,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), StoreError> {
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(StoreError::BadKey);
        }
        let meta = meta.to_string();
        let old = self.entries.get(key);
        let old_bytes = old.map_or(0, |entry| entry.meta.len());
        let total = self.meta_bytes - old_bytes + meta.len();
        if meta.len() > MAX_META_BYTES || total > MAX_TOTAL_META_BYTES {
            return Err(StoreError::Full("metadata"));
        }
        if descriptors.len() > MAX_ENTRY_DESCRIPTORS {
            return Err(StoreError::Full("descriptors of one entry"));
        }
        let descriptors: Arc<[OwnedFd]> = match old {
            None if descriptors.is_empty() => return Err(StoreError::NoDescriptor),
            None if self.entries.len() >= MAX_ENTRIES => return Err(StoreError::Full("entries")),
            Some(entry) if descriptors.is_empty() => Arc::clone(&entry.descriptors),
            None | Some(_) => descriptors.into(),
        };
        self.meta_bytes = total;
        self.entries.insert(key.to_owned(), Entry { meta: meta.into(), descriptors });
        Ok(())
    }

    /// The entry of a key.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    pub fn get(&self, key: &str) -> Result<Entry, StoreError> {
        self.entries.get(key).cloned().ok_or_else(|| StoreError::NotFound(key.to_owned()))
    }

    /// All keys in order.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    /// Forgets a key; nothing happens when it is not there.
    pub fn remove(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.meta_bytes -= entry.meta.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn descriptor() -> Vec<OwnedFd> {
        vec![std::fs::File::open("/dev/null").unwrap().into()]
    }

    #[test]
    fn a_put_without_descriptors_changes_only_the_metadata() {
        let mut store = Store::default();
        store.put("pod/v", &json!({"a": 1}), descriptor()).unwrap();
        store.put("pod/v", &json!({"a": 2}), vec![]).unwrap();
        let entry = store.get("pod/v").unwrap();
        assert_eq!(&*entry.meta, r#"{"a":2}"#);
        assert_eq!(entry.descriptors.len(), 1);
    }

    #[test]
    fn bounds_refuse_and_leave_the_store_as_it_was() {
        let mut store = Store::default();
        assert_eq!(store.put("", &json!({}), descriptor()), Err(StoreError::BadKey));
        assert_eq!(store.put("k", &json!({}), vec![]), Err(StoreError::NoDescriptor));
        let long = json!("x".repeat(MAX_META_BYTES));
        assert_eq!(store.put("k", &long, descriptor()), Err(StoreError::Full("metadata")));
        assert!(store.keys().is_empty());
        let big = json!("x".repeat(MAX_META_BYTES - 2));
        for n in 0..MAX_TOTAL_META_BYTES / MAX_META_BYTES {
            store.put(&format!("k{n}"), &big, descriptor()).unwrap();
        }
        assert_eq!(
            store.put("one-more", &json!({}), descriptor()),
            Err(StoreError::Full("metadata"))
        );
        store.remove("k0");
        store.put("one-more", &json!({}), descriptor()).unwrap();
    }

    #[test]
    fn the_last_entry_that_fits_is_the_limit() {
        let mut store = Store::default();
        let shared = std::fs::File::open("/dev/null").unwrap();
        for n in 0..MAX_ENTRIES {
            let fd = shared.try_clone().unwrap().into();
            store.put(&n.to_string(), &json!({}), vec![fd]).unwrap();
        }
        assert_eq!(store.put("more", &json!({}), descriptor()), Err(StoreError::Full("entries")));
        store.put("7", &json!({"again": true}), descriptor()).unwrap();
        assert_eq!(store.keys().len(), MAX_ENTRIES);
    }
}
