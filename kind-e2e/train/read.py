"""What a training job does with its datasets: reads each by file, by ring and by scan, and compares digests.

    python3 read.py --expect FOLDER NAME=MOUNT...

FOLDER has NAME.json, made with the data: rows, the row digest and each file's sha256. One line for each way of
reading; the last line says whether all digests agree, and so does the exit status.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile
import time
from typing import BinaryIO, Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import torch  # noqa: F401  Loaded here, so that no reading is measured with it.
import vortex

import lampyris
from lampyris import ring
from lampyris.digest import row_digest

# What a filter on a column in file order leaves: whole blocks of rows are not fetched.
FILTERS = {
    "month": ("month = 3", pc.field("month") == 3, ["month", "carrier", "dep_delay"]),
    "id": ("id < 2000", pc.field("id") < 2000, ["id", "label", "image"]),
}


# Bytes of one read: what a data loader asks for at a time. Nothing here holds a whole file in memory.
PIECE = 8 << 20


class Report:
    def __init__(self) -> None:
        self.compared = 0
        self.wrong = []

    def line(self, name: str, way: str, rows: int, size: int, seconds: float, more: str) -> None:
        rate = size / seconds / 1e6 if seconds else 0.0
        print(f"{name:<14} {way:<6} {rows:>8} rows {size:>11} B {seconds:7.3f} s {rate:8.1f} MB/s  {more}", flush=True)

    def compare(self, what: str, got: object, expected: object) -> str:
        self.compared += 1
        if got != expected:
            self.wrong.append(f"{what}: got {got}, expected {expected}")
        return str(got)[:12]


def decode(paths: list) -> Iterator[pa.RecordBatch]:
    """What upstream's package finds in the files, a batch at a time."""
    for path in paths:
        for batch in vortex.open(str(path)).to_arrow():
            # PyArrow does not filter views.
            plain = [f.with_type(pa.string()) if pa.types.is_string_view(f.type) else f for f in batch.schema]
            yield batch.cast(pa.schema(plain))


def fetch(file: BinaryIO, copy: pathlib.Path) -> tuple:
    """Reads all of a file and keeps a copy: seconds spent reading, bytes, and their sha256."""
    seconds, size, digest = 0.0, 0, hashlib.sha256()
    with copy.open("wb") as out:
        while True:
            begin = time.monotonic()
            piece = file.read(PIECE)
            seconds += time.monotonic() - begin
            if not piece:
                return seconds, size, digest.hexdigest()
            size += len(piece)
            digest.update(piece)
            out.write(piece)


def check_bytes(report: Report, name: str, way: str, expect: dict, open_file: Callable, folder: pathlib.Path) -> list:
    """Reads every file through `open_file`, and has upstream's package decode what came, copied below `folder`."""
    seconds, size, sums, copies = 0.0, 0, [], []
    for entry in expect["files"]:
        path = entry["path"]
        copies.append(folder / path)
        with open_file(path) as file:
            spent, got, digest = fetch(file, copies[-1])
        seconds, size = seconds + spent, size + got
        sums.append(report.compare(f"{name} by {way}: sha256 of {path}", digest, entry["sha256"]))
    rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in decode(copies):
            rows += batch.num_rows
            yield batch

    digest = report.compare(f"{name} by {way}: rows", row_digest(counted()), expect["digest"])
    report.line(name, way, rows, size, seconds, f"sha256 {' '.join(sums)}  rows {digest}")
    return copies


def check_scan(report: Report, name: str, expect: dict) -> None:
    """Batches as a training loop takes them, for the time; then again as Arrow, for the digest."""
    begin = time.monotonic()
    scan = lampyris.scan(name, format="torch")
    rows = sum(len(next(iter(batch.values()))) for batch in scan)
    seconds = time.monotonic() - begin
    report.compare(f"{name} by scan: number of rows", rows, expect["rows"])
    digest = report.compare(f"{name} by scan: rows", row_digest(lampyris.scan(name, format="arrow")), expect["digest"])
    report.line(name, "scan", rows, scan.stats["bytesFetched"], seconds, f"rows {digest}")


def check_filter(report: Report, name: str, copies: list) -> None:
    """A filtered scan has the rows that a filter over everything leaves, and fetches less."""
    names = next(decode(copies)).schema.names
    where, expression, columns = next(FILTERS[column] for column in FILTERS if column in names)
    begin = time.monotonic()
    scan = lampyris.scan(name, columns=columns, where=where, format="arrow")
    got = row_digest(scan)
    seconds = time.monotonic() - begin
    tables = (pa.Table.from_batches([batch]).filter(expression).select(columns) for batch in decode(copies))
    expected = row_digest(pa.concat_tables(tables).combine_chunks())
    digest = report.compare(f"{name} where {where}: rows", got, expected)
    fetched, size = scan.stats["bytesFetched"], scan.stats["fileBytes"]
    report.compare(f"{name} where {where}: fetches less than half", fetched * 2 < size, True)
    more = f"where {where}: {fetched / size:.1%} of {size} B fetched  rows {digest}"
    report.line(name, "filter", scan.stats["rows"], fetched, seconds, more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expect", type=pathlib.Path, required=True, help="folder of NAME.json")
    parser.add_argument("sets", nargs="+", metavar="NAME=MOUNT")
    args = parser.parse_args()
    report = Report()
    for pair in args.sets:
        name, mount = pair.split("=", 1)
        expect = json.loads((args.expect / f"{name}.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            by_file = lambda path: open(f"{mount}/{path}", "rb", buffering=0)
            copies = check_bytes(report, name, "file", expect, by_file, pathlib.Path(folder))
            check_bytes(report, name, "ring", expect, lambda path: ring.open(f"{mount}/{path}"), pathlib.Path(folder))
            check_scan(report, name, expect)
            check_filter(report, name, copies)
    for wrong in report.wrong:
        print(wrong)
    verdict = "all digests agree" if not report.wrong else f"{len(report.wrong)} DO NOT AGREE"
    print(f"{report.compared} comparisons: {verdict}", flush=True)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
