//! The chunk server: one engine per disk, replicas of chains, frames in and out.
//!
//! `engine` stores, crate `chain` decides, this crate joins the two: [`node`] answers requests,
//! `target` runs a replica's effects, `membership` talks to the manager, `sync` brings a returning
//! neighbour up to date. Begin with [`server`]. It never decides who serves a chain.

#![deny(unsafe_code)]

pub mod args;
mod budget;
mod convert;
pub mod engine;
mod membership;
mod metrics;
pub mod node;
mod peers;
pub mod server;
mod sync;
mod target;
mod uring;
