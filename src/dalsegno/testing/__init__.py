"""Fakes, planted faults and oracles for tests; nothing in the package imports it."""
