//! Every message, by the server that answers it.

use crate::codec::Wire;
use crate::frame::Kind;

pub mod chain;
pub mod manager;
pub mod meta;
pub mod storage;

/// A message head that asks for something.
pub trait Request: Wire + Send + Sync + 'static {
    /// Its number on the wire, frozen.
    const KIND: Kind;
    /// The head of a good answer.
    type Response: Wire + Send + Sync + 'static;
}

macro_rules! names {
    ($($request:ty = $name:literal,)*) => {
        impl Kind {
            /// The request's name in metrics, `unknown` for a kind that this build does not know.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(<$request as Request>::KIND => $name,)*
                    _ => "unknown",
                }
            }
        }
    };
}

names! {
    storage::Read = "read",
    storage::Update = "update",
    storage::QueryFile = "query_file",
    chain::Forward = "forward",
    chain::ListChunks = "list_chunks",
    chain::ForgetChunk = "forget_chunk",
    chain::SyncDone = "sync_done",
    manager::Heartbeat = "heartbeat",
    manager::GetRouting = "get_routing",
    meta::Lookup = "lookup",
    meta::GetAttributes = "get_attributes",
    meta::SetAttributes = "set_attributes",
    meta::Create = "create",
    meta::Open = "open",
    meta::ReportLength = "report_length",
    meta::Truncate = "truncate",
    meta::MakeDirectory = "make_directory",
    meta::MakeSymlink = "make_symlink",
    meta::ReadSymlink = "read_symlink",
    meta::Remove = "remove",
    meta::Rename = "rename",
    meta::ReadDirectory = "read_directory",
    meta::StatFileSystem = "stat_file_system",
    meta::KeepSessions = "keep_sessions",
}

/// Names the number and the answer of a request.
#[macro_export]
macro_rules! request {
    ($request:ty = $kind:literal -> $response:ty) => {
        impl $crate::message::Request for $request {
            const KIND: $crate::frame::Kind = $crate::frame::Kind($kind);
            type Response = $response;
        }
    };
}
