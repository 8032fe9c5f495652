"""A client of the fake Mooncake with bad luck: what real ones were seen to return, now and then, by a seed."""

import ctypes
import random
from collections import Counter
from collections.abc import Sequence

from dalsegno.store.mooncake.codes import Code
from dalsegno.testing.fake_mooncake import FakeMooncakeClient, FakeMooncakeMaster

__all__ = ["UnluckyMooncakeClient"]


class UnluckyMooncakeClient(FakeMooncakeClient):
    """Each call meets one misfortune at the rate given: objects are evicted, the master restarts, codes come instead.

    Attributes:
        met: how often each misfortune has happened, by name.
    """

    def __init__(self, master: FakeMooncakeMaster, segment_bytes: int, rate: float, seed: int = 0) -> None:
        """Lend `segment_bytes`; misfortunes happen in `rate` of the calls."""
        super().__init__(master, segment_bytes)
        self._rate = rate
        self._rng = random.Random(seed)
        self._calls_out = 0
        self.met: Counter[str] = Counter()

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """See `MooncakeClient`; what exists may be evicted right behind the answer."""
        if (out := self._is_out(keys)) is not None:
            return out
        codes = super().batch_is_exist(keys)
        misfortune = self._choose("evicted behind exists", "exists fails")
        if misfortune == "evicted behind exists":
            self._evict_some()
        elif misfortune:
            codes[self._rng.randrange(len(codes))] = Code.INTERNAL_ERROR
        return codes

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """See `MooncakeClient`; one object of the batch may be refused, the others are stored."""
        if (out := self._is_out(keys)) is not None:
            return out
        misfortune = self._choose("no room for one", "one transfer fails")
        spared = self._rng.randrange(len(keys)) if misfortune else -1
        taken = [i for i in range(len(keys)) if i != spared]
        codes = super().batch_put_from_multi_buffers(
            [keys[i] for i in taken], [all_buffer_ptrs[i] for i in taken], [all_sizes[i] for i in taken]
        )
        if misfortune:
            failed = Code.NO_AVAILABLE_HANDLE if misfortune == "no room for one" else Code.TRANSFER_FAIL
            codes.insert(spared, failed)
        return codes

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """See `MooncakeClient`; a read that outlives its lease leaves other bytes in the buffers."""
        if (out := self._is_out(keys)) is not None:
            return out
        misfortune = self._choose("evicted before get", "lease runs out", "wrong bytes", "one read fails")
        if misfortune == "evicted before get":
            self._evict_some()
        codes = super().batch_get_into_multi_buffers(keys, all_buffer_ptrs, all_sizes)
        if misfortune in ("lease runs out", "wrong bytes", "one read fails"):
            hit = self._rng.randrange(len(keys))
            if codes[hit] > 0:
                _overwrite(all_buffer_ptrs[hit], all_sizes[hit])
            if misfortune == "lease runs out":
                codes[hit] = Code.LEASE_EXPIRED
            elif misfortune == "one read fails":
                codes[hit] = Code.TRANSFER_FAIL
        return codes

    def _choose(self, *misfortunes: str) -> str | None:
        if self._rng.random() >= self._rate:
            return None
        misfortune = self._rng.choice(misfortunes)
        self.met[misfortune] += 1
        return misfortune

    def _is_out(self, keys: Sequence[str]) -> list[int] | None:
        """What a call returns while the master is away; it comes back, without its objects, some calls later."""
        if self._calls_out:
            self._calls_out -= 1
            if not self._calls_out:
                self.master.restart()
        elif self._rng.random() < self._rate / 40:
            self.met["master restarts"] += 1
            self._calls_out = self._rng.randrange(1, 4)
        return [int(self._rng.choice([Code.RPC_FAIL, Code.RPC_TIMEOUT]))] * len(keys) if self._calls_out else None

    def _evict_some(self) -> None:
        with self.master.lock:
            names = [name for name, item in self.master.objects.items() if item.is_complete]
            self.master.evict(*[name for name in names if self._rng.random() < 0.2] or names[:1])


def _overwrite(addresses: list[int], sizes: list[int]) -> None:
    for address, size in zip(addresses, sizes, strict=True):
        ctypes.memset(address, 0x5A, size)
