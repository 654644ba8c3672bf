//! The client against real servers: one metadata process, three storage processes, three chains of three. The binaries are
//! those of the same build (`cargo build -p meta -p storage-node` first, or `LAMPYRIS_BIN_DIR`).

mod failures;
mod files;
mod harness;
