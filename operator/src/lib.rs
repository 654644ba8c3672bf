//! The operator: it turns the objects of `lampyris.dev` into running servers, Jobs and injected
//! pods. It owns no data and is not on the data path: with the operator away, pods read on.
//!
//! One way through: [`observe`] reads the API, [`plan`] decides (pure), [`plan::lint`] checks,
//! [`execute`] writes. [`controller`] ties the four together for each kind, [`webhook`] injects
//! pods, [`placement`] designs chain tables, [`lease`] makes sure that one replica writes.
//! Begin with `plan/cluster.rs` and a text in `tests/scenarios/`.
#![forbid(unsafe_code)]

pub mod api;
pub mod args;
pub mod controller;
pub mod execute;
pub mod http;
pub mod lease;
pub mod metrics;
pub mod observe;
pub mod placement;
pub mod plan;
pub mod retire;
pub mod run;
pub mod webhook;
