"""How a store is connected to the KV-cache manager: the interface only. No torch."""
