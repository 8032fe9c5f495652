"""`kv_transfer_config`: which connector, in which role, with which settings of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options

__all__ = ["ROLES", "KVTransferConfig"]

ROLES = ("kv_producer", "kv_consumer", "kv_both")
_POLICIES = ("recompute", "fail")
_KEYS = (
    "kv_connector",
    "kv_role",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "kv_load_failure_policy",
    "engine_id",
)
# What vLLM has besides, at the values that ask for nothing.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "kv_buffer_device": (None, "cpu"),
    "kv_port": (None, 14579),
    "enable_permute_local_kv": (None, False),
    "kv_rank": (None,),
    "kv_parallel_size": (None, 1),
    "kv_buffer_size": (None,),
    "kv_ip": (None,),
}


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """The parsed option.

    Attributes:
        kv_connector: a name of the registry, or of a class or function in `kv_connector_module_path`.
        kv_role: what this instance does: `kv_producer` saves prompts, `kv_consumer` only answers and only with
            `save_decode_cache`, `kv_both` both. Every role looks up and loads.
        kv_connector_extra_config: the connector's own settings.
        kv_connector_module_path: module of a third party's connector.
        kv_load_failure_policy: what a failed load is: a miss ("recompute") or the request's end ("fail").
        engine_id: a name for logs.

    Raises:
        OptionError: naming the key, what was given and what is allowed.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "recompute"
    engine_id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kv_connector, str) or not self.kv_connector:
            raise OptionError(f"kv_transfer_config: kv_connector must be a name, got {self.kv_connector!r}")
        if self.kv_role not in ROLES:
            raise OptionError(f"kv_transfer_config: kv_role must be one of {', '.join(ROLES)}, got {self.kv_role!r}")
        if self.kv_load_failure_policy not in _POLICIES:
            raise OptionError(
                f"kv_transfer_config: kv_load_failure_policy must be recompute or fail, "
                f"got {self.kv_load_failure_policy!r}"
            )
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise OptionError(
                "kv_transfer_config: kv_connector_extra_config must be an object of settings, "
                f"got {self.kv_connector_extra_config!r}"
            )
        for name in ("kv_connector_module_path", "engine_id"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise OptionError(f"kv_transfer_config: {name} must be text, got {value!r}")

    @classmethod
    def parse(cls, given: object) -> "KVTransferConfig":
        """Read the option: a mapping, or its JSON.

        Raises:
            OptionError: it is neither, a key is unknown, or a value is not allowed.
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise OptionError(f"kv_transfer_config is no JSON ({error}): {given!r:.80}") from None
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise OptionError(f"kv_transfer_config must be an object with kv_connector and kv_role, got {given!r:.80}")
        if given.get("kv_connector") is None:
            raise OptionError(f"kv_transfer_config: kv_connector is missing; keys are {', '.join(_KEYS)}")
        foreign = {key: value for key, value in given.items() if key not in _KEYS}
        check_foreign_options(foreign, _FOREIGN, _KEYS, "kv_transfer_config")
        return cls(**{key: value for key, value in given.items() if key in _KEYS and value is not None})
