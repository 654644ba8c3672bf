//! Waiting for a condition with a deadline: the only way in which these tests pass time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Between two looks: short against every deadline used here, long against an API call.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Calls `look` until it gives a value, and says how long that took. `look` answers an error as long
/// as it sees anything but what is waited for.
///
/// # Errors
/// When the deadline passes; the message is what `look` saw last.
pub fn until<T>(
    what: &str,
    deadline: Duration,
    look: impl FnMut() -> Result<T>,
) -> Result<(T, Duration)> {
    since(Instant::now(), what, deadline, look)
}

/// [`until`] with a deadline that counts from `begin`: several things that have the same time for all
/// of them are waited for one after the other.
///
/// # Errors
/// As [`until`].
pub fn since<T>(
    begin: Instant,
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> Result<T>,
) -> Result<(T, Duration)> {
    loop {
        let seen = look();
        let passed = begin.elapsed();
        match seen {
            Ok(value) => return Ok((value, passed)),
            Err(error) if passed > deadline => {
                bail!("{what} did not happen within {} s: {error:#}", deadline.as_secs())
            }
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_reports_what_was_seen_last() {
        let mut looks = 0;
        let result: Result<((), _)> = until("the moon", Duration::from_millis(600), || {
            looks += 1;
            bail!("look {looks}")
        });
        let message = format!("{:#}", result.expect_err("nothing was ever seen"));
        assert_eq!(message, format!("the moon did not happen within 0 s: look {looks}"));
        assert!(looks >= 2);
    }

    #[test]
    fn two_waits_with_one_beginning_share_their_time() {
        let (begin, time) = (Instant::now(), Duration::from_millis(500));
        let first: Result<((), _)> = since(begin, "the first", time, || bail!("never"));
        assert!(first.is_err());
        let mut looks = 0;
        let second: Result<((), _)> = since(begin, "the second", time, || {
            looks += 1;
            bail!("never")
        });
        assert!(second.is_err() && looks == 1, "{looks} looks");
    }
}
