"""The Mooncake store: objects in memory that processes of many hosts lend to one master."""

from dalsegno.store.mooncake.mooncake_store import MooncakeStore, open_mooncake

__all__ = ["MooncakeStore", "open_mooncake"]
