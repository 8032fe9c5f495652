"""The store of a connector's sides in one process: the last one to leave closes it."""

import logging

from dalsegno.store.base import Store

__all__ = ["SharedStore"]

logger = logging.getLogger(__name__)


class SharedStore:
    """An open store and how many use it. Used on the engine thread, but for the store itself.

    Attributes:
        store: closed behind the last `leave`.
    """

    def __init__(self, store: Store, num_users: int) -> None:
        """Let `num_users` sides use `store`."""
        self.store = store
        self._num_users = num_users
        self._hangs = False

    def leave(self, *, hangs: bool = False) -> None:
        """A side has ended; one that still has a call under way `hangs`, and the store is left open to it."""
        self._num_users -= 1
        self._hangs = self._hangs or hangs
        if self._num_users:
            return
        if self._hangs:
            logger.warning("the store does not answer: it is not closed")
        else:
            self.store.close()
