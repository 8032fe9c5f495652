"""A worker without a model: integers instead of tensors, so that wrong bytes are wrong answers.

A token's cell is a mix of the token and the cell before it, read back from the block table; the state is a running mix
of all tokens. The next token is a function of every cell the last token may see and of the state. One stale, missing or
foreign cell anywhere therefore changes every later token. `expected_tokens` computes the same from the tokens alone.

A worker of several ranks does all of this for each of them, on memory of its own in which the cells are masked with the
rank's number, and checks that all come to the same: bytes of another rank are as wrong as any.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from dalsegno.connector.base import WorkerConnector
from dalsegno.connector.port import ConnectorPort
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.prefix.resolve import window_first_block
from dalsegno.testing.fake_memory import POISON, RankMemory, rank_mask
from dalsegno.types import NULL_BLOCK, SampleSpec, ScheduledRequest, StepPlan, StepResult, TokenLogprobs

__all__ = [
    "FakeClock",
    "FakeWorker",
    "expected_logprobs",
    "expected_prompt_logprobs",
    "expected_tokens",
    "extend_cells",
]

_MASK = (1 << 62) - 1
_MOMENT_S = 0.005


def _mix(left: int, right: int) -> int:
    value = (left * 0x9E3779B97F4A7C15 + right * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & ((1 << 64) - 1)
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9 >> 2) & _MASK


def _seen(cells: dict[int, int], state: int | None) -> int:
    """Everything a token may see, mixed into one number."""
    value = 7 if state is None else state
    for group, total in sorted(cells.items()):
        value = _mix(value, total + group)
    return value


def _next_token(seen: int, sample: int, vocab_size: int) -> int:
    return _mix(seen, sample) % vocab_size


def _logprobs(seen: int, token: int, count: int, vocab_size: int) -> TokenLogprobs:
    """Numbers that show what was seen; a real model's would also be sorted."""
    tokens = (token, *((_mix(seen, 1000 + i)) % vocab_size for i in range(count)))
    return TokenLogprobs(tokens, tuple(-(_mix(seen, t) % 4096) / 256 for t in tokens), 1 + _mix(seen, token) % 99)


def _sum_of(cells: Sequence[int]) -> int:
    """Order matters: a cell at the wrong position is a wrong sum."""
    total = 0
    for cell in cells:
        total = _mix(total, cell)
    return total


def extend_cells(cells: list[int], token_ids: Iterable[int]) -> None:
    """Append the cell of each token to the cells of those before it; the last one is also the state after it."""
    for token in token_ids:
        cells.append(_mix(cells[-1] if cells else 0, token))


def expected_tokens(
    layout: MemoryLayout, prompt: Sequence[int], num_tokens: int, vocab_size: int, sample: int = 0
) -> list[int]:
    """What a fresh `FakeWorker` answers to `prompt`, computed from the tokens alone."""
    tokens = list(prompt)
    cells: list[int] = []
    for _ in range(num_tokens):
        extend_cells(cells, tokens[len(cells) :])
        tokens.append(_next_token(_seen_behind(layout, cells), sample, vocab_size))
    return tokens[len(prompt) :]


def expected_logprobs(layout: MemoryLayout, tokens: Sequence[int], count: int, vocab_size: int) -> TokenLogprobs:
    """What a fresh `FakeWorker` reports on the last of `tokens`, computed from the tokens alone."""
    cells: list[int] = []
    extend_cells(cells, tokens[:-1])
    return _logprobs(_seen_behind(layout, cells), tokens[-1], count, vocab_size)


def expected_prompt_logprobs(
    layout: MemoryLayout, prompt: Sequence[int], count: int, vocab_size: int
) -> list[TokenLogprobs]:
    """What a fresh `FakeWorker` reports on the tokens of a prompt after the first, computed from the tokens alone."""
    cells: list[int] = []
    rows = []
    for before, token in pairwise(prompt):
        extend_cells(cells, [before])
        rows.append(_logprobs(_seen_behind(layout, cells), token, count, vocab_size))
    return rows


def _seen_behind(layout: MemoryLayout, cells: list[int]) -> int:
    sums = {
        group.group_id: _sum_of(cells if group.window is None else cells[-group.window :])
        for group in layout.paged_groups
    }
    return _seen(sums, cells[-1] if layout.state_group is not None else None)


class FakeClock:
    """A clock that advances only when told."""

    def __init__(self) -> None:
        """Start at zero."""
        self.time = 0.0

    def now(self) -> float:
        """Return the time set last, in seconds."""
        return self.time


class _FakePort(ConnectorPort):
    """A port on which time passes while somebody waits."""

    def __init__(self, connectors: Sequence[WorkerConnector], memories: Sequence[RankMemory], clock: FakeClock) -> None:
        super().__init__(connectors, memories)
        self._clock = clock

    def wait(self, timeout_s: float) -> bool:
        """Let the connector's threads run for a moment; if they have nothing to say, all of `timeout_s` goes by."""
        woken = super().wait(min(timeout_s, _MOMENT_S))
        if not woken:
            self._clock.time += timeout_s
        return woken


class FakeWorker:
    """Executes plans on integer cells; a read of a poisoned or never written cell raises AssertionError.

    Attributes:
        port: the connector's worker sides, if there are any.
        memories: the integers of each rank.
        before_step: called with each plan before it runs; may raise, to make the step fail.
        num_steps: plans executed.
        num_computed: tokens computed, by request id.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        clock: FakeClock | None = None,
        *,
        vocab_size: int = 997,
        connectors: Sequence[WorkerConnector] = (),
        put_step: Mapping[int, int] | None = None,
    ) -> None:
        """Make the memory of `layout`, poisoned throughout.

        Args:
            layout: of every rank.
            clock: advances by one with each step.
            vocab_size: tokens are below.
            connectors: one for each rank; there is one rank without.
            put_step: see `ConnectorContext`.
        """
        self.layout = layout
        self.clock = clock or FakeClock()
        self.vocab_size = vocab_size
        self.before_step: Callable[[StepPlan], None] | None = None
        self.num_steps = 0
        self.num_computed: dict[str, int] = {}
        self.closed = False
        steps = put_step or {}

        self.memories = []
        for rank in range(max(1, len(connectors))):
            masks = {g.group_id: rank_mask(rank, g.group_id, steps.get(g.group_id, 1)) for g in layout.groups}
            self.memories.append(RankMemory(layout, masks))
        # Of the rank that is being computed.
        self._memory = self.memories[0]
        self.port: ConnectorPort = _FakePort(connectors, self.memories[: len(connectors)], self.clock)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan: copies, then each request's tokens, then sampling."""
        with self.port.step(plan):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        if self.before_step is not None:
            self.before_step(plan)
        self.num_steps += 1
        self.clock.time += 1.0
        results = []
        for memory in self.memories:
            self._memory = memory
            results.append(self._run_rank(plan))
            assert results[-1] == results[0], f"rank {len(results) - 1} came to another answer than rank 0"
        self._memory = self.memories[0]
        for request_id, count in results[0].num_computed.items():
            self.num_computed[request_id] = self.num_computed.get(request_id, 0) + count
        return results[0]

    def _run_rank(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self._memory.copy(copy.group_id, copy.source, copy.target, copy.num_tokens)
        # All states are read before any is written, as the kernels do.
        states = [self._read_state(request) for request in plan.requests]
        result = StepResult()
        for request, state in zip(plan.requests, states, strict=True):
            end_state = self._compute(request, state, result)
            result.num_computed[request.request_id] = len(request.token_ids)
            if request.sample is not None:
                self._sample(request, request.sample, end_state, result)
        return result

    def poison(self, group_id: int, block_ids: Sequence[int]) -> None:
        """Make reads of these blocks fail until they are written again."""
        for memory in self.memories:
            memory.poison(group_id, block_ids)

    def cells(self, group_id: int, block_id: int) -> list[int]:
        """Return what a block of rank 0 holds, token by token; a state block has one cell."""
        return self._memory.cells(group_id, block_id)

    def close(self) -> None:
        """Remember that the worker was closed."""
        self.port.close()
        self.closed = True

    def _sample(self, request: ScheduledRequest, spec: SampleSpec, end_state: int | None, result: StepResult) -> None:
        seen = self._seen_by(request, request.end, end_state)
        tokens = [_next_token(seen, sample, self.vocab_size) for sample in spec.sample_indices]
        result.sampled[request.request_id] = tokens
        count = spec.num_logprobs
        if count is not None:
            result.logprobs[request.request_id] = [_logprobs(seen, t, count, self.vocab_size) for t in tokens]

    def _report_prompt(self, request: ScheduledRequest, offset: int, state: int | None, result: StepResult) -> None:
        rows = request.prompt_rows
        if rows is None or not 0 <= offset - rows.first < len(rows.token_ids):
            return
        seen = self._seen_by(request, request.start + offset + 1, state)
        row = _logprobs(seen, rows.token_ids[offset - rows.first], rows.count, self.vocab_size)
        result.prompt_logprobs.setdefault(request.request_id, []).append(row)

    def _seen_by(self, request: ScheduledRequest, end: int, state: int | None) -> int:
        """Everything that the last of the request's first `end` tokens may see."""
        return _seen({g.group_id: self._read_sum(g, request, end) for g in self.layout.paged_groups}, state)

    def _state_group(self) -> int:
        group = self.layout.state_group
        assert group is not None, "a plan names a state in a layout without state group"
        return group.group_id

    def _read_state(self, request: ScheduledRequest) -> int | None:
        if request.state is None:
            return None
        if request.state.read_block == NULL_BLOCK:
            assert request.start == 0, f"{request.request_id} starts at {request.start} from the null state"
            return 0
        value = self._memory.read(self._state_group(), request.state.read_block)
        assert value != POISON, f"{request.request_id} reads a poisoned state from block {request.state.read_block}"
        return value

    def _compute(self, request: ScheduledRequest, state: int | None, result: StepResult) -> int | None:
        exports = {export.num_tokens: export.block for export in request.state.exports} if request.state else {}
        previous = self._previous_cells(request)
        for offset, token in enumerate(request.token_ids):
            position = request.start + offset
            for group in self.layout.paged_groups:
                cell = _mix(previous[group.group_id], token)
                previous[group.group_id] = cell
                block = request.block_tables[group.group_id][position // group.block_size]
                assert block != NULL_BLOCK, f"{request.request_id} writes token {position} to the null block"
                self._memory.write(group.group_id, block, position % group.block_size, cell)
            if state is not None:
                state = _mix(state, token)
                if offset + 1 in exports:
                    self._memory.write(self._state_group(), exports[offset + 1], 0, state)
            self._report_prompt(request, offset, state, result)
        if request.state is not None:
            assert state is not None, "a plan names a state to write but none to read"
            self._memory.write(self._state_group(), request.state.write_block, 0, state)
        return state

    def _previous_cells(self, request: ScheduledRequest) -> dict[int, int]:
        """Per group the cell before the step's first token."""
        if request.start == 0:
            return dict.fromkeys((group.group_id for group in self.layout.paged_groups), 0)
        return {group.group_id: self._read(group, request, request.start - 1) for group in self.layout.paged_groups}

    def _read(self, group: GroupSpec, request: ScheduledRequest, position: int) -> int:
        block = request.block_tables[group.group_id][position // group.block_size]
        value = self._memory.read(group.group_id, block, position % group.block_size)
        where = f"{request.request_id} reads token {position} of group {group.name} from block {block}"
        assert block != NULL_BLOCK, f"{where}: the null block"
        assert value != POISON, f"{where}: poisoned"
        return value

    def _read_sum(self, group: GroupSpec, request: ScheduledRequest, end: int) -> int:
        first = 0 if group.window is None else max(0, end - group.window)
        assert group.window is None or first // group.block_size >= window_first_block(
            end - 1, group.window, group.block_size
        ), "the window of the last token starts before the blocks that are kept"
        return _sum_of([self._read(group, request, position) for position in range(first, end)])
