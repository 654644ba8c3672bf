"""Rows and bytes of a Lampyris dataset, in the pod that has it.

``lampyris.scan`` yields batches of rows as torch tensors, NumPy arrays or Arrow record batches;
``lampyris.ring`` reads files through shared memory.
"""

import importlib
from types import ModuleType

from lampyris.errors import (
    DatasetFailed,
    InvalidRequest,
    LampyrisError,
    ScanInterrupted,
    UnsupportedType,
)
from lampyris.scan import Ragged, Scan, datasets, scan

__all__ = [
    "DatasetFailed",
    "InvalidRequest",
    "LampyrisError",
    "Ragged",
    "Scan",
    "ScanInterrupted",
    "UnsupportedType",
    "datasets",
    "ring",
    "scan",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    # When it is first used: it is native, and a checkout that nobody built has everything else.
    if name == "ring":
        return importlib.import_module("lampyris.ring")
    raise AttributeError(f"module 'lampyris' has no attribute {name!r}")
