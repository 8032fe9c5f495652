"""Engine options: defined once here, read by `LLM(...)` and by the command line.

A field of `EngineOptions` is the whole definition of an option: name, type, default and help text. Options of vLLM that
we do not have are accepted at the value that switches them off and refused by name otherwise.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.config import KVTransferConfig
from dalsegno.engine.foreign_options import FOREIGN_OFF_VALUES, OURS_INSTEAD
from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options, check_integer, check_seconds
from dalsegno.store.registry import MIN_STORE_BYTES, is_mooncake

__all__ = ["EngineOptions", "OptionSpec", "option_specs"]

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
_MAX_SEED = 2**63 - 1


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Everything that can be asked of an engine; checked when constructed, never changed afterwards.

    A value of None is filled in from the model, the machine or another option by the methods below.

    Raises:
        OptionError: naming the option, what was given and what is allowed.
    """

    block_size: int = _option(16, "Tokens per block of attention cache; a multiple of the hash block size.")
    hash_block_size: int = _option(16, "Tokens per hash; cache hits land on its multiples (vLLM's prefix_match_unit).")
    max_model_len: int | None = _option(None, "Most tokens of prompt and answer together; default: the model's length.")
    max_num_batched_tokens: int = _option(2048, "Most tokens computed in one step.")
    max_num_seqs: int = _option(256, "Most requests in one step.")
    kv_cache_memory_bytes: int | None = _option(
        None, "Bytes for KV and states; default: a quarter of free memory, at most 4 GiB (CPU)."
    )
    enable_prefix_caching: bool = _option(True, "Reuse what earlier prompts computed.")
    prefix_cache_retention_interval: int = _option(
        0, "Keep a state every so many prompt tokens besides the chosen boundaries; 0 is never."
    )
    decode_checkpoint_interval: int | None = _option(
        None, "Keep the state of an answer every so many tokens; 0 is never; default: the hash block size."
    )
    max_states_per_request: int = _option(16, "Most states one request may leave in the cache.")
    scheduling_policy: str = _option(
        "priority", "Order of requests: priority (smaller first, then arrival), or fcfs (arrival alone)."
    )
    prefix_wait_steps: int = _option(
        64, "Most steps a request waits for a common prefix that another one is computing."
    )
    dtype: str = _option("auto", "Dtype of weights and KV: auto (float32 on a CPU), float32, bfloat16 or float16.")
    device: str = _option("auto", "Where to run: auto, cpu, cuda or cuda:N.")
    seed: int = _option(0, "Seed of the random streams of requests that set none.")
    threads: int | None = _option(None, "CPU threads of the kernels, shared by the process; default: torch's choice.")
    native_kernels: bool = _option(
        True, "Use C kernels in decode steps on a CPU, compiled on first use where there is a C compiler."
    )
    tokenizer: str | None = _option(None, "Folder or hub name of the tokenizer; default: the model's.")
    skip_tokenizer_init: bool = _option(False, "Load no tokenizer: prompts are token ids, answers have no text.")
    kv_store: str | None = _option(
        None, "Folder of an embedded store that keeps prefixes beyond the process, or mooncake://HOST:PORT."
    )
    kv_store_bytes: int | None = _option(
        None, "Most bytes of the embedded store; default: the store's. For Mooncake: bytes this engine lends to it."
    )
    kv_transfer_config: str | Mapping[str, Any] | None = _option(
        None, "Connector, its role and settings, as JSON or a dict; kv_store is the short form."
    )
    kv_load_timeout_s: float = _option(30.0, "Longest wait of a request for what it loads from the store.")
    kv_job_timeout_s: float = _option(30.0, "Longest wait of an answer that is to tell what is stored.")
    kv_close_timeout_s: float = _option(30.0, "Longest wait for the store when the engine is closed.")
    verify_prefix_cache: float = _option(
        0.0, "Share of the requests with a hit, 0 to 1, that are computed again cold in the background and compared."
    )
    verify_dump_dir: str | None = _option(
        None, "Folder for a JSON file per mismatch found by verify_prefix_cache; default: it goes to the log."
    )
    debug: bool = _option(False, "Check every count after every step and poison freed memory; slow.")

    def __post_init__(self) -> None:
        for name in ("enable_prefix_caching", "native_kernels", "skip_tokenizer_init", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("max_model_len", "kv_cache_memory_bytes", "threads"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, 0, _MAX_SEED)
        for name in ("kv_load_timeout_s", "kv_job_timeout_s", "kv_close_timeout_s"):
            check_seconds(name, getattr(self, name))
        self._check_connector()
        if self.tokenizer is not None and (not isinstance(self.tokenizer, str) or not self.tokenizer):
            raise OptionError(f"tokenizer must be a folder or a hub name, got {self.tokenizer!r}")
        if not isinstance(self.dtype, str) or self.dtype not in _DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise OptionError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        self._check_verification()
        self.cache_config()
        self.scheduler_config(self.max_model_len or 1)

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any], owner: str = "LLM") -> "EngineOptions":
        """Build options from keyword arguments as users write them.

        Args:
            given: options by name; `prefix_match_unit` and switched-off options of vLLM are allowed.
            owner: what the options belong to, for error messages.

        Raises:
            OptionError: an option is unknown (the nearest valid name is given), not supported, or out of range.
        """
        names = [spec.name for spec in option_specs()]
        own = {name: _plain(value) for name, value in given.items() if name in names}
        foreign = {name: value for name, value in given.items() if name not in names}
        unit = foreign.pop("prefix_match_unit", None)
        check_foreign_options(foreign, FOREIGN_OFF_VALUES, [*names, "prefix_match_unit"], owner, OURS_INSTEAD)
        if unit is not None:
            check_integer("prefix_match_unit", unit, 1)
            if own.setdefault("hash_block_size", unit) != unit:
                raise OptionError(
                    f"prefix_match_unit={unit!r} and hash_block_size={own['hash_block_size']!r} are two names of one "
                    "option; give one of them, or the same value"
                )
        return cls(**own)

    def cache_config(self) -> CacheConfig:
        """Return the settings of the prefix cache, `decode_checkpoint_interval` filled in."""
        interval = self.decode_checkpoint_interval
        return CacheConfig(
            block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            prefix_cache_retention_interval=self.prefix_cache_retention_interval,
            decode_checkpoint_interval=self.hash_block_size if interval is None else interval,
            max_states_per_request=self.max_states_per_request,
        )

    def scheduler_config(self, model_length: int) -> SchedulerConfig:
        """Return the settings of the scheduler for a model made for `model_length` tokens.

        Raises:
            OptionError: `max_model_len` is longer than the model's length.
        """
        if self.max_model_len is not None and self.max_model_len > model_length:
            raise OptionError(
                f"max_model_len must be at most the model's length of {model_length} tokens, got {self.max_model_len}"
            )
        return SchedulerConfig(
            max_model_len=self.max_model_len or model_length,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            policy=self.scheduling_policy,
            prefix_wait_steps=self.prefix_wait_steps,
        )

    def transfer_config(self) -> KVTransferConfig | None:
        """Return the connector's settings, `kv_store` spelled out; None without a connector.

        Raises:
            OptionError: they contradict each other, or are not allowed.
        """
        if self.kv_transfer_config is not None:
            for name in ("kv_store", "kv_store_bytes"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"{name}={getattr(self, name)!r} is a short form of kv_transfer_config; give one of them"
                    )
            return KVTransferConfig.parse(self.kv_transfer_config)
        if self.kv_store is None:
            if self.kv_store_bytes is not None:
                raise OptionError(f"kv_store_bytes={self.kv_store_bytes!r} needs kv_store, the folder")
            return None
        if not isinstance(self.kv_store, str) or not self.kv_store or "\0" in self.kv_store:
            raise OptionError(f"kv_store must be a folder or mooncake://HOST:PORT, got {self.kv_store!r}")
        if is_mooncake(self.kv_store):
            return KVTransferConfig("MooncakeStoreConnector", kv_connector_extra_config=self._mooncake())
        settings: dict[str, Any] = {"store": "embedded", "path": self.kv_store}
        if self.kv_store_bytes is not None:
            settings["bytes"] = check_integer("kv_store_bytes", self.kv_store_bytes, MIN_STORE_BYTES)
        return KVTransferConfig("StoreConnector", kv_connector_extra_config=settings)

    def _mooncake(self) -> dict[str, Any]:
        """Settings of the Mooncake store that `kv_store` names."""
        from dalsegno.store.mooncake.config import MIN_SEGMENT_BYTES, master_address

        settings: dict[str, Any] = {"store": "mooncake", "master_server_address": master_address(self.kv_store or "")}
        if self.kv_store_bytes is not None:
            lent = settings["global_segment_size"] = check_integer("kv_store_bytes", self.kv_store_bytes, 0, 2**62)
            if 0 < lent < MIN_SEGMENT_BYTES:
                raise OptionError(
                    f"kv_store_bytes, what the engine lends to Mooncake, must be 0 or at least {MIN_SEGMENT_BYTES}, "
                    f"got {lent}"
                )
        return settings

    def _check_verification(self) -> None:
        share, folder = self.verify_prefix_cache, self.verify_dump_dir
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise OptionError(f"verify_prefix_cache must be a share between 0 and 1, got {share!r}")
        if share and not self.enable_prefix_caching:
            raise OptionError(f"verify_prefix_cache={share!r} checks hits: it needs enable_prefix_caching=True")
        if folder is not None and (not isinstance(folder, str) or not folder):
            raise OptionError(f"verify_dump_dir must be a folder, got {folder!r}")
        if folder is not None and not share:
            raise OptionError(f"verify_dump_dir={folder!r} needs verify_prefix_cache above 0")

    def _check_connector(self) -> None:
        if self.transfer_config() is None:
            return
        if not self.enable_prefix_caching:
            raise OptionError("a KV connector stores and finds cached prefixes: it needs enable_prefix_caching=True")
        if isinstance(self.device, str) and self.device.startswith("cuda"):
            raise OptionError(
                f"a KV connector needs device='cpu', got {self.device!r}: other memory cannot be stored yet"
            )

    @property
    def dtype_name(self) -> str:
        """The torch name of `dtype`, or "auto"."""
        return _DTYPES[self.dtype]


def _plain(value: Any) -> Any:
    """Turn a path or a torch dtype into the string it stands for; anything else is returned as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option as the command line needs it; `type` may be a union with None."""

    name: str
    type: Any
    default: Any
    help: str


def option_specs() -> Iterator[OptionSpec]:
    """Yield every option of `EngineOptions`, in order of definition."""
    types = get_type_hints(EngineOptions)
    for entry in fields(EngineOptions):
        yield OptionSpec(entry.name, types[entry.name], entry.default, entry.metadata["help"])
