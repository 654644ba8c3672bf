"""Rows and bytes of a Lampyris dataset, in the pod that has it.

``lampyris.scan`` yields batches of rows as torch tensors, NumPy arrays or Arrow record batches;
``lampyris.ring`` reads files through shared memory.
"""

from lampyris import ring
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
