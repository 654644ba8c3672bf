"""CPU time of a scan from S3, ours against PyArrow's on Parquet, in one run.

    python bench_scan.py --agent PATH --versitygw PATH FOLDER...

Each FOLDER holds Vortex files and a digests.json. Their rows are written again as Parquet with PyArrow's defaults;
both go into one S3 server (plain HTTP, so that neither side's TLS is measured). Each side scans everything several
times into Arrow batches in a fresh process; the agent's CPU time is added to its client's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pyarrow as pa
import pyarrow.parquet

REPEAT = 5
KEYS = {"accessKeyId": "bench", "secretAccessKey": "bench-secret"}


def ours(name: str, run_dir: str) -> int:
    import lampyris

    os.environ["LAMPYRIS_SCAN_SOCKET"] = f"{run_dir}/scan.sock"
    return sum(batch.num_rows for batch in lampyris.scan(name, format="arrow"))


def pyarrows(name: str, port: str) -> int:
    import pyarrow.dataset
    import pyarrow.fs

    filesystem = pyarrow.fs.S3FileSystem(
        access_key=KEYS["accessKeyId"],
        secret_key=KEYS["secretAccessKey"],
        endpoint_override=f"127.0.0.1:{port}",
        scheme="http",
        region="us-east-1",
    )
    rows = pyarrow.dataset.dataset(f"bench/{name}-parquet", filesystem=filesystem, format="parquet")
    return sum(batch.num_rows for batch in rows.to_batches())


def client(way: str, name: str, where: str) -> None:
    """The measured process: scans several times, prints rows and its own CPU and wall time."""
    scan = ours if way == "ours" else pyarrows
    scan(name, where)  # Imports, connections and footers are not what is compared.
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    rows = sum(scan(name, where) for _ in range(REPEAT))
    after, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - begin
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"rows": rows, "cpu": cpu, "wall": wall}), flush=True)


def measure(way: str, name: str, where: str) -> dict:
    command = [sys.executable, __file__, "--client", way, name, where]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return json.loads(done.stdout)


def cpu_of(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def wait_until(what: str, holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def process(command: list, **more):
    running = subprocess.Popen([str(part) for part in command], **more)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)


def put(root: pathlib.Path, folder: pathlib.Path) -> str:
    """The objects of a set, as files below the server's root; returns the name of the set."""
    import vortex

    name = folder.name.split("-")[0]
    digests = json.loads((folder / "digests.json").read_text())
    for suffix in ("", "-parquet"):
        (root / "bench" / (name + suffix)).mkdir(parents=True)
    for file in digests["files"]:
        shutil.copy(folder / file["path"], root / "bench" / name)
        table = vortex.open(str(folder / file["path"])).to_arrow().read_all()
        pyarrow.parquet.write_table(table, root / "bench" / f"{name}-parquet" / (file["path"] + ".parquet"))
    return name


def node_plugin(run_dir: pathlib.Path, port: int, names: list) -> None:
    """Says to the agent what the node plugin would: one volume for each set."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "node.sock"))
    listener.listen()
    endpoint = f"http://127.0.0.1:{port}"
    lines = []
    for index, name in enumerate(names):
        s3 = {"uri": f"s3://bench/{name}", "endpoint": endpoint, "region": "us-east-1", "credentials": KEYS}
        volume = {"name": name, "dataset": name, "format": "Vortex", "source": {"s3": s3}, "last": index + 1 == len(names)}
        lines.append(json.dumps({"volume": volume}) + "\n")

    def serve() -> None:
        connection, _ = listener.accept()
        connection.sendall("".join(lines).encode())
        while connection.recv(4096):
            pass

    threading.Thread(target=serve, daemon=True).start()


def compare(name: str, agent_pid: int, run_dir: pathlib.Path, port: int) -> dict:
    measure("ours", name, str(run_dir))
    before = cpu_of(agent_pid)
    mine = measure("ours", name, str(run_dir))
    # The client's first scan, which it does not count, is one of the agent's.
    agent = (cpu_of(agent_pid) - before) * REPEAT / (REPEAT + 1)
    anchor = measure("pyarrow", name, str(port))
    assert mine["rows"] == anchor["rows"], (mine, anchor)
    millions = mine["rows"] / 1e6
    return {
        "bench": "scan-first",
        "set": name,
        "rows": mine["rows"] // REPEAT,
        "cpu_s_per_million_rows": round((mine["cpu"] + agent) / millions, 3),
        "of_it_agent": round(agent / millions, 3),
        "pyarrow_cpu_s_per_million_rows": round(anchor["cpu"] / millions, 3),
        "ratio": round((mine["cpu"] + agent) / anchor["cpu"], 3),
        "wall_s": round(mine["wall"] / REPEAT, 3),
        "pyarrow_wall_s": round(anchor["wall"] / REPEAT, 3),
        "agent_rss_mib": round(rss_mib(agent_pid), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", nargs=3, metavar=("WAY", "NAME", "WHERE"), help=argparse.SUPPRESS)
    parser.add_argument("--agent", help="the scan agent's binary")
    parser.add_argument("--versitygw", help="the S3 server's binary")
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    if args.client:
        client(*args.client)
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root, run_dir, port = pathlib.Path(folder) / "data", pathlib.Path(folder) / "run", free_port()
        root.mkdir()
        run_dir.mkdir()
        names = [put(root, path) for path in args.folders]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        flags = ["--access", KEYS["accessKeyId"], "--secret", KEYS["secretAccessKey"], "--keep-alive", "--quiet"]
        gateway = [args.versitygw, *flags, "--port", f"127.0.0.1:{port}", "posix", "--default-etag", "bench", root]
        stack.enter_context(process(gateway, **quiet))
        wait_until("the S3 server", lambda: answers(port))
        node_plugin(run_dir, port, names)
        serve = [args.agent, "serve", "--private-dir", run_dir, "--app-dir", run_dir]
        agent = stack.enter_context(process(serve, stderr=subprocess.DEVNULL))
        wait_until("the agent", lambda: (run_dir / "scan.sock").exists())
        for name in names:
            print(json.dumps(compare(name, agent.pid, run_dir, port)), flush=True)


if __name__ == "__main__":
    main()
