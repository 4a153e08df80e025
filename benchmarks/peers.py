"""Baselines: other libraries, called for what ours does, and imported when a provider is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.irreps import Channelwise, e3nn_in_double
from benchmarks.registry import Unavailable

__all__ = [
    "CueConvolution",
    "CueProduct",
    "cue_convolution",
    "cue_fully_connected",
    "e3nn_compiled",
    "e3nn_product",
    "oeq",
    "oeq_problem",
    "spconv",
    "spconv_on_cpu",
    "warpconvnet",
]


def require_cuda(device: torch.device) -> None:
    """Raise `Unavailable` on other devices: the library's kernels need a GPU."""
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
    """Return the problem of a tensor product of e3nn: the same paths, with either library's default normalisation."""
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
        raise RuntimeError("openequivariance normalises these paths differently from e3nn")
    return problem


def e3nn_product(build: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Build a module of e3nn whose constants are exact to the last digit of the dtype."""
    with e3nn_in_double():
        module = build()
    return module.to(device=device, dtype=dtype)


def e3nn_compiled(build: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Build the same for `torch.compile`, as e3nn's own tests do: without its TorchScript."""
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


class CueProduct(NamedTuple):
    """A fully connected product of cuEquivariance, and where each of its numbers is in e3nn's layout.

    Attributes:
        call: (x, y, w) -> output, all in cuEquivariance's own layout, the faster one; weights are ordered as e3nn's.
        x: column of e3nn's first input for each column of its own.
        y: the same of the second.
        out: the same of the output.
    """

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    out: Tensor


def cue_fully_connected(
    in1: str, in2: str, out: str, *, shared: bool, device: torch.device, method: str | None = None
) -> CueProduct:
    """cuEquivariance's fully connected product, by default with the method that it selects; "naive" runs on a CPU."""
    if method != "naive":
        require_cuda(device)
    cue: Any = importlib.import_module("cuequivariance")
    cuet: Any = importlib.import_module("cuequivariance_torch")
    irreps = [cue.Irreps("O3", text) for text in (in1, in2, out)]
    product = cuet.FullyConnectedTensorProduct(
        *irreps,
        layout=cue.ir_mul,
        shared_weights=shared,
        internal_weights=False,
        device=device,
        dtype=torch.float32,
        method=method,
    )
    _require_kernels(product, method)

    def call(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return product(x, y, w[None] if shared else w)

    return CueProduct(call, *(_columns(each).to(device) for each in irreps))


def _require_kernels(product: Any, method: str | None) -> None:
    """Raise where cuEquivariance runs its slow method, to which it falls back with no more than a warning."""
    used = {part.method for part in product.modules() if hasattr(part, "method")}
    if method != "naive" and (not used or "naive" in used):
        raise RuntimeError(
            "cuEquivariance does not run its kernels here; its warning says why. cuequivariance_ops_torch needs"
            " the wheel for this Python and CUDA, and the folders of CUDA's libnvrtc and libcublas in LD_LIBRARY_PATH"
        )


class CueConvolution(NamedTuple):
    """A convolution of cuEquivariance, and where each of its numbers is in e3nn's layout.

    Attributes:
        call: (x, y, w, receivers, senders, nodes) -> output, all in cuEquivariance's own layout, the faster one.
        x: column of e3nn's input for each column of its own.
        w: the same of the weights.
        out: the same of the output.
    """

    call: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    x: Tensor
    w: Tensor
    out: Tensor


def cue_convolution(
    shape: Channelwise, device: torch.device, dtype: torch.dtype, method: str = "uniform_1d"
) -> CueConvolution:
    """cuEquivariance's channelwise product with gather and scatter; of its methods only "naive" runs on a CPU."""
    if method != "naive":
        require_cuda(device)
    cue: Any = importlib.import_module("cuequivariance")
    cuet: Any = importlib.import_module("cuequivariance_torch")
    in1, in2, out = (cue.Irreps("O3", text) for text in (shape.in1, shape.in2, shape.out))
    product = cuet.ChannelWiseTensorProduct(
        *(in1, in2, list(dict.fromkeys(ir for _, ir in out))),
        layout=cue.ir_mul,
        shared_weights=False,
        internal_weights=False,
        device=device,
        dtype=dtype,
        math_dtype=dtype,
        method=method,
    )
    _require_kernels(product, method)
    # Its paths in the order in which it makes them, and then sorted by their outputs.
    kept = {ir for _, ir in out}
    paths = [
        (i, j, mul * other, ir)
        for i, (mul, a) in enumerate(in1)
        for j, (other, b) in enumerate(in2)
        for ir in a * b
        if ir in kept
    ]
    order = cue.Irreps("O3", [(mul, ir) for _, _, mul, ir in paths]).sort().inv
    place = {(i, j, str(out[k].ir)): n for n, (i, j, k, *_) in enumerate(shape.instructions)}
    starts = np.cumsum([0, *(mul * ir.dim for mul, ir in out)])
    weights = np.cumsum([0, *(out[k].mul for _, _, k, *_ in shape.instructions)])
    columns: list[Tensor] = []
    weight_columns: list[Tensor] = []
    for i, j, mul, ir in (paths[k] for k in order):
        number = place[i, j, str(ir)]
        columns.append(int(starts[shape.instructions[number][2]]) + _component_major(mul, ir.dim))
        weight_columns.append(int(weights[number]) + torch.arange(mul))

    def call(x: Tensor, y: Tensor, w: Tensor, receivers: Tensor, senders: Tensor, nodes: int) -> Tensor:
        return product(x, y, w, indices_1=senders, indices_out=receivers, size_out=nodes)

    found = (_columns(in1), torch.cat(weight_columns), torch.cat(columns))
    return CueConvolution(call, *(each.to(device) for each in found))


def _columns(irreps: Any) -> Tensor:
    """Column of e3nn's layout for each column of cuEquivariance's."""
    starts = np.cumsum([0, *(mul * ir.dim for mul, ir in irreps)]).tolist()
    return torch.cat([start + _component_major(mul, ir.dim) for start, (mul, ir) in zip(starts, irreps, strict=False)])


def _component_major(mul: int, dim: int) -> Tensor:
    """Columns of a (mul, dim) block in the order of (dim, mul)."""
    return torch.arange(mul * dim).reshape(mul, dim).T.reshape(-1)


def warpconvnet(device: torch.device) -> Any:
    """WarpConvNet's modules: `convolution` is its layer, `voxels` its tensor. It tunes itself at the first calls."""
    require_cuda(device)
    layers: Any = importlib.import_module("warpconvnet.nn.modules.sparse_conv")
    types: Any = importlib.import_module("warpconvnet.geometry.types.voxels")
    return layers.SparseConv3d, types.Voxels


def spconv(name: str, device: torch.device, *, tf32: bool = False) -> Any:
    """Import the module `pytorch` of `spconv` or `spconv_triton`, with tf32 allowed or not."""
    require_cuda(device)
    module: Any = importlib.import_module(f"{name}.pytorch")
    constants: Any = importlib.import_module(f"{name}.constants")
    constants.SPCONV_ALLOW_TF32 = tf32
    return module


def spconv_on_cpu() -> Any:
    """Import spconv's wheel for CPUs (`tests/peers/spconv/requirements.txt`)."""
    if torch.get_num_threads() > 1:
        raise Unavailable("on a CPU its threads add to the same rows without atomics")
    module: Any = importlib.import_module("spconv.pytorch")
    # Its backward asks for the current CUDA stream there too.
    for part in ("ops", "functional"):
        vars(getattr(module, part))["get_current_stream"] = lambda: 0
    return module
