"""The connector that stores nothing and finds nothing: for tests, and as a child beside others."""

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext

__all__ = ["create"]


def create(config: KVTransferConfig, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    """Make both sides."""
    return SchedulerConnector(), WorkerConnector()
