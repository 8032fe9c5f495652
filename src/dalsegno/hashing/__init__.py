"""Chained hashes that name prefixes. No torch."""
