"""Files read through memory that is shared with the mount sidecar: no byte goes through the kernel.

    from lampyris import ring
    with ring.open("/data/flights/flights.vortex") as file:
        header = file.pread(0, 4096)
        everything = file.read()

Each thread has its own connection (16 MiB of memory; a pod has 64 of them at most), and so has each process: a file
that was opened before a fork, or that was pickled for a process that is spawned, is opened again there when it is first
used, at the position that it had. So a ``Dataset`` may open files in its ``__init__``, whichever way the ``DataLoader``
starts its workers.

A file also outlives the sidecar: when that one was replaced, the file is opened again by its path, and a read that was
cut goes on. The sidecar may take a minute to come back; after that it is a ``ConnectionError``. What was opened again
is what lies at the path now. If its size is not what it was at ``open``, the file was replaced: that is an ``OSError``
with ``ESTALE``, and whoever wants the new file opens it.

Every wait for the sidecar ends by Ctrl-C or another signal handler that raises, and after a minute with
``TimeoutError``. A file that is forgotten without ``close`` is closed at some later ``open`` of its thread, at the
latest when the thread or process ends.
"""

import collections
import contextlib
import errno
import os
import threading
import time
import weakref
from typing import Any, Deque, Dict, Optional, Tuple, Union

from lampyris._lampyris import Ring

__all__ = ["Ring", "RingFile", "open", "read"]

DEFAULT_SOCKET = "/run/lampyris/app/ring.sock"
_PATIENCE = 60.0  # Seconds that a sidecar may take to come back.
_PAUSE = 0.05
_local = threading.local()


class _Connection:
    """A ring, and the files on it that nobody closed."""

    def __init__(self, socket: str) -> None:
        self.pid = os.getpid()
        try:
            self.ring = Ring(socket)
        except ConnectionError as error:
            raise ConnectionError(f"no mount sidecar answers at {socket}: {error}") from error
        # Filled by finalizers, which run at any moment, on any thread, also while this ring is used: they only note.
        self.forgotten: Deque[int] = collections.deque()

    def open(self, path: str) -> Tuple[int, int]:
        while self.forgotten:
            # If it fails, the connection is lost and the file with it.
            with contextlib.suppress(OSError):
                self.ring.close(self.forgotten.popleft())
        return self.ring.open(path)

    def is_mounted(self, path: str) -> bool:
        """Whether the sidecar has the volume of a path yet: then it knows the folders on the way."""
        while path not in ("", "/"):
            path = os.path.dirname(path)
            try:
                self.ring.open(path)
            except FileNotFoundError:
                continue
            except ConnectionError:
                return False
            except OSError:  # It is a folder.
                return True
        return False


def _rings() -> Dict[str, _Connection]:
    """This thread's connections by their sockets; a fork begins with none."""
    if getattr(_local, "pid", None) != os.getpid():
        _local.rings = {}
        _local.pid = os.getpid()
    return _local.rings


def _open_once(path: str, socket: str) -> Tuple[_Connection, int, int]:
    rings = _rings()
    try:
        if socket not in rings:
            rings[socket] = _Connection(socket)
        return (rings[socket], *rings[socket].open(path))
    except ConnectionError:
        rings.pop(socket, None)  # The next one is a fresh one.
        raise


def _open(path: str, socket: str, patience: float = 0.0) -> Tuple[_Connection, int, int]:
    """Opens a file on this thread's connection: that one, the file's number there, its size. A sidecar that was there
    before gets time to come back, and ``patience`` says how many seconds one gets in any case."""
    if socket in _rings():
        try:
            return _open_once(path, socket)
        except ConnectionError:
            patience = _PATIENCE
        except FileNotFoundError:
            if patience == 0.0:
                raise
    deadline = time.monotonic() + patience
    while True:
        try:
            return _open_once(path, socket)
        except ConnectionError:
            if time.monotonic() >= deadline:
                raise
        except FileNotFoundError:
            # A sidecar that has just started may not have been told of its volumes.
            if time.monotonic() >= deadline or _rings()[socket].is_mounted(path):
                raise
        time.sleep(_PAUSE)


class RingFile:
    """A file opened for reading. Not to be shared between threads."""

    def __init__(self, path: str, socket: str) -> None:
        self._path = path
        self._socket = socket
        self._position = 0
        self._is_open = True
        self._connection: Optional[_Connection] = None
        self._finalizer: Any = None
        opened = _open(path, socket)
        self.size = opened[2]
        self._adopt(opened)

    def _adopt(self, opened: Tuple[_Connection, int, int]) -> None:
        self._forget()
        self._connection, self._id, _ = opened
        self._finalizer = weakref.finalize(self, self._connection.forgotten.append, self._id)
        self._finalizer.atexit = False  # The sidecar sees the process end.

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> Dict[str, Any]:
        """What another process needs to open it."""
        return {**self.__dict__, "_connection": None, "_finalizer": None}

    def _open_again(self) -> _Connection:
        opened = _open(self._path, self._socket, _PATIENCE)
        connection, number, size = opened
        if size != self.size:
            connection.forgotten.append(number)
            message = f"it had {self.size} bytes and has {size} now: open it anew"
            raise OSError(errno.ESTALE, message, self._path)
        self._adopt(opened)
        return connection

    def pread(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset``; fewer only at the end."""
        if not self._is_open:
            raise ValueError(f"{self._path} is closed")
        connection = self._connection
        if connection is not None and connection.pid == os.getpid():
            try:
                return connection.ring.read(self._id, offset, length)
            except ConnectionError:
                pass  # Reading does no harm, so it may be done again.
        return self._open_again().ring.read(self._id, offset, length)

    def read(self, length: int = -1) -> bytes:
        """The next bytes; all that are left by default."""
        left = max(self.size - self._position, 0)
        data = self.pread(self._position, left if length < 0 else length)
        self._position += len(data)
        return data

    def seek(self, offset: int) -> None:
        """Where the next ``read`` begins, from the start of the file."""
        self._position = offset

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        connection, self._connection = self._connection, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if connection is not None and connection.pid == os.getpid():
            # With a lost connection the sidecar has closed it already.
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.ring.close(self._id)

    def __enter__(self) -> "RingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(path: Union[str, "os.PathLike[str]"], socket: Optional[str] = None) -> RingFile:
    """Opens a file by its absolute path under a mount of this pod. Raises ``FileNotFoundError``
    and other ``OSError`` as the sidecar answers, ``ConnectionError`` if it is not there."""
    return RingFile(os.fspath(path), socket or os.environ.get("LAMPYRIS_RING_SOCKET", DEFAULT_SOCKET))


def read(path: Union[str, "os.PathLike[str]"], socket: Optional[str] = None) -> bytes:
    """All bytes of a file."""
    with open(path, socket) as file:
        return file.read()
