"""The embedded store: objects in an LMDB file that processes of one host share and that outlives them."""

from dalsegno.store.embedded.embedded_store import DEFAULT_STORE_BYTES, EmbeddedStore

__all__ = ["DEFAULT_STORE_BYTES", "EmbeddedStore"]
