"""The Python implementation of DIGEST.md by itself."""

import hashlib
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa

from lampyris.digest import row_digest


def test_known_rows_have_the_digest_of_the_specification():
    sha = lambda data: hashlib.sha256(data).digest()
    node = sha(
        struct.pack("<Q", 3) + b"i32" + sha(b"\1\0\1") + sha(b"") + sha(struct.pack("<ii", 1, -1)) + bytes(32)
    )
    whole = b"lampyris-row-digest-1\n" + struct.pack("<QQ", 3, 1) + b"a" + node
    table = pa.table({"a": pa.array([1, None, -1], pa.int32())})
    assert row_digest(table) == hashlib.sha256(whole).hexdigest()


def test_layout_and_chunks_do_not_show():
    values = ["a", None, "", "été"] * 5
    plain = pa.table({"s": pa.array(values), "l": pa.array([[1, None], None, [], [2]] * 5)})
    wide = pa.table({"s": pa.array(values, pa.large_string()), "l": plain["l"].cast(pa.large_list(pa.int64()))})
    coded = pa.table({"s": pa.array(values).dictionary_encode(), "l": plain["l"]})
    cut = pa.Table.from_batches(plain.to_batches(max_chunksize=3))
    assert len({row_digest(t) for t in (plain, wide, coded, cut)}) == 1


def test_nans_are_one_nan_and_zeros_two():
    nans = np.array([0x7FF8000000000000, 0xFFF800000000BEEF], np.uint64).view(np.float64)
    one = lambda value: row_digest(pa.table({"x": pa.array(np.array([value]))}))
    assert one(nans[0]) == one(nans[1])
    assert one(0.0) != one(-0.0)


def test_a_checkout_that_nobody_built_has_all_but_the_native_part():
    checkout = pathlib.Path(__file__).resolve().parent.parent
    program = """
from lampyris.digest import row_digest
import lampyris
print(lampyris.__file__, callable(lampyris.scan))
try:
    lampyris.ring
except ModuleNotFoundError as error:
    print(error.name)
"""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(checkout / "lampyris/__init__.py"), "True", "lampyris._lampyris"]
