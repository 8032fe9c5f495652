"""From an engine's identity to store keys: everything that decides whether two engines may share bytes.

The namespace is a digest of what is the same for all objects of one group of one rank; group, boundary, salt and hash
make the key. Neighbouring ranks that hold the same bytes of a group share its namespace, and each puts its part.
"""

from dalsegno.connector.registry import ConnectorContext
from dalsegno.connector.store.messages import StoredObject
from dalsegno.kv.layout import GroupSpec
from dalsegno.store.keys import StoreKey, namespace_digest

__all__ = ["KeyMaker"]


class KeyMaker:
    """Keys of one rank of one engine.

    Attributes:
        namespaces: those of all its keys.
    """

    def __init__(self, context: ConnectorContext, rank: int, object_tokens: int, cache_prefix: str) -> None:
        """Derive the namespace.

        Args:
            context: the engine.
            rank: whose keys, of `context.world_size`.
            object_tokens: tokens per object of full attention.
            cache_prefix: the user's own part of the namespace.
        """
        config = context.cache_config
        items: dict[str, str | int] = {
            "cache_prefix": cache_prefix,
            "block_size": config.block_size,
            "hash_block_size": config.hash_block_size,
            "object_tokens": object_tokens,
        }
        items |= {f"identity.{name}": value for name, value in context.identity.items()}
        items |= {f"group.{group.group_id}": _describe(group) for group in context.layout.groups}
        self._rank = rank
        self._steps = [context.put_step.get(group.group_id, 1) for group in context.layout.groups]
        by_step = {
            step: namespace_digest({**items, "rank": rank // step, "world_size": context.world_size // step})
            for step in set(self._steps)
        }
        self.namespaces = sorted(by_step.values())
        self._groups = [
            (by_step[step], group.name) for step, group in zip(self._steps, context.layout.groups, strict=True)
        ]

    def key(self, salt: str, item: StoredObject) -> StoreKey:
        """The key of an object in a key domain."""
        namespace, part = self._groups[item.group_id]
        return StoreKey(namespace, salt, part, item.boundary, item.block_hash)

    def puts(self, item: StoredObject) -> bool:
        """Whether it is this rank that puts the object, among those that hold the same bytes."""
        step = self._steps[item.group_id]
        return int.from_bytes(item.block_hash[:8], "little") % step == self._rank % step


def _describe(group: GroupSpec) -> str:
    """Everything about a group that decides what its bytes mean."""
    layers = [
        f"{layer.layer}:" + ",".join(f"{part.name}{list(part.shape)}{part.dtype}" for part in layer.parts)
        for layer in group.layers
    ]
    return (
        f"{group.name} prefix={group.prefix} window={group.window} block={group.block_size} layers={';'.join(layers)}"
    )
