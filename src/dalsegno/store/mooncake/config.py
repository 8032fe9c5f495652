"""Where Mooncake is and what this process lends to it: Mooncake's own settings, under its own names.

They come from the file that MOONCAKE_CONFIG_PATH names or, without one, from MOONCAKE_MASTER and its like; settings of
the store go first, key by key.
"""

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options

__all__ = [
    "DEFAULT_PORT",
    "MIN_SEGMENT_BYTES",
    "P2P_METADATA",
    "MooncakeConfig",
    "master_address",
    "parse_bytes",
    "split_address",
]

DEFAULT_PORT = 50051
"""Port of a master that is named by its host alone."""

P2P_METADATA = "P2PHANDSHAKE"
"""`metadata_server` of clients that find each other by asking each other."""

MIN_SEGMENT_BYTES = 2**24
"""Least bytes that a process can lend, if it lends any; Mooncake refuses less."""

_SCHEME = "mooncake://"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TOO_MANY_BYTES = 2**63
_SIZES = ("global_segment_size", "local_buffer_size")
_PROTOCOLS = ("tcp", "rdma")
_MODES = ("embedded", "standalone-store")

_OFF: Mapping[str, tuple[Any, ...]] = {
    "enable_offload": (False, None),
    "enable_ssd_offload": (False, None),
    "ssd_offload_path": ("", None),
    "tenant_id": ("default", "", None),
    "enable_client_http_server": (False, None),
    "client_http_port": (9300, None),
    "preferred_segment": ("", False, None),
}
"""What else stands in Mooncake's files and beside them, with the values that ask for nothing."""

_VARIABLES = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "local_buffer_size",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
}


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Checked settings.

    Attributes:
        master_server_address: HOST:PORT of the master, also as mooncake://HOST:PORT, or an address with a scheme of
            Mooncake's.
        local_hostname: the name under which other hosts reach this one; found out if empty.
        metadata_server: where clients find each other; by asking each other unless set.
        global_segment_size: bytes this process lends; what others put there is gone when it ends.
        local_buffer_size: bytes of a buffer of the client's own, which this store does not need.
        protocol: "tcp" or "rdma".
        device_name: the RDMA device.
        mode: "standalone-store" insists that nothing is lent.

    Raises:
        OptionError: naming the setting, what was given and what is allowed.
    """

    master_server_address: str = ""
    local_hostname: str = ""
    metadata_server: str = P2P_METADATA
    global_segment_size: int = 0
    local_buffer_size: int = 0
    protocol: str = "tcp"
    device_name: str = ""
    mode: str = "embedded"

    def __post_init__(self) -> None:
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            if name in _SIZES:
                object.__setattr__(self, name, parse_bytes(name, value))
            elif not isinstance(value, str):
                raise OptionError(f"mooncake: {name} must be text, got {value!r}")
        object.__setattr__(self, "protocol", self.protocol.lower())
        for name, allowed in (("protocol", _PROTOCOLS), ("mode", _MODES)):
            if getattr(self, name) not in allowed:
                raise OptionError(f"mooncake: {name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}")
        if 0 < self.global_segment_size < MIN_SEGMENT_BYTES:
            raise OptionError(
                f"mooncake: global_segment_size must be 0 or at least {MIN_SEGMENT_BYTES}, got "
                f"{self.global_segment_size}"
            )
        if self.mode == "standalone-store" and self.global_segment_size:
            raise OptionError(
                "mooncake: mode='standalone-store' lends nothing, so global_segment_size must be 0, got "
                f"{self.global_segment_size}"
            )
        if not self.master_server_address:
            raise OptionError(
                "mooncake: master_server_address must be HOST:PORT of the master; give it, or a file of settings by "
                "MOONCAKE_CONFIG_PATH"
            )
        if self.master_server_address.startswith(_SCHEME):
            object.__setattr__(self, "master_server_address", master_address(self.master_server_address))
        if "://" not in self.master_server_address:
            host, port = split_address(self.master_server_address)
            object.__setattr__(self, "master_server_address", f"{host}:{port}")
        if not self.local_hostname:
            object.__setattr__(self, "local_hostname", _own_name(self.master_server_address))

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> "MooncakeConfig":
        """Build the config from the store's settings, above those of the environment, `os.environ` by default."""
        found = _from_environment(os.environ if environment is None else environment)
        return cls(**found | _own(settings, "the mooncake store"))


def master_address(url: str) -> str:
    """Return the HOST:PORT of `mooncake://HOST:PORT`.

    Raises:
        OptionError: it is something else.
    """
    if not url.startswith(_SCHEME):
        raise OptionError(f"a Mooncake store is named mooncake://HOST:PORT, got {url!r}")
    host, port = split_address(url.removeprefix(_SCHEME))
    return f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or HOST; `OptionError` where it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = address, str(DEFAULT_PORT)
    if not re.fullmatch(r"[\w.-]+", host) or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 2**16:
        raise OptionError(f"the address of a Mooncake master is HOST:PORT, got {address!r}")
    return host, int(port)


def parse_bytes(name: str, value: Any) -> int:
    """Return a number of bytes given as an integer of at least 0 or as text such as "4GB"; raises `OptionError`."""
    num_bytes: float = -1
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        num_bytes = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if 0 <= num_bytes < _TOO_MANY_BYTES:
        return int(num_bytes)
    raise OptionError(f'{name} must be a number of bytes, as an integer or such as "4GB", got {value!r}')


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    if environment.get("MOONCAKE_PREFERRED_SEGMENT"):
        raise OptionError("MOONCAKE_PREFERRED_SEGMENT is not supported: the master chooses where objects lie; unset it")
    path = environment.get("MOONCAKE_CONFIG_PATH")
    if not path:
        return {name: environment[variable] for variable, name in _VARIABLES.items() if environment.get(variable)}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"MOONCAKE_CONFIG_PATH={path!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"MOONCAKE_CONFIG_PATH={path!r} must hold a JSON object, got {found!r}")
    return _own(found, f"MOONCAKE_CONFIG_PATH={path!r}")


def _own(given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the settings that are ours; the others are refused by name unless they ask for nothing."""
    names = [entry.name for entry in fields(MooncakeConfig)]
    check_foreign_options({name: value for name, value in given.items() if name not in names}, _OFF, names, owner)
    return {name: value for name, value in given.items() if name in names and value is not None}


def _own_name(master: str) -> str:
    """The address from which this host reaches the master: others on that network reach it there."""
    if "://" in master:
        return socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(split_address(master))  # sends nothing
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
