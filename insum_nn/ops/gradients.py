"""What layers between statements, and models, take from the compiler."""

from insum_nn.compiler.api import call_step, keep_inner, silu

__all__ = ["call_step", "keep_inner", "silu"]
