//! A store whose commits sometimes do not tell what became of them, for tests of exactly-once.

use super::conformance::Dice;
use super::*;
use std::sync::{Arc, Mutex};

/// Wraps a store: some commits fail before they happen, some after.
#[derive(Clone)]
pub(crate) struct Unsure<S> {
    inner: S,
    dice: Arc<Mutex<Dice>>,
}

impl<S> Unsure<S> {
    pub(crate) fn new(inner: S, seed: u64) -> Self {
        Self { inner, dice: Arc::new(Mutex::new(Dice(seed))) }
    }
}

pub(crate) struct UnsureTxn<T> {
    inner: T,
    dice: Arc<Mutex<Dice>>,
}

impl<S: Store> Store for Unsure<S> {
    type Txn = UnsureTxn<S::Txn>;

    async fn begin(&self) -> Result<Self::Txn, TxnError> {
        Ok(UnsureTxn { inner: self.inner.begin().await?, dice: Arc::clone(&self.dice) })
    }
}

impl<T: Txn> Txn for UnsureTxn<T> {
    async fn get(&mut self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>, TxnError> {
        self.inner.get(key, isolation).await
    }

    async fn scan(&mut self, scan: Scan) -> Result<Page, TxnError> {
        self.inner.scan(scan).await
    }

    fn set(&mut self, key: &[u8], value: &[u8]) {
        self.inner.set(key, value);
    }

    fn clear(&mut self, key: &[u8]) {
        self.inner.clear(key);
    }

    fn clear_range(&mut self, begin: &[u8], end: &[u8]) {
        self.inner.clear_range(begin, end);
    }

    fn add(&mut self, key: &[u8], amount: u64) {
        self.inner.add(key, amount);
    }

    fn read_conflict(&mut self, key: &[u8]) {
        self.inner.read_conflict(key);
    }

    fn write_conflict(&mut self, key: &[u8]) {
        self.inner.write_conflict(key);
    }

    async fn commit(self) -> Result<(), TxnError> {
        let fate = self.dice.lock().unwrap().below(4);
        match fate {
            0 => Err(TxnError::UnknownResult),
            1 => {
                self.inner.commit().await?;
                Err(TxnError::UnknownResult)
            }
            _ => self.inner.commit().await,
        }
    }
}
