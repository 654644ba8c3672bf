//! The core of the store: identities, chain table, target states, replica, sync planner.
//!
//! Synchronous, without IO, clock or randomness: events and a time go in, effects come out.
//! Storage servers, the manager and the file client run this one crate; `PROTOCOL.md` numbers
//! the rules that code and tests cite.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod id;
pub mod layout;
pub mod replica;
pub mod sync;
pub mod table;
