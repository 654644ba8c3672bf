//! Eventfds: the doorbells of queues.
//!
//! Whoever holds one can fill its counter and make it blocking, for every other holder too. So nothing here trusts the
//! descriptor's own mode: it is looked at before it is rung, and drained without waiting.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags};

/// An eventfd. A peer that holds it too and fills it between the look and the ring, having made it blocking, holds the ringing
/// thread up until it is drained: whoever must not be held up by that peer rings from a thread that serves this peer alone,
/// and drains it before joining that thread.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one with count 0, close-on-exec.
    ///
    /// # Errors
    /// The kernel's error, e.g. no more descriptors.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// One received from a peer.
    #[must_use]
    pub const fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// A second handle on the same eventfd.
    ///
    /// # Errors
    /// The kernel's error, e.g. no more descriptors.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Wakes whoever waits, now or at its next wait. A full counter is a ring that already rings.
    pub fn notify(&self) {
        let now = timespec(Duration::ZERO);
        loop {
            let mut room = [PollFd::new(&self.0, PollFlags::OUT)];
            match poll(&mut room, Some(&now)) {
                Err(Errno::INTR) => continue,
                Ok(0) => return,
                _ => {}
            }
            if rustix::io::write(&self.0, &1u64.to_le_bytes()) != Err(Errno::INTR) {
                return;
            }
        }
    }

    /// Sets the count back to 0; true if it had been rung.
    #[must_use]
    pub fn drain(&self) -> bool {
        let mut count = [0u8; 8];
        loop {
            let into = &mut [IoSliceMut::new(&mut count)];
            let taken = rustix::io::preadv2(&self.0, into, u64::MAX, ReadWriteFlags::NOWAIT);
            let taken = match taken {
                // Linux before 5.8, or a filter of system calls older than this one.
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => {
                    rustix::io::read(&self.0, &mut count)
                }
                other => other,
            };
            match taken {
                Err(Errno::INTR) => {}
                other => return other.is_ok(),
            }
        }
    }

    /// Waits until it is rung, and drains it. False at the timeout (`None` waits for ever).
    ///
    /// # Errors
    /// The kernel's error of poll.
    pub fn wait(&self, timeout: Option<Duration>) -> std::io::Result<bool> {
        let timeout = timeout.map(timespec);
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => Ok(false),
            Ok(_) => Ok(self.drain()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The kernel's form of a duration; longer than it can hold is as long as it can hold.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_once_for_many_notifies_and_times_out_when_quiet() {
        let event = EventFd::new().unwrap();
        assert!(!event.wait(Some(Duration::ZERO)).unwrap());
        let twin = event.try_clone().unwrap();
        twin.notify();
        twin.notify();
        assert!(event.wait(None).unwrap());
        assert!(!event.drain());
    }

    #[test]
    fn one_that_a_peer_filled_or_made_blocking_holds_nobody_up() {
        let event = EventFd::new().unwrap();
        let peer = event.try_clone().unwrap();
        rustix::fs::fcntl_setfl(&peer.0, rustix::fs::OFlags::empty()).unwrap();
        let (done, ended) = std::sync::mpsc::channel();
        let holder = std::thread::spawn(move || {
            let quiet = event.drain();
            rustix::io::write(&event.0, &(u64::MAX - 1).to_le_bytes()).unwrap();
            event.notify();
            event.notify();
            done.send((quiet, event.drain(), event.drain())).unwrap();
        });
        let found = ended.recv_timeout(Duration::from_secs(20)).expect("nothing blocks");
        assert_eq!(found, (false, true, false));
        holder.join().unwrap();
    }
}
