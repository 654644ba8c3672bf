//! Shared memory between an application and its sidecar: descriptors over unix sockets, sealed regions, eventfds,
//! single-producer queues, and on top of them the native ring that serves file reads and writes.
//!
//! Owns: the ABI ([`layout`]) and everything that maps memory which another process can change.
//! Never does: IO on files, async, parsing of anything longer than a fixed entry.
//! Begin with [`layout`], then [`queue`] (how the two sides meet), then [`client`].
//!
//! This is the crate that an application links, so it depends on nothing but system calls. It is one of the few places
//! that may use `unsafe`, and only [`shm`] (mappings), [`ffi`] (the C functions) and [`peer`] (a socket option) do. Rule for both sides: a field that the
//! other process can change is read once, copied, and the copy is validated.
#![deny(unsafe_code, missing_docs)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing))]

pub mod client;
pub mod event;
pub mod fd;
pub mod ffi;
pub mod layout;
pub mod peer;
pub mod queue;
pub mod shm;

#[cfg(not(target_endian = "little"))]
compile_error!("the ring ABI is little-endian");
