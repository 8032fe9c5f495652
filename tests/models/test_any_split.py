"""A whole model gives the same however a prompt is cut, and exports the very state of a run that ended there."""

import random

import pytest
import torch

from dalsegno.models.tiny import TINY_KINDS
from dalsegno.types import GroupKind
from tests.matrix.tiny_models import tiny_kinds_with
from tests.models.conftest import ModelOf
from tests.models.harness import Export, ModelRunner
from tests.models.logits import assert_close, run_split, run_whole

LENGTH = 300
UNIT = 16


@pytest.mark.parametrize("kind", tiny_kinds_with(GroupKind.STATE))
def test_an_export_at_every_boundary_is_the_state_of_a_run_that_ended_there(kind: str, tiny_model: ModelOf) -> None:
    """One step of 300 tokens with an export at each boundary, beside one run per boundary that stops there."""
    model = tiny_model(kind)
    prompt = [random.Random(5).randrange(model.vocab_size) for _ in range(LENGTH)]
    boundaries = range(UNIT, LENGTH, UNIT)
    runner = ModelRunner(model, 1, LENGTH, spare=len(boundaries))
    runner.step({0: prompt}, [Export(0, boundary, slot) for slot, boundary in enumerate(boundaries)])
    names = {part.name for spec in runner.specs if spec.kind is GroupKind.STATE for part in spec.parts}
    assert "conv" in names
    for slot, boundary in enumerate(boundaries):
        ended = ModelRunner(model, 1, LENGTH)
        ended.step({0: prompt[:boundary]})
        for name in sorted(names):
            for exported, last in zip(runner.state_parts(name), ended.state_parts(name), strict=True):
                assert_close(exported[runner.spares[0][slot]], last[ended.states[0]])


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_random_splits_of_fifty_prompts_agree(kind: str, tiny_model: ModelOf) -> None:
    """Logits of all tokens of 50 prompts: each prompt in one step, and cut at random beside cut neighbours."""
    model = tiny_model(kind)
    rng = random.Random(9)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(rng.randint(2, 150))] for _ in range(50)]
    for start in range(0, len(prompts), 10):
        few = prompts[start : start + 10]
        with torch.inference_mode():
            for split, whole in zip(run_split(model, few, 70), run_whole(model, few), strict=True):
                assert_close(split, whole)
