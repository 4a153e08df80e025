"""GraphModule -> callable through TorchInductor. The only file that names Inductor's options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from insum_nn.compiler.options import Options
from insum_nn.errors import InsumBackendError

__all__ = ["compile_graph", "inductor_options", "kernel_sources"]


def inductor_options(device_type: str, options: Options) -> dict[str, Any]:
    """Options for our graphs; they are passed with each compilation and never set for the whole process."""
    chosen: dict[str, Any] = {
        # Every index was proven or clamped before the graph reads through it.
        "assert_indirect_indexing": False,
    }
    if device_type == "cuda" and options.native_matmul:
        chosen["triton.native_matmul"] = True
        chosen["triton.prefer_nd_tiling"] = True
    if device_type == "cuda":
        chosen["max_autotune_pointwise"] = True
    return chosen


def _no_duck_shapes() -> AbstractContextManager[None]:
    """Two axes that happen to be equally long in the first call must not be taken for the same extent."""
    from torch.fx.experimental import _config

    return _config.patch(use_duck_shape=False)


def compile_graph(graph: fx.GraphModule, device_type: str, options: Options) -> Callable[..., Tensor]:
    """Compile for all sizes.

    Raises:
        InsumBackendError: Inductor does not compile the graph on this device.
    """
    compiled = torch.compile(
        graph, fullgraph=True, dynamic=True, backend="inductor", options=inductor_options(device_type, options)
    )
    first = True

    def run(*args: object) -> Tensor:
        nonlocal first
        if not first:
            return compiled(*args)
        try:
            with _no_duck_shapes():
                result = compiled(*args)
        except Exception as error:
            raise InsumBackendError(
                f"Inductor could not compile the statement for {device_type}: {type(error).__name__}: {error}",
                fix='choose Options(backend="eager"), or report the statement.',
            ) from error
        first = False
        return result

    return run


def kernel_sources(graph: fx.GraphModule, args: tuple[object, ...], device_type: str, options: Options) -> list[str]:
    """The code that Inductor writes for these arguments, for `explain()` and for tests of its shape."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(
        graph, fullgraph=True, dynamic=True, backend="inductor", options=inductor_options(device_type, options)
    )
    with torch.no_grad(), _no_duck_shapes():
        torch._dynamo.reset_code(type(graph).forward.__code__)
        _, sources = run_and_get_code(compiled, *args)
    return list(sources)
