"""Connectors of a third party, as tests name them by module path."""

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides

__all__ = ["ClassConnector", "NotOneAtAll", "OneSided", "function_connector"]


class ClassConnector(SchedulerConnector):
    """A class with a class method `create`."""

    @classmethod
    def create(cls, config: KVTransferConfig, context: ConnectorContext) -> Sides:
        return cls(), [WorkerConnector() for _ in context.ranks]


class OneSided:
    """Returns something else than two sides."""

    @classmethod
    def create(cls, config: KVTransferConfig, context: ConnectorContext) -> tuple[SchedulerConnector, str]:
        return SchedulerConnector(), "worker"


def function_connector(config: KVTransferConfig, context: ConnectorContext) -> Sides:
    """A function that makes both sides."""
    return ClassConnector(), [WorkerConnector() for _ in context.ranks]


NotOneAtAll = 3
