"""A Mooncake master of this process's own: for tests, trials, and a Mooncake on one host."""

import contextlib
import logging
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from dalsegno.errors import EngineError, OptionError
from dalsegno.store.mooncake.client import MISSING_PACKAGE

__all__ = ["MooncakeMaster", "find_master", "free_port"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0


class MooncakeMaster:
    """A running `mooncake_master`, stopped with this object's context.

    Attributes:
        port: where it listens.
        metrics_port: where it tells over HTTP, at /metrics, what it holds; another one after each start.
        process: the running process; None while it is stopped.
    """

    def __init__(self, port: int | None = None, *, lease_s: float = 10.0, log: Path | None = None) -> None:
        """Start a master and wait until it listens.

        Args:
            port: where it listens, a free one by default.
            lease_s: how long what was looked up or read is kept from eviction.
            log: file for what it prints; dropped by default.

        Raises:
            OptionError: the package is missing, or something else listens at the port.
            EngineError: it does not start.
        """
        self.port = free_port() if port is None else port
        self._lease_s = lease_s
        self._log = log
        self._command = find_master()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        """HOST:PORT of it, on this host."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or start it again at the same port, without what an earlier one knew."""
        if _listens(self.port):
            raise OptionError(f"port {self.port} is in use already, perhaps by another mooncake_master")
        # The port of its metrics is found free and then let go, so that somebody else may take it in between.
        for _ in range(3):
            self.metrics_port = free_port()
            command = [
                self._command,
                f"--rpc_port={self.port}",
                f"--metrics_port={self.metrics_port}",
                f"--default_kv_lease_ttl={round(self._lease_s * 1000)}",
            ]
            with contextlib.ExitStack() as stack:
                target = subprocess.DEVNULL if self._log is None else stack.enter_context(self._log.open("ab"))
                # A group of its own: a Ctrl-C at the terminal is for us, who stop it when nobody needs it any more.
                self.process = subprocess.Popen(command, stdout=target, stderr=target, process_group=0)
            if self._wait():
                return
            self.stop()
        raise EngineError(f"{self._command} does not start at port {self.port}")

    def stop(self, *, kill: bool = False) -> None:
        """End it, if it runs; with `kill` at once, as a crash would."""
        process, self.process = self.process, None
        if process is None:
            return
        (process.kill if kill else process.terminate)()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> "MooncakeMaster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self) -> bool:
        """Wait until it listens; whether it does."""
        assert self.process is not None, "it has been started"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if _listens(self.port):
                return True
            time.sleep(0.01)
        return False


def find_master() -> str:
    """Return the path of `mooncake_master`, that of this Python's environment first.

    Raises:
        OptionError: there is none.
    """
    beside = Path(sys.executable).parent / "mooncake_master"
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if found is None:
        raise OptionError(f"there is no mooncake_master: {MISSING_PACKAGE}")
    return found


def free_port() -> int:
    """Return a port that nothing on this host listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
