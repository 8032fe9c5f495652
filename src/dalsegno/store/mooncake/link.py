"""The way to a client of Mooncake: open, out while the master does not answer, or closed.

Once the master has not answered a call, no other call pays for that: all are told so at once, and one thread asks until
it answers again. A closed client is never called; one that hangs in a call is never closed.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dalsegno.store.mooncake.client import MooncakeClient
from dalsegno.store.mooncake.codes import UNREACHABLE, Code

__all__ = ["Link"]

logger = logging.getLogger(__name__)

_PROBE_KEY = "dalsegno:probe"
_left_alone: list[object] = []


class Link:
    """Passes calls on to a client, which it closes. May be used from several threads.

    Attributes:
        num_lost, num_reconnects: how often the master stopped and began to answer.
        num_refused: calls that were not made because it did not.
    """

    def __init__(self, client: MooncakeClient, probe_interval_s: float, close_timeout_s: float) -> None:
        """Use `client`; while it is out ask every `probe_interval_s`, at the end wait `close_timeout_s` for calls."""
        self._client = client
        self._probe_interval_s = probe_interval_s
        self._close_timeout_s = close_timeout_s
        self._idle = threading.Condition()
        self._num_calls = 0
        self._is_out = False
        self._closed = threading.Event()
        self.num_lost = 0
        self.num_reconnects = 0
        self.num_refused = 0

    @property
    def is_out(self) -> bool:
        """Whether the master does not answer."""
        return self._is_out

    def call(self, count: int, make: Callable[[MooncakeClient], Sequence[int]]) -> list[int]:
        """Return the codes of a call about `count` keys: RPC_FAIL where it is not made, INTERNAL_ERROR if it raises."""
        if self._is_out:
            self.num_refused += 1
            return [Code.RPC_FAIL] * count
        codes = self.call_locally(count, make)
        if not UNREACHABLE.isdisjoint(codes):
            self._lose()
        return codes

    def call_locally(self, count: int, make: Callable[[MooncakeClient], Sequence[int]]) -> list[int]:
        """Make a call for which it does not matter whether the master answers."""
        with self._idle:
            if self._closed.is_set():
                return [Code.RPC_FAIL] * count
            self._num_calls += 1
        try:
            return _checked(make(self._client), count)
        except Exception:
            logger.exception("a call of Mooncake's client failed")
            return [Code.INTERNAL_ERROR] * count
        finally:
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()

    def close(self, last: Callable[[MooncakeClient], object], keep: object) -> None:
        """Close the client behind the calls under way, and `last` before that; a second call does nothing.

        If calls are still under way after the timeout, the client is left to them, and with it `keep`, the memory that
        it may yet write.
        """
        with self._idle:
            if self._closed.is_set():
                return
            self._closed.set()
            is_idle = self._idle.wait_for(lambda: self._num_calls == 0, self._close_timeout_s)
        if is_idle:
            last(self._client)
            self._client.close()
        else:
            logger.warning("Mooncake does not answer: its client is not closed")
            _left_alone.append((self._client, keep))

    def _lose(self) -> None:
        with self._idle:
            if self._is_out or self._closed.is_set():
                return
            self._is_out = True
            self.num_lost += 1
        logger.warning("the Mooncake master does not answer; nothing is stored or found until it does")
        threading.Thread(target=self._probe, name="dalsegno-mooncake-probe", daemon=True).start()

    def _probe(self) -> None:
        """Ask until the master answers or the link is closed."""
        while not self._closed.wait(self._probe_interval_s):
            [code] = self.call_locally(1, lambda client: client.batch_is_exist([_PROBE_KEY]))
            if code >= 0:
                self._is_out = False
                self.num_reconnects += 1
                logger.warning("the Mooncake master answers again")
                return


def _checked(codes: Any, count: int) -> list[int]:
    """Return `count` integers; what is none says that the call failed for this key, a wrong number for all."""
    if not isinstance(codes, list | tuple) or len(codes) != count:
        return [Code.INTERNAL_ERROR] * count
    return [code if isinstance(code, int) else Code.INTERNAL_ERROR for code in codes]
