//! The descriptor keeper, and the two small protocols by which descriptors change hands on a node.
//!
//! A FUSE mount lives as long as one descriptor of its connection is open. The keeper is the process
//! whose only work is to hold that descriptor, so that the node plugin and the sidecars may crash and
//! be upgraded without an application seeing an error. It is small, has no network, starts no other
//! program and is replaced only on purpose.
//!
//! It owns [`store`] (what is kept, and its bounds) and [`server`] (the root-only socket). It never
//! looks into the descriptors or the metadata it keeps. [`wire`] is the framing that both protocols
//! share, [`handover`] the messages between node plugin and sidecar, [`client`] the node plugin's side
//! of the keeper. Begin with [`store`].
#![forbid(unsafe_code)]

pub mod args;
pub mod client;
pub mod handover;
pub mod log;
pub mod server;
pub mod store;
pub mod wire;
