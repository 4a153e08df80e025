"""Time the first forward and backward pass of every layer on a CPU: `python -m tests.layers.first_call_times`.

Times are the processor's, so that other work on the machine counts little.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from insum_nn.layers import ElementwiseTensorProduct, FullTensorProduct, FullyConnectedTensorProduct, TensorSquare
from tests.layers.every_layer import EVERY_LAYER

__all__ = ["first_call_times"]


def _irreps(multiplicity: int, lmax: int) -> str:
    return "+".join(f"{multiplicity}x{degree}{'eo'[degree % 2]}" for degree in range(lmax + 1))


# Tables of thousands of coefficients: their layouts are chosen in the first call.
LARGE: dict[str, Callable[[], nn.Module]] = {
    "FullTensorProduct, lmax 6": lambda: FullTensorProduct(_irreps(2, 6), _irreps(1, 6)),
    "ElementwiseTensorProduct, lmax 6": lambda: ElementwiseTensorProduct(_irreps(2, 6), _irreps(2, 6)),
    "TensorSquare, lmax 6": lambda: TensorSquare(_irreps(4, 6)),
    "FullyConnectedTensorProduct, lmax 4": lambda: FullyConnectedTensorProduct(*[_irreps(8, 4)] * 3),
}


def _cases() -> Iterator[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    for name, case in EVERY_LAYER.items():
        yield name, case.module(), case.inputs(24)
    for name, make in LARGE.items():
        module = make()
        sides = ("in",) if isinstance(module, TensorSquare) else ("in1", "in2")
        yield name, module, tuple(torch.randn(32, getattr(module, f"irreps_{side}").dim) for side in sides)


def first_call_times() -> Iterator[tuple[str, float, float]]:
    """Yield each layer's name and the seconds of its first forward and backward pass."""
    # Torch's own first backward pass starts threads.
    torch.ones(1, requires_grad=True).sum().backward()
    for name, module, inputs in _cases():
        passed = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        begin = time.process_time()
        output = module(*passed)
        middle = time.process_time()
        output.sum().backward()
        yield name, middle - begin, time.process_time() - middle


if __name__ == "__main__":
    found = {name: (forward, backward) for name, forward, backward in first_call_times()}
    if "--json" in sys.argv:
        print(json.dumps(found))
    else:
        for name, (forward, backward) in found.items():
            print(f"{name:40} forward {1e3 * forward:7.1f} ms, backward {1e3 * backward:7.1f} ms")
