"""From checkpoint tensors to model parameters: what a model expects, the check, the copy.

A model lists, for every tensor name of its checkpoint, the part of a parameter it fills (`WeightTarget`). So
parameters may be fused or reordered while the names and shapes on disk stay those of the Hugging Face layout.
The check compares every name, shape and dtype and needs no memory: targets may live on the meta device.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.errors import CheckpointError
from dalsegno.models.checkpoint import Checkpoint
from dalsegno.obs.progress import Progress

__all__ = ["FusedTensor", "WeightTarget", "check_weights", "load_weights", "present_targets"]

_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one checkpoint tensor goes.

    Attributes:
        destination: a parameter or a view of one; its shape is the tensor's shape on disk.
        row_order: `[rows]` int64, or None; destination row i is row `row_order[i]` on disk.
    """

    destination: Tensor
    row_order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk."""
        return tuple(self.destination.shape)


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """One checkpoint tensor that may stand for several others.

    Attributes:
        target: where it goes.
        parts: names of the tensors that are absent when it is there.
    """

    target: WeightTarget
    parts: tuple[str, ...]


def present_targets(
    checkpoint: Checkpoint, targets: Mapping[str, WeightTarget], fused: Mapping[str, FusedTensor]
) -> dict[str, WeightTarget]:
    """Return `targets` in the spelling of the checkpoint: fused tensors that are there, in place of their parts."""
    chosen = dict(targets)
    for name, tensor in fused.items():
        if name in checkpoint.tensors:
            chosen[name] = tensor.target
            for part in tensor.parts:
                chosen.pop(part, None)
    return chosen


def check_weights(
    checkpoint: Checkpoint,
    targets: Mapping[str, WeightTarget],
    *,
    duplicates: Iterable[str] = (),
    ignored: Iterable[str] = (),
    owner: str = "the model",
) -> None:
    """Compare a checkpoint with what a model expects.

    Args:
        checkpoint: the tensors there are.
        targets: the tensors there must be.
        duplicates: names that may be there as well, as copies of a tied tensor.
        ignored: regular expressions of names that are left alone (they must match the whole name).
        owner: the architecture, for messages.

    Raises:
        CheckpointError: naming missing, unexpected and misshapen tensors and dtypes that are not supported.
    """
    known = set(targets) | set(duplicates)
    patterns = [re.compile(pattern) for pattern in ignored]
    extra = [
        name
        for name in sorted(checkpoint.tensors.keys() - known)
        if not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    problems = [
        _listed("missing tensor", sorted(targets.keys() - checkpoint.tensors.keys())),
        _listed("unexpected tensor", extra),
        _listed("", _misfits(checkpoint, targets)),
    ]
    found = "; ".join(problem for problem in problems if problem)
    if found:
        raise CheckpointError(f"{checkpoint.directory} does not fit {owner}: {found}")


def _misfits(checkpoint: Checkpoint, targets: Mapping[str, WeightTarget]) -> list[str]:
    found = []
    for name in sorted(targets.keys() & checkpoint.tensors.keys()):
        entry, shape = checkpoint.tensors[name], targets[name].shape
        if entry.shape != shape:
            found.append(f"tensor {name!r} has shape {list(entry.shape)}, expected {list(shape)}")
        elif entry.dtype not in _FLOAT_DTYPES:
            found.append(f"tensor {name!r} has dtype {entry.dtype}, supported are {', '.join(_FLOAT_DTYPES)}")
    return found


def _listed(label: str, items: list[str]) -> str:
    if not items:
        return ""
    shown = [f"{label} {item!r}" if label else item for item in items[:_MOST_NAMED]]
    more = [f"and {len(items) - _MOST_NAMED} more"] if len(items) > _MOST_NAMED else []
    return ", ".join(shown + more)


def load_weights(
    checkpoint: Checkpoint, targets: Mapping[str, WeightTarget], *, duplicates: Mapping[str, str] | None = None
) -> None:
    """Copy every tensor to its target, converting dtype and device; a terminal sees how far it is.

    The checkpoint has passed `check_weights`.

    Args:
        checkpoint: where to read.
        targets: where to write.
        duplicates: name of a copy -> name of the tied tensor it must equal.

    Raises:
        CheckpointError: a file cannot be read, or a copy of a tied tensor differs from it.
    """
    num_done = 0
    with Progress("tensors loaded", len(targets)) as progress:
        for file, names in checkpoint.files().items():
            with checkpoint.open(file) as handle:
                for name in names:
                    if name in targets:
                        _copy(handle.get_tensor(name), targets[name])
                        num_done += 1
                    if progress.is_due():
                        progress.show(num_done)
    for name, original in (duplicates or {}).items():
        if name in checkpoint.tensors:
            _check_duplicate(checkpoint, name, original)


def _copy(source: Tensor, target: WeightTarget) -> None:
    if target.row_order is not None:
        source = source[target.row_order.to(source.device)]
    target.destination.copy_(source)


def _check_duplicate(checkpoint: Checkpoint, name: str, original: str) -> None:
    if not torch.equal(checkpoint.read(name), checkpoint.read(original)):
        raise CheckpointError(
            f"{checkpoint.directory}: config.json ties {name!r} to {original!r} (tie_word_embeddings), but the tensors"
            " differ; set tie_word_embeddings to false or remove the copy"
        )
