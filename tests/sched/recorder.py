"""An engine core whose plans are written down, for tests of what runs when."""

from collections.abc import Iterable
from typing import Any

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.request import Request
from dalsegno.testing.builders import STALL_STEPS, make_core, make_layout
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens
from dalsegno.types import StepPlan

UNIT = 16


class Recorder:
    """Runs requests and keeps, per step, how many tokens of which request were computed."""

    def __init__(
        self, kinds: str = "as", *, num_slabs: int = 400, config: CacheConfig | None = None, **options: Any
    ) -> None:
        config = config or CacheConfig()
        self.core: EngineCore = make_core(
            make_layout(kinds, config, num_slabs=num_slabs), config, **{"max_model_len": 600, **options}
        )
        assert isinstance(self.core.worker, FakeWorker)
        self.worker = self.core.worker
        self.worker.before_step = self.record
        self.steps: list[dict[str, tuple[int, int]]] = []

    def record(self, plan: StepPlan) -> None:
        self.steps.append({part.request_id: (part.start, part.end) for part in plan.requests})

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add_request(request)

    def run(self, requests: Iterable[Request] = (), *, steps: int | None = None) -> None:
        """Run until idle, or for some steps."""
        self.add(*requests)
        for _ in range(steps if steps is not None else STALL_STEPS * 10):
            if not self.core.has_unfinished_requests:
                break
            self.core.step()

    def first_step(self, request_id: str) -> int:
        """The step a request ran in first."""
        return next(number for number, step in enumerate(self.steps) if request_id in step)

    def num_computed(self, request: Request) -> int:
        """Tokens the worker computed for a request."""
        return self.worker.num_computed.get(request.request_id, 0)

    def assert_right(self, *requests: Request) -> None:
        for request in requests:
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            expected = expected_tokens(self.core.layout, prompt, request.max_tokens, self.worker.vocab_size)
            assert request.output_token_ids == expected
        self.core.verify()
