"""The scan from end to end: upstream's files and ours, every format, what goes wrong."""

import datetime
import gc
import importlib
import json
import os
import threading

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
import vortex

import lampyris
from lampyris.digest import row_digest
from lampyris.errors import from_reply

NAMES = ["upstream", "ours", "flights", "flights-ours"]


def upstream_read(data, name):
    paths = sorted(data.path(name).glob("*.vortex"))
    return pa.concat_tables(vortex.open(str(p)).to_arrow().read_all() for p in paths)


def test_both_generators_make_the_same_rows(data):
    assert data.digests("upstream")["digest"] == data.digests("ours")["digest"]
    assert data.digests("flights")["digest"] == data.digests("flights-ours")["digest"]
    assert data.digests("flights")["rows"] == 336_776


@pytest.mark.parametrize("name", NAMES)
def test_our_scan_and_upstreams_reader_agree_with_the_digest_made_at_the_start(agent, data, name):
    expected = data.digests(name)
    scan = lampyris.scan(name, format="arrow", socket=agent)
    assert row_digest(scan) == expected["digest"]
    assert scan.stats["rows"] == expected["rows"]
    assert row_digest(upstream_read(data, name)) == expected["digest"]


def test_batches_have_the_rows_asked_for_whatever_the_files_hold(agent, data):
    rows = [b.num_rows for b in lampyris.scan("flights", ["year"], batch_rows=10_000, format="arrow", socket=agent)]
    assert rows == [10_000] * 33 + [6_776]


def test_a_filter_gives_upstreams_rows_and_skips_bytes(agent, data):
    table = upstream_read(data, "flights")
    table = table.select(["carrier", "dep_delay", "month"])
    table = table.set_column(0, "carrier", table["carrier"].cast(pa.string()))
    mask = pc.and_(pc.equal(table["month"], 12), pc.greater(table["dep_delay"], 120))
    wanted = table.filter(mask).select(["carrier", "dep_delay"])
    scan = lampyris.scan(
        "flights", ["carrier", "dep_delay"], "month = 12 and dep_delay > 120", format="arrow", socket=agent
    )
    assert row_digest(scan) == row_digest(wanted)
    assert 0 < scan.stats["bytesFetched"] < scan.stats["fileBytes"] / 2, scan.stats


def test_numpy_and_torch_hold_the_same_values(agent, data):
    table = upstream_read(data, "ours").slice(0, 1000)
    columns = ["id", "label", "score", "price", "taken", "city", "flag", "image"]
    with lampyris.scan("ours", columns, batch_rows=1000, format="numpy", socket=agent) as scan:
        arrays = next(scan)
    with lampyris.scan("ours", columns, batch_rows=1000, format="torch", socket=agent) as scan:
        tensors = next(scan)
    label = table["label"].to_pylist()
    assert arrays["label:valid"].tolist() == [v is not None for v in label]
    assert arrays["label"].tolist() == [v or 0 for v in label]
    assert arrays["city"].tolist() == table["city"].to_pylist()
    assert arrays["taken"].dtype == np.dtype("M8[us]")
    assert arrays["image"].shape == (1000, 3072) and arrays["image"].dtype == np.uint8
    flat = table["image"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(arrays["image"].reshape(-1), flat)
    for name, dtype in [("id", torch.int64), ("price", torch.float32), ("flag", torch.bool), ("image", torch.uint8)]:
        assert tensors[name].dtype == dtype
        assert np.array_equal(tensors[name].numpy(), arrays[name])
    offsets, values = tensors["city"].offsets, tensors["city"].values
    first = bytes(values[offsets[0] : offsets[1]].tolist()).decode()
    assert first == (table["city"][0].as_py() or "")
    tensors["id"] += 1
    assert int(tensors["id"][0]) == 1, "tensors are writable"


def test_dates_lists_and_nulls_are_what_the_documentation_says(agent, data):
    scan = lambda format: lampyris.scan("shapes", format=format, socket=agent)
    (arrays,), (tensors,), (batch,) = scan("numpy"), scan("torch"), scan("arrow")
    assert row_digest(batch) == data.digests("shapes")["digest"] == row_digest(upstream_read(data, "shapes"))
    assert arrays["day"].dtype == np.dtype("M8[D]")
    days = [(2024, 2, 29), (1970, 1, 1), (1969, 12, 31)]
    assert arrays["day"].tolist() == [datetime.date(*day) for day in days]
    assert tensors["day"].dtype == torch.int32 and tensors["day"].tolist() == [19782, 0, -1]
    for values in (arrays, tensors):
        assert values["day:valid"].tolist() == [True, False, True]
        assert values["embedding"].tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 6.0]]
        assert values["embedding:valid"].tolist() == [True, False, True]
        assert values["tags"].values.tolist() == [1, 2, 0] and values["tags"].offsets.tolist() == [0, 2, 2, 3]
        assert values["tags:valid"].tolist() == [True, False, True]


class _Laid:
    """Buffers of a batch, made by hand."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def put(self, values, dtype):
        raw, start = np.array(values, dtype).tobytes(), len(self.bytes)
        self.bytes += raw + bytes(-len(raw) % 64)
        return [start, len(raw)]

    def bits(self, flags):
        return self.put(np.packbits(flags, bitorder="little"), np.uint8)

    def deliver(self, format, kind, node):
        module = importlib.import_module("lampyris.scan")
        maker = module._FORMATS[format]()
        maker.prepare([{"name": "c", "nullable": True, "type": kind}])
        whole = np.frombuffer(self.bytes, np.uint8).copy()
        memory = module._Batch(module._Memory(whole.ctypes.data, len(whole), whole), 0)
        return maker.batch({"columns": [node]}, memory)["c"]


INTS = {"kind": "int", "bits": 32, "signed": True}
PAIRS = {"kind": "fixedSizeList", "size": 2, "item": INTS}
LISTS = {"kind": "list", "item": INTS}


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_what_lies_under_a_null_is_not_delivered(format):
    laid = _Laid()
    ints = {"len": 4, "nulls": 1, "buffers": [laid.bits([1, 0, 1, 1]), laid.put([1, 99, 3, 4], "i4")]}
    assert laid.deliver(format, INTS, ints).tolist() == [1, 0, 3, 4]
    pairs = {"len": 2, "nulls": 1, "buffers": [laid.bits([1, 0])], "children": [ints]}
    assert laid.deliver(format, PAIRS, pairs).tolist() == [[1, 0], [0, 0]]
    offsets = laid.put([0, 1, 3, 4], "i4")
    lists = {"len": 3, "nulls": 1, "buffers": [laid.bits([1, 0, 1]), offsets], "children": [ints]}
    values = laid.deliver(format, LISTS, lists)
    assert (values.values.tolist(), values.offsets.tolist()) == ([1, 4], [0, 1, 1, 2])

    # A list of lists of which the second row is null: it would have [99, 3] and [4].
    ends = laid.put([0, 1, 3], "i4")
    nested = {"len": 2, "nulls": 1, "buffers": [laid.bits([1, 0]), ends], "children": [{**lists, "nulls": 0}]}
    nested["children"][0]["buffers"] = [None, offsets]
    values = laid.deliver(format, {"kind": "list", "item": LISTS}, nested)
    assert values.offsets.tolist() == [0, 1, 1]
    assert (values.values.values.tolist(), values.values.offsets.tolist()) == ([1], [0, 1])

    text = {"len": 3, "nulls": 1, "buffers": [laid.bits([1, 0, 1]), offsets, laid.put(list(b"axyc"), "u1")]}
    values = laid.deliver(format, {"kind": "utf8"}, text)
    if format == "numpy":
        assert values.tolist() == ["a", None, "c"]
        words = {"len": 1, "nulls": 1, "buffers": [laid.bits([0])], "children": [{**text, "nulls": 0}]}
        kind = {"kind": "fixedSizeList", "size": 3, "item": {"kind": "utf8"}}
        assert laid.deliver(format, kind, words).tolist() == [[None, None, None]]
    else:
        assert (bytes(values.values.tolist()), values.offsets.tolist()) == (b"ac", [0, 1, 1, 2])


def test_a_scan_without_rows_has_the_digest_of_a_table_without_rows(agent, data):
    scan = lampyris.scan("flights", ["carrier", "dep_delay"], "month = 13", format="arrow", socket=agent)
    table = upstream_read(data, "flights").select(["carrier", "dep_delay"]).slice(0, 0)
    assert row_digest(scan) == row_digest(table) != row_digest([])
    assert scan.schema.names == ["carrier", "dep_delay"]
    assert scan.stats["rows"] == 0


def test_a_consumer_that_keeps_everything_gets_copies_and_right_values(agent, data):
    scan = lampyris.scan("ours", ["id", "image"], batch_rows=256, slab_bytes=4 << 20, socket=agent)
    kept = list(scan)
    ids = torch.cat([batch["id"] for batch in kept])
    assert torch.equal(ids, torch.arange(data.digests("ours")["rows"]))


def test_memory_is_reused_once_batches_are_garbage(agent):
    scan = lampyris.scan("ours", ["image"], batch_rows=256, slab_bytes=2 << 20, format="numpy", socket=agent)
    batches = 0
    for batch in scan:
        batches += 1
        del batch
        gc.collect()
    assert batches > 10 and scan._ring.copied == 0


@pytest.mark.parametrize("share", [0.45, 0.4, 0.26, 0.1])
def test_a_consumer_that_uses_a_batch_until_the_next_has_come_is_never_stuck(agent, data, share):
    # Rows of strings make batches of different sizes, so one does not fit exactly where another was.
    rows = int(share * (1 << 20) / 3125)
    scan = lampyris.scan("ours", format="arrow", batch_rows=rows, slab_bytes=1 << 20, socket=agent)
    assert row_digest(scan) == data.digests("ours")["digest"]
    assert (scan._ring.copied > 0) == (share > 0.25)


def test_several_scans_run_at_once(agent, data):
    digests = [None] * 4

    def work(index):
        digests[index] = row_digest(lampyris.scan("upstream", format="arrow", batch_rows=777, socket=agent))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert set(digests) == {data.digests("upstream")["digest"]}


def test_mistakes_are_explained(agent):
    with pytest.raises(lampyris.InvalidRequest, match="no dataset nope; this pod has .*flights"):
        lampyris.scan("nope", socket=agent)
    with pytest.raises(lampyris.InvalidRequest, match="no column nope"):
        lampyris.scan("flights", ["nope"], socket=agent)
    with pytest.raises(lampyris.InvalidRequest) as error:
        lampyris.scan("flights", where="month = ", socket=agent)
    assert error.value.position == 8
    with pytest.raises(lampyris.InvalidRequest, match="not torch, numpy or arrow"):
        lampyris.scan("flights", format="jax", socket=agent)
    with pytest.raises(lampyris.InvalidRequest, match="batchRows"):
        lampyris.scan("flights", batch_rows=0, socket=agent)


def test_what_a_format_cannot_hold_is_refused_before_the_first_batch():
    formats = importlib.import_module("lampyris.scan")._FORMATS
    u64 = {"kind": "int", "bits": 64, "signed": False}
    decimal = {"kind": "decimal", "precision": 10, "scale": 2}
    ragged = {"kind": "list", "item": {"kind": "bool"}}
    pairs = lambda item: {"kind": "fixedSizeList", "size": 2, "item": item}
    refused = {
        "numpy": [decimal, pairs(decimal), pairs(ragged), {"kind": "list", "item": pairs(ragged)}],
        "torch": [decimal, u64, pairs(u64), pairs(ragged), pairs({"kind": "utf8"}), pairs({"kind": "binary"})],
        "arrow": [],
    }
    for name, kinds in refused.items():
        for kind in kinds:
            with pytest.raises(lampyris.UnsupportedType, match="column c: "):
                formats[name]().prepare([{"name": "c", "nullable": True, "type": kind}])
    for kind in refused["torch"]:
        formats["arrow"]().prepare([{"name": "c", "nullable": True, "type": kind}])
    formats["numpy"]().prepare([{"name": "c", "nullable": True, "type": pairs({"kind": "utf8"})}])


def test_an_agent_with_too_many_scans_is_worth_another_try():
    for reason in ("Busy", "Stopping"):
        error = from_reply({"reason": reason, "message": "scan again later"})
        assert isinstance(error, lampyris.ScanInterrupted) and error.message == "scan again later"


class _SocketThatCollects:
    """A socket during whose first send the garbage collector runs."""

    def __init__(self) -> None:
        self.sent, self.garbage, self.is_shut, self.is_closed = [], [], False, False

    def sendall(self, line):
        self.sent.append(json.loads(line))
        self.garbage.clear()
        gc.collect()

    def shutdown(self, how):
        self.is_shut = True

    def close(self):
        self.is_closed = self.is_shut


def test_a_batch_may_be_collected_while_its_thread_sends():
    module = importlib.import_module("lampyris.scan")
    sock = _SocketThatCollects()
    channel = module._Channel(sock)
    channel.fds = [os.memfd_create("ring")]
    os.ftruncate(channel.fds[0], 4096)
    ring = module._Ring(channel, 4096)
    node = lambda start: {"buffers": [[start, 64]]}
    batches = [ring.take({"id": i, "bytes": 64, "columns": [node(64 * i)]}) for i in range(2)]
    batches[0].itself = batches[0]  # Only the collector finds this one.
    sock.garbage.extend(batches)
    batches.clear()
    calls = [lambda: channel.send({"want": {}}), channel.close, lambda: channel.send({"want": {}})]
    thread = threading.Thread(target=lambda: [call() for call in calls], daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the finalizer waits for the thread that it runs on"
    assert sock.sent[0] == {"want": {}} and len(sock.sent) == 3
    assert sorted(message["release"]["id"] for message in sock.sent[1:]) == [0, 1]
    assert sock.is_closed and channel.fds == []


def test_a_cut_file_is_a_typed_failure(agent):
    with pytest.raises(lampyris.DatasetFailed) as error:
        lampyris.scan("broken", socket=agent)
    assert error.value.reason == "TruncatedFile"


def test_the_datasets_of_the_pod_are_listed(agent):
    assert [d["name"] for d in lampyris.datasets(socket=agent)] == sorted(["broken", "shapes", *NAMES])


def test_without_an_agent_the_wait_is_bounded():
    with pytest.raises(lampyris.ScanInterrupted, match="no scan agent"):
        lampyris.scan("x", socket="/nonexistent/scan.sock", timeout=0.1)
