"""`dalsegno store serve`: lending memory to a Mooncake store until stopped."""

import contextlib
import signal
import threading

import typer

from dalsegno.errors import EngineError, OptionError
from dalsegno.store.mooncake.client import connect, load_package
from dalsegno.store.mooncake.config import MIN_SEGMENT_BYTES, MooncakeConfig, master_address, parse_bytes, split_address
from dalsegno.store.mooncake.master import MooncakeMaster

__all__ = ["serve_memory"]

_WATCH_S = 0.5


def serve_memory(url: str, segment_bytes: str, *, with_master: bool) -> None:
    """Lend memory to the master at `mooncake://HOST:PORT` until SIGINT or SIGTERM; called on the main thread.

    Prints one line on stdout when others can use the memory. The settings that are not given come from the environment,
    see `MooncakeConfig.from_settings`.

    Raises:
        OptionError: something is wrong with the address or the size, the package is missing, no master answers, or
            the port of the one to start is in use.
        EngineError: the master that was started has ended by itself.
    """
    address = master_address(url)
    num_bytes = parse_bytes("segment_bytes", segment_bytes)
    if num_bytes < MIN_SEGMENT_BYTES:
        raise OptionError(f"segment_bytes must be at least {MIN_SEGMENT_BYTES}, got {num_bytes}")
    config = MooncakeConfig.from_settings({"master_server_address": address, "global_segment_size": num_bytes})
    load_package()
    stopped = threading.Event()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: stopped.set()))
        master = stack.enter_context(MooncakeMaster(split_address(address)[1])) if with_master else None
        client = connect(config)
        stack.callback(client.close)
        host = split_address(address)[0]
        metrics = f", metrics at http://{host}:{master.metrics_port}/metrics" if master is not None else ""
        typer.echo(f"lending {num_bytes:,} bytes to mooncake://{address}{metrics}; stop with Ctrl-C or SIGTERM")
        while not stopped.wait(_WATCH_S):
            if master is not None and master.process is not None and master.process.poll() is not None:
                raise EngineError("the master has ended; what was stored is lost")
