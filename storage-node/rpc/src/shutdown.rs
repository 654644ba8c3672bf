//! The end of a process: SIGTERM or SIGINT turns a switch that every task watches; another one turns a second switch, for
//! those that would go on for a while.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// A switch that becomes true at the first SIGTERM or SIGINT.
///
/// # Errors
/// The signal handlers could not be installed.
pub fn on_signal() -> std::io::Result<watch::Receiver<bool>> {
    Ok(on_signals()?.0)
}

/// Two switches: one that becomes true at the first SIGTERM or SIGINT, and one at the second.
///
/// # Errors
/// The signal handlers could not be installed.
pub fn on_signals() -> std::io::Result<(watch::Receiver<bool>, watch::Receiver<bool>)> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (stop, stopped) = watch::channel(false);
    let (hurry, hurried) = watch::channel(false);
    // One task takes both, each as it comes: two that nobody has taken yet count as one.
    tokio::spawn(async move {
        for (switch, message) in [(&stop, "asked to stop"), (&hurry, "asked to stop at once")] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("{message}");
            switch.send_replace(true);
        }
        // Kept until the process ends: a dropped sender would look like an error to watchers.
        tokio::join!(stop.closed(), hurry.closed());
    });
    Ok((stopped, hurried))
}

/// Waits until the switch is on. A switch whose owner is gone counts as on.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The guard of the value must not live across a select.
    drop(stop.wait_for(|stop| *stop).await);
}
