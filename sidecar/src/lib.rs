//! The mount sidecar's parts: file systems behind one trait, and the front ends that drive them.
//!
//! Owns: what a training pod sees of a dataset as files and as a native ring. Never does: mounting (that is the node
//! plugin's) and deciding where bytes live (that is the client's). Begin with [`vfs`], then [`store_fs`].
#![deny(unsafe_code)]

pub mod args;
pub mod attach;
pub mod dataset_fs;
pub mod fuse;
pub mod memory;
pub mod metrics;
pub mod open;
pub mod report;
pub mod resume;
pub mod ring_server;
pub mod run;
pub mod status;
pub mod store_fs;
pub mod unsaved;
pub mod vfs;
mod volume;
