"""The worker that runs a model: copies, forward with exports, sample.

It owns the device memory and keeps nothing of a plan beyond the call.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dalsegno.connector.base import WorkerConnector
from dalsegno.connector.port import ConnectorPort
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.models.base import CausalLM
from dalsegno.ops.batch import ForwardBatch, LayerCache, PagedBatch, PagedLayerCache, StateBatch, StateLayerCache
from dalsegno.ops.native.library import kernels_in_use, load_kernels
from dalsegno.ops.views import PagedView, StateView
from dalsegno.types import PromptRows, SampleSpec, ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from dalsegno.worker.kv_memory import KVMemory
from dalsegno.worker.logprobs import row_slices, token_logprobs
from dalsegno.worker.sampler import sample_tokens

__all__ = ["ModelWorker"]


class ModelWorker:
    """Executes step plans on a model; implements `dalsegno.worker.interface.Worker`.

    Attributes:
        memory: the cache's memory.
        port: the connector's worker side, if there is one.
        logits_observer: for tests; called with request id, position of the token to be sampled and its logits
            `[vocab]` float32, once per row that is sampled from.
    """

    def __init__(
        self,
        model: CausalLM,
        layout: MemoryLayout,
        device: torch.device | str,
        connector: WorkerConnector | None = None,
        *,
        native_kernels: bool = True,
    ) -> None:
        """Take the memory of `layout` on `device`, where the model's parameters are.

        On a CPU `native_kernels` lets the ops use kernels in C, which are compiled where that was not done before.

        Raises:
            OptionError: there is a connector, and the device's memory is out of its reach.
        """
        self.model = model
        self.layout = layout
        self.device = torch.device(device)
        shared = connector is not None and connector.needs_shared_memory
        self.memory = KVMemory(layout, self.device, shared=shared)
        self._kernels = load_kernels() if native_kernels and self.device.type == "cpu" else None
        self.port = ConnectorPort() if connector is None else ConnectorPort([connector], [self.memory.host_bytes()])
        self.logits_observer: Callable[[str, int, Tensor], None] | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `Worker.execute`.

        Raises:
            EngineError: the model's output is not a number.
        """
        with self.port.step(plan), kernels_in_use(self._kernels):
            self.memory.copy_blocks(plan.copies)
            return self._run(plan) if plan.requests else StepResult()

    def poison(self, group_id: int, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        self.memory.poison(group_id, block_ids)

    def close(self) -> None:
        """Give the device memory back."""
        self.port.close()
        self.memory.close()

    def _run(self, plan: StepPlan) -> StepResult:
        batch = self._forward_batch(plan.requests)
        hidden = self.model(batch)
        result = StepResult(num_computed={request.request_id: len(request.token_ids) for request in plan.requests})
        self._sample(plan.requests, batch.query_start, hidden, result)
        for request, start in zip(plan.requests, batch.query_start, strict=False):
            if request.prompt_rows is not None:
                rows = self._prompt_logprobs(request.prompt_rows, hidden[start + request.prompt_rows.first :])
                result.prompt_logprobs[request.request_id] = rows
        return result

    def _forward_batch(self, requests: Sequence[ScheduledRequest]) -> ForwardBatch:
        query_start = [0, *np.cumsum([len(request.token_ids) for request in requests]).tolist()]
        layers: list[LayerCache | None] = [None] * (1 + max(self.memory.views))
        for group in self.layout.groups:
            for layer, cache in self._group_caches(group, requests, query_start):
                layers[layer] = cache
        return ForwardBatch(
            token_ids=self._move(np.concatenate([np.asarray(request.token_ids) for request in requests])),
            positions=self._move(np.concatenate([np.arange(request.start, request.end) for request in requests])),
            query_start=query_start,
            layers=layers,
        )

    def _group_caches(
        self, group: GroupSpec, requests: Sequence[ScheduledRequest], query_start: list[int]
    ) -> list[tuple[int, LayerCache]]:
        """Build the group's batch of the step and pair each of its layers with it."""
        views = [(layer.layer, self.memory.views[layer.layer]) for layer in group.layers]
        if group.is_state:
            state = self._state_batch(group, requests, query_start)
            return [(layer, StateLayerCache(view, state)) for layer, view in views if isinstance(view, StateView)]
        paged = PagedBatch.build(
            query_start,
            [request.start for request in requests],
            [request.block_tables[group.group_id] for request in requests],
            group.block_size,
            group.blocks_per_slab,
            group.window,
            self.device,
        )
        return [(layer, PagedLayerCache(view, paged)) for layer, view in views if isinstance(view, PagedView)]

    def _state_batch(
        self, group: GroupSpec, requests: Sequence[ScheduledRequest], query_start: list[int]
    ) -> StateBatch:
        states = [request.state for request in requests if request.state is not None]
        assert len(states) == len(requests), "every request of a model with state layers has a state"
        return StateBatch.build(
            query_start,
            [state.read_block for state in states],
            [state.write_block for state in states],
            [(row, e.num_tokens, e.block) for row, state in enumerate(states) for e in state.exports],
            group.blocks_per_slab,
            self.device,
        )

    def _sample(
        self, requests: Sequence[ScheduledRequest], query_start: list[int], hidden: Tensor, result: StepResult
    ) -> None:
        """Sample where it is asked for; adds to `result`."""
        asked = [(request, end - 1) for request, end in zip(requests, query_start[1:], strict=True) if request.sample]
        if not asked:
            return
        last = torch.tensor([token for _, token in asked], device=self.device)
        logits = self.model.compute_logits(hidden.index_select(0, last)).float()
        specs = [request.sample for request, _ in asked if request.sample is not None]
        ids = [request.request_id for request, _ in asked]
        if self.logits_observer is not None:
            for request_id, spec, row in zip(ids, specs, logits, strict=True):
                self.logits_observer(request_id, spec.position, row)
        result.sampled.update(zip(ids, sample_tokens(logits, specs), strict=True))
        self._add_logprobs(logits, ids, specs, result)

    def _add_logprobs(
        self, logits: Tensor, ids: Sequence[str], specs: Sequence[SampleSpec], result: StepResult
    ) -> None:
        """Report on the sampled tokens of the rows that ask for it."""
        asked = [
            (row, request_id, spec.num_logprobs, token)
            for row, (request_id, spec) in enumerate(zip(ids, specs, strict=True))
            if spec.num_logprobs is not None
            for token in result.sampled[request_id]
        ]
        if not asked:
            return
        rows, names, counts, tokens = zip(*asked, strict=True)
        for name, found in zip(names, token_logprobs(logits, rows, tokens, counts), strict=True):
            result.logprobs.setdefault(name, []).append(found)

    def _prompt_logprobs(self, rows: PromptRows, hidden: Tensor) -> list[TokenLogprobs]:
        """Report on prompt tokens; `hidden` starts at the first row. Logits are never there for more than a slice."""
        found: list[TokenLogprobs] = []
        for start, end in row_slices(len(rows.token_ids), self.model.vocab_size):
            logits = self.model.compute_logits(hidden[start:end]).float()
            count = end - start
            found += token_logprobs(logits, range(count), rows.token_ids[start:end].tolist(), [rows.count] * count)
        return found

    def _move(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)
