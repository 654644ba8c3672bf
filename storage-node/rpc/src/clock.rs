//! The one clock of the data path: CLOCK_BOOTTIME, which also runs while a machine is suspended.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since this machine started, suspended time included. Compare it only on one machine.
#[must_use]
pub fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(now.tv_nsec).unwrap_or_default();
    Duration::new(seconds, nanos)
}
