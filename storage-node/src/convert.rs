//! Between the words of the wire, the replica and the engine. No decision is taken here.

use bytes::Bytes;
use chain::id::{ChainVersion, UpdateVersion};
use chain::replica::{
    Applied, Change, Content, Forward, Identity, Known, Refusal, Stage, State, Whole,
};
use rpc::message::chain::{AppliedUpdate, Forward as ForwardMessage, Link};
use rpc::message::storage::UpdateOp;
use rpc::{Code, Error};

use crate::engine;

/// A number of the engine as the wire has it: chunks are at most 64 MiB.
fn short(length: u64) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
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
        Content::Change(Change::Write { offset, bytes }) => {
            engine::Op::Write { offset: offset.into(), bytes }
        }
        Content::Change(Change::Truncate { length }) => {
            engine::Op::Truncate { length: length.into() }
        }
        Content::Change(Change::Remove) => engine::Op::Remove,
        Content::Whole(whole) => engine::Op::Replace(engine::Replace {
            checksum: crc32c::crc32c(&whole.bytes),
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

pub(crate) fn change(op: UpdateOp, payload: Bytes) -> Change {
    match op {
        UpdateOp::Write { offset } => Change::Write { offset, bytes: payload },
        UpdateOp::Truncate { length } => Change::Truncate { length },
        UpdateOp::Remove => Change::Remove,
    }
}

/// The message and payload of a forward.
pub(crate) fn forward_out(link: Link, forward: Forward) -> (ForwardMessage, Bytes) {
    let (op, removed, duplicates, payload) = match forward.content {
        Content::Change(Change::Write { offset, bytes }) => {
            (Some(UpdateOp::Write { offset }), false, Vec::new(), bytes)
        }
        Content::Change(Change::Truncate { length }) => {
            (Some(UpdateOp::Truncate { length }), false, Vec::new(), Bytes::new())
        }
        Content::Change(Change::Remove) => {
            (Some(UpdateOp::Remove), false, Vec::new(), Bytes::new())
        }
        Content::Whole(whole) => {
            let entry = |(client, channel, a): (_, _, Applied)| AppliedUpdate {
                client,
                channel,
                seq: a.seq,
                version: a.version,
                length: a.length,
            };
            let duplicates = whole.duplicates.into_iter().map(entry).collect();
            (None, whole.removed, duplicates, whole.bytes)
        }
    };
    let message = ForwardMessage {
        link,
        chunk: forward.chunk,
        id: forward.id,
        identity: forward.identity,
        base: forward.base,
        truncate_generation: forward.truncate_generation,
        op,
        removed,
        duplicates,
        checksum: crc32c::crc32c(&payload),
    };
    (message, payload)
}

/// The inverse of [`forward_out`].
pub(crate) fn forward_in(message: ForwardMessage, payload: Bytes) -> Forward {
    let content = match message.op {
        Some(op) => Content::Change(change(op, payload)),
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
        Code::Unreachable | Code::Timeout => Refusal::Unreachable(error.message.clone()),
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
        engine::Error::BadUpdate { .. } => Code::InvalidRequest,
        _ => Code::Internal,
    }
}

pub(crate) fn engine_refusal(error: &engine::Error) -> Refusal {
    Refusal::Engine(engine_code(error).number(), error.to_string())
}

pub(crate) fn engine_error(error: &engine::Error) -> Error {
    Error::new(engine_code(error), error.to_string())
}
