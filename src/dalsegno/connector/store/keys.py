"""From an engine's identity to store keys: everything that decides whether two engines may share bytes.

The namespace is a digest of what is the same for all objects of one rank; group, boundary, salt and hash make the key.
"""

from dalsegno.connector.registry import ConnectorContext
from dalsegno.connector.store.messages import StoredObject
from dalsegno.kv.layout import GroupSpec
from dalsegno.store.keys import StoreKey, namespace_digest

__all__ = ["KeyMaker"]


class KeyMaker:
    """Keys of one rank of one engine."""

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
            "rank": rank,
            "world_size": context.world_size,
        }
        items |= {f"identity.{name}": value for name, value in context.identity.items()}
        items |= {f"group.{group.group_id}": _describe(group) for group in context.layout.groups}
        self.namespace = namespace_digest(items)
        self._parts = [group.name for group in context.layout.groups]

    def key(self, salt: str, item: StoredObject) -> StoreKey:
        """The key of an object in a key domain."""
        return StoreKey(self.namespace, salt, self._parts[item.group_id], item.boundary, item.block_hash)


def _describe(group: GroupSpec) -> str:
    """Everything about a group that decides what its bytes mean."""
    layers = [
        f"{layer.layer}:" + ",".join(f"{part.name}{list(part.shape)}{part.dtype}" for part in layer.parts)
        for layer in group.layers
    ]
    return (
        f"{group.name} prefix={group.prefix} window={group.window} block={group.block_size} layers={';'.join(layers)}"
    )
