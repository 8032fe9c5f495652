"""Settings of the store connector: the keys of `kv_connector_extra_config` that are not the store's own."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dalsegno.connector.config import KVTransferConfig
from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options, check_integer, check_seconds

__all__ = ["StoreSettings"]

_SHARED_STORES = ("embedded", "mooncake")
_REMOTE_STORES = ("mooncake",)
_MOONCAKE_CONNECTOR = "MooncakeStoreConnector"
_BOOLEANS = ("enable_lookup", "load_async", "save_decode_cache", "lookup_async")
_BY_DEFAULT = ("save_decode_cache", "lookup_async")
# What vLLM's connector has besides, at the values that ask for nothing.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "enable_group_semantics": (False, None),
    "enable_store_tp_lcm": (False, None),
    "prefill_tp_sizes": ([], [1], None),
    "store_tp_size": (1, None),
}
_SECONDS = ("lookup_timeout_s", "pressure_pause_s")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Checked settings.

    Attributes:
        store_block_size: tokens per object of full attention, a multiple of the block size.
        max_store_backlog_bytes: most bytes that store jobs hold at once; work beyond is dropped and counted.
        max_state_probes: most boundaries one lookup asks for states at.
        enable_lookup: whether to look up and load at all.
        load_async: whether other requests run while one loads.
        lookup_async: whether a lookup may take longer than a step; then it runs on a thread of its own. Default: with a
            store behind a network.
        lookup_timeout_s: after so long such a lookup is a miss.
        save_decode_cache: whether answers are stored; default: in role kv_both.
        cache_prefix: engines with different ones never hit each other.
        pressure_pause_s: when the store had no room, saves are skipped for so long before one is tried again.
        offload_worker: what puts objects into the store: a "thread" of the engine's process, or a "process", which
            disturbs decode steps less and needs a store that several processes share; the default for one on this host.
        store: the settings of the store itself.

    Raises:
        OptionError: naming the key, what was given and what is allowed.
    """

    store_block_size: int = 256
    max_store_backlog_bytes: int = 2**30
    max_state_probes: int = 256
    enable_lookup: bool = True
    load_async: bool = True
    lookup_async: bool | None = None
    lookup_timeout_s: float = 5.0
    save_decode_cache: bool | None = None
    cache_prefix: str = ""
    pressure_pause_s: float = 1.0
    offload_worker: str | None = None
    store: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("store_block_size", self.store_block_size, 1)
        check_integer("max_store_backlog_bytes", self.max_store_backlog_bytes, 0)
        check_integer("max_state_probes", self.max_state_probes, 1)
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name in _BY_DEFAULT and value is None):
                raise OptionError(f"kv_connector_extra_config: {name} must be true or false, got {value!r}")
        for name in _SECONDS:
            check_seconds(name, getattr(self, name))
        if self.offload_worker not in (None, "thread", "process"):
            raise OptionError(
                f"kv_connector_extra_config: offload_worker must be thread or process, got {self.offload_worker!r}"
            )
        if self.offload_worker == "process" and not self._can_be_shared:
            raise OptionError(
                "kv_connector_extra_config: offload_worker='process' needs Linux and a store that processes share, "
                f"such as 'embedded', got {self.store.get('store')!r}"
            )
        if not isinstance(self.cache_prefix, str):
            raise OptionError(f"kv_connector_extra_config: cache_prefix must be text, got {self.cache_prefix!r}")
        if self.lookup_async is None:
            object.__setattr__(self, "lookup_async", self._store_name in _REMOTE_STORES)

    @classmethod
    def parse(cls, config: KVTransferConfig, block_size: int) -> "StoreSettings":
        """Read the connector's settings; what it does not know is left to the store, which refuses by name."""
        names = {entry.name for entry in fields(cls)} - {"store"}
        given = dict(config.kv_connector_extra_config)
        own = {name: given.pop(name) for name in list(given) if name in names}
        foreign = {name: given.pop(name) for name in _FOREIGN if name in given}
        check_foreign_options(foreign, _FOREIGN, names, "kv_connector_extra_config")
        if config.kv_connector == _MOONCAKE_CONNECTOR:
            given.setdefault("store", "mooncake")
        if isinstance(given.get("path"), str) and given["path"]:
            # Another process opens it too, perhaps when the working directory is another one.
            given["path"] = os.path.abspath(given["path"])
        settings = cls(**own, store=given)
        if "store_block_size" in own and settings.store_block_size % block_size:
            raise OptionError(
                "kv_connector_extra_config: store_block_size must be a multiple of "
                f"block_size={block_size}, got {settings.store_block_size}"
            )
        return settings

    @property
    def uses_process(self) -> bool:
        """Whether a process of its own puts objects into the store."""
        if self.offload_worker is None:
            return self._can_be_shared and self._store_name not in _REMOTE_STORES
        return self.offload_worker == "process"

    @property
    def process_store(self) -> Mapping[str, Any]:
        """Settings with which that process opens the store; the memory lent to it is the engine's alone."""
        return {**self.store, "global_segment_size": 0} if self._store_name == "mooncake" else self.store

    @property
    def _can_be_shared(self) -> bool:
        return sys.platform == "linux" and self._store_name in _SHARED_STORES

    @property
    def _store_name(self) -> Any:
        return self.store.get("store", "embedded")

    def object_tokens(self, block_size: int) -> int:
        """Tokens per object of full attention: the setting, rounded up to whole blocks."""
        return -(-self.store_block_size // block_size) * block_size
