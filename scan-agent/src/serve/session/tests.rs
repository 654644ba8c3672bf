use arrow_array::types::Int32Type;
use arrow_array::{ArrayRef, Int64Array, ListArray, StringArray};

use super::*;

fn batch(rows: i32) -> RecordBatch {
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values((0..rows).map(i64::from)));
    let texts: ArrayRef =
        Arc::new(StringArray::from_iter_values((0..rows).map(|_| "x".repeat(1000))));
    let lists = (0..rows).map(|row| Some(vec![Some(row); 100]));
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists));
    RecordBatch::try_from_iter([("n", numbers), ("text", texts), ("list", lists)]).unwrap()
}

/// The batches that a client hears of, each given back at once, and whether the last word is that
/// all rows were sent.
fn hear(stream: &UnixStream, slab: &Slab) -> (Vec<usize>, bool) {
    let (mut reader, mut rows) = (LineReader::new(), Vec::new());
    while let Some(line) = reader.recv_line(stream).unwrap() {
        match serde_json::from_slice(&line.bytes).unwrap() {
            Reply::Batch(batch) => {
                assert!(batch.bytes <= slab.largest());
                rows.push(batch.rows);
                assert!(slab.release(batch.id));
            }
            Reply::Done(done) => {
                assert_eq!(done.rows, rows.iter().sum::<usize>() as u64);
                return (rows, true);
            }
            other => panic!("{other:?}"),
        }
    }
    (rows, false)
}

#[test]
fn no_more_is_held_back_than_a_batch_may_have() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (slab, metrics) = (Slab::new(1 << 20).unwrap(), Metrics::default());
    let (rows, is_done) = thread::scope(|scope| {
        let client = scope.spawn(|| hear(&theirs, &slab));
        // More rows than come at all.
        let mut sender = Sender::new(&ours, &slab, 1 << 20, &metrics);
        for _ in 0..100 {
            // Parts of larger arrays, as filters leave them.
            assert!(sender.push(batch(500).slice(100, 37)).is_continue());
            assert!(sender.pending_bytes <= slab.largest(), "{} bytes", sender.pending_bytes);
            assert!(sender.pending_rows < slab.largest() / 1000, "{} rows", sender.pending_rows);
        }
        sender.finish(&[]).unwrap();
        client.join().unwrap()
    });
    assert!(is_done);
    assert_eq!(rows.iter().sum::<usize>(), 3700);
    // 2^20 rows halved until they fit.
    assert!(rows[..rows.len() - 1].iter().all(|rows| *rows == 256), "{rows:?}");
    assert_eq!(metrics.rows.get(), 3700);
}

#[test]
fn a_client_that_is_gone_is_not_told_that_all_was_sent() {
    let (slab, metrics) = (Slab::new(1 << 20).unwrap(), Metrics::default());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut sender = Sender::new(&ours, &slab, 100, &metrics);
    theirs.shutdown(std::net::Shutdown::Read).unwrap();
    assert!(sender.push(batch(100)).is_break());
    assert!(sender.outcome().is_ok() && matches!(sender.stop, Some(Stop::Gone)));
    assert!(sender.finish(&[]).is_ok());
    assert_eq!((metrics.rows.get(), sender.done.rows), (0, 0));

    // It said something that ended its session, and still reads.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut sender = Sender::new(&ours, &slab, 100, &metrics);
    slab.close();
    sender.finish(&[]).unwrap();
    drop(sender);
    drop(ours);
    assert_eq!(hear(&theirs, &slab), (Vec::new(), false));
}
