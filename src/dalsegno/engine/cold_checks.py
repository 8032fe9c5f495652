"""Cold checks as options ask for them, and what a mismatch leaves: a log line, and all it takes to replay it."""

import json
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dalsegno.engine.options import EngineOptions
from dalsegno.errors import OptionError
from dalsegno.models.checkpoint import weights_fingerprint
from dalsegno.sched.cold_checks import ColdCheckSetup, Mismatch

__all__ = ["cold_check_setup", "describe_mismatch"]

_log = logging.getLogger(__name__)

_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By dtype. float32 has that of rule R1; the others allow for about a dozen roundings (of 2^-11 and of 2^-8)."""


def cold_check_setup(options: EngineOptions, path: Path, dtype: str, start_up_plan: str) -> ColdCheckSetup:
    """Return which hits are checked, as `verify_prefix_cache` says, and where mismatches are reported.

    Args:
        options: of the engine.
        path: the model's folder.
        dtype: name of the dtype of weights and KV.
        start_up_plan: how the memory is cut.

    Raises:
        OptionError: the folder `verify_dump_dir` cannot be made.
    """
    folder = None if options.verify_dump_dir is None else Path(options.verify_dump_dir)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"verify_dump_dir={options.verify_dump_dir!r} cannot be made: {error}") from error

    def engine() -> dict[str, Any]:
        return {
            "model": str(path),
            "weights_fingerprint": weights_fingerprint(path),
            "dtype": dtype,
            "options": {name: value for name, value in asdict(options).items() if name != "kv_transfer_config"},
            "start_up_plan": start_up_plan,
            "versions": {name: version(name) for name in ("dalsegno", "torch")} | {"python": platform.python_version()},
        }

    return ColdCheckSetup(
        share=options.verify_prefix_cache,
        seed=options.seed,
        tolerance=_TOLERANCE[dtype],
        report=lambda mismatch: _report(mismatch, folder, engine),
    )


def describe_mismatch(mismatch: Mismatch) -> dict[str, Any]:
    """Return everything known of a mismatch as plain values for JSON."""
    request = mismatch.request
    return {
        "request_id": request.request_id,
        "number": request.order[1],
        "sample_index": request.sample_index,
        "seed": request.seed,
        "cache_salt": request.cache_salt,
        "sampling_params": asdict(request.params),
        "token_ids": request.token_ids.tolist(),
        "num_prompt_tokens": request.num_prompt_tokens,
        "hit_report": asdict(request.hit_report),
        "num_preemptions": request.num_preemptions,
        "block_hashes": [block_hash.hex() for block_hash in request.block_hashes],
        "forgotten": [{"group": g, "boundary": boundary, "block": b} for g, boundary, b in mismatch.forgotten],
        "position": mismatch.position,
        "allowed": mismatch.allowed,
        "expected": asdict(mismatch.expected),
        "seen": asdict(mismatch.seen),
    }


def _report(mismatch: Mismatch, folder: Path | None, engine: Callable[[], dict[str, Any]]) -> None:
    request, expected, seen = mismatch.request, mismatch.expected, mismatch.seen
    record = json.dumps(describe_mismatch(mismatch) | engine(), default=str)
    where = record
    if folder is not None:
        target = folder / f"mismatch-{request.order[1]}-{request.sample_index}.json"
        try:
            target.write_text(record)
            where = str(target)
        except OSError as error:
            _log.warning("%s cannot be written, so it follows in the log: %s", target, error)
    _log.error(
        "verify_prefix_cache: request %s, hit of %d tokens, differs from a cold run at token %d: likeliest %s %s, "
        "cold %s %s; %d blocks forgotten; %s",
        request.request_id,
        request.hit_report.boundary,
        mismatch.position,
        seen.token_ids[1:],
        seen.logprobs,
        expected.token_ids[1:],
        expected.logprobs,
        len(mismatch.forgotten),
        where,
    )
