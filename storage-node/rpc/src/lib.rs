//! Everything that two processes say to each other: frames, codec, error table, transport, and
//! the admin endpoint that every process has.
//!
//! `WIRE.md` is the contract, byte by byte; golden files hold every message to it. Start with
//! [`frame`], then [`message`]; [`conn`] calls, [`serve`] answers. This crate moves bytes and
//! decides nothing.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod admin;
pub mod clock;
pub mod codec;
pub mod conn;
pub mod error;
pub mod flags;
pub mod frame;
pub mod fuzz;
pub mod message;
pub mod privacy;
pub mod serve;
pub mod shutdown;
pub mod telemetry;
pub mod transport;

pub use error::{Code, Error, Retry};
