//! The cluster tests: one binary, one installation, run one after the other by `kind-e2e/test e2e`.
//!
//! They run in the order of their names, module by module, which is why the modules have numbers: what needs a
//! cluster without an operator comes first, what needs one that nobody has used yet next, then faults from small to
//! large, and last what takes everything away. Each test also runs alone, on a cluster that others have used:
//! `cargo test -p kind-e2e --test e2e -- --test-threads=1 NAME`.

#![forbid(unsafe_code)]

mod t10_manifests;
mod t20_install;
mod t30_charts;
mod t40_pods;
mod t50_dataset;
mod t60_s3_faults;
mod t70_storage_faults;
mod t80_retain;
mod t90_uninstall;
