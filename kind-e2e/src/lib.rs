//! What the cluster tests stand on: `kubectl` and `helm` as a user would run them, the audit log,
//! nodes that can be cut off and killed, and waiting with a deadline.
//!
//! It drives the same programs that the README names, so that a green test means that the commands
//! work. It never talks to our own processes except through Kubernetes. Begin at [`site`], which
//! installs the charts once for a run of tests.

#![forbid(unsafe_code)]

pub mod audit;
pub mod command;
pub mod explain;
pub mod helm;
pub mod kube;
pub mod node;
pub mod pod;
pub mod site;
pub mod training;
pub mod wait;
