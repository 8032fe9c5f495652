"""Compiling the kernels with the machine's C compiler, once per source, compiler and kind of processor.

The result is kept in a folder of the user's own; processes may compile at the same time, each puts a whole file in
place. Whatever is missing or fails here means that there is no library, never an error.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["compiled_library"]

_log = logging.getLogger(__name__)
_COMPILERS = ("cc", "gcc", "clang")
# No option may assume that there are no NaNs; the last two only drop errno and traps, so that loops become vector code.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_TIMEOUT_S = 120


def compiled_library(source: Path) -> Path | None:
    """Return the shared library of a C source, compiled if that was not done before; None where it cannot be had."""
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if os.name != "posix" or compiler is None:
        _log.info("torch runs everything: no C compiler (%s) for the native kernels", ", ".join(_COMPILERS))
        return None
    try:
        library = _private_folder() / f"{source.stem}-{_digest(source, compiler)}.so"
        if not library.exists():
            _compile(source, compiler, library)
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        _log.info("torch runs everything: the native kernels could not be compiled: %s", detail)
        return None
    return library


def _private_folder() -> Path:
    """Return a folder that only this user can write: what is loaded from it runs as this user."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "dalsegno"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} can be written by others")
    return folder


def _digest(source: Path, compiler: str) -> str:
    """Name source, flags and what the compiler predefines: its version and the instructions of this processor."""
    predefined = _run([compiler, *_FLAGS, "-E", "-dM", "-x", "c", os.devnull])
    parts = [source.read_bytes(), " ".join(_FLAGS).encode(), compiler.encode(), predefined.encode()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _compile(source: Path, compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        _run([compiler, *_FLAGS, str(source), "-o", str(made), "-lm"])
        made.replace(library)


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return result.stdout
