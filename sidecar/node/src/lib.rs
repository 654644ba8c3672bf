//! The node plugin: mounts datasets into pods and hands the mounts to unprivileged sidecars.
//!
//! The only privileged binary of the product, so it does little: CSI's node service for inline volumes,
//! the hand-over of FUSE descriptors, and what only it can see of a pod's sidecars (their status as
//! Events, their metrics). It never reads data and never reads Secrets: kubelet passes the one that a
//! volume names.
//!
//! Begin with [`plugin`]; [`volume`] and [`publish`] decide without IO, [`mount`] and [`socket`] hold
//! the calls that need privilege or care.
#![forbid(unsafe_code)]

pub mod args;
pub mod cluster;
pub mod csi;
mod events;
pub mod exposition;
pub mod handover;
pub mod metrics;
pub mod mount;
pub mod plugin;
pub mod publish;
pub mod seccomp;
pub mod serve;
pub mod socket;
mod told;
pub mod volume;
