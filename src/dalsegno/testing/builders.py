"""Small layouts, requests and engine cores for tests, each with defaults that a test overrides where it cares."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.engine.core import EngineCore
from dalsegno.hashing.block_hash import to_token_array
from dalsegno.kv.layout import GroupSpec, MemoryLayout, plan_layout
from dalsegno.kv.manager import KVCacheManager
from dalsegno.request import FinishReason, Request, RequestUpdate
from dalsegno.sampling_params import SamplingParams
from dalsegno.sched.cold_checks import ColdCheckSetup
from dalsegno.testing.fake_worker import FakeWorker
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

__all__ = [
    "GROUP_KINDS",
    "STALL_STEPS",
    "layer_specs",
    "layout_alone",
    "make_core",
    "make_cut",
    "make_layout",
    "make_request",
    "run_all",
    "steps",
]

GROUP_KINDS = {"a": GroupKind.ATTENTION, "w": GroupKind.WINDOW, "s": GroupKind.STATE}
"""Letters for group kinds, as in "aaws": two attention layers, a window layer, a state layer."""

STALL_STEPS = 200
"""A run that makes no token for so many steps counts as stalled."""

_ALIGNMENT = 256


def layer_specs(kinds: str, *, window: int = 40, state_width: int = 64) -> list[LayerCacheSpec]:
    """Return one layer per letter of `kinds`; `state_width` sets the bytes of a state (16 each)."""
    specs = []
    for layer, letter in enumerate(kinds):
        kind = GROUP_KINDS[letter]
        if kind is GroupKind.STATE:
            parts: tuple[CachePart, ...] = (CachePart("recurrent", (1, state_width, 4), "float32"),)
        else:
            parts = (CachePart("key", (1, 4), "float32"), CachePart("value", (1, 4), "float32"))
        specs.append(LayerCacheSpec(layer, kind, parts, window if kind is GroupKind.WINDOW else None))
    return specs


def make_layout(
    kinds: str = "as", config: CacheConfig | None = None, *, num_slabs: int = 64, **layers: int
) -> MemoryLayout:
    """Plan a layout as the engine does; `layers` are options of `layer_specs`."""
    return plan_layout(layer_specs(kinds, **layers), config or CacheConfig(), num_slabs=num_slabs)


def make_cut(
    kinds: str,
    blocks_per_slab: Sequence[int],
    *,
    num_slabs: int = 8,
    block_size: int = 16,
    hash_block_size: int = 16,
    window: int = 40,
    block_sizes: Mapping[str, int] | None = None,
    prefix: Mapping[str, str] | None = None,
) -> MemoryLayout:
    """Make a layout whose group of the i-th letter has exactly `blocks_per_slab[i]` blocks per slab.

    `prefix` maps letters to "fine", "block" or "none", and is fine where nothing is said; `block_sizes` maps letters of
    paged groups to a block size other than `block_size`.
    """
    slab_bytes = _ALIGNMENT
    for count in blocks_per_slab:
        slab_bytes *= count
    groups = tuple(
        GroupSpec(
            group_id=group_id,
            kind=GROUP_KINDS[letter],
            block_size=hash_block_size if letter == "s" else (block_sizes or {}).get(letter, block_size),
            block_bytes=slab_bytes // count,
            blocks_per_slab=count,
            layers=(),
            part_offsets=(),
            window=window if letter == "w" else None,
            prefix=(prefix or {}).get(letter, "fine"),
        )
        for group_id, (letter, count) in enumerate(zip(kinds, blocks_per_slab, strict=True))
    )
    return MemoryLayout(groups, slab_bytes, num_slabs)


def make_request(
    request_id: str, token_ids: Iterable[int], max_tokens: int = 1, *, n: int = 1, **fields: Any
) -> Request:
    """Make sample 0 of a greedy request with its `n - 1` siblings; `fields` are attributes of `Request`."""
    tokens = list(token_ids)
    params = fields.pop("params", None) or SamplingParams(temperature=0, max_tokens=max_tokens, n=n)
    samples = [
        Request(
            request_id if index == 0 else f"{request_id}#{index}",
            to_token_array(tokens),
            params,
            arrival_time=0.0,
            max_tokens=max_tokens,
            sample_index=index,
            **fields,
        )
        for index in range(n)
    ]
    samples[0].siblings = samples[1:]
    return samples[0]


def layout_alone(layout: MemoryLayout, config: CacheConfig, *, max_model_len: int, budget: int) -> int:
    """Return the slabs, the null slab included, that one request of `max_model_len` tokens needs."""
    manager = KVCacheManager(layout, config, max_step_tokens=budget)
    return manager.slabs_alone(max_model_len) + 1


def make_core(
    layout: MemoryLayout | None = None,
    config: CacheConfig | None = None,
    *,
    max_model_len: int = 512,
    budget: int = 2048,
    cold_checks: ColdCheckSetup | None = None,
    **scheduler: Any,
) -> EngineCore:
    """Make an engine core in debug mode over a `FakeWorker`; `scheduler` are fields of `SchedulerConfig`."""
    config = config or CacheConfig()
    layout = layout or make_layout(config=config)
    worker = FakeWorker(layout)
    scheduler_config = SchedulerConfig(max_model_len, budget, **scheduler)
    return EngineCore(worker, worker.clock, layout, config, scheduler_config, debug=True, cold_checks=cold_checks)


def steps(core: EngineCore) -> Iterator[list[RequestUpdate]]:
    """Step until the engine is idle, yielding each step's updates; fails when no token comes for long."""
    idle = 0
    while core.has_unfinished_requests:
        updates = core.step()
        idle = 0 if any(update.new_token_ids or update.finished for update in updates) else idle + 1
        assert idle < STALL_STEPS, f"no token for {idle} steps: {core.stats()}"
        yield updates


def run_all(core: EngineCore, requests: Iterable[Request] = ()) -> list[RequestUpdate]:
    """Add requests, run the engine until it is idle and return all updates; no request may end with an error."""
    for request in requests:
        core.add_request(request)
    updates = [update for new in steps(core) for update in new]
    for update in updates:
        assert update.request.finish_reason is not FinishReason.ERROR, update.request.error
    return updates
