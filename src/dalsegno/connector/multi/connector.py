"""`MultiConnector`: several connectors as one, from `{"connectors": [{"kv_connector": …}, …]}`."""

from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.multi.scheduler import MultiScheduler
from dalsegno.connector.multi.worker import MultiWorker
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.errors import OptionError
from dalsegno.options import check_foreign_options

__all__ = ["create"]

_OWNER = "kv_connector_extra_config of MultiConnector"


def create(config: KVTransferConfig, context: ConnectorContext) -> Sides:
    """Make the sides of every child, in order, and those that drive them.

    Raises:
        OptionError: the list of children is not one, or a child's config is refused; those made before are shut down.
    """
    made: list[Sides] = []
    try:
        for index, given in enumerate(_children(config)):
            try:
                made.append(create_connector(_child_config(given, config), context))
            except OptionError as error:
                raise OptionError(f"MultiConnector, connectors[{index}]: {error}") from error
    except BaseException:
        scheduler, workers = _sides(made, context)
        for worker in workers:
            worker.shutdown()
        scheduler.shutdown()
        raise
    return _sides(made, context)


def _sides(children: Sequence[Sides], context: ConnectorContext) -> Sides:
    by_rank = zip(*(workers for _, workers in children), strict=True)
    schedulers = [scheduler for scheduler, _ in children]
    return MultiScheduler(schedulers, context.world_size), [MultiWorker(sides) for sides in by_rank]


def _children(config: KVTransferConfig) -> Sequence[Any]:
    given = config.kv_connector_extra_config
    check_foreign_options({name: given[name] for name in given if name != "connectors"}, {}, ["connectors"], _OWNER)
    children = given.get("connectors")
    if isinstance(children, str) or not isinstance(children, Sequence) or not children:
        raise OptionError(
            f"{_OWNER}: connectors must be a list of at least one object with kv_connector, got {children!r:.80}"
        )
    return children


def _child_config(given: object, parent: KVTransferConfig) -> KVTransferConfig:
    """Read one child; its role is the parent's unless it has its own."""
    if not isinstance(given, Mapping):
        raise OptionError(f"must be an object with kv_connector, got {given!r:.80}")
    policy = parent.kv_load_failure_policy
    inherited = {"kv_role": parent.kv_role, "kv_load_failure_policy": policy}
    config = KVTransferConfig.parse({**inherited, **{key: value for key, value in given.items() if value is not None}})
    if config.kv_load_failure_policy != policy:
        raise OptionError(
            f"kv_load_failure_policy={config.kv_load_failure_policy!r} must be that of the MultiConnector, {policy!r}: "
            "it holds for all children"
        )
    return config
