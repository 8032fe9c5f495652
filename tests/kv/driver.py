"""Drives a KV manager over integer memory as a scheduler does, but with chunks, order and failures of the test's."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.config import CacheConfig
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.manager import KVCacheManager
from dalsegno.request import Request
from dalsegno.sampling_params import SamplingParams
from dalsegno.testing.builders import make_request
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens, extend_cells
from dalsegno.testing.oracles import audit_published, boundary_in_index
from dalsegno.types import BlockHash, SampleSpec, ScheduledRequest, StepPlan

MAX_STEP_TOKENS = 512
VOCAB_SIZE = 997


class Driver:
    """One manager, one fake worker, and every prefix that was ever hashed."""

    def __init__(
        self, layout: MemoryLayout, config: CacheConfig | None = None, *, max_step_tokens: int = MAX_STEP_TOKENS
    ) -> None:
        self.layout = layout
        self.config = config or CacheConfig()
        self.worker = FakeWorker(layout, vocab_size=VOCAB_SIZE)
        self.manager = KVCacheManager(layout, self.config, max_step_tokens=max_step_tokens)
        self.manager.pool.on_fill = self.worker.poison
        self.cells_of: dict[BlockHash, list[int]] = {}
        self.step_id = 0

    def new(self, request_id: str, token_ids: Sequence[int], **fields: Any) -> Request:
        """A request as the scheduler would queue it; it answers up to a thousand tokens."""
        request = make_request(request_id, token_ids, 1000, **fields)
        self.manager.start_request(request)
        return request

    def admit(self, request: Request, num_tokens: int | None = None, *, end: int | None = None) -> bool:
        """Admit at the longest boundary (of at most `end`) and get room for `num_tokens`; None is all that are left."""
        computed, boundary, report = self.manager.get_computed_blocks(request)
        assert report.boundary == boundary
        if end is not None:
            computed = self.manager.truncate_computed_blocks(computed, end)
        left = request.num_tokens - computed.boundary
        chunk = left if num_tokens is None else min(num_tokens, left)
        return self.manager.allocate_slots(request, chunk, computed) is not None

    def step(self, parts: Mapping[Request, int], *, fails: bool = False) -> bool:
        """Run a step in which every request, already with room, computes so many tokens; whether it counted."""
        for request, num_tokens in parts.items():
            self.manager.grant_write(request)
            self.manager.grant_exports(request, num_tokens)
        plan = self.plan(parts)
        result = self.worker.execute(plan)
        self.manager.end_copies()
        if fails:
            return False
        for request, num_tokens in parts.items():
            self.manager.commit(request, num_tokens)
            self.learn(request)
            if request.num_computed_tokens == request.num_tokens:
                request.token_ids.append(result.sampled[request.request_id][0])
        return True

    def plan(self, parts: Mapping[Request, int]) -> StepPlan:
        self.step_id += 1
        return StepPlan(
            self.step_id,
            tuple(self.part(request, num_tokens) for request, num_tokens in parts.items()),
            self.manager.take_copies(),
        )

    def part(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        params = SamplingParams(temperature=0)
        sample = SampleSpec(params, 0, (request.sample_index,), end) if end == request.num_tokens else None
        return ScheduledRequest(
            request.request_id,
            request.token_ids[start:end],
            start,
            self.manager.block_tables(request),
            self.manager.state_step(request),
            sample,
        )

    def compute(self, request: Request, num_tokens: int | None = None) -> None:
        """Compute the next tokens of a running request; None is all known ones."""
        num_tokens = num_tokens or request.num_tokens - request.num_computed_tokens
        assert self.manager.allocate_slots(request, num_tokens) is not None, "no room"
        self.step({request: num_tokens})

    def serve(self, request_id: str, token_ids: Sequence[int], num_answers: int = 1, **fields: Any) -> Request:
        """Serve a request alone: prefill at once, `num_answers` tokens, finish."""
        request = self.new(request_id, token_ids, **fields)
        assert self.admit(request), "no room"
        self.step({request: request.num_tokens - request.num_computed_tokens})
        while request.num_output_tokens < num_answers:
            self.compute(request)
        self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        self.manager.publish_last_state(request, finished=True)
        self.manager.free(request)

    def preempt(self, request: Request) -> None:
        self.manager.publish_last_state(request, finished=False)
        self.manager.free(request)
        request.num_computed_tokens = 0

    def hit(self, token_ids: Sequence[int]) -> int:
        """The boundary a prompt would resume at; checked against every published hash one by one."""
        request = self.new("probe", token_ids)
        _, boundary, report = self.manager.get_computed_blocks(request)
        expected = boundary_in_index(self.manager.index, request.block_hashes, request.num_tokens - 1)
        assert boundary == expected, f"the hit ends at {boundary}, the index holds {expected}"
        assert report.boundary + sum(report.lost.values()) == len(token_ids)
        return boundary

    def learn(self, request: Request) -> None:
        """Remember what every hash of a request stands for."""
        unit = self.config.hash_block_size
        if request.block_hashes and request.block_hashes[-1] not in self.cells_of:
            cells: list[int] = []
            extend_cells(cells, request.token_ids)
            for count, block_hash in enumerate(request.block_hashes, 1):
                self.cells_of.setdefault(block_hash, cells[: count * unit])

    def check(self) -> None:
        """Counts are right and published bytes are those of a cold run (R4: they can never have changed)."""
        self.manager.verify()
        audit_published(self.manager, self.worker, self.cells_of)

    def assert_right_answer(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        expected = expected_tokens(
            self.layout, prompt, request.num_output_tokens, VOCAB_SIZE, sample=request.sample_index
        )
        assert request.output_token_ids == expected


def snapshot(manager: KVCacheManager) -> dict[str, Any]:
    """Everything a manager knows, in a form that compares."""
    pool, index = manager.pool, manager.index
    return {
        "references": [pool.referenced(group) for group in range(len(manager.layout.groups))],
        "open": list(pool.open),
        "reclaimable": pool.reclaimable,
        "bound": list(pool.bound),
        "free": [sorted(blocks) for blocks in pool._free],
        "empty": sorted(pool._empty),
        "evicted": pool.num_evicted,
        "index": {
            (group.group_id, block): index.vouched(group.group_id, block)
            for group in manager.layout.groups
            for block in index.published(group.group_id)
        },
        "units": index.num_units,
        "ranks": {
            (group.group_id, block): pool._policy.rank(group.group_id, block)
            for group in manager.layout.groups
            for block in index.published(group.group_id)
        },
        "requests": {request_id: copy.deepcopy(blocks) for request_id, blocks in manager.requests.items()},
        "in flight": list(manager.copies_in_flight),
        "pins": dict(manager.pins.counts),
        "counters": dict(manager.counters),
    }
