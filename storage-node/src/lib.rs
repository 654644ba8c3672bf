//! The chunk server: one engine per disk, replicas of chains, frames in and out.

#![deny(unsafe_code)]

pub mod engine;
mod uring;
