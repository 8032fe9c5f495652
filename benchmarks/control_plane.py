"""What hashing, lookup, allocation and scheduling cost by themselves: one attention and one state group, no model.

Each figure is the median over fresh prompts, in CPU time of the one thread that does the work, so that what else runs
on the machine counts as little as possible. The first rows of a block size are beside vLLM's figures for the same
work; rows "per token" are beside the same work on short prompts, rows "cached" beside the same work on a small cache.
Where blocks are larger than the hash unit (16), the cache is counted in units all the same: that is what it indexes.
"""

import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from null_worker import NullWorker
from rows import Row, command_line, parse_arguments, print_rows

from dalsegno import SamplingParams
from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.engine.core import EngineCore
from dalsegno.engine.inputs import token_buffer
from dalsegno.request import Request
from dalsegno.testing.builders import make_layout

UNIT = 16
VOCAB = 150_000
CHUNK = 8_192
EXTENSION = 200
BATCH = 256
CONTEXT = 1_024
# A slab holds a state, and as many bytes of attention as 528 tokens fill; the state's width is in 16 bytes.
SLAB_TOKENS = 528
STATE_WIDTH = 1_056

# vLLM's CPU build on two cores, in ms: (at block size 528, at block size 16).
HASH, EXTEND, CONVERT = "hash a new prompt", "hash a prompt that extends a recent one by 200", "list to u32 buffer"
LOOKUP, ALLOCATE, RELEASE = "full-hit lookup", "allocate in chunks of 8192 and publish", "finish and release"
STEP = "scheduler step, decode batch of 256"
REFERENCES = {HASH: (27.0, 27.0), EXTEND: (27.0, 27.0), LOOKUP: (0.6, 14.0), ALLOCATE: (3.6, 37.0), STEP: (3.0, 3.0)}

Figures = dict[str, float]
"""Milliseconds by what was done."""


class Clock:
    """The machine's clock, as the engine asks for it."""

    def now(self) -> float:
        """Return seconds."""
        return time.monotonic()


class ControlPlane:
    """An engine core on a worker that computes nothing, with room for all the benchmark caches."""

    def __init__(self, block_size: int, num_tokens: int, cache_tokens: int, repeats: int) -> None:
        config = CacheConfig(block_size=block_size, hash_block_size=UNIT)
        room = cache_tokens + 8 * (repeats + 2) * num_tokens + 4 * BATCH * (CONTEXT + 1_024)
        # Every prompt also takes a few slabs for its states.
        num_slabs = 64 + 4 * room // SLAB_TOKENS // 3 + 16 * BATCH
        layout = make_layout("as", config, num_slabs=num_slabs, state_width=STATE_WIDTH)
        scheduling = SchedulerConfig(num_tokens + 4 * CHUNK, CHUNK, BATCH)
        self.worker = NullWorker()
        self.core = EngineCore(self.worker, Clock(), layout, config, scheduling)
        self.manager = self.core.manager
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._rng = random.Random(0)
        self._count = 0

    def fill(self, num_units: int) -> None:
        """Make the cache hold `num_units` units, or a little more; starts anew when there are many more."""
        if self.manager.index.num_units > num_units * 5 // 4:
            assert self.manager.reset_prefix_cache(), "the cache is in use between two measurements"
        while self.manager.index.num_units < num_units:
            self._serve(self._request(self._fresh(CHUNK)))

    def measure(self, num_units: int, num_tokens: int, repeats: int) -> Figures:
        """Hash, allocate, publish and look up prompts of `num_tokens` tokens beside `num_units` others.

        Returns:
            Medians in ms.
        """
        figures: list[Figures] = []
        for _ in range(repeats):
            self.fill(num_units)
            self.seconds.clear()
            ids = self._fresh(num_tokens)
            listed = ids.tolist()
            with self._timed(CONVERT):
                token_buffer(listed, VOCAB, "prompt")
            request, extension = self._request(ids), self._request(ids + self._fresh(EXTENSION))
            with self._timed(HASH):
                self.manager.start_request(request)
            with self._timed(EXTEND):
                self.manager.start_request(extension)
            self._serve(request)
            resend = self._request(ids)
            self.manager.start_request(resend)
            with self._timed(LOOKUP):
                computed, _, _ = self.manager.get_computed_blocks(resend)
            assert computed.boundary == (num_tokens - 1) // UNIT * UNIT, f"the hit ends at {computed.boundary}"
            figures.append(self._medians())
        return {name: statistics.median(figure[name] for figure in figures) for name in figures[0]}

    def measure_step(self, num_units: int, steps: int) -> Figures:
        """Decode a full batch for `steps` steps; return the median of what a step takes outside the worker, in ms."""
        self.fill(num_units)
        self.seconds.clear()
        requests = [self._request(self._fresh(CONTEXT + index), max_tokens=1_000) for index in range(BATCH)]
        for request in requests:
            self.core.add_request(request)
        while any(request.num_output_tokens < 8 for request in requests):
            self.core.step()
        for _ in range(steps):
            in_worker, started = self.worker.seconds, time.thread_time()
            updates = self.core.step()
            self.seconds[STEP].append(time.thread_time() - started - (self.worker.seconds - in_worker))
            assert len(updates) == BATCH, f"a step advanced {len(updates)} of {BATCH} requests"
        for request in requests:
            self.core.abort(request.request_id)
        self.core.step()
        return self._medians()

    def check(self) -> None:
        """Make sure that nothing was evicted and that every count is right."""
        evicted = self.core.stats()["num_evicted_blocks"]
        assert not evicted, f"the cache was too small: {evicted} blocks were evicted"
        self.core.verify()

    def _serve(self, request: Request) -> None:
        """Do what the scheduler does of a prompt that is prefilled alone and finishes."""
        manager = self.manager
        if not request.block_hashes:
            manager.start_request(request)
        computed, _, _ = manager.get_computed_blocks(request)
        assert not computed.boundary, "a fresh prompt has a hit"
        with self._timed(ALLOCATE):
            while request.num_computed_tokens < request.num_tokens:
                num_tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens)
                if request.num_computed_tokens:
                    granted = manager.allocate_slots(request, num_tokens)
                    manager.grant_write(request)
                else:
                    granted = manager.allocate_slots(request, num_tokens, computed, room_for_tokens=request.num_tokens)
                assert granted is not None, "the cache is too small for the benchmark"
                manager.grant_exports(request, num_tokens)
                manager.block_tables(request)
                manager.state_step(request)
                manager.take_copies()
                manager.end_copies()
                manager.commit(request, num_tokens)
        with self._timed(RELEASE):
            manager.publish_last_state(request, finished=True)
            manager.free(request)

    def _fresh(self, count: int) -> "array[int]":
        return array("I", self._rng.choices(range(VOCAB), k=count))

    def _request(self, ids: "array[int]", max_tokens: int = 1) -> Request:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return Request(f"{self._count}", array("I", ids), params, arrival_time=0.0, max_tokens=max_tokens)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.seconds[name].append(time.thread_time() - started)

    def _medians(self) -> Figures:
        return {name: 1e3 * statistics.median(values) for name, values in self.seconds.items()}


def main() -> None:
    """Measure at both block sizes and print."""
    arguments = parse_arguments(
        __doc__ or "",
        ("tokens", 131_072),
        ("short", 8_192),
        ("cached", 1_000_000),
        ("few", 10_000),
        ("repeats", 7),
        ("steps", 64),
    )
    rows: list[Row] = []
    for position, block_size in enumerate((SLAB_TOKENS, UNIT)):
        plane = ControlPlane(block_size, arguments.tokens, arguments.cached * UNIT, arguments.repeats)
        by_cache = []
        for num_units in (arguments.few, arguments.cached):
            long = plane.measure(num_units, arguments.tokens, arguments.repeats)
            short = plane.measure(num_units, arguments.short, 3 * arguments.repeats)
            by_cache.append((long | plane.measure_step(num_units, arguments.steps), short))
        plane.check()
        (few, few_short), (many, many_short) = by_cache
        references = {name: values[position] for name, values in REFERENCES.items()}
        tokens, short_tokens = arguments.tokens, arguments.short
        rows += [_row(f"B={block_size}: {name}", few[name], "ms", references.get(name)) for name in few]
        for name in few_short:
            per_token = (1e3 * few[name] / tokens, 1e3 * few_short[name] / short_tokens)
            rows.append(
                _row(f"B={block_size}: {name}, per token, {tokens} | {short_tokens}", per_token[0], "us", per_token[1])
            )
        cached = f"{arguments.cached} | {arguments.few} cached"
        rows += [_row(f"B={block_size}: {name}, {cached}", many[name], "ms", few[name]) for name in few]
        rows += [
            _row(f"B={block_size}: {name}, {short_tokens} tokens, {cached}", many_short[name], "ms", few_short[name])
            for name in few_short
        ]
    print_rows(rows, as_json=arguments.json)


def _row(name: str, value: float, unit: str, reference: float | None) -> Row:
    return Row(name, value, unit, reference, None if reference is None else value / reference, command_line())


if __name__ == "__main__":
    main()
