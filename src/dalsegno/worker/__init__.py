"""Executes step plans on a model: device memory, forward, sampling."""
