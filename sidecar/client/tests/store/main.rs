//! The client against real servers: one metadata process, three storage processes, three chains of three. The binaries are
//! those of the same build (`cargo build -p meta -p storage-node` first, or `LAMPYRIS_BIN_DIR`).

#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test fails by it"
)]

mod failures;
mod files;
mod harness;
