"""A scan agent over made and real data, written by both writers."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import vortex

from lampyris.digest import row_digest

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOOL = ROOT / "scan-agent/python/tools/make_data.py"
BYTES = "16777216"


def agent_binary() -> str:
    """LAMPYRIS_SCAN_AGENT, or where the project's builds put it."""
    given = os.environ.get("LAMPYRIS_SCAN_AGENT")
    cache = pathlib.Path(os.environ.get("LAMPYRIS_CACHE", pathlib.Path.home() / ".cache/lampyris"))
    places = [cache / "target", ROOT / "target"]
    found = [given] if given else [str(p / "debug/scan-agent") for p in places]
    for path in found:
        if path and os.path.exists(path):
            return path
    raise RuntimeError(f"no scan-agent at {found}: build it or set LAMPYRIS_SCAN_AGENT")


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_shapes(folder: pathlib.Path) -> None:
    """Three rows of the types that the other sets do not have, each with nulls."""
    table = pa.table(
        {
            "day": pa.array([19782, None, -1], pa.date32()),
            "embedding": pa.array([[1, 2], None, [None, 6]], pa.list_(pa.float32(), 2)),
            "tags": pa.array([[1, 2], None, [None]], pa.list_(pa.int64())),
        }
    )
    folder.mkdir()
    vortex.io.write(table, str(folder / "shapes.vortex"))
    (folder / "digests.json").write_text(json.dumps({"rows": 3, "digest": row_digest(table)}))


class Data:
    """Folders of data sets, each with a digests.json made when the data was made."""

    def __init__(self, root: pathlib.Path) -> None:
        agent = agent_binary()
        self.agent = agent
        self.root = root
        run(sys.executable, TOOL, "synthetic", "--bytes", BYTES, "--files", 2, "--out", root / "upstream")
        run(agent, "make-data", "--bytes", BYTES, "--files", 2, "--out", root / "ours")
        run(sys.executable, TOOL, "flights", "--out", root / "flights")
        flights = root / "flights/flights.vortex"
        run(agent, "make-data", "--kind", "rewrite", "--from", flights, "--out", root / "flights-ours")
        write_shapes(root / "shapes")

    def path(self, name: str) -> pathlib.Path:
        return self.root / name

    def digests(self, name: str) -> dict:
        return json.loads((self.root / name / "digests.json").read_text())


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Data:
    return Data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def agent(data, tmp_path_factory):
    """Path of the socket of a running agent that has every data set."""
    run_dir = tmp_path_factory.mktemp("run")
    names = ["upstream", "ours", "flights", "flights-ours", "shapes"]
    flags = [f"--dataset={name}={data.path(name)}" for name in names]
    broken = run_dir / "broken"
    broken.mkdir()
    whole = data.path("ours/part-00000.vortex").read_bytes()
    (broken / "cut.vortex").write_bytes(whole[: len(whole) // 2])
    flags.append(f"--dataset=broken={broken}")
    command = [data.agent, "serve", "--private-dir", run_dir, "--app-dir", run_dir, *flags]
    log = (run_dir / "log").open("wb")
    process = subprocess.Popen(command, stderr=log)
    socket = run_dir / "scan.sock"
    deadline = time.monotonic() + 20
    while not socket.exists():
        assert process.poll() is None and time.monotonic() < deadline, (run_dir / "log").read_text()
        time.sleep(0.02)
    yield str(socket)
    process.terminate()
    assert process.wait(20) == 0
