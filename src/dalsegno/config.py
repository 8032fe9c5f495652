"""Resolved settings of the cache and the scheduler: frozen, checked once, passed down whole."""

from dataclasses import dataclass

from dalsegno.errors import OptionError
from dalsegno.options import check_integer

__all__ = ["CacheConfig", "SchedulerConfig"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the prefix cache, in tokens.

    Attributes:
        block_size: tokens per attention and window block (B).
        hash_block_size: tokens per hash (H); hits land on its multiples; divides B.
        enable_prefix_caching: off means nothing is looked up and nothing is published.
        prefix_cache_retention_interval: extra boundary states every so many tokens; 0 is none.
        decode_checkpoint_interval: how often a decoding request keeps its state; 0 is never.
        max_states_per_request: most boundary states one request may publish.

    Raises:
        OptionError: naming the option, what was given and what is allowed.
    """

    block_size: int = 16
    hash_block_size: int = 16
    enable_prefix_caching: bool = True
    prefix_cache_retention_interval: int = 0
    decode_checkpoint_interval: int = 16
    max_states_per_request: int = 16

    def __post_init__(self) -> None:
        unit = check_integer("hash_block_size", self.hash_block_size, 1)
        check_integer("block_size", self.block_size, 1)
        if self.block_size % unit:
            low = self.block_size - self.block_size % unit
            near = f"{low} or {low + unit}" if low else f"{unit}"
            raise OptionError(
                f"block_size must be a multiple of hash_block_size={unit}, got {self.block_size}; use {near}"
            )
        for name in ("prefix_cache_retention_interval", "decode_checkpoint_interval"):
            value = getattr(self, name)
            if value is None:
                raise OptionError(f"{name}=None is not supported; use 0 (none) or a multiple of {unit}")
            if check_integer(name, value, 0) % unit:
                raise OptionError(f"{name} must be 0 or a multiple of hash_block_size={unit}, got {value}")
        check_integer("max_states_per_request", self.max_states_per_request, 0)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler.

    Attributes:
        max_model_len: most tokens of one request, prompt and answer together.
        max_num_batched_tokens: token budget of one step.
        max_num_seqs: most requests in one step.
        policy: "fcfs" or "priority" (smaller first, then arrival).
        prefix_wait_steps: longest wait for a common prefix that a running request is computing.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    policy: str = "fcfs"
    prefix_wait_steps: int = 64

    def __post_init__(self) -> None:
        check_integer("max_model_len", self.max_model_len, 1)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_integer("max_num_seqs", self.max_num_seqs, 1)
        check_integer("prefix_wait_steps", self.prefix_wait_steps, 0)
        if self.policy not in ("fcfs", "priority"):
            raise OptionError(f"scheduling_policy must be 'fcfs' or 'priority', got {self.policy!r}")
