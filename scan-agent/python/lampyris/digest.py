"""The canonical row digest of Arrow data, as scan-agent/DIGEST.md specifies it.

Written apart from the agent's implementation, so that one checks the other.
"""

import hashlib
import struct
from typing import Any, Iterable, List, Optional

import numpy as np
import pyarrow as pa

_MAGIC = b"lampyris-row-digest-1\n"
_NANS = {2: 0x7E00, 4: 0x7FC00000, 8: 0x7FF8000000000000}


def row_digest(data: Any) -> str:
    """The digest of a ``pyarrow.Table``, a ``RecordBatch``, a ``Scan`` or an iterable of record batches. An iterable
    that has no ``schema`` must not be empty: only its batches have the names of the columns."""
    if isinstance(data, pa.RecordBatch):
        data = [data]
    batches: Iterable[pa.RecordBatch] = data.to_batches() if isinstance(data, pa.Table) else data
    nodes: Optional[List[_Node]] = [_Node(f.type) for f in data.schema] if hasattr(data, "schema") else None
    names = [f.name for f in data.schema] if nodes is not None else []
    rows = 0
    for batch in batches:
        if nodes is None:
            nodes = [_Node(field.type) for field in batch.schema]
            names = batch.schema.names
        for node, column in zip(nodes, batch.columns):
            node.feed(column)
        rows += batch.num_rows
    whole = hashlib.sha256(_MAGIC + struct.pack("<Q", rows))
    for name, node in zip(names, nodes or []):
        text = name.encode()
        whole.update(struct.pack("<Q", len(text)) + text + node.finish())
    return whole.hexdigest()


class _Node:
    def __init__(self, kind: pa.DataType) -> None:
        self._kind = _plain(kind)
        self._streams = [hashlib.sha256() for _ in range(3)]
        self._child = _Node(self._kind.value_type) if _is_list(self._kind) else None

    def finish(self) -> bytes:
        name = type_name(self._kind).encode()
        node = hashlib.sha256(struct.pack("<Q", len(name)) + name)
        for stream in self._streams:
            node.update(stream.digest())
        node.update(self._child.finish() if self._child else bytes(32))
        return node.digest()

    def feed(self, column: Any) -> None:
        if column.type != self._kind:
            column = column.cast(self._kind)
        presence, lengths, values = self._streams
        present = column.is_valid().to_numpy(zero_copy_only=False)
        presence.update(present.astype(np.uint8).tobytes())
        if column.null_count:
            column = column.filter(pa.array(present))
        kind = self._kind
        if pa.types.is_boolean(kind):
            values.update(column.to_numpy(zero_copy_only=False).astype(np.uint8).tobytes())
        elif pa.types.is_fixed_size_list(kind):
            self._child.feed(column.flatten())
        elif pa.types.is_list(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind):
            offsets = _buffer(column, 1, np.int32, len(column) + 1)
            lengths.update(np.diff(offsets.astype(np.int64)).astype("<u8").tobytes())
            if self._child:
                self._child.feed(column.flatten())
            elif len(column):
                data = column.buffers()[2]
                if data is not None:
                    values.update(memoryview(data)[offsets[0] : offsets[-1]])
        else:
            values.update(self._fixed(column).tobytes())

    def _fixed(self, column: Any) -> np.ndarray:
        width = self._kind.bit_width // 8
        raw = _buffer(column, 1, np.dtype(f"V{width}"), len(column))
        if pa.types.is_floating(self._kind):
            floats, ints = raw.view(f"f{width}"), raw.view(f"u{width}")
            return np.where(np.isnan(floats), np.array(_NANS[width], f"u{width}"), ints)
        return raw


def _buffer(column: Any, index: int, dtype: Any, count: int) -> np.ndarray:
    buffer = column.buffers()[index]
    if buffer is None or (count == 1 and index == 1 and len(column) == 0):
        return np.zeros(count, dtype)
    dtype = np.dtype(dtype)
    return np.frombuffer(buffer, dtype, count, column.offset * dtype.itemsize)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """One layout for types that Arrow has several of."""
    text = pa.types
    if text.is_dictionary(kind):
        return _plain(kind.value_type)
    if text.is_large_string(kind) or text.is_string_view(kind):
        return pa.string()
    if text.is_large_binary(kind) or text.is_binary_view(kind):
        return pa.binary()
    if text.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if text.is_list(kind) or text.is_large_list(kind) or text.is_list_view(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


def type_name(kind: pa.DataType) -> str:
    """A type's name in the digest."""
    text = pa.types
    if text.is_boolean(kind):
        return "bool"
    if text.is_integer(kind):
        return f"{'i' if text.is_signed_integer(kind) else 'u'}{kind.bit_width}"
    if text.is_floating(kind):
        return f"f{kind.bit_width}"
    if text.is_string(kind):
        return "utf8"
    if text.is_binary(kind):
        return "binary"
    if text.is_date(kind):
        return "date[d]" if text.is_date32(kind) else "date[ms]"
    if text.is_time(kind):
        return f"time[{kind.unit}]"
    if text.is_timestamp(kind):
        return f"timestamp[{kind.unit}{',' + kind.tz if kind.tz else ''}]"
    if text.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if text.is_fixed_size_list(kind):
        return f"list[{kind.list_size}]<{type_name(kind.value_type)}>"
    if text.is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    raise TypeError(f"{kind} has no digest")
