"""Connectors of a third party, as tests name them by module path."""

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext

__all__ = ["ClassConnector", "NotOneAtAll", "OneSided", "function_connector"]


class ClassConnector(SchedulerConnector):
    """A class with a class method `create`."""

    @classmethod
    def create(cls, config: KVTransferConfig, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
        return cls(), WorkerConnector()


class OneSided:
    """Returns something else than two sides."""

    @classmethod
    def create(cls, config: KVTransferConfig, context: ConnectorContext) -> tuple[SchedulerConnector, str]:
        return SchedulerConnector(), "worker"


def function_connector(
    config: KVTransferConfig, context: ConnectorContext
) -> tuple[SchedulerConnector, WorkerConnector]:
    """A function that makes both sides."""
    return ClassConnector(), WorkerConnector()


NotOneAtAll = 3
