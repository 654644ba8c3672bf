//! The end of a process: SIGTERM or SIGINT turns one switch that every task watches.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// A switch that becomes true at the first SIGTERM or SIGINT.
///
/// # Errors
/// The signal handlers could not be installed.
pub fn on_signal() -> std::io::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("asked to stop");
        // Kept until the process ends: a dropped sender would look like an error to watchers.
        stop.send_replace(true);
        stop.closed().await;
    });
    Ok(stopped)
}

/// Waits until the switch is on. A switch whose owner is gone counts as on.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The guard of the value must not live across a select.
    drop(stop.wait_for(|stop| *stop).await);
}
