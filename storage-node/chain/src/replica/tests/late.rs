//! What a network and a memory can do to a message: it comes late, or it comes damaged.

use super::*;

const OTHER: ChunkId = ChunkId { file: InodeId::new(5), index: 1 };

/// Takes a message off the network.
fn hold(world: &mut World, index: usize) -> Packet {
    let packet = world.network.remove(index);
    assert!(matches!(packet, Packet::Go { .. }), "an answer: {packet:?}");
    packet
}

/// Takes a message off the network; its sender gives it up.
fn give_up(world: &mut World, index: usize) -> Packet {
    let packet = hold(world, index);
    if let Packet::Go { from, attempt, body, .. } = &packet {
        let lost = Err(Refusal::Unreachable("no answer in time".into()));
        world.event(*from, Event::Sent(body.chunk(), *attempt, lost));
    }
    packet
}

/// What the network held arrives after all.
fn arrive(world: &mut World, late: Packet) {
    world.network.push(late);
    world.settle();
}

fn sync(world: &mut World, from: u64, chunk: ChunkId) -> Token {
    let token = world.token();
    let version = world.chain.version;
    world.event(from, Event::Sync(token, version, chunk));
    token
}

/// 3 comes back without what 1 and 2 have written meanwhile.
fn returning() -> World {
    let mut world = World::new();
    world.kill(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Offline)]);
    world.send(1, write(1, "one"));
    world.send(1, Update { chunk: OTHER, ..update(8, 1, put(0, "other")) });
    world.settle();
    world.start(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Syncing)]);
    world
}

/// 3 serves, has what the others have, and goes on with them.
fn assert_serves_with(mut world: World, text: &str) {
    world.publish(&[(1, Serving), (2, Serving), (3, Serving)]);
    world.settle();
    assert_eq!(world.texts(), [text; 3]);
    assert_eq!(world.disks[&3].committed, world.disks[&2].committed);
    let next = world.send(1, update(9, 1, put(0, "a longer text")));
    world.settle();
    assert!(world.answers[&next].is_ok(), "{:?}", world.answers.get(&next));
    assert_eq!(world.texts(), ["a longer text"; 3]);
    assert!(world.is_quiet());
}

#[test]
fn a_whole_chunk_that_comes_late_takes_back_nothing() {
    let mut world = returning();
    let pass = sync(&mut world, 2, CHUNK);
    let late = give_up(&mut world, 0);
    assert!(world.answers[&pass].is_err(), "the pass is repeated");
    let newer = world.send(1, write(2, "two!"));
    world.settle();
    assert_eq!(world.done(newer), (2, 4));
    world.sync(2, 3);
    arrive(&mut world, late);
    assert_serves_with(world, "two!");
}

#[test]
fn an_update_that_comes_late_as_a_whole_chunk_takes_back_nothing() {
    let mut world = returning();
    world.send(1, write(2, "two!"));
    // 1 to 2, then 2 to 3, which needs the whole chunk and says so.
    (0..3).for_each(|_| world.deliver(0));
    let late = give_up(&mut world, 0);
    assert!(matches!(
        &late,
        Packet::Go { to: 3, body: Body::Forward(Forward { content: Content::Whole(_), .. }), .. }
    ));
    world.settle();
    // Of the same head under the same chain version: only the order tells the two apart.
    world.send(1, write(3, "three"));
    world.settle();
    assert_eq!(world.texts(), ["three"; 3]);
    world.sync(2, 3);
    arrive(&mut world, late);
    assert_serves_with(world, "three");
}

#[test]
fn a_forget_that_comes_late_erases_nothing_that_was_made_meanwhile() {
    let mut world = World::new();
    world.send(1, write(1, "lost"));
    world.kill(1);
    world.publish(&[(2, Serving), (3, Serving), (1, Offline)]);
    world.start(1);
    world.publish(&[(2, Serving), (3, Serving), (1, Syncing)]);
    let pass = sync(&mut world, 3, CHUNK);
    let late = give_up(&mut world, 0);
    assert!(matches!(&late, Packet::Go { to: 1, body: Body::Forget(CHUNK), .. }));
    assert!(world.answers[&pass].is_err());
    world.send(2, update(8, 1, put(0, "kept")));
    world.settle();
    assert_eq!(world.texts(), ["kept"; 3]);
    world.sync(3, 1);
    arrive(&mut world, late);
    world.publish(&[(2, Serving), (3, Serving), (1, Serving)]);
    assert_eq!(world.texts(), ["kept"; 3]);
}

#[test]
fn what_a_process_sent_that_has_ended_takes_back_nothing_either() {
    let mut world = returning();
    sync(&mut world, 2, CHUNK);
    let late = hold(&mut world, 0);
    world.kill(2);
    world.start(2);
    let newer = world.send(1, write(2, "two!"));
    world.settle();
    assert_eq!(world.done(newer), (2, 4));
    world.sync(2, 3);
    arrive(&mut world, late);
    assert_serves_with(world, "two!");
}

#[test]
fn a_message_is_sent_again_if_one_of_another_chunk_was_given_up_and_overtook_it() {
    let mut world = returning();
    let first = sync(&mut world, 2, CHUNK);
    let other = sync(&mut world, 2, OTHER);
    let late = give_up(&mut world, 0);
    assert!(world.answers[&first].is_err());
    let again = sync(&mut world, 2, CHUNK);
    world.deliver(1);
    world.deliver(0);
    assert!(
        matches!(world.network.last(), Some(Packet::Back { result: Err(Refusal::Late), .. })),
        "{:?}",
        world.network
    );
    world.settle();
    assert!([other, again].iter().all(|token| world.answers[token].is_ok()));
    arrive(&mut world, late);
    world.sync(2, 3);
    assert_serves_with(world, "one");
}

#[test]
fn another_predecessor_counts_anew() {
    let mut world = returning();
    // 2 gives up so often that 1, which started before it, is of an older era.
    for _ in 0..3 {
        sync(&mut world, 2, CHUNK);
        give_up(&mut world, 0);
    }
    sync(&mut world, 2, OTHER);
    world.settle();
    world.kill(2);
    world.publish(&[(1, Serving), (3, Syncing), (2, Offline)]);
    world.sync(1, 3);
    assert_eq!(world.disks[&3].committed, world.disks[&1].committed);
}

#[test]
fn an_update_that_makes_other_bytes_is_refused_each_time_and_leaves_nothing() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    let Packet::Go { version, era, body: Body::Forward(mut forward), .. } = hold(&mut world, 0)
    else {
        panic!("not a forward");
    };
    forward.identity.checksum ^= 1;
    for _ in 0..2 {
        let token = world.token();
        world.event(2, Event::Forward(token, version, era, forward.clone()));
        assert_eq!(world.answers[&token], Err(Refusal::Conflict(UpdateVersion::new(1))), "W5");
        assert!(world.network.is_empty(), "it went on: {:?}", world.network);
        assert!(world.disks[&2].pending.is_empty() && world.disks[&2].committed.is_empty());
    }
    world.kill(1);
    world.publish(&[(2, Serving), (3, Serving), (1, Offline)]);
    world.settle();
    assert_eq!(world.texts(), ["-"; 3], "W8 finds nothing to drive");
    world.send(2, update(8, 1, put(0, "two")));
    world.settle();
    assert_eq!(world.texts(), ["-", "two", "two"]);
}

#[test]
fn a_pending_update_with_other_bytes_is_no_answer_to_the_forward() {
    let mut world = World::new();
    let token = world.send(1, write(1, "one"));
    let mut other = world.disks[&1].pending[&CHUNK].clone();
    other.state.identity.checksum ^= 1;
    world.disks.get_mut(&2).unwrap().pending.insert(CHUNK, other);
    for _ in 0..2 {
        world.deliver(0);
        assert!(
            matches!(world.network[..], [Packet::Back { result: Err(Refusal::Conflict(_)), .. }]),
            "{:?}",
            world.network
        );
        world.deliver(0);
    }
    assert_eq!(world.texts(), ["-"; 3]);
    assert!(!world.answers.contains_key(&token));
}

#[test]
fn a_syncing_target_replaces_a_pending_update_with_other_bytes() {
    let mut world = returning();
    let mut other = world.disks[&2].committed[&CHUNK].clone();
    other.state.identity.checksum ^= 1;
    world.disks.get_mut(&3).unwrap().pending.insert(CHUNK, other);
    world.sync(2, 3);
    assert_serves_with(world, "one");
}

#[test]
fn bytes_that_change_on_the_way_are_refused_and_sent_again_from_the_disk() {
    let mut world = World::new();
    let token = world.send(1, write(1, "one"));
    for packet in &mut world.network {
        if let Packet::Go { body: Body::Forward(forward), .. } = packet
            && let Content::Change(Change::Write { bytes, .. }) = &mut forward.content
        {
            *bytes = Bytes::from_static(b"onf");
        }
    }
    world.deliver(0);
    assert!(
        matches!(world.network[..], [Packet::Back { result: Err(Refusal::Damaged), .. }]),
        "N10: {:?}",
        world.network
    );
    assert!(world.disks[&2].pending.is_empty());
    world.deliver(0);
    // It may be in the memory of the head that they changed.
    let is_whole = |packet: &Packet| match packet {
        Packet::Go { body: Body::Forward(forward), .. } => {
            matches!(forward.content, Content::Whole(_))
        }
        _ => false,
    };
    assert!(world.network.iter().all(is_whole), "{:?}", world.network);
    world.settle();
    assert_eq!(world.done(token), (1, 3));
    assert_eq!(world.texts(), ["one"; 3]);
    // The head refuses what its client's bytes have become.
    let bytes = Bytes::from_static(b"twp");
    let change = Change::Write { offset: 0, bytes, checksum: crc32c::crc32c(b"two") };
    let damaged = world.send(1, update(7, 2, change));
    assert_eq!(world.answers[&damaged], Err(Refusal::Damaged));
    assert!(world.is_quiet());
    world.send(1, write(2, "two"));
    world.settle();
    assert_eq!(world.texts(), ["two"; 3]);
}
