"""Other libraries, asked for what ours does; imported when a provider is built, so that an absent one is one gap."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.irreps import e3nn_in_double
from benchmarks.registry import Unavailable

__all__ = ["cue_fully_connected", "e3nn_compiled", "e3nn_product", "oeq", "oeq_problem", "spconv"]


def require_cuda(device: torch.device) -> None:
    """Raises `Unavailable` elsewhere: the peer's kernels need a GPU."""
    if device.type != "cuda":
        raise Unavailable("needs CUDA")


def oeq(device: torch.device) -> Any:
    """OpenEquivariance; its C++ extension is compiled when it is first imported."""
    require_cuda(device)
    module: Any = importlib.import_module("openequivariance")
    if not module.BUILT_EXTENSION:
        raise RuntimeError(f"openequivariance built no extension: {module.BUILT_EXTENSION_ERROR}")
    return module


def oeq_problem(module: Any, product: Any, dtype: torch.dtype) -> Any:
    """The problem of a tensor product of e3nn: the same paths, normalised alike by either library's defaults."""
    number = np.float64 if dtype == torch.float64 else np.float32
    problem = module.TPProblem(
        str(product.irreps_in1),
        str(product.irreps_in2),
        str(product.irreps_out),
        [(i.i_in1, i.i_in2, i.i_out, i.connection_mode, True) for i in product.instructions],
        shared_weights=product.shared_weights,
        internal_weights=False,
        irrep_dtype=number,
        weight_dtype=number,
    )
    ours = [float(i.path_weight) for i in product.instructions]
    if not np.allclose(ours, [float(i.path_weight) for i in problem.instructions]):
        raise RuntimeError("openequivariance normalises these paths otherwise than e3nn")
    return problem


def e3nn_product(build: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A module of e3nn, its constants exact to the last digit of the dtype."""
    with e3nn_in_double():
        module = build()
    return module.to(device=device, dtype=dtype)


def e3nn_compiled(build: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The same through `torch.compile`, as e3nn's own tests do it: its TorchScript left out, its graph handed over."""
    library: Any = importlib.import_module("e3nn")
    before = library.get_optimization_defaults()
    name, plain = ("jit_mode", "eager") if "jit_mode" in before else ("jit_script_fx", False)
    torch.compiler.reset()
    library.set_optimization_defaults(**{name: plain})
    try:
        module = e3nn_product(build, device, dtype)
    finally:
        library.set_optimization_defaults(**{name: before[name]})
    return torch.compile(module, fullgraph=True)


def cue_fully_connected(in1: str, in2: str, out: str, *, shared: bool, device: torch.device) -> Any:
    """cuEquivariance's product in e3nn's layout; e3nn's order of weights is its own."""
    require_cuda(device)
    cue: Any = importlib.import_module("cuequivariance")
    cuet: Any = importlib.import_module("cuequivariance_torch")
    product = cuet.FullyConnectedTensorProduct(
        *(cue.Irreps("O3", text) for text in (in1, in2, out)),
        layout=cue.mul_ir,
        shared_weights=shared,
        internal_weights=False,
        device=device,
        dtype=torch.float32,
    )

    def call(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return product(x, y, w[None] if shared else w)

    return call


def spconv(name: str, device: torch.device, *, tf32: bool = False) -> Any:
    """`spconv` or `spconv_triton`: the module `pytorch` of either, tf32 allowed or not."""
    require_cuda(device)
    module: Any = importlib.import_module(f"{name}.pytorch")
    constants: Any = importlib.import_module(f"{name}.constants")
    constants.SPCONV_ALLOW_TF32 = tf32
    return module
