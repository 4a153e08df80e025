"""`spconv.pytorch.cppcore`: torch tensors for cumm's code, and facts about the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from insum_nn.errors import InsumDeviceError, import_extra
from insum_nn.faults import Faults

__all__ = ["get_arch", "get_current_stream", "torch_tensor_to_tv", "torch_tensors_to_tv"]

# Those of cumm, of which torch has the same names, but for quantised int8.
_NAMES = {
    getattr(torch, name): name.removeprefix("q")
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "qint8", "uint8")
}


def get_current_stream() -> int:
    """Return the address of the current CUDA stream; 0 without CUDA."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def get_arch() -> tuple[int, int]:
    """Return the compute capability of the current CUDA device; (0, 0) without CUDA."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def torch_tensor_to_tv(
    ten: Tensor, dtype: int | None = None, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
) -> Any:
    """Return a `cumm.tensorview.Tensor` over the memory of a tensor, for callers with kernels of cumm.

    Args:
        ten: on a CPU or a CUDA device; it must outlive the result.
        dtype: one of cumm's; default: that of `ten`.
        shape: default: that of `ten`.
        stride: default: that of `ten`, or of a contiguous tensor of `shape`.

    Raises:
        MissingExtraError: cumm is not installed.
        InsumDtypeError: cumm has no such dtype.
        InsumDeviceError: the tensor is on another kind of device.
    """
    tv = import_extra("cumm.tensorview", "torch_tensor_to_tv; functions of this package take the torch tensor")
    faults = Faults("torch_tensor_to_tv")
    if dtype is None:
        faults.dtype_among("ten", ten.dtype, [*_NAMES], fix="convert the tensor first.")
    if ten.device.type not in ("cpu", "cuda"):
        message = f"is on {ten.device}, expected a CPU or a CUDA device"
        faults.add(InsumDeviceError, "ten", message, fix="move the tensor first.")
    faults.raise_all()
    dtype = getattr(tv, _NAMES[ten.dtype]) if dtype is None else dtype
    device = -1 if ten.device.type == "cpu" else 0
    if shape is not None and stride is None and ten.is_contiguous():
        return tv.from_blob(ten.data_ptr(), list(shape), dtype, device)
    sizes, steps = list(ten.shape if shape is None else shape), list(ten.stride() if stride is None else stride)
    return tv.from_blob_strided(ten.data_ptr(), sizes, steps, dtype, device)


def torch_tensors_to_tv(*tens: Tensor) -> Iterator[Any]:
    """`torch_tensor_to_tv` of each."""
    return (torch_tensor_to_tv(ten) for ten in tens)
