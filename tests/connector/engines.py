"""Engine cores on the fake worker with a store connector, several of them on one store if wanted."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.engine.core import EngineCore
from dalsegno.request import Request, RequestUpdate
from dalsegno.sched.connection import ConnectorSetup
from dalsegno.store.base import Store
from dalsegno.testing.builders import make_layout, make_request
from dalsegno.testing.fake_worker import FakeClock, FakeWorker, expected_tokens
from tests.connector.unruly import UnrulyWorker

__all__ = ["VOCABULARY", "StoreEngine"]

VOCABULARY = 997
_STALL_STEPS = 3000
# On the fake clock, which runs fast while threads are waited for.
_PATIENCE_S = 10_000.0
_PATIENT = {"load_timeout_s": _PATIENCE_S, "job_timeout_s": _PATIENCE_S}
_IDENTITY = {"weights": "w", "config": "c", "dtype": "int64"}


class Unclosable:
    """A store that several engines share: an engine's end does not close it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """Do nothing."""


class StoreEngine:
    """A core, its layout and its worker, in debug mode: every count is checked after every step."""

    def __init__(
        self,
        store: Store,
        kinds: str = "as",
        *,
        block_size: int = 32,
        hash_block_size: int = 16,
        num_slabs: int = 200,
        max_model_len: int = 2000,
        budget: int = 500,
        role: str = "kv_both",
        world_size: int = 1,
        put_step: Mapping[int, int] | None = None,
        identity: Mapping[str, str] = _IDENTITY,
        setup: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        config = CacheConfig(block_size, hash_block_size, decode_checkpoint_interval=hash_block_size)
        self.layout = make_layout(kinds, config, num_slabs=num_slabs)
        self.clock = FakeClock()
        settings = {"store": Unclosable(store), "store_block_size": 2 * block_size, **extra}
        self.context = ConnectorContext(
            self.layout, config, identity, self.clock, range(world_size), world_size, put_step or {}
        )
        scheduler, workers = self.connect(role, settings)
        self.worker = FakeWorker(self.layout, self.clock, vocab_size=VOCABULARY, connectors=workers, put_step=put_step)
        self.core = EngineCore(
            self.worker,
            self.clock,
            self.layout,
            config,
            SchedulerConfig(max_model_len, budget),
            debug=True,
            connector=ConnectorSetup(scheduler, world_size, **{**_PATIENT, **(setup or {})}),
        )
        self._count = 0

    def connect(self, role: str, settings: Mapping[str, Any]) -> Sides:
        """Make the connector."""
        scheduler, workers = create_connector(KVTransferConfig("StoreConnector", role, settings), self.context)
        self.ranks = [UnrulyWorker(worker) for worker in workers]
        self.reports = self.ranks[0]
        return scheduler, self.ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> Request:
        """Make a request of a name of its own."""
        self._count += 1
        return make_request(f"r{self._count}", prompt, max_tokens, **fields)

    def send(self, prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> Request:
        """Run one request to its end and check its tokens against those of a cold run."""
        request = self.request(prompt, max_tokens, **fields)
        self.core.add_request(request)
        self.run()
        assert request.output_token_ids == self.expected(prompt, max_tokens), request.hit_report
        return request

    def run(self) -> list[RequestUpdate]:
        """Step until no request is left."""
        updates: list[RequestUpdate] = []
        for _ in range(_STALL_STEPS):
            if not self.core.has_unfinished_requests:
                return updates
            updates += self.core.step()
        raise AssertionError(f"no end after {_STALL_STEPS} steps: {self.core.stats()}")

    def settle(self) -> None:
        """Wait for every store job, then take the census."""
        assert self.core.wait_for_connector(_PATIENCE_S), self.core.stats()
        self.core.verify()

    def expected(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What a cold run answers."""
        return expected_tokens(self.layout, prompt, num_tokens, VOCABULARY)

    def close(self) -> None:
        """Settle and close."""
        self.core.close()
