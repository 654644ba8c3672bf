use proptest::prelude::*;

use super::*;

fn allocator(total: u64) -> Arc<Allocator> {
    Arc::new(Allocator::new(total, 0, Vec::new()).unwrap())
}

fn take(allocator: &Arc<Allocator>, bytes: u64) -> Option<Block> {
    let taken = allocator.take(bytes, |_, _| Ok(())).ok()?;
    let block = taken.block();
    taken.keep();
    Some(block)
}

#[test]
fn blocks_have_the_next_power_of_two_and_never_the_header() {
    let allocator = allocator(4096);
    for (bytes, size) in [(1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT), (64 << 20, 64 << 20)] {
        let block = take(&allocator, bytes).unwrap();
        assert_eq!(block.size(), size);
        assert!(block.offset() >= UNIT);
        assert_eq!(block.offset() % size, 0);
    }
}

#[test]
fn a_dropped_allocation_and_its_neighbours_become_one_large_block_again() {
    let allocator = allocator(2048);
    let small: Vec<_> = (0..2047).map(|_| allocator.take(1, |_, _| Ok(())).unwrap()).collect();
    assert!(take(&allocator, 1).is_none());
    drop(small);
    assert_eq!(take(&allocator, 64 << 20).unwrap().offset(), 64 << 20);
}

#[test]
fn a_retired_block_waits_for_the_readers_that_may_know_it() {
    let allocator = allocator(2);
    let block = take(&allocator, 1).unwrap();
    let before = allocator.enter();
    allocator.retire([block]);
    let after = allocator.enter();
    assert!(take(&allocator, 1).is_none(), "a reader from before still runs");
    drop(before);
    assert_eq!(take(&allocator, 1), Some(block), "a later reader does not hold it");
    drop(after);
}

#[test]
fn a_full_file_system_refuses_and_changes_nothing() {
    let allocator = allocator(1024);
    let full = |_, _| Err(io::Error::from(io::ErrorKind::StorageFull));
    let answer = allocator.take(1, full);
    assert!(matches!(answer, Err(AllocError::NoSpace { wanted_bytes: UNIT, .. })));
    assert_eq!(allocator.space(), (1023 * UNIT, 0));
    assert!(take(&allocator, 1).is_some());
}

#[test]
fn the_last_bytes_of_a_file_system_are_used_though_generous_growth_fails() {
    let allocator = allocator(1024);
    let nearly_full =
        |_, to| if to > 2 * UNIT { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
    allocator.take(1, nearly_full).unwrap().keep();
    assert!(allocator.take(1, nearly_full).is_err());
}

#[test]
fn the_file_grows_from_its_start_and_not_to_the_odd_pieces_at_the_end_of_the_disk() {
    let allocator = allocator(1_000_003);
    for units in 1..=1000 {
        let block = take(&allocator, UNIT << (units % 3)).unwrap();
        assert!(block.offset() / UNIT < 4 * units, "block {units} at {}", block.offset());
    }
    assert!(allocator.lock().backed < 4000);
}

#[test]
fn overlapping_blocks_are_named() {
    let (a, b) = (Block::new(8, 3).unwrap(), Block::new(12, 0).unwrap());
    assert_eq!(Allocator::new(64, 0, vec![b, a]).unwrap_err(), Overlap(a, b));
}

#[test]
fn raw_numbers_that_are_not_blocks_are_refused() {
    let good = Block::new(16, 4).unwrap();
    assert_eq!(Block::from_raw(good.to_raw()), Some(good));
    for raw in [0, 11, 3 << 8 | 1, 1 << 8 | 11, u64::MAX] {
        assert_eq!(Block::from_raw(raw), None, "{raw:#x}");
    }
}

proptest! {
    #[test]
    fn live_blocks_never_overlap_and_all_space_comes_back(
        steps in prop::collection::vec((any::<bool>(), 0..=6_u8, any::<prop::sample::Index>()), 1..300),
    ) {
        let total = 512;
        let allocator = allocator(total);
        let mut live: Vec<Block> = Vec::new();
        for (is_take, order, pick) in steps {
            if is_take {
                live.extend(take(&allocator, UNIT << order));
            } else if !live.is_empty() {
                allocator.retire([live.swap_remove(pick.index(live.len()))]);
            }
            // Building a map from the live blocks finds overlaps, and must agree on what is used.
            let rebuilt = Allocator::new(total, 0, live.clone());
            prop_assert!(rebuilt.is_ok());
            prop_assert_eq!(rebuilt.unwrap().space(), allocator.space());
        }
        allocator.retire(live);
        let free = allocator.lock().free.clone();
        prop_assert_eq!(free, Allocator::new(total, 0, vec![]).unwrap().lock().free.clone());
    }
}
