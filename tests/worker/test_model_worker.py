"""The model worker: steps, copies, exports, sampling, and what it leaves alone."""

import math
import random
import weakref
from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dalsegno.errors import EngineError
from dalsegno.ops.views import PagedView
from dalsegno.types import BlockCopy, PromptRows, ScheduledRequest, StateExport, StepPlan
from dalsegno.worker.interface import Worker
from dalsegno.worker.model_worker import ModelWorker
from tests.worker.stand_in import VOCAB, Planner, StandIn, greedy_sample, make_layout, scheduled

TOKENS = [random.Random(1).randrange(VOCAB) for _ in range(200)]
OTHERS = [random.Random(2).randrange(VOCAB) for _ in range(200)]


class Rig:
    """A worker over poisoned memory, and the logits it saw by request and position."""

    def __init__(self, kinds: str = "aws", **options: int) -> None:
        self.model = StandIn(kinds)
        self.layout = make_layout(self.model, **options)
        self.worker = ModelWorker(self.model, self.layout, "cpu")
        self.planner = Planner(self.layout)
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.worker.logits_observer = self._observe
        for group in self.layout.groups:
            ids = range(group.blocks_per_slab, self.layout.num_slabs * group.blocks_per_slab)
            self.worker.poison(group.group_id, ids)

    def _observe(self, request_id: str, position: int, row: Tensor) -> None:
        self.logits[request_id, position] = row.clone()

    def run(self, *requests: ScheduledRequest, copies: tuple[BlockCopy, ...] = ()) -> dict[str, list[int]]:
        result = self.worker.execute(StepPlan(0, requests, copies))
        assert result.num_computed == {request.request_id: len(request.token_ids) for request in requests}
        return result.sampled

    def cold(self, tokens: list[int], name: str = "cold") -> Tensor:
        """Logits behind `tokens` of a run in one step in blocks of its own."""
        state = (0, self.planner.state_block()) if self.layout.state_group else None
        self.run(scheduled(name, tokens, (0, len(tokens)), self.planner.tables(len(tokens)), state))
        return self.logits[name, len(tokens)]


def _close(left: Tensor, right: Tensor) -> None:
    assert bool(right.isfinite().all())
    torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-5)


def test_it_is_a_worker() -> None:
    worker: Worker = Rig().worker
    worker.close()


@pytest.mark.parametrize("kinds", ["aws", "a", "w", "s", "sa"])
@pytest.mark.parametrize("options", [{}, {"block_size": 64}, {"block_size": 4, "hash_block_size": 2}], ids=str)
def test_steps_of_any_size_beside_others_end_like_one_step(kinds: str, options: dict[str, int]) -> None:
    rig = Rig(kinds, **options)
    names = {"one": TOKENS[:90], "two": OTHERS[:70]}
    cold = {name: rig.cold(tokens) for name, tokens in names.items()}
    tables = {name: rig.planner.tables(100) for name in names}
    blocks = {name: rig.planner.state_block() if "s" in kinds else 0 for name in names}

    def part(name: str, begin: int, end: int) -> ScheduledRequest:
        state = (blocks[name] if begin else 0, blocks[name]) if "s" in kinds else None
        return scheduled(name, names[name], (begin, end), tables[name], state, sample=end == len(names[name]))

    assert rig.run(part("one", 0, 33)) == {}
    rig.run(part("one", 33, 34), part("two", 0, 50))
    rig.run(part("two", 50, 69), part("one", 34, 89))
    rig.run(part("one", 89, 90), part("two", 69, 70))
    for name, tokens in names.items():
        _close(rig.logits[name, len(tokens)], cold[name])


def test_an_exported_state_resumes_a_later_request() -> None:
    rig = Rig()
    tables = rig.planner.tables(200)
    running, kept = rig.planner.state_block(), rig.planner.state_block()
    prompt = scheduled("first", TOKENS, (0, 100), tables, (0, running), exports=[StateExport(48, kept)])
    rig.run(prompt)
    other = TOKENS[:48] + OTHERS[48:80]
    own = rig.planner.tables(80)
    mixed = tuple([*table[:3], *mine[3:]] for table, mine in zip(tables, own, strict=True))
    before = rig.worker.memory.memory.clone()
    rig.run(scheduled("second", other, (48, 80), mixed, (kept, rig.planner.state_block())))
    _close(rig.logits["second", 80], rig.cold(other))
    group = rig.layout.state_group
    assert group is not None
    address = rig.layout.address(group.group_id, kept)
    block = slice(address, address + group.block_bytes)
    assert torch.equal(rig.worker.memory.memory[block], before[block])


def test_copies_run_before_the_forward_and_carry_only_their_tokens() -> None:
    rig = Rig("aw")
    tables = rig.planner.tables(48)
    rig.run(scheduled("first", TOKENS, (0, 40), tables))
    own = rig.planner.tables(48)
    mixed = tuple([*table[:2], mine[2]] for table, mine in zip(tables, own, strict=True))
    copies = tuple(BlockCopy(group, tables[group][2], mixed[group][2], 5) for group in (0, 1))
    other = TOKENS[:37] + OTHERS[:5]
    rig.run(scheduled("second", other, (37, 42), mixed), copies=copies)
    _close(rig.logits["second", 42], rig.cold(other))
    view = rig.worker.memory.views[0]
    assert isinstance(view, PagedView)
    keys = view.key[mixed[0][2] // view.blocks_per_slab, mixed[0][2] % view.blocks_per_slab]
    assert [bool(key.isnan().all()) for key in keys] == [position >= 10 for position in range(16)]


def test_a_plan_of_copies_alone_is_executed() -> None:
    rig = Rig("a")
    tables = rig.planner.tables(32)
    rig.run(scheduled("first", TOKENS, (0, 16), tables))
    rig.run(copies=(BlockCopy(0, tables[0][0], tables[0][1], 16),))
    rig.run(scheduled("again", TOKENS, (16, 17), ([tables[0][1], *rig.planner.blocks(0, 1)],)))
    _close(rig.logits["again", 17], rig.cold(TOKENS[:17]))


def test_a_step_writes_what_its_plan_names_and_nothing_else() -> None:
    rig = Rig()
    tables = rig.planner.tables(64)
    written, kept, read = (rig.planner.state_block() for _ in range(3))
    rig.run(scheduled("one", TOKENS, (0, 20), tables, (0, read)))
    memory = rig.worker.memory.memory
    before = memory.clone()
    rig.run(scheduled("one", TOKENS, (20, 30), tables, (read, written), exports=[StateExport(4, kept)]))
    changed = before != memory
    for group in rig.layout.groups:
        for block in [written, kept] if group.is_state else [tables[group.group_id][1]]:
            address = rig.layout.address(group.group_id, block)
            part = changed[address : address + group.block_bytes]
            assert bool(part.any())
            if not group.is_state:
                # Tokens 20 to 29 are slots 4 to 13 of the second block.
                slots = part.view(2, group.block_size, -1).any(-1)
                assert slots.tolist() == [[4 <= slot < 14 for slot in range(16)]] * 2
            part.fill_(False)
    assert not bool(changed.any())
    assert not bool(memory[: rig.layout.slab_bytes].any())


def test_logits_are_computed_for_sampled_rows_only() -> None:
    rig = Rig("a")
    rig.run(
        scheduled("one", TOKENS, (0, 30), rig.planner.tables(30), sample=False),
        scheduled("two", OTHERS, (0, 9), rig.planner.tables(9)),
        scheduled("three", TOKENS, (0, 1), rig.planner.tables(1)),
    )
    rig.run(scheduled("four", TOKENS, (0, 5), rig.planner.tables(5), sample=False))
    assert rig.model.num_logit_rows == [2]
    assert set(rig.logits) == {("two", 9), ("three", 1)}
    assert rig.logits["two", 9].dtype == torch.float32


def test_one_token_is_sampled_per_asked_sample() -> None:
    rig = Rig("a")
    request = scheduled("one", TOKENS, (0, 9), rig.planner.tables(9))
    sample = greedy_sample(9, count=3)
    request = ScheduledRequest("one", request.token_ids, 0, request.block_tables, None, sample)
    best = int(rig.cold(TOKENS[:9]).argmax())
    assert rig.run(request) == {"one": [best] * 3}


def test_the_lists_of_a_plan_are_not_kept() -> None:
    class Table(list[int]):
        """A list that can be watched."""

    rig = Rig("a")
    table = Table(rig.planner.blocks(0, 2))
    watch = weakref.ref(table)
    rig.run(scheduled("one", TOKENS, (0, 20), (table,)))
    del table
    assert watch() is None


def test_a_stale_block_is_an_error_not_an_answer() -> None:
    rig = Rig()
    state = rig.planner.state_block()
    with pytest.raises(EngineError, match="not a number"):
        rig.run(scheduled("one", TOKENS, (16, 20), rig.planner.tables(20), (state, state)))
    assert math.isfinite(float(rig.cold(TOKENS[:5]).sum()))


def test_rows_of_a_prompt_are_those_of_the_tokens_before_them_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.worker.logprobs._SLICE_ELEMENTS", 4 * VOCAB + 5)
    rig = Rig("a")
    part = scheduled("one", TOKENS, (0, 20), rig.planner.tables(20))
    part = replace(part, prompt_rows=PromptRows(array("I", TOKENS[8:21]), first=7, count=2))
    other = scheduled("other", OTHERS, (0, 9), rig.planner.tables(9))
    result = rig.worker.execute(StepPlan(0, (other, part)))
    assert rig.model.num_logit_rows == [2, 4, 4, 4, 1]
    assert list(result.prompt_logprobs) == ["one"]
    for position, row in enumerate(result.prompt_logprobs["one"], 8):
        values = rig.cold(TOKENS[:position]).log_softmax(-1)
        best = values.topk(2)
        assert row.token_ids == (TOKENS[position], *best.indices.tolist())
        assert row.logprobs == pytest.approx([float(values[TOKENS[position]]), *best.values.tolist()], abs=1e-4)
        assert row.rank == int((values >= values[TOKENS[position]]).sum())
