//! Flags, and what each command does.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Parser, Subcommand};

use crate::client::Client;
use crate::log::{self, Level};
use crate::server::Server;

/// Keeps the FUSE descriptors of a node, so that mounts survive restarts of everything else.
///
/// Runs as root, without a network and without privileges. Its socket serves root only. When it stops,
/// the node plugin gives it the descriptors again; when both stop at once, mounts of running pods end.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the keeper's socket until SIGTERM.
    Serve(Socket),
    /// Exit 0 if the keeper answers on its socket; for the kubelet.
    Probe(Socket),
}

#[derive(Debug, clap::Args)]
struct Socket {
    /// Path of the keeper's unix socket; its directory is made if missing.
    #[arg(long, default_value = "/var/lib/kubelet/plugins/csi.lampyris.dev/keeper.sock")]
    socket: PathBuf,
}

/// Runs the command; the exit code is 0 on success.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let outcome = match &args.command {
        Command::Serve(Socket { socket }) => serve(socket),
        Command::Probe(Socket { socket }) => {
            Client::new(socket.clone()).list().map(drop).map_err(|error| chain(&error))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            log::write(Level::Error, "stopped", &[("error", &message)]);
            ExitCode::FAILURE
        }
    }
}

fn serve(socket: &std::path::Path) -> Result<(), String> {
    if !socket.is_absolute() {
        return Err(format!("--socket {} must be an absolute path", socket.display()));
    }
    // As process 1 of a container there is no default action: without this SIGTERM would be ignored.
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let always = Arc::new(AtomicBool::new(true));
        signal_hook::flag::register_conditional_shutdown(signal, 0, always)
            .map_err(|error| format!("handle signal {signal}: {error}"))?;
    }
    let server = Server::bind(socket, 0).map_err(|error| chain(&error))?;
    log::write(Level::Info, "serving", &[("socket", &socket.display())]);
    server.run();
    Ok(())
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
