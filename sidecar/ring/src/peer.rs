//! Who is at the other end of a unix socket.
//!
//! Processes of different containers do not see each other: the kernel then gives process id 0, which is no valid id for
//! `rustix` (its answer is undefined), so this asks the kernel itself and leaves the process id out.
#![expect(unsafe_code, reason = "getsockopt fills a structure of C")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// User and group of a peer, as the kernel saw them when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

/// The peer of a connected unix stream socket.
///
/// # Errors
/// The kernel's answer, as for a descriptor that is no socket.
pub fn peer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the pointers lead to `found` and to its size, which outlive the call.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { uid: found.uid, gid: found.gid })
}

/// The supplementary groups of a peer, as the kernel saw them when the connection was made.
///
/// Asked of the socket and not of `/proc`: the process may have changed since, its number may belong to another one or mean
/// nothing here.
///
/// # Errors
/// The kernel's answer, as for a descriptor that is no connected socket.
pub fn groups_of(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; 32];
    loop {
        let mut length = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(0);
        // SAFETY: the pointers lead to `groups` and to its size in bytes, which outlive the call.
        let status = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = length as usize / size_of::<u32>();
        if status == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // Too little room: the kernel has said how much it wants.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_a_pair_are_this_process() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let own = Peer {
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        };
        assert_eq!(peer_of(&socket).expect("a socket"), own);
        let own: Vec<_> =
            rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        assert_eq!(groups_of(&socket).expect("a socket"), own);
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert_eq!(peer_of(&file).expect_err("a file").raw_os_error(), Some(libc::ENOTSOCK));
    }
}
