"""From settings to a store: which stores there are and what each of them asks for."""

from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options, check_integer, check_seconds
from dalsegno.store.base import Store

__all__ = ["MIN_STORE_BYTES", "STORES", "is_mooncake", "open_store"]

MIN_STORE_BYTES = 2**20
"""Least bound on the bytes of a store."""


def is_mooncake(place: str) -> bool:
    """Whether this names a Mooncake store rather than a folder."""
    return "://" in place


def open_store(config: Mapping[str, Any]) -> Store:
    """Open the store that `config["store"]` names, "embedded" by default, with the other settings.

    Raises:
        OptionError: an unknown store or setting, or a bad value; names it and what is allowed.
    """
    settings = dict(config)
    name = settings.pop("store", "embedded")
    if name not in STORES:
        raise OptionError(f"store must be one of {', '.join(sorted(STORES))}, got {name!r}")
    return STORES[name](settings)


def _take_bytes(settings: dict[str, Any]) -> int | None:
    value = settings.pop("bytes", None)
    return None if value is None else check_integer("bytes", value, MIN_STORE_BYTES)


def _open_memory(settings: dict[str, Any]) -> Store:
    from dalsegno.store.memory import MemoryStore

    num_bytes = _take_bytes(settings)
    check_foreign_options(settings, {}, ("bytes",), "the memory store")
    return MemoryStore(num_bytes)


def _open_embedded(settings: dict[str, Any]) -> Store:
    from dalsegno.store.embedded import EmbeddedStore

    path = settings.pop("path", None)
    if not isinstance(path, str) or not path:
        raise OptionError(f"the embedded store needs path=, the folder it is in, got {path!r}")
    num_bytes = _take_bytes(settings)
    interval = check_seconds("sync_interval_s", settings.pop("sync_interval_s", 5.0))
    check_foreign_options(settings, {}, ("path", "bytes", "sync_interval_s"), "the embedded store")
    return EmbeddedStore(path, num_bytes, sync_interval_s=interval)


def _open_mooncake(settings: dict[str, Any]) -> Store:
    from dalsegno.store.mooncake import open_mooncake

    return open_mooncake(settings)


STORES: dict[str, Callable[[dict[str, Any]], Store]] = {
    "embedded": _open_embedded,
    "memory": _open_memory,
    "mooncake": _open_mooncake,
}
"""How each store is opened, by the name that settings give it."""
