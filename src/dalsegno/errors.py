"""The error tree, split by who must act.

    DalsegnoError
    ├── UserError        a bad option or a bad request: the caller changes something (HTTP 4xx)
    │   ├── OptionError  an option of the engine, the command line or a sampling parameter
    │   ├── RequestError one request; others go on
    │   └── CheckpointError  a model folder that cannot be served as it is
    └── EngineError      ours (HTTP 5xx)

Expected outcomes (no room, a miss) are values, never exceptions.
"""

__all__ = ["CheckpointError", "DalsegnoError", "EngineError", "OptionError", "RequestError", "UserError"]


class DalsegnoError(Exception):
    """Base of everything Dalsegno raises on purpose."""


class UserError(DalsegnoError, ValueError):
    """The caller gave something that is not allowed; the message says what was given and what is."""


class OptionError(UserError):
    """A bad or unknown option."""


class RequestError(UserError):
    """A request that can never be served."""


class CheckpointError(UserError):
    """A model folder that is missing something, or holds something that is not supported."""


class EngineError(DalsegnoError, RuntimeError):
    """Something failed inside the engine; the message names the request or the broken invariant."""
