"""Functions of the compiler for models and for layers that run between statements."""

from insum_nn.compiler.api import call_step, keep_inner, silu

__all__ = ["call_step", "keep_inner", "silu"]
