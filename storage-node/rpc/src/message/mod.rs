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
