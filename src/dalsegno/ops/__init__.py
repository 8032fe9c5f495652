"""Kernels on paged memory, each beside the naive float32 reference that defines it."""
