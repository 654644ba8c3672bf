//! What every engine behind [`Txn`] has to do. Written for any [`Store`]; each engine's tests run
//! [`cases`] and [`randomized`] on a store of its own.

use super::*;
use std::collections::BTreeMap;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;
type Ranges = Vec<(Vec<u8>, Vec<u8>)>;

async fn put<S: Store>(store: &S, pairs: &[(&str, &str)]) {
    let mut txn = store.begin().await.unwrap();
    pairs.iter().for_each(|(k, v)| txn.set(k.as_bytes(), v.as_bytes()));
    txn.commit().await.unwrap();
}

async fn get<T: Txn>(txn: &mut T, key: &str) -> Option<String> {
    let value = txn.get(key.as_bytes(), Isolation::Serializable).await.unwrap();
    value.map(|v| String::from_utf8(v.to_vec()).unwrap())
}

fn span(begin: &str, end: &str, limit: usize) -> Scan {
    Scan::new(begin.into(), end.into(), limit)
}

async fn keys<T: Txn>(txn: &mut T, scan: Scan) -> (Vec<String>, bool) {
    let page = txn.scan(scan).await.unwrap();
    let key = |(k, _): (Bytes, Bytes)| String::from_utf8(k.to_vec()).unwrap();
    (page.pairs.into_iter().map(key).collect(), page.more)
}

/// All single cases, each on keys of its own.
pub(crate) async fn cases<S: Store>(store: &S) {
    reads_one_version(store).await;
    reads_its_own_writes(store).await;
    refuses_write_skew(store).await;
    refuses_phantoms(store).await;
    a_limited_range_conflicts_only_where_it_read(store).await;
    snapshot_reads_never_conflict(store).await;
    blind_writes_never_conflict(store).await;
    explicit_conflicts_count(store).await;
    counters_add_up(store).await;
    limits_are_errors(store).await;
}

async fn reads_one_version<S: Store>(store: &S) {
    put(store, &[("a1", "old"), ("a2", "old"), ("a3", "old")]).await;
    let mut txn = store.begin().await.unwrap();
    put(store, &[("a1", "new"), ("a4", "new")]).await;
    let mut clear = store.begin().await.unwrap();
    clear.clear(b"a2");
    clear.clear_range(b"a3", b"a4");
    clear.commit().await.unwrap();
    assert_eq!(get(&mut txn, "a1").await.as_deref(), Some("old"));
    assert_eq!(get(&mut txn, "a2").await.as_deref(), Some("old"));
    assert_eq!(get(&mut txn, "a4").await, None);
    let old = ["a1", "a2", "a3"].map(String::from).to_vec();
    assert_eq!(keys(&mut txn, span("a", "b", 9)).await, (old.clone(), false));
    assert_eq!(keys(&mut txn, span("a", "b", 2)).await, (old[..2].to_vec(), true));
    let mut back = span("a", "b", 2);
    back.reverse = true;
    assert_eq!(keys(&mut txn, back).await, (vec!["a3".into(), "a2".into()], true));
    let mut newer = store.begin().await.unwrap();
    let new = vec!["a1".to_owned(), "a4".into()];
    assert_eq!(keys(&mut newer, span("a", "b", 9)).await, (new, false));
}

async fn reads_its_own_writes<S: Store>(store: &S) {
    put(store, &[("b1", "x"), ("b2", "x"), ("b3", "x")]).await;
    let mut txn = store.begin().await.unwrap();
    txn.clear_range(b"b1", b"b3");
    txn.set(b"b15", b"own");
    txn.set(b"b2", b"again");
    txn.clear(b"b3");
    assert_eq!(get(&mut txn, "b1").await, None);
    assert_eq!(get(&mut txn, "b2").await.as_deref(), Some("again"));
    let own = vec!["b15".to_owned(), "b2".into()];
    assert_eq!(keys(&mut txn, span("b", "c", 9)).await, (own.clone(), false));
    assert_eq!(keys(&mut txn, span("b", "c", 1)).await, (own[..1].to_vec(), true));
    txn.commit().await.unwrap();
    let mut after = store.begin().await.unwrap();
    assert_eq!(keys(&mut after, span("b", "c", 9)).await, (own, false));
}

async fn refuses_write_skew<S: Store>(store: &S) {
    put(store, &[("c1", "on"), ("c2", "on")]).await;
    let (mut one, mut two) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    for txn in [&mut one, &mut two] {
        assert_eq!(keys(txn, span("c", "d", 9)).await.0.len(), 2);
    }
    one.set(b"c1", b"off");
    two.set(b"c2", b"off");
    assert_eq!(one.commit().await, Ok(()));
    assert_eq!(two.commit().await, Err(TxnError::Conflict));
}

async fn refuses_phantoms<S: Store>(store: &S) {
    let mut empty = store.begin().await.unwrap();
    assert_eq!(keys(&mut empty, span("d", "e", 1)).await, (vec![], false));
    let mut absent = store.begin().await.unwrap();
    assert_eq!(get(&mut absent, "d1").await, None);
    put(store, &[("d1", "x")]).await;
    empty.set(b"dx", b"x");
    absent.set(b"dx", b"x");
    assert_eq!(empty.commit().await, Err(TxnError::Conflict));
    assert_eq!(absent.commit().await, Err(TxnError::Conflict));
}

async fn a_limited_range_conflicts_only_where_it_read<S: Store>(store: &S) {
    put(store, &[("e1", "x"), ("e3", "x"), ("e5", "x")]).await;
    for (written, result) in [("e4", Ok(())), ("e2", Err(TxnError::Conflict))] {
        let mut txn = store.begin().await.unwrap();
        assert_eq!(keys(&mut txn, span("e", "f", 2)).await.0, ["e1", "e3"]);
        put(store, &[(written, "x")]).await;
        txn.set(b"e9", b"x");
        assert_eq!(txn.commit().await, result, "after a write of {written}");
        put_away(store, written).await;
        put_away(store, "e9").await;
    }
}

async fn put_away<S: Store>(store: &S, key: &str) {
    let mut txn = store.begin().await.unwrap();
    txn.clear(key.as_bytes());
    txn.commit().await.unwrap();
}

async fn snapshot_reads_never_conflict<S: Store>(store: &S) {
    put(store, &[("f1", "x")]).await;
    let mut txn = store.begin().await.unwrap();
    txn.get(b"f1", Isolation::Snapshot).await.unwrap();
    txn.scan(span("f", "g", 9).snapshot()).await.unwrap();
    put(store, &[("f1", "y"), ("f2", "y")]).await;
    let same = txn.get(b"f1", Isolation::Snapshot).await.unwrap();
    assert_eq!(same.as_deref(), Some(&b"x"[..]));
    txn.set(b"f3", b"x");
    assert_eq!(txn.commit().await, Ok(()));
}

async fn blind_writes_never_conflict<S: Store>(store: &S) {
    let (mut one, mut two) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    one.set(b"g1", b"one");
    two.set(b"g1", b"two");
    // Reading an own write is no read.
    assert_eq!(get(&mut two, "g1").await.as_deref(), Some("two"));
    assert_eq!((one.commit().await, two.commit().await), (Ok(()), Ok(())));
    let mut after = store.begin().await.unwrap();
    assert_eq!(get(&mut after, "g1").await.as_deref(), Some("two"));
}

async fn explicit_conflicts_count<S: Store>(store: &S) {
    put(store, &[("h1", "x")]).await;
    let (mut reader, mut toucher) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    reader.read_conflict(b"h1");
    reader.set(b"h2", b"x");
    toucher.write_conflict(b"h1");
    assert_eq!(toucher.commit().await, Ok(()));
    assert_eq!(reader.commit().await, Err(TxnError::Conflict));
    let mut after = store.begin().await.unwrap();
    assert_eq!(get(&mut after, "h1").await.as_deref(), Some("x"));
}

async fn counters_add_up<S: Store>(store: &S) {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = store.clone();
        tasks.spawn(async move {
            for _ in 0..20 {
                let mut txn = store.begin().await.unwrap();
                txn.add(b"i", 3);
                txn.add(b"i", u64::MAX);
                txn.commit().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let mut txn = store.begin().await.unwrap();
    txn.add(b"i", 1);
    let sum = txn.get(b"i", Isolation::Serializable).await.unwrap().unwrap();
    assert_eq!(sum[..], 321u64.to_le_bytes());
}

async fn limits_are_errors<S: Store>(store: &S) {
    let too_large = |what, size, limit| Err(TxnError::TooLarge { what, size, limit });
    let mut txn = store.begin().await.unwrap();
    txn.set(b"j", &vec![0; VALUE_MAX_BYTES + 1]);
    assert_eq!(txn.commit().await, too_large("value", VALUE_MAX_BYTES + 1, VALUE_MAX_BYTES));
    let mut txn = store.begin().await.unwrap();
    txn.set(&[b'j'; KEY_MAX_BYTES + 1], b"");
    assert_eq!(txn.commit().await, too_large("key", KEY_MAX_BYTES + 1, KEY_MAX_BYTES));
    let mut txn = store.begin().await.unwrap();
    (0..101u8).for_each(|i| txn.set(&[b'j', i], &vec![0; VALUE_MAX_BYTES]));
    assert!(matches!(txn.commit().await, Err(TxnError::TooLarge { what: "transaction", .. })));
    let mut txn = store.begin().await.unwrap();
    assert_eq!(keys(&mut txn, span("j", "k", 1)).await, (vec![], false));
}

/// Numbers that depend on a seed only.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn key(&mut self) -> Vec<u8> {
        format!("r{:02}", self.below(24)).into_bytes()
    }

    fn range(&mut self) -> (Vec<u8>, Vec<u8>) {
        let (a, b) = (self.key(), self.key());
        if a <= b { (a, b) } else { (b, a) }
    }
}

/// A transaction and what it should see.
struct Twin<T> {
    txn: T,
    view: Model,
    base: Model,
    begun: usize,
    reads: Ranges,
    wrote: bool,
    writes: Ranges,
}

/// Interleaves transactions at random and compares every read and every commit with a model that
/// keeps all versions. The keys start with `r`.
pub(crate) async fn randomized<S: Store>(store: &S, seed: u64, steps: usize) {
    let mut dice = Dice(seed);
    // By commit: the state after it, and the ranges that it wrote.
    let mut versions: Vec<(Model, Ranges)> = vec![(Model::new(), vec![])];
    let mut wipe = store.begin().await.unwrap();
    wipe.clear_range(b"r", b"s");
    wipe.commit().await.unwrap();
    let mut open: Vec<Twin<S::Txn>> = Vec::new();
    let mut conflicts = 0;
    for step in 0..steps {
        if open.len() < 4 && dice.below(3) == 0 {
            let base = versions.last().unwrap().0.clone();
            open.push(Twin {
                txn: store.begin().await.unwrap(),
                view: base.clone(),
                base,
                begun: versions.len(),
                reads: vec![],
                wrote: false,
                writes: vec![],
            });
        }
        if open.is_empty() {
            continue;
        }
        let at = usize::try_from(dice.below(open.len() as u64)).unwrap();
        if dice.below(6) > 0 {
            open[at].step(&mut dice, step).await;
            continue;
        }
        let twin = open.swap_remove(at);
        let touched = versions[twin.begun..].iter().flat_map(|(_, writes)| writes);
        let overlap =
            |(b, e): &(Vec<u8>, Vec<u8>)| twin.reads.iter().any(|(rb, re)| rb < e && b < re);
        let may = twin.wrote && touched.into_iter().any(overlap);
        let now = &versions.last().unwrap().0;
        let must = twin.wrote && twin.reads.iter().any(|(b, e)| changed(&twin.base, now, b, e));
        let mut after = now.clone();
        twin.writes.iter().for_each(|(b, e)| after.retain(|k, _| !(b <= k && k < e)));
        let in_writes = |k: &[u8]| twin.writes.iter().any(|(b, e)| &b[..] <= k && k < &e[..]);
        after.extend(twin.view.into_iter().filter(|(k, _)| in_writes(k)));
        match twin.txn.commit().await {
            Ok(()) => {
                assert!(!must, "seed {seed} step {step}: a stale read was committed");
                versions.push((after, twin.writes));
            }
            Err(TxnError::Conflict) => {
                assert!(may, "seed {seed} step {step}: a conflict with nothing");
                conflicts += 1;
            }
            Err(error) => panic!("seed {seed} step {step}: {error}"),
        }
    }
    assert!(conflicts > 0 && versions.len() > steps / 40, "seed {seed} tested nothing");
}

fn changed(base: &Model, now: &Model, begin: &[u8], end: &[u8]) -> bool {
    let within = |model: &Model| -> Model {
        model
            .iter()
            .filter(|(k, _)| begin <= &k[..] && &k[..] < end)
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect()
    };
    within(base) != within(now)
}

impl<T: Txn> Twin<T> {
    fn write(&mut self, begin: Vec<u8>, end: Vec<u8>) {
        self.wrote = true;
        self.writes.push((begin, end));
    }

    /// Own writes hide what is below them: reading them is no read.
    fn is_own(&self, key: &[u8]) -> bool {
        self.writes.iter().any(|(b, e)| &b[..] <= key && key < &e[..])
    }

    async fn step(&mut self, dice: &mut Dice, step: usize) {
        match dice.below(6) {
            0 | 1 => {
                let key = dice.key();
                let found = self.txn.get(&key, Isolation::Serializable).await.unwrap();
                assert_eq!(found.as_deref(), self.view.get(&key).map(|v| &v[..]), "step {step}");
                if !self.is_own(&key) {
                    self.reads.push((key.clone(), key_after(&key)));
                }
            }
            2 => self.scan(dice, step).await,
            3 | 4 => {
                let (key, value) = (dice.key(), step.to_le_bytes());
                self.txn.set(&key, &value);
                self.view.insert(key.clone(), value.to_vec());
                self.write(key.clone(), key_after(&key));
            }
            _ => {
                let (begin, end) = dice.range();
                self.txn.clear_range(&begin, &end);
                self.view.retain(|k, _| !(begin <= *k && *k < end));
                if begin < end {
                    self.write(begin, end);
                }
            }
        }
    }

    async fn scan(&mut self, dice: &mut Dice, step: usize) {
        let (begin, end) = dice.range();
        let limit = usize::try_from(dice.below(6)).unwrap() + 1;
        let reverse = dice.below(2) == 0;
        let mut scan = Scan::new(begin.clone(), end.clone(), limit);
        scan.reverse = reverse;
        let page = self.txn.scan(scan).await.unwrap();
        let inside = self.view.iter().filter(|(k, _)| begin <= **k && **k < end);
        let mut expected: Vec<(&[u8], &[u8])> = inside.map(|(k, v)| (&k[..], &v[..])).collect();
        if reverse {
            expected.reverse();
        }
        let more = expected.len() > limit;
        expected.truncate(limit);
        let found: Vec<(&[u8], &[u8])> = page.pairs.iter().map(|(k, v)| (&k[..], &v[..])).collect();
        assert_eq!((found, page.more), (expected, more), "step {step}");
        // The model asks for no more than the least: keys of the range that were not own writes.
        let last = page.pairs.last().map(|(k, _)| k.to_vec());
        let (read_begin, read_end) = match (last, page.more, reverse) {
            (Some(last), true, false) => (begin, key_after(&last)),
            (Some(last), true, true) => (last, end),
            _ => (begin, end),
        };
        self.reads.push((read_begin, read_end));
    }
}
