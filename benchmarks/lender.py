"""A Mooncake on this host for benchmarks: another process has the memory, so that bytes cross the loopback."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dalsegno.store.mooncake.master import free_port

__all__ = ["lender"]


@contextmanager
def lender(num_bytes: int) -> Iterator[str]:
    """Run `dalsegno store serve --with-master` on a free port; gives the master's HOST:PORT."""
    address = f"127.0.0.1:{free_port()}"
    serve = ["store", "serve", f"mooncake://{address}", "--with-master", "--segment-bytes", str(num_bytes)]
    command = [sys.executable, "-c", "from dalsegno.cli.main import app; app()", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"lending"), "it has ended"
        try:
            yield address
        finally:
            process.terminate()
