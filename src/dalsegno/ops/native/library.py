"""The loaded kernels, and which of them the ops of the calling thread use.

A worker loads them once and makes them current around each step; without them, or outside of a step, ops run torch.
"""

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

from dalsegno.ops.native.compiler import compiled_library

__all__ = ["Kernels", "current_kernels", "kernels_in_use", "load_kernels"]

Kernels = ctypes.PyDLL
"""The library. Calls keep the interpreter lock: a kernel takes less time than handing it over may."""

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("kernels.c")
_TYPES = {"p": c_void_p, "i": c_int64, "f": c_float}
# The arguments of each kernel as kernels.c has them: pointers, integers, floats.
_SIGNATURES = {
    "linear": "pppp iiii",
    "rms_norm": "pppp iiiiiiii ff",
    "conv_step": "ppppp i pp iiiii",
    "gated_delta_step": "ppppppp i pp iiiiiiiiii ff",
    "scan_step": "pppppppp i pp iiiiiiiii",
    "routed_experts": "ppppppp iiiiii",
}


class _Current(threading.local):
    kernels: Kernels | None = None


_current = _Current()


def load_kernels() -> Kernels | None:
    """Compile the kernels if need be and load them; None where that cannot be done, with one line of log."""
    path = compiled_library(_SOURCE)
    if path is None:
        return None
    try:
        kernels = Kernels(str(path))
        for name, signature in _SIGNATURES.items():
            function = getattr(kernels, name)
            function.argtypes = [_TYPES[letter] for letter in signature if letter != " "]
            function.restype = None
    except (OSError, AttributeError) as error:
        _log.info("torch runs everything: the native kernels could not be loaded: %s", error)
        return None
    return kernels


def current_kernels() -> Kernels | None:
    """Return the kernels the calling thread may use."""
    return _current.kernels


@contextmanager
def kernels_in_use(kernels: Kernels | None) -> Iterator[None]:
    """Make `kernels` current for the calling thread within the block; None makes ops run torch."""
    before, _current.kernels = _current.kernels, kernels
    try:
        yield
    finally:
        _current.kernels = before
