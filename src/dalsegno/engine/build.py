"""From a model folder and options to a running engine: the one place where all parts meet.

Everything that loads torch is imported inside the functions, so that importing the API costs nothing.
"""

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dalsegno.connector.base import WorkerConnector
from dalsegno.connector.registry import ConnectorContext, create_connector
from dalsegno.engine.cold_checks import cold_check_setup
from dalsegno.engine.core import EngineCore
from dalsegno.engine.front_end import FrontEnd
from dalsegno.engine.inputs import PromptParser
from dalsegno.engine.options import EngineOptions
from dalsegno.engine.sampling_defaults import sampling_defaults
from dalsegno.engine.tokenizer import Tokenizer, load_tokenizer
from dalsegno.errors import OptionError
from dalsegno.kv.layout import plan_layout
from dalsegno.kv.start_up import describe_plan
from dalsegno.models.checkpoint import (
    config_fingerprint,
    read_config,
    read_end_token_ids,
    read_generation_config,
    resolve_model_path,
    weights_fingerprint,
)
from dalsegno.sched.connection import ConnectorSetup

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "MonotonicClock", "build_engine"]

_log = logging.getLogger(__name__)
_MAX_CPU_CACHE_BYTES = 4 * 2**30


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of a running engine; `start_up_plan` says in words how its memory is cut and what can hit."""

    core: EngineCore
    front_end: FrontEnd
    parser: PromptParser
    tokenizer: Tokenizer | None
    start_up_plan: str
    sampling_defaults: dict[str, Any]


def build_engine(model: str | os.PathLike[str], options: EngineOptions) -> Engine:
    """Load a model and start an engine on it.

    Raises:
        CheckpointError: the model folder, or its tokenizer, cannot be served as it is.
        OptionError: an option does not fit the model or the machine.
    """
    from dalsegno.models.registry import build_model, load_model
    from dalsegno.worker.model_worker import ModelWorker

    path = resolve_model_path(model)
    device = _device(options.device)
    dtype = _dtype(options, path, device)
    if options.threads is not None:
        _set_threads(options.threads)
    # What can be checked without the weights comes before them.
    scheduler_config = options.scheduler_config(build_model(read_config(path), dtype, "meta").max_model_len)
    cache_config = options.cache_config()
    tokenizer = None if options.skip_tokenizer_init else load_tokenizer(options.tokenizer or path)
    defaults = sampling_defaults(read_generation_config(path))
    end_token_ids = _end_token_ids(path, tokenizer)
    max_model_len = scheduler_config.max_model_len
    _log.info("loading %s: %s on %s, up to %d tokens", path, str(dtype).removeprefix("torch."), device, max_model_len)
    network = load_model(path, dtype, device)
    memory_bytes = options.kv_cache_memory_bytes or _default_memory_bytes(device)
    layout = plan_layout(network.cache_specs(), cache_config, memory_bytes=memory_bytes)
    start_up_plan = describe_plan(layout, cache_config, max_model_len)
    _log.info("%s", start_up_plan)
    clock = MonotonicClock()
    setup, worker_side = _connector(options, path, dtype, ConnectorContext(layout, cache_config, {}, clock))
    worker = ModelWorker(network, layout, device, worker_side, native_kernels=options.native_kernels)
    core = EngineCore(
        worker,
        clock,
        layout,
        cache_config,
        scheduler_config,
        debug=options.debug,
        connector=setup,
        cold_checks=cold_check_setup(options, path, str(dtype).removeprefix("torch."), start_up_plan),
    )
    front_end = FrontEnd(
        core,
        clock,
        tokenizer,
        vocab_size=network.vocab_size,
        end_token_ids=end_token_ids,
        max_model_len=max_model_len,
        seed=options.seed,
    )
    parser = PromptParser(
        None if tokenizer is None else tokenizer.encode,
        network.vocab_size,
        max_model_len,
        takes_priority=options.scheduling_policy == "priority",
    )
    return Engine(core, front_end, parser, tokenizer, start_up_plan, defaults)


def _connector(
    options: EngineOptions, path: Path, dtype: "torch.dtype", context: ConnectorContext
) -> tuple[ConnectorSetup | None, WorkerConnector | None]:
    """Make both sides of the connector that is asked for; none where nothing is cached."""
    config = options.transfer_config()
    if config is None:
        return None, None
    identity = {
        "weights": weights_fingerprint(path),
        "config": config_fingerprint(path),
        "dtype": str(dtype).removeprefix("torch."),
    }
    scheduler, (worker,) = create_connector(config, replace(context, identity=identity))
    setup = ConnectorSetup(
        scheduler,
        load_timeout_s=options.kv_load_timeout_s,
        job_timeout_s=options.kv_job_timeout_s,
        close_timeout_s=options.kv_close_timeout_s,
        load_failure_ends_request=config.kv_load_failure_policy == "fail",
    )
    return setup, worker


def _end_token_ids(path: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    own = None if tokenizer is None else tokenizer.end_token_id
    return read_end_token_ids(path) | (frozenset() if own is None else {own})


def _device(asked: str) -> "torch.device":
    import torch

    available = torch.cuda.is_available()
    if asked == "auto":
        return torch.device("cuda" if available else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and (not available or (device.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count() if available else 0
        raise OptionError(f"device={asked!r} is not there: torch sees {count} CUDA devices; use 'cpu' or 'auto'")
    return device


def _dtype(options: EngineOptions, path: Path, device: "torch.device") -> "torch.dtype":
    import torch

    from dalsegno.models.registry import read_dtype

    if options.dtype_name != "auto":
        dtype = getattr(torch, options.dtype_name)
        assert isinstance(dtype, torch.dtype), "an option's dtype is a name of torch"
        return dtype
    return torch.float32 if device.type == "cpu" else read_dtype(path)


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _default_memory_bytes(device: "torch.device") -> int:
    """A quarter of the free memory; at most 4 GiB on a CPU, whose memory others use too."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return min(_free_bytes() // 4, _MAX_CPU_CACHE_BYTES)


def _free_bytes() -> int:
    """Free memory of the machine, or of the container where that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit
        return free
    return max(0, min(free, limit - used))
