"""Batches of rows from the scan agent.

The agent decodes and filters; each batch arrives as a place in memory that this process shares
with it. What is yielded are views of that memory wherever the format allows. The memory of a batch
goes back to the agent when the last view of it is garbage: keep only what is needed. A consumer
that keeps the lower half of the ring busy gets copies instead, so it never stalls itself.

A scan belongs to the process that opened it. A fork of that process cannot go on with it, and what
it has of a batch changes once its parent lets the batch go. With a ``DataLoader``, scan in the
worker, and let the scan make the batches::

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return lampyris.scan("flights", where="month = 3")

    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=1)

Every scan has all rows that its filter leaves: of several workers, each needs a filter of its own.
One is enough, or none, because the work is done by the agent, in a process of its own.
"""

import collections
import json
import mmap
import os
import socket
import threading
import time
import weakref
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from lampyris.errors import InvalidRequest, ScanInterrupted, UnsupportedType, from_reply

DEFAULT_SOCKET = "/run/lampyris/app/scan.sock"
_VERSION = 1
_MAX_LINE = 1 << 20
_ELSEWHERE = "a scan belongs to the process that opened it: open it in the worker, as in __iter__ of an IterableDataset"


class Ragged(NamedTuple):
    """Rows of different lengths: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``. For strings
    the values are UTF-8 bytes."""

    values: Any
    offsets: Any


def scan(
    dataset: str,
    columns: Optional[Sequence[str]] = None,
    where: Optional[str] = None,
    batch_rows: int = 8192,
    format: str = "torch",
    socket: Optional[str] = None,
    slab_bytes: int = 64 << 20,
    timeout: float = 60.0,
) -> "Scan":
    """Scans a dataset of this pod.

    dataset: name of the Dataset, of the volume, or the path where it is mounted.
    columns: names in the order wanted; all by default.
    where: a filter such as ``"dep_delay > 60 and carrier in ('AA', 'UA') and dest is not null"``;
        whole blocks of rows that cannot match are not fetched.
    batch_rows: rows of a batch. The last is shorter, and so are those whose rows are so big that
        the batch would fill more than half of the ring.
    format: ``"torch"`` and ``"numpy"`` yield dicts by column name, ``"arrow"`` record batches.
    socket: the agent's socket; else LAMPYRIS_SCAN_SOCKET, else the pod's.
    slab_bytes: size of the shared ring.
    timeout: how long to wait for the agent to come up.

    Types: numbers are views. For torch u16 and u32 are widened by a copy and u64 is refused;
    bool is unpacked (a copy); times, timestamps and dates are their ticks as integers, but timestamps
    and dates are ``datetime64`` in NumPy (a copy for dates in days); fixed-size lists are
    ``[rows, size]`` views; strings and lists are :class:`Ragged` (in NumPy strings are an object
    array, a copy). A nullable column comes with a second entry ``"<name>:valid"``, a bool array, and
    reads 0 where it is null: a fixed-size list zeros, a :class:`Ragged` row no values, a string in
    NumPy ``None``. Items of lists that are null read the same, but there is no mask that tells them from
    those that are zero: where that matters, take ``"arrow"``.
    """
    if format not in _FORMATS:
        raise InvalidRequest("InvalidRequest", f"format {format!r} is not torch, numpy or arrow")
    request = {
        "version": _VERSION,
        "dataset": dataset,
        "columns": None if columns is None else list(columns),
        "where": where,
        "batchRows": batch_rows,
        "slabBytes": slab_bytes,
    }
    return Scan(_connect(socket, timeout), request, _FORMATS[format]())


def datasets(socket: Optional[str] = None, timeout: float = 60.0) -> List[Dict[str, str]]:
    """The datasets of this pod: dicts with ``name`` and, if mounted, ``mountPath``."""
    channel = _connect(socket, timeout)
    try:
        channel.send({"datasets": {}})
        return channel.receive()["datasets"]
    finally:
        channel.close()


class Scan:
    """An iterator over batches. ``columns`` describes them; after the last one ``stats`` has
    ``rows``, ``batches``, ``bytesFetched`` and ``fileBytes``."""

    def __init__(self, channel: "_Channel", request: dict, maker: Any) -> None:
        self._channel = channel
        self.stats: Optional[Dict[str, int]] = None
        try:
            channel.send({"open": request})
            opened = channel.receive("opened")
            self.columns: List[dict] = opened["columns"]
            maker.prepare(self.columns)
            self._ring = _Ring(channel, opened["slabBytes"])
        except BaseException:
            channel.close()
            raise
        self._maker = maker
        # One that is forgotten half-way ends too, even where a fork still has its socket.
        weakref.finalize(self, channel.close)

    @property
    def schema(self) -> Any:
        """``columns`` as a ``pyarrow.Schema``: that of the batches with ``format="arrow"``."""
        return arrow_schema(self.columns)

    def __reduce__(self) -> Any:
        raise InvalidRequest("InvalidRequest", _ELSEWHERE)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.stats is not None:
            raise StopIteration
        try:
            reply = self._channel.receive(wants=True)
        except BaseException:
            self.close()
            raise
        if "done" in reply:
            self.stats = reply["done"]
            self._channel.close()
            raise StopIteration
        batch = reply["batch"]
        self._channel.batches += 1
        memory = self._ring.take(batch)
        return self._maker.batch(batch, memory)

    def close(self) -> None:
        """Ends the scan early. Batches that were yielded stay valid."""
        self.stats = self.stats or {}
        self._channel.close()

    def __enter__(self) -> "Scan":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Channel:
    """Lines of JSON over the agent's socket. A fork of its process has the socket too, but may only let go of it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._outbox: Deque[Optional[bytes]] = collections.deque()  # None closes the channel.
        self._is_open = True
        self.fds: List[int] = []
        self.batches = 0  # That have been read.

    def send(self, message: dict) -> None:
        """Sends, or leaves it to whoever is sending: a finalizer may run at any moment, also while its own thread
        holds the lock, and must not wait for it."""
        self._post(json.dumps(message).encode() + b"\n")

    def _post(self, line: Optional[bytes]) -> None:
        if os.getpid() != self._pid:
            # The agent would take a fork's word for the owner's, who may still read what the fork lets go. Nor is the
            # lock taken: a thread that the fork does not have may hold it.
            if line is None:
                self._let_go()
            return
        self._outbox.append(line)
        # Whoever had the lock looks again after letting it go, so that nothing stays behind.
        while self._outbox and self._lock.acquire(blocking=False):
            try:
                while self._outbox:
                    self._write(self._outbox.popleft())
            finally:
                self._lock.release()

    def _write(self, line: Optional[bytes]) -> None:
        if not self._is_open:
            return
        if line is None:
            self._is_open = False
            try:
                # Closing alone would not end the conversation while a fork has the socket.
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # The agent has ended it.
            self._let_go()
            return
        try:
            self._sock.sendall(line)
        except OSError:
            pass  # The next receive says why.

    def _let_go(self) -> None:
        self._sock.close()
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)

    def _is_empty(self) -> bool:
        try:  # recv_fds would not pass MSG_DONTWAIT on.
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False

    def receive(self, kind: Optional[str] = None, wants: bool = False) -> dict:
        """The next reply, or the part of it called ``kind``. With ``wants`` the agent is told when it is waited for."""
        if os.getpid() != self._pid:
            raise InvalidRequest("InvalidRequest", _ELSEWHERE)
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE:
                raise ScanInterrupted("the agent sent a line that does not end")
            try:
                if wants and self._is_empty():
                    self.send({"want": {"read": self.batches}})
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 4)
            except OSError as error:
                raise ScanInterrupted(f"lost the agent: {error}") from error
            self.fds.extend(fds)
            if not data:
                raise ScanInterrupted("the agent went away")
            self._buffer += data
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        reply = json.loads(line)
        if "error" in reply:
            raise from_reply(reply["error"])
        return reply if kind is None else reply[kind]

    def close(self) -> None:
        self._post(None)


def _connect(path: Optional[str], timeout: float) -> _Channel:
    path = path or os.environ.get("LAMPYRIS_SCAN_SOCKET", DEFAULT_SOCKET)
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
            return _Channel(sock)
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise ScanInterrupted(f"no scan agent at {path}: {error}") from error
            time.sleep(0.05)


class _Memory:
    """One batch's bytes. NumPy and Arrow keep it alive as the base of their views."""

    def __init__(self, address: int, length: int, keep: Any) -> None:
        self._keep = keep
        self.address = address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }


class _Ring:
    def __init__(self, channel: _Channel, size: int) -> None:
        if len(channel.fds) != 1:
            raise ScanInterrupted("the agent sent no memory")
        self._channel = channel
        self._size = size
        self._map = mmap.mmap(channel.fds[0], size)
        os.close(channel.fds.pop())  # The map has its own.
        self._whole = np.frombuffer(self._map, dtype=np.uint8)
        self.copied = 0  # Batches of which the consumer got a copy.

    def take(self, batch: dict) -> "_Batch":
        """The batch's memory; a copy of it when it lies in the ring's upper half, which must be empty again before
        the next batch is waited for (scan-agent/src/serve/slab.rs)."""
        start, length = _extent(batch["columns"]), batch["bytes"]
        if start >= self._size // 2:
            copy = self._whole[start : start + length].copy()
            self.copied += 1
            self._channel.send({"release": {"id": batch["id"]}})
            return _Batch(_Memory(copy.ctypes.data, length, copy), start)
        memory = _Memory(self._whole.ctypes.data + start, length, self._whole)
        released = weakref.finalize(memory, self._give_back, batch["id"])
        released.atexit = False  # The agent sees the process end.
        return _Batch(memory, start)

    def _give_back(self, batch_id: int) -> None:
        self._channel.send({"release": {"id": batch_id}})


class _Batch:
    """Buffers of one batch."""

    def __init__(self, memory: _Memory, start: int) -> None:
        self._memory = memory
        self._start = start
        self._bytes = np.asarray(memory)

    def array(self, place: Sequence[int], dtype: Any) -> np.ndarray:
        offset = place[0] - self._start
        return self._bytes[offset : offset + place[1]].view(dtype)

    def bits(self, place: Sequence[int], count: int) -> np.ndarray:
        packed = self.array(place, np.uint8)
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def arrow_buffer(self, place: Optional[Sequence[int]]) -> Any:
        import pyarrow as pa

        if place is None:
            return None
        address = self._memory.address + place[0] - self._start
        return pa.foreign_buffer(address, place[1], base=self._memory)


def _extent(nodes: Sequence[dict]) -> int:
    """Lowest offset of a batch: where its memory begins."""
    lowest = 1 << 62
    for node in nodes:
        for place in node["buffers"]:
            if place is not None:
                lowest = min(lowest, place[0])
        lowest = min(lowest, _extent(node.get("children", ())))
    return lowest


class _ArrowMaker:
    def prepare(self, columns: List[dict]) -> None:
        self._schema = arrow_schema(columns)

    def batch(self, batch: dict, memory: _Batch) -> Any:
        import pyarrow as pa

        arrays = [
            self._array(field.type, node, memory)
            for field, node in zip(self._schema, batch["columns"])
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, kind: Any, node: dict, memory: _Batch) -> Any:
        import pyarrow as pa

        buffers = [memory.arrow_buffer(place) for place in node["buffers"]]
        children = [self._array(kind.value_type, c, memory) for c in node.get("children", ())]
        return pa.Array.from_buffers(kind, node["len"], buffers, node["nulls"], 0, children)


class _NumpyMaker:
    _RAGGED = ("list",)  # Kinds whose values are Ragged.

    def prepare(self, columns: List[dict]) -> None:
        self._columns = columns
        for column in columns:
            self._check(column["name"], column["type"])

    def _check(self, name: str, kind: dict) -> None:
        if kind["kind"] == "decimal":
            raise UnsupportedType(f"column {name}: decimals need format='arrow'")
        item = kind.get("item")
        if item is not None:
            if kind["kind"] == "fixedSizeList" and item["kind"] in self._RAGGED:
                raise UnsupportedType(f"column {name}: fixed-size lists of {item['kind']} need format='arrow'")
            self._check(name, item)

    def batch(self, batch: dict, memory: _Batch) -> Dict[str, Any]:
        out: Dict[str, Any] = {}
        for column, node in zip(self._columns, batch["columns"]):
            name = column["name"]
            valid = self._valid(node, memory)
            out[name] = self._values(column["type"], node, memory, valid)
            if column["nullable"]:
                rows = np.ones(node["len"], np.bool_) if valid is None else valid
                out[name + ":valid"] = self._finish(rows)
        return out

    def _valid(self, node: dict, memory: _Batch) -> Optional[np.ndarray]:
        place = node["buffers"][0]
        return None if place is None else memory.bits(place, node["len"])

    def _values(self, kind: dict, node: dict, memory: _Batch, valid: Optional[np.ndarray]) -> Any:
        if kind["kind"] in ("utf8", "binary"):
            return self._text(kind, node, memory, valid)
        if kind["kind"] == "list":
            child = node["children"][0]
            items = self._values(kind["item"], child, memory, self._valid(child, memory))
            return self._ragged(items, memory.array(node["buffers"][1], np.int32), valid)
        return self._finish(self._rows(kind, node, memory, valid))

    def _rows(self, kind: dict, node: dict, memory: _Batch, valid: Optional[np.ndarray]) -> np.ndarray:
        """Values that are of one size each."""
        name = kind["kind"]
        if name in ("utf8", "binary"):
            return self._text(kind, node, memory, valid)
        if name == "fixedSizeList":
            child = node["children"][0]
            items = self._rows(kind["item"], child, memory, self._valid(child, memory))
            values = items.reshape((node["len"], kind["size"]) + items.shape[1:])
        elif name == "bool":
            values = memory.bits(node["buffers"][1], node["len"])
        else:
            values = self._typed(kind, memory.array(node["buffers"][1], numpy_type(kind)))
        if valid is not None:
            # What lies where a row is null is anything.
            values[~valid] = None if values.dtype == object else np.zeros((), values.dtype)
        return values

    def _ragged(self, items: Any, offsets: np.ndarray, valid: Optional[np.ndarray]) -> Ragged:
        """Rows of different lengths. A row that is null may have items, but not for the caller."""
        lengths = np.diff(offsets)
        if valid is not None and lengths[~valid].any():
            items = self._chosen(items, np.repeat(valid, lengths))
            offsets = _offsets(np.where(valid, lengths, 0))
        return Ragged(items, self._finish(offsets))

    def _chosen(self, items: Any, keep: np.ndarray) -> Any:
        """A copy with those items only."""
        if isinstance(items, Ragged):
            lengths = np.diff(np.asarray(items.offsets))
            inner = self._chosen(items.values, np.repeat(keep, lengths))
            return Ragged(inner, self._finish(_offsets(lengths[keep])))
        return self._finish(np.asarray(items)[keep])

    def _typed(self, kind: dict, values: np.ndarray) -> np.ndarray:
        return values.astype("M8[D]") if kind == {"kind": "date", "unit": "d"} else values

    def _text(self, kind: dict, node: dict, memory: _Batch, valid: Optional[np.ndarray]) -> Any:
        offsets = memory.array(node["buffers"][1], np.int32)
        data = memory.array(node["buffers"][2], np.uint8).tobytes()
        rows = np.empty(node["len"], dtype=object)
        for row in range(node["len"]):
            if valid is None or valid[row]:
                value = data[offsets[row] : offsets[row + 1]]
                rows[row] = value.decode() if kind["kind"] == "utf8" else value
        return rows

    def _finish(self, values: np.ndarray) -> Any:
        return values


class _TorchMaker(_NumpyMaker):
    _RAGGED = ("list", "utf8", "binary")
    _WIDER = {"uint16": np.int32, "uint32": np.int64}

    def _check(self, name: str, kind: dict) -> None:
        super()._check(name, kind)
        if kind["kind"] == "int" and kind["bits"] == 64 and not kind["signed"]:
            raise UnsupportedType(f"column {name}: torch has no u64, use format='numpy'")

    def _typed(self, kind: dict, values: np.ndarray) -> np.ndarray:
        return values.view(np.int64) if values.dtype.kind == "M" else values

    def _text(self, kind: dict, node: dict, memory: _Batch, valid: Optional[np.ndarray]) -> Any:
        offsets = memory.array(node["buffers"][1], np.int32)
        return self._ragged(self._finish(memory.array(node["buffers"][2], np.uint8)), offsets, valid)

    def _finish(self, values: np.ndarray) -> Any:
        import torch

        wider = self._WIDER.get(values.dtype.name)
        return torch.from_numpy(values if wider is None else values.astype(wider))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


_FORMATS = {"torch": _TorchMaker, "numpy": _NumpyMaker, "arrow": _ArrowMaker}


def numpy_type(kind: dict) -> np.dtype:
    """The NumPy type in which values of a fixed-width column type lie in memory."""
    name = kind["kind"]
    if name == "int":
        return np.dtype(f"{'i' if kind['signed'] else 'u'}{kind['bits'] // 8}")
    if name == "float":
        return np.dtype(f"f{kind['bits'] // 8}")
    if name == "timestamp":
        return np.dtype(f"M8[{kind['unit']}]")
    if name == "date":
        return np.dtype("i4") if kind["unit"] == "d" else np.dtype("M8[ms]")
    if name == "time":
        return np.dtype("i4" if kind["unit"] in ("s", "ms") else "i8")
    raise UnsupportedType(f"no NumPy type for {name}")


def arrow_schema(columns: List[dict]) -> Any:
    """The pyarrow schema of columns as the agent describes them."""
    import pyarrow as pa

    return pa.schema([pa.field(c["name"], arrow_type(c["type"]), c["nullable"]) for c in columns])


def arrow_type(kind: dict) -> Any:
    """The pyarrow type of a column type as the agent describes it."""
    import pyarrow as pa

    name = kind["kind"]
    if name == "int":
        return getattr(pa, f"{'' if kind['signed'] else 'u'}int{kind['bits']}")()
    if name == "float":
        return getattr(pa, f"float{kind['bits']}")()
    if name == "decimal":
        return pa.decimal128(kind["precision"], kind["scale"])
    if name == "timestamp":
        return pa.timestamp(kind["unit"], kind["timezone"])
    if name == "date":
        return pa.date32() if kind["unit"] == "d" else pa.date64()
    if name == "time":
        wide = kind["unit"] in ("us", "ns")
        return pa.time64(kind["unit"]) if wide else pa.time32(kind["unit"])
    if name == "fixedSizeList":
        return pa.list_(arrow_type(kind["item"]), kind["size"])
    if name == "list":
        return pa.list_(arrow_type(kind["item"]))
    return {"bool": pa.bool_, "utf8": pa.string, "binary": pa.binary}[name]()
