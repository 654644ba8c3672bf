"""What can go wrong, one class for each kind of reaction."""

from typing import Any, Optional, Tuple, Type


class LampyrisError(Exception):
    """Any failure of this package. ``reason`` is the word that conditions and events use.

    Survives pickling, as between processes of a pool. A ``DataLoader`` makes the exception of a worker again from its
    text alone: then it has the right class, and ``reason`` is the name of the class."""

    def __init__(self, reason: str, message: Optional[str] = None, position: Optional[int] = None) -> None:
        if message is None:
            reason, message = type(self).__name__, reason
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.position = position

    def __reduce__(self) -> Tuple[Any, ...]:
        return _again, (type(self), self.reason, self.message, self.position)


class InvalidRequest(LampyrisError):
    """The caller's mistake: an unknown column or dataset, a filter that does not parse (then
    ``position`` is the offset of the character), a scan used by another process than its own."""


class UnsupportedType(LampyrisError):
    """A column has a type that the chosen format cannot hold. Raised by ``scan``, never later."""

    def __init__(self, message: str) -> None:
        super().__init__("UnsupportedType", message)


class DatasetFailed(LampyrisError):
    """The dataset cannot be read: ``reason`` is InvalidCredentials, BucketNotFound,
    ObjectNotFound, AccessDenied, DatasetChanged, TruncatedFile, CorruptFile, UnknownEncoding,
    EndpointUnreachable, TlsFailed or StoreUnavailable."""


class ScanInterrupted(LampyrisError):
    """The agent went away during the scan, is ending, or has as many as it may; a new scan may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__("ScanInterrupted", message)


def _again(kind: Type[LampyrisError], reason: str, message: str, position: Optional[int]) -> LampyrisError:
    error = kind.__new__(kind)
    LampyrisError.__init__(error, reason, message, position)
    return error


def from_reply(error: dict) -> LampyrisError:
    """The exception for an agent's ``error`` message."""
    if error["reason"] in ("Busy", "Stopping"):
        return ScanInterrupted(error["message"])
    kinds = {"InvalidRequest": InvalidRequest, "DatasetUnknown": InvalidRequest}
    kind = kinds.get(error["reason"], DatasetFailed)
    return kind(error["reason"], error["message"], error.get("position"))
