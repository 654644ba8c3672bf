"""Scans and other processes: forks, workers of a DataLoader, what is pickled."""

import gc
import http.client
import json
import os
import pathlib
import pickle
import socket
import time
import traceback

import numpy as np
import pytest
import torch

import lampyris
from lampyris.digest import row_digest


def fork(work) -> tuple:
    """A fork that does some work: its number, and where its answer can be read."""
    answer, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, answer
    try:
        os.write(write, work().encode())
    except BaseException:
        os.write(write, traceback.format_exc().encode())
    os._exit(0)


def answer_of(pid: int, answer: int) -> str:
    with open(answer, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


def sessions(agent: str) -> int:
    """Scans that the agent has."""
    connection = http.client.HTTPConnection("agent")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(str(pathlib.Path(agent).with_name("scan-admin.sock")))
    connection.request("GET", "/state", headers={"Connection": "close"})
    state = json.loads(connection.getresponse().read())
    connection.close()
    return state["sessions"]


def has_sessions(agent: str, count: int) -> bool:
    deadline = time.monotonic() + 10
    while sessions(agent) != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_fork_that_lets_a_batch_go_does_not_give_its_memory_back(agent):
    scan = lampyris.scan("ours", ["id", "image"], batch_rows=64, slab_bytes=2 << 20, format="numpy", socket=agent)
    first = next(scan)
    before = {name: values.copy() for name, values in first.items()}

    def let_go() -> str:
        nonlocal first
        del first
        gc.collect()
        return "gone"

    assert answer_of(*fork(let_go)) == "gone"
    batches = sum(1 for _ in scan)
    assert batches > 50
    for name, values in before.items():
        assert np.array_equal(first[name], values), f"{name} was overwritten"


def test_a_fork_cannot_go_on_with_a_scan_and_its_parent_can(agent, data):
    scan = lampyris.scan("upstream", format="arrow", batch_rows=256, socket=agent)

    def go_on() -> str:
        with pytest.raises(lampyris.InvalidRequest, match="open it in the worker"):
            next(scan)
        scan.close()
        return "refused"

    assert answer_of(*fork(go_on)) == "refused"
    assert row_digest(scan) == data.digests("upstream")["digest"]


@pytest.mark.parametrize("way", ["close", "forget"])
def test_a_scan_that_is_left_ends_while_a_fork_has_its_socket(agent, way):
    gc.collect()
    assert has_sessions(agent, 0)
    # So small a ring that the agent waits for room.
    scan = lampyris.scan("ours", ["id", "image"], batch_rows=64, slab_bytes=1 << 20, format="numpy", socket=agent)
    kept = next(scan)
    assert has_sessions(agent, 1)
    wait, end = os.pipe()

    def idle() -> str:
        os.close(end)
        return os.read(wait, 1).decode()

    forked = fork(idle)
    try:
        if way == "close":
            scan.close()
        else:
            del scan
        assert has_sessions(agent, 0)
        assert kept["id"].tolist() == list(range(64)), "what was yielded stays"
    finally:
        os.write(end, b"x")
        os.close(end)
        os.close(wait)
        assert answer_of(*forked) == "x"


def test_scans_that_are_left_half_way_leave_no_descriptors(agent):
    def leave() -> None:
        for batch in lampyris.scan("ours", ["id"], batch_rows=10, format="numpy", socket=agent):
            break

    leave()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        leave()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, agent: str, name: str) -> None:
        self.agent, self.name = agent, name

    def __iter__(self):
        return lampyris.scan(self.name, ["id", "city"], batch_rows=500, slab_bytes=1 << 20, socket=self.agent)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_worker_of_a_data_loader_scans(agent, data, way):
    loader = lambda name: torch.utils.data.DataLoader(
        Rows(agent, name), batch_size=None, num_workers=1, multiprocessing_context=way
    )
    kept = list(loader("ours"))
    rows = data.digests("ours")["rows"]
    assert torch.equal(torch.cat([batch["id"] for batch in kept]), torch.arange(rows))
    plain = lampyris.scan("ours", ["city"], batch_rows=500, socket=agent)
    for batch, want in zip(kept, plain):
        assert torch.equal(batch["city"].values, want["city"].values)
        assert torch.equal(batch["city"].offsets, want["city"].offsets)
        assert torch.equal(batch["city:valid"], want["city:valid"])
    with pytest.raises(lampyris.InvalidRequest, match="no dataset nope; this pod has"):
        list(loader("nope"))


def test_a_scan_is_not_pickled_and_its_failures_are(agent):
    with lampyris.scan("ours", ["id"], socket=agent) as scan:
        with pytest.raises(lampyris.InvalidRequest, match="open it in the worker"):
            pickle.dumps(scan)
    failures = [
        lampyris.InvalidRequest("InvalidRequest", "no column nope", 7),
        lampyris.DatasetFailed("TruncatedFile", "cut.vortex ends early"),
        lampyris.UnsupportedType("column c: decimals need format='arrow'"),
        lampyris.ScanInterrupted("the agent went away"),
    ]
    for failure in failures:
        again = pickle.loads(pickle.dumps(failure))
        assert type(again) is type(failure) and str(again) == str(failure)
        assert vars(again) == vars(failure)
