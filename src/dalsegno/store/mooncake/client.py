"""The calls of Mooncake's own client that the store makes, and how a client of the real package is made.

All of them may be made from several threads at once and release the interpreter lock, except `close`, behind which no
other call may follow: the package would read freed memory.
"""

import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any, Protocol

from dalsegno.errors import OptionError
from dalsegno.store.mooncake.codes import code_name
from dalsegno.store.mooncake.config import P2P_METADATA, MooncakeConfig, split_address

__all__ = ["MISSING_PACKAGE", "MooncakeClient", "connect", "load_package"]

MISSING_PACKAGE = (
    "the mooncake store needs libibverbs1, libnuma1 and libcurl4 of Debian, or what has them elsewhere, and a package "
    "for Linux: pip install mooncake-transfer-engine-non-cuda, or a CUDA build of it"
)

_MASTER_TIMEOUT_S = 5.0
# A call of the master's protocol, coro_rpc, without arguments and of no function; what is answered begins likewise.
_QUESTION = bytes([21]) + bytes(19)

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""What the package takes from the environment when it is loaded, unless whoever runs us has set it otherwise.

By itself it logs every connection to stderr, and waits half a minute for a master or a lender that is frozen.
"""


class MooncakeClient(Protocol):
    """What we use of `MooncakeDistributedStore`; codes are those of `Code`, sizes and addresses are in bytes."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Make memory known; returns a code, for memory that overlaps known one an error."""
        ...

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Forget memory that was registered from this very address."""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1, 0 or a negative code for each key; 1 grants a lease."""
        ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """A code for each key; 0 also for a key that existed and has not been overwritten."""
        ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """The number of bytes or a negative code for each key; grants a lease."""
        ...

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        """A code for each key; `force` removes leased ones too."""
        ...

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """The number of objects removed, or a negative code."""
        ...

    def get_size(self, key: str, /) -> int:
        """The object's bytes, or a negative code."""
        ...

    def close(self) -> int:
        """Give back what is lent and end."""
        ...


def load_package() -> Any:
    """Import the package; `OptionError` says what is missing."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise OptionError(f"{MISSING_PACKAGE} ({error})") from error


def connect(config: MooncakeConfig) -> MooncakeClient:
    """Make a client, which lends `global_segment_size` bytes from now until it is closed.

    Raises:
        OptionError: the package is missing, no master answers, or the package refuses the settings.
    """
    package = load_package()
    _check_master(config.master_server_address)
    client: Any = package.MooncakeDistributedStore()
    code = client.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_size,
        config.local_buffer_size,
        config.protocol,
        config.device_name,
        config.master_server_address,
    )
    if code:
        raise OptionError(
            f"Mooncake refuses to start a client ({code_name(code)}) at master {config.master_server_address}; "
            f"{' '.join(_doubts(config))} What Mooncake has printed may say more"
        )
    made: MooncakeClient = client
    return made


def _doubts(config: MooncakeConfig) -> Iterator[str]:
    """What may be wrong with settings that the package refuses."""
    yield f"is local_hostname={config.local_hostname!r} right?"
    if config.metadata_server != P2P_METADATA:
        yield f"Does metadata_server={config.metadata_server!r} answer? {P2P_METADATA} needs none."
    if config.protocol != "tcp":
        yield f"Is there a device for protocol={config.protocol!r}, device_name={config.device_name!r}?"
    if num_bytes := config.global_segment_size + config.local_buffer_size:
        yield f"Are there {num_bytes:,} bytes of memory?"


def _check_master(address: str) -> None:
    """Refuse at once whom the package would try to reach for minutes: nobody, one who is silent, somebody else."""
    if "://" in address:
        return
    port = split_address(address)[1]
    try:
        with socket.create_connection(split_address(address), _MASTER_TIMEOUT_S) as line:
            line.sendall(_QUESTION)
            answer = line.recv(1)
    except OSError as error:
        raise OptionError(
            f"no Mooncake master answers at {address} ({error}); start one with mooncake_master --rpc_port {port}"
        ) from error
    if answer != _QUESTION[:1] and os.environ.get("MC_RPC_PROTOCOL", "tcp") == "tcp":
        raise OptionError(f"what listens at {address} is no Mooncake master: is {port} the master's --rpc_port?")
