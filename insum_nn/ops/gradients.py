"""What layers between statements take from the compiler."""

from insum_nn.compiler.api import keep_inner, silu

__all__ = ["keep_inner", "silu"]
