"""What applications do with ``lampyris.ring``: run by sidecar/tests/mount, against a real sidecar.

    python ring_cases.py CASE SOCKET EXPECTED PATH [PATH]

PATH names a file to the sidecar, EXPECTED one with the same bytes (with two paths: with those of the second). A case
that needs something done says so by a line on standard output, and goes on when a line comes on standard input.
"""

import errno
import faulthandler
import os
import pathlib
import signal
import socket as sockets
import struct
import sys
import time
import traceback

from lampyris import ring

PIECE = 96 << 10
STUCK_S = 120
FILES_OF_A_CONNECTION = 1024


def ask(what: str) -> None:
    print(what, flush=True)
    assert sys.stdin.readline(), "the caller is gone"


def same(got: bytes, want: bytes, what: str) -> None:
    assert got == want, f"{what}: {len(got)} bytes that are not those {len(want)}"


def forks(socket: str, want: bytes, path: str) -> None:
    """A file that was opened before forks is read by all of them, and by their parent, at once."""
    file = ring.open(path, socket)
    same(file.read(1000), want[:1000], "before")

    def work(index: int) -> None:
        for offset in [*range(index * 1111, len(want), PIECE)] * 5:
            same(file.pread(offset, PIECE), want[offset : offset + PIECE], f"process {index} at {offset}")
        same(file.read(1000), want[1000:2000], "from the position before the fork")

    children = []
    for index in (1, 2):
        pid = os.fork()
        if pid == 0:
            try:
                work(index)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    work(0)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    assert statuses == [0, 0], statuses


class Pieces:
    """A data set as DataLoader wants it, which opens its file where it is made."""

    def __init__(self, socket: str, path: str) -> None:
        self.file = ring.open(path, socket)

    def __len__(self) -> int:
        return -(-self.file.size // PIECE)

    def __getitem__(self, index: int) -> bytes:
        return self.file.pread(index * PIECE, PIECE)


def workers(socket: str, want: bytes, path: str) -> None:
    """The workers of a DataLoader, however they are started."""
    from torch.utils.data import DataLoader

    for way in ("fork", "spawn"):
        loader = DataLoader(
            Pieces(socket, path), batch_size=4, num_workers=2, collate_fn=b"".join, multiprocessing_context=way
        )
        same(b"".join(loader), want, way)


def forgotten(socket: str, want: bytes, path: str) -> None:
    """More files than a connection may have, none of which is closed."""
    for offset in range(FILES_OF_A_CONNECTION + 76):
        same(ring.open(path, socket).pread(offset, 8), want[offset : offset + 8], f"file {offset}")
    with ring.open(path, socket) as file:
        same(file.read(), want, "with")
    try:
        file.pread(0, 1)
    except ValueError as error:
        assert str(error) == f"{path} is closed", error
    else:
        raise AssertionError("a closed file was read")


class Stop(Exception):
    pass


def stop(*_: object) -> None:
    raise Stop


def interrupted(socket: str, want: bytes, path: str) -> None:
    """A handler that raises ends every wait for a sidecar that does not answer, and nothing is lost by it."""
    signal.signal(signal.SIGALRM, stop)
    file = ring.open(path, socket)
    beyond = ring.open(path, socket)
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as other:
        other.connect(socket)
        cred = other.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
        sidecar = struct.unpack("3i", cred)[0]
    calls = {
        "pread": lambda: file.pread(0, len(want)),
        "open": lambda: ring.open(path, socket),
        "read": lambda: ring.read(path, socket),
        "size": lambda: beyond.pread(len(want), 1),
    }
    os.kill(sidecar, signal.SIGSTOP)
    try:
        for name, call in calls.items():
            begin = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                call()
            except Stop:
                assert time.monotonic() - begin < 10, name
            else:
                raise AssertionError(f"{name} got an answer")
    finally:
        os.kill(sidecar, signal.SIGCONT)
    same(file.pread(5, PIECE), want[5 : 5 + PIECE], "afterwards")
    same(ring.read(path, socket), want, "anew")


def restarts(socket: str, want: bytes, path: str) -> None:
    """Files outlive the sidecar; one that was replaced meanwhile is not taken for the old one."""
    file, unused = ring.open(path, socket), ring.open(path, socket)
    same(file.read(PIECE), want[:PIECE], "before")
    ask("kill the sidecar, and start another a while later")
    same(file.read(PIECE), want[PIECE : 2 * PIECE], "while it was away")
    unused.close()
    same(ring.read(path, socket), want, "anew")
    ask("replace the sidecar")
    try:
        ring.open(path + ".none", socket)
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("a file that is not there")
    same(ring.read(path, socket), want, "anew after the second one")
    same(file.pread(0, len(want)), want, "after the second one")
    ask("replace the sidecar, and make the file two bytes long")
    try:
        file.read()
    except OSError as error:
        assert error.errno == errno.ESTALE and "open it anew" in str(error), error
    else:
        raise AssertionError("another file was read")
    same(ring.read(path, socket), want[:2], "the new file")


def refused(socket: str, want: bytes, path: str, other: str) -> None:
    """A read of several pieces that fails takes no other read with it."""
    replaced, whole = ring.open(path, socket), ring.open(other, socket)
    ask("replace the first file")
    for _ in range(2):
        try:
            replaced.pread(0, replaced.size)
        except OSError as error:
            assert error.errno == errno.ESTALE, error
        else:
            raise AssertionError("a file that is not there any more was read")
        same(whole.pread(0, whole.size), want, "the other file")


def main() -> None:
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    case, socket, expected, *paths = sys.argv[1:]
    cases = {f.__name__: f for f in (forks, workers, forgotten, interrupted, restarts, refused)}
    cases[case](socket, pathlib.Path(expected).read_bytes(), *paths)


if __name__ == "__main__":
    main()
