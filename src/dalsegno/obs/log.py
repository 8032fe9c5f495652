"""Where log lines go when Dalsegno is the application: stderr, one line each. As a library it configures nothing."""

import logging
import sys

__all__ = ["log_to_stderr"]


def log_to_stderr(level: int) -> None:
    """Send log lines of Dalsegno from `level` up to stderr; a second call only changes the level."""
    logger = logging.getLogger("dalsegno")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever `sys.stderr` is when the line comes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self.stream = sys.stderr
        super().emit(record)
