//! Between the words of the wire, the replica and the engine. No decision is taken here.

use bytes::Bytes;
use chain::id::{ChainVersion, UpdateVersion};
use chain::replica::{
    Applied, Change, Content, Era, Forward, Identity, Known, Refusal, Stage, State, Whole,
};
use rpc::message::chain::{AppliedUpdate, Forward as ForwardMessage, Link};
use rpc::message::storage::{ChunkLength, UpdateOp};
use rpc::{Code, Error};

use crate::engine;

/// CRC32C of a payload that is none.
const NO_BYTES: u32 = 0;

/// A number of the engine as the wire has it: chunks are at most 64 MiB.
fn short(length: u64) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

pub(crate) fn chunk_length((index, length): (u64, u64)) -> ChunkLength {
    ChunkLength { index, length: short(length) }
}

pub(crate) fn identity(state: &engine::ChunkState) -> Identity {
    Identity { assigned: state.chain_version, version: state.version, checksum: state.checksum }
}

pub(crate) fn state(state: &engine::ChunkState) -> State {
    State { identity: identity(state), id: state.id, length: short(state.length) }
}

pub(crate) fn known(info: &engine::ChunkInfo, id: Option<chain::id::UpdateId>) -> Known {
    let applied = id.and_then(|id| {
        let table = &info.committed.as_ref()?.duplicates;
        let entry = table.get(&(id.client, id.channel))?;
        let length = short(entry.length);
        Some(Applied { seq: entry.seq, version: entry.version, length })
    });
    Known {
        committed: info.committed.as_ref().map(state),
        pending: info.pending.as_ref().map(state),
        applied,
    }
}

pub(crate) fn stage(stage: Stage) -> engine::Stage {
    let op = match stage.content {
        Content::Change(Change::Write { offset, bytes, checksum }) => {
            engine::Op::Write { offset: offset.into(), bytes, checksum }
        }
        Content::Change(Change::Truncate { length }) => {
            engine::Op::Truncate { length: length.into() }
        }
        Content::Change(Change::Remove) => engine::Op::Remove,
        Content::Whole(whole) => engine::Op::Replace(engine::Replace {
            // N10: what the sender's disk says, not what the bytes have become.
            checksum: stage.checksum.unwrap_or_else(|| crc32c::crc32c(&whole.bytes)),
            bytes: whole.bytes,
            removed: whole.removed,
            duplicates: whole.duplicates.into_iter().map(|(c, l, a)| ((c, l), table(a))).collect(),
        }),
    };
    engine::Stage {
        chunk: stage.chunk,
        version: stage.version,
        chain_version: stage.assigned,
        id: stage.id,
        truncate_generation: stage.truncate_generation,
        expected: stage.checksum,
        op,
    }
}

fn table(applied: Applied) -> engine::Applied {
    engine::Applied { seq: applied.seq, version: applied.version, length: applied.length.into() }
}

pub(crate) fn whole(bytes: Bytes, state: &engine::ChunkState) -> Whole {
    let entry = |((client, channel), a): (&_, &engine::Applied)| {
        let applied = Applied { seq: a.seq, version: a.version, length: short(a.length) };
        (*client, *channel, applied)
    };
    let duplicates = state.duplicates.iter().map(|((c, l), a)| entry((&(*c, *l), a))).collect();
    Whole { bytes, removed: state.removed, duplicates }
}

/// `checksum` is the writer's, and stays with the bytes from target to target (N10).
pub(crate) fn change(op: UpdateOp, payload: Bytes, checksum: u32) -> Change {
    match op {
        UpdateOp::Write { offset } => Change::Write { offset, bytes: payload, checksum },
        UpdateOp::Truncate { length } => Change::Truncate { length },
        UpdateOp::Remove => Change::Remove,
    }
}

/// The message and payload of a forward. The payload's checksum is never made here: it is of those
/// who had the bytes before, so that what happened to them in this process shows at the next.
pub(crate) fn forward_out(link: Link, era: Era, forward: Forward) -> (ForwardMessage, Bytes) {
    let alone = |op| (Some(op), false, Vec::new());
    let ((op, removed, duplicates), payload, checksum) = match forward.content {
        Content::Change(Change::Write { offset, bytes, checksum }) => {
            (alone(UpdateOp::Write { offset }), bytes, checksum)
        }
        Content::Change(Change::Truncate { length }) => {
            (alone(UpdateOp::Truncate { length }), Bytes::new(), NO_BYTES)
        }
        Content::Change(Change::Remove) => (alone(UpdateOp::Remove), Bytes::new(), NO_BYTES),
        Content::Whole(whole) => {
            let entry = |(client, channel, a): (_, _, Applied)| AppliedUpdate {
                client,
                channel,
                seq: a.seq,
                version: a.version,
                length: a.length,
            };
            let duplicates = whole.duplicates.into_iter().map(entry).collect();
            // The payload is the chunk.
            ((None, whole.removed, duplicates), whole.bytes, forward.identity.checksum)
        }
    };
    let message = ForwardMessage {
        link,
        era,
        chunk: forward.chunk,
        id: forward.id,
        identity: forward.identity,
        base: forward.base,
        truncate_generation: forward.truncate_generation,
        op,
        removed,
        duplicates,
        checksum,
    };
    (message, payload)
}

/// The inverse of [`forward_out`].
pub(crate) fn forward_in(message: ForwardMessage, payload: Bytes) -> Forward {
    let content = match message.op {
        Some(op) => Content::Change(change(op, payload, message.checksum)),
        None => Content::Whole(Whole {
            bytes: payload,
            removed: message.removed,
            duplicates: message
                .duplicates
                .into_iter()
                .map(|d| {
                    let applied = Applied { seq: d.seq, version: d.version, length: d.length };
                    (d.client, d.channel, applied)
                })
                .collect(),
        }),
    };
    Forward {
        chunk: message.chunk,
        id: message.id,
        identity: message.identity,
        base: message.base,
        truncate_generation: message.truncate_generation,
        content,
    }
}

/// What a peer is told.
pub(crate) fn error_out(refusal: &Refusal) -> Error {
    let (code, detail) = match *refusal {
        Refusal::StaleChain(version) => (Code::StaleChain, version.get()),
        Refusal::NotServing => (Code::NotServing, 0),
        Refusal::NotHead => (Code::NotHead, 0),
        Refusal::NoLease => (Code::NoLease, 0),
        Refusal::Dirty(version) => (Code::Dirty, version.get()),
        Refusal::Busy => (Code::Busy, 0),
        Refusal::StaleUpdate => (Code::StaleUpdate, 0),
        Refusal::NeedWhole => (Code::NeedWhole, 0),
        Refusal::Gap(version) => (Code::VersionGap, version.get()),
        Refusal::Conflict(version) => (Code::DivergedChunk, version.get()),
        Refusal::Damaged => (Code::ChecksumMismatch, 0),
        Refusal::Late => (Code::LateMessage, 0),
        Refusal::Engine(code, _) => (Code::from_number(code), 0),
        Refusal::Unreachable(_) => (Code::Unreachable, 0),
    };
    Error::new(code, refusal.to_string()).with_detail(detail)
}

/// What a successor answered, for the replica.
pub(crate) fn refusal_in(error: &Error) -> Refusal {
    match error.code {
        Code::StaleChain => Refusal::StaleChain(ChainVersion::new(error.detail)),
        Code::NotServing => Refusal::NotServing,
        Code::Busy => Refusal::Busy,
        Code::NeedWhole => Refusal::NeedWhole,
        Code::VersionGap => Refusal::Gap(UpdateVersion::new(error.detail)),
        Code::DivergedChunk => Refusal::Conflict(UpdateVersion::new(error.detail)),
        Code::ChecksumMismatch => Refusal::Damaged,
        Code::LateMessage => Refusal::Late,
        // Of a defect nobody knows what became of the request either.
        Code::Unreachable | Code::Timeout | Code::Internal => {
            Refusal::Unreachable(error.message.clone())
        }
        code => Refusal::Engine(code.number(), error.message.clone()),
    }
}

/// What the engine's refusal means to a caller.
pub(crate) fn engine_code(error: &engine::Error) -> Code {
    match error {
        engine::Error::Failed(_) | engine::Error::Open(_) => Code::DiskFailed,
        engine::Error::NoSpace { .. } => Code::NoSpace,
        engine::Error::Corrupt { .. } => Code::CorruptChunk,
        engine::Error::StaleTruncate { .. } => Code::StaleTruncate,
        engine::Error::Damaged(_) => Code::ChecksumMismatch,
        engine::Error::Diverged { .. } => Code::DivergedChunk,
        engine::Error::BadUpdate { .. } => Code::InvalidRequest,
        _ => Code::Internal,
    }
}

pub(crate) fn engine_refusal(error: &engine::Error) -> Refusal {
    match error {
        engine::Error::Damaged(_) => Refusal::Damaged,
        engine::Error::Diverged { asked, .. } => Refusal::Conflict(*asked),
        _ => Refusal::Engine(engine_code(error).number(), error.to_string()),
    }
}

pub(crate) fn engine_error(error: &engine::Error) -> Error {
    Error::new(engine_code(error), error.to_string())
}
