//! The scan agent: rows of a dataset as batches in shared memory, for a training loop beside it.
//!
//! It owns the scan (projection and filter in the file layer, decode on the CPU), the delivery of
//! batches to clients of its socket, the inspection of datasets for the operator, and the loader
//! from S3 into the store. It never mounts anything and never talks to Kubernetes.
//! Begin at [`bridge`] (files to Arrow), then [`serve`] (sessions, the shared ring), then
//! [`filter`], [`schema`] and [`digest`] (DIGEST.md).
#![forbid(unsafe_code)]

pub mod args;
pub mod bridge;
pub mod digest;
pub mod digest_command;
pub mod filter;
pub mod inspect;
pub mod load;
pub mod make_data;
pub mod schema;
pub mod serve;
