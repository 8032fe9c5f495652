"""One engine core, one request at a time: send a prompt, get the answer and the finished request."""

from collections.abc import Sequence

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.engine.core import EngineCore
from dalsegno.hashing.block_hash import to_token_array
from dalsegno.kv.layout import plan_layout
from dalsegno.request import Request
from dalsegno.sampling_params import SamplingParams
from tests.matrix.backends import Backend, Logits


class Sender:
    """An engine core on a backend, with room for everything the test does."""

    def __init__(
        self,
        backend: Backend,
        config: CacheConfig,
        *,
        budget: int = 512,
        num_slabs: int = 120,
        max_model_len: int = 512,
    ) -> None:
        self.logits: Logits = {}
        layout = plan_layout(backend.specs, config, num_slabs=num_slabs)
        worker = backend.worker(layout, self.logits, (), {})
        scheduling = SchedulerConfig(max_model_len, budget)
        self.core = EngineCore(worker, backend.clock, layout, config, scheduling, debug=True)
        self._count = 0

    def send(
        self, prompt: Sequence[int], max_tokens: int = 1, marks: Sequence[int] = (), salt: str | None = None
    ) -> Request:
        """Answer one prompt; the engine is idle before and after, which its census checks."""
        self._count += 1
        request = Request(
            request_id=f"request {self._count}",
            token_ids=to_token_array(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            arrival_time=0.0,
            max_tokens=max_tokens,
            checkpoint_at=tuple(marks),
            cache_salt=salt,
        )
        self.core.add_request(request)
        while self.core.has_unfinished_requests:
            self.core.step()
        self.core.verify()
        return request
