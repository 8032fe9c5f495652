"""Blocks and slabs, group managers and the KV-cache manager the scheduler sees. No torch."""
