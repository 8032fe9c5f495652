"""Between a caller's buffers and the pieces that the store keeps; only where buffers meet is a piece put together."""

from collections.abc import Iterable, Iterator

from dalsegno.store.base import Buffers, flat_view
from dalsegno.store.embedded.records import PIECE_BYTES

__all__ = ["gather", "scatter"]


def gather(buffers: Buffers, scratch: memoryview) -> Iterator[memoryview]:
    """Yield the buffers' bytes in pieces of `PIECE_BYTES`, the last one shorter.

    A piece is valid until the next one is asked for: it is a slice of one buffer, or `scratch` (at least `PIECE_BYTES`)
    where several buffers meet.
    """
    filled = 0
    for buffer in map(flat_view, buffers):
        start = 0
        while start < len(buffer):
            if not filled and len(buffer) - start >= PIECE_BYTES:
                yield buffer[start : start + PIECE_BYTES]
                start += PIECE_BYTES
                continue
            count = min(PIECE_BYTES - filled, len(buffer) - start)
            scratch[filled : filled + count] = buffer[start : start + count]
            filled += count
            start += count
            if filled == PIECE_BYTES:
                yield scratch[:PIECE_BYTES]
                filled = 0
    if filled:
        yield scratch[:filled]


def scatter(pieces: Iterable[memoryview | None], buffers: Buffers) -> bool:
    """Copy the pieces, one after the other, into the buffers; whether they had exactly as many bytes as fit."""
    targets = (view for view in map(flat_view, buffers) if len(view))
    target = next(targets, None)
    position = 0
    for piece in pieces:
        if piece is None:
            return False
        start = 0
        while start < len(piece):
            if target is None:
                return False
            count = min(len(target) - position, len(piece) - start)
            target[position : position + count] = piece[start : start + count]
            start += count
            position += count
            if position == len(target):
                target, position = next(targets, None), 0
    return target is None
