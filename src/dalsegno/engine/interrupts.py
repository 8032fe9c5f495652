"""Ctrl-C between steps, never inside one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the block has ended; a second one gets through at once.

    A step that is left in the middle would leave counts behind that nobody owns. Outside the main thread, or under a
    handler of the application's own, signals arrive as they always do.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    arrived = False

    def remember(_number: int, _frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt
