"""Activations between statements."""

from insum_nn.compiler.api import silu

__all__ = ["silu"]
