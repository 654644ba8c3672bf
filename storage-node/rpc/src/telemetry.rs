//! Logs: one JSON object a line on standard error, level by `LAMPYRIS_LOG` (default `info`).

use tracing_subscriber::EnvFilter;

/// Installs the process's one subscriber; a second call changes nothing.
pub fn init() {
    let filter = EnvFilter::try_from_env("LAMPYRIS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let subscriber =
        tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr);
    if subscriber.try_init().is_err() {
        tracing::debug!("the subscriber was installed before");
    }
}
