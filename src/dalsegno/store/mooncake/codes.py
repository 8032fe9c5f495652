"""Return codes of Mooncake's client by name, and the one mapping from a code to a status."""

import enum

from dalsegno.store.base import Status

__all__ = ["UNREACHABLE", "Code", "code_name", "status_of"]


@enum.unique
class Code(enum.IntEnum):
    """The codes that the calls we use have been seen to return; what is positive is a number of bytes or keys."""

    OK = 0
    INTERNAL_ERROR = -1
    SEGMENT_NOT_FOUND = -101
    NO_AVAILABLE_HANDLE = -200
    """No segment has room for the object."""
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    """Buffers too small, an empty object, or memory registered twice."""
    INVALID_REPLICA = -702
    REPLICA_IS_NOT_READY = -703
    """Somebody is still writing the object."""
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    """Read lately, so that only force removes it."""
    LEASE_EXPIRED = -707
    """The read took longer than its lease: what has been copied may be another object's bytes."""
    REPLICA_IS_GONE = -712
    TRANSFER_FAIL = -800
    """The owner of the segment does not answer, or the buffers are larger than the object."""
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010


UNREACHABLE = frozenset({Code.RPC_FAIL, Code.RPC_TIMEOUT})
"""What every call returns while the master does not answer."""

_STATUS = {
    Code.OK: Status.OK,
    Code.NO_AVAILABLE_HANDLE: Status.NO_ROOM,
    Code.REPLICA_IS_NOT_READY: Status.MISS,
    Code.OBJECT_NOT_FOUND: Status.MISS,
    Code.OBJECT_ALREADY_EXISTS: Status.EXISTS,
    Code.REPLICA_IS_GONE: Status.MISS,
    Code.CHECKSUM_MISMATCH: Status.CORRUPT,
}


def status_of(code: int) -> Status:
    """Return what a code that is 0 or negative means for its key; ERROR for all that say nothing about it."""
    return next((status for known, status in _STATUS.items() if known == code), Status.ERROR)


def code_name(code: int) -> str:
    """Return the code's name in snake_case, its number where we know none."""
    return Code(code).name.lower() if code in Code._value2member_map_ else f"code_{-code}"
