"""Small checkpoints for demos and tests, in which a wrong state, conv state or KV shows in greedy tokens."""

from dalsegno.models.tiny.maker import TINY_KINDS, make_tiny_model

__all__ = ["TINY_KINDS", "make_tiny_model"]
