//! The cluster tests: one binary, one installation, run one after the other by `kind-e2e/test e2e`.

#![forbid(unsafe_code)]

mod charts;
mod dataset;
mod install;
mod manifests;
mod pods;
mod s3_faults;
mod storage_faults;
mod uninstall;
