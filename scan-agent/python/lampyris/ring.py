"""Files read through shared memory with the mount sidecar, without a system call for each read.

    from lampyris import ring
    with ring.open("/data/flights/flights.vortex") as file:
        header = file.pread(0, 4096)
        everything = file.read()
"""

import os
import threading
from typing import Optional

from lampyris._lampyris import Ring

__all__ = ["Ring", "RingFile", "open", "read"]

DEFAULT_SOCKET = "/run/lampyris/app/ring.sock"
_local = threading.local()


def _ring(socket: Optional[str]) -> Ring:
    """This thread's connection; a child process gets its own."""
    path = socket or os.environ.get("LAMPYRIS_RING_SOCKET", DEFAULT_SOCKET)
    rings = getattr(_local, "rings", None)
    if rings is None or _local.pid != os.getpid():
        rings = _local.rings = {}
        _local.pid = os.getpid()
    if path not in rings:
        rings[path] = Ring(path)
    return rings[path]


class RingFile:
    """A file opened for reading. Not to be shared between threads."""

    def __init__(self, ring: Ring, path: str) -> None:
        self._ring = ring
        self._id, self.size = ring.open(path)
        self._position = 0
        self._is_open = True

    def pread(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset``; fewer only at the end."""
        return self._ring.read(self._id, offset, length)

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
        if self._is_open:
            self._is_open = False
            self._ring.close(self._id)

    def __enter__(self) -> "RingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(path: str, socket: Optional[str] = None) -> RingFile:
    """Opens a file by its absolute path under a mount of this pod. Raises ``FileNotFoundError``
    and other ``OSError`` as the sidecar answers, ``ConnectionError`` if it is not there."""
    return RingFile(_ring(socket), path)


def read(path: str, socket: Optional[str] = None) -> bytes:
    """All bytes of a file."""
    with open(path, socket) as file:
        return file.read()
