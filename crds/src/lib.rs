//! The API of `lampyris.dev/v1alpha1`: five kinds, their defaults and the rules that the API server
//! itself enforces. Types only: whatever needs a client lives in `operator`.
//!
//! Start with [`dataset`], the kind a user writes, then [`cluster`], the kind an administrator
//! writes. [`node`] and [`table`] are written by the operator. A field exists only if it works.
//!
//! `crds/yaml/` is generated from here by `crdgen`; a test compares the two.
#![forbid(unsafe_code)]
#![allow(unreachable_pub, reason = "KubeSchema repeats each type inside a function")]

pub mod cluster;
pub mod dataset;
pub mod generate;
pub mod load;
pub mod names;
pub mod node;
pub mod shared;
pub mod table;

pub use cluster::{StorageCluster, StorageClusterSpec, StorageClusterStatus};
pub use dataset::{Dataset, DatasetSpec, DatasetStatus};
pub use load::{DatasetLoad, DatasetLoadSpec, DatasetLoadStatus};
pub use node::{StorageNode, StorageNodeSpec, StorageNodeStatus};
pub use table::{ChainTable, ChainTableSpec, ChainTableStatus};
