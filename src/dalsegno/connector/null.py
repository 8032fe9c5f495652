"""The connector that stores nothing and finds nothing: for tests, and as a child beside others."""

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides
from dalsegno.errors import OptionError

__all__ = ["create"]


def create(config: KVTransferConfig, context: ConnectorContext) -> Sides:
    """Make the sides.

    Raises:
        OptionError: it is given settings; it has none.
    """
    if config.kv_connector_extra_config:
        raise OptionError(
            f"NullConnector has no settings, got kv_connector_extra_config={dict(config.kv_connector_extra_config)!r}"
        )
    return SchedulerConnector(), [WorkerConnector() for _ in context.ranks]
