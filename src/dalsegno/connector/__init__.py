"""Connectors: what moves blocks between the device and a store. Scheduler sides decide, worker sides move."""
