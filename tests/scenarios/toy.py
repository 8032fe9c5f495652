"""The toy hybrid of the recipes: B = 64, H = 16, greedy, integer memory that is poisoned when it is freed."""

import random
from collections.abc import Sequence
from typing import Any

from dalsegno.config import CacheConfig
from dalsegno.kv.layout import MemoryLayout
from dalsegno.request import FinishReason, Request
from dalsegno.testing.builders import make_core, make_layout, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens, extend_cells
from dalsegno.testing.oracles import audit_published
from dalsegno.types import BlockHash

B, H = 64, 16


class Toy:
    """One engine; every `send` ends EXACT, with a CENSUS and an audit of all that is published."""

    def __init__(
        self,
        kinds: str = "as",
        *,
        layout: MemoryLayout | None = None,
        num_slabs: int = 400,
        config: CacheConfig | None = None,
        **options: Any,
    ) -> None:
        self.config = config or CacheConfig(block_size=B, hash_block_size=H)
        layout = layout or make_layout(kinds, self.config, num_slabs=num_slabs)
        self.core = make_core(layout, self.config, **{"max_model_len": 1000, **options})
        assert isinstance(self.core.worker, FakeWorker)
        self.worker = self.core.worker
        self.cells: dict[BlockHash, list[int]] = {}
        self.num_sent = 0

    def request(self, prompt: Sequence[int], k: int = 1, **fields: Any) -> Request:
        self.num_sent += 1
        return make_request(fields.pop("request_id", f"r{self.num_sent}"), prompt, k, **fields)

    def send(self, prompt: Sequence[int], k: int = 1, **fields: Any) -> Request:
        """Serve one prompt alone."""
        [request] = self.send_all(self.request(prompt, k, **fields))
        return request

    def send_all(self, *requests: Request) -> tuple[Request, ...]:
        """Serve prompts together."""
        run_all(self.core, requests)
        self.check(*requests)
        return requests

    def check(self, *requests: Request) -> None:
        for request in requests:
            assert request.finish_reason is not FinishReason.ERROR
            assert request.output_token_ids == self.cold(request)
            self.learn(request)
        self.core.verify()
        audit_published(self.core.manager, self.worker, self.cells)

    def cold(self, request: Request) -> list[int]:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        return expected_tokens(
            self.core.layout, prompt, request.num_output_tokens, self.worker.vocab_size, request.sample_index
        )

    def learn(self, request: Request) -> None:
        cells: list[int] = []
        extend_cells(cells, request.token_ids)
        for count, block_hash in enumerate(request.block_hashes, 1):
            self.cells.setdefault(block_hash, cells[: count * H])

    def hit(self, prompt: Sequence[int], **fields: Any) -> int:
        """What a prompt would hit now; changes nothing."""
        request = self.request(prompt, **fields)
        self.core.manager.start_request(request)
        return self.core.manager.get_computed_blocks(request)[1]


def random_prompt(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{n} {seed}")
    return [rng.randrange(10**6) for _ in range(n)]
