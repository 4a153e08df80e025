"""The code that e3nn generates for its tensor products, where it is needed: in TorchScript, and for the state dict.

e3nn keeps a dense block of coefficients for each triple of degrees that this code reads. The static tables replace
these constants; they are written into a state dict and ignored when one is read, so that checkpoints go both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from insum_nn.layers.equivariant.adoption import o3

__all__ = ["add_constants", "did_compile_right", "drop_constants", "generate_code"]

_codegen = o3._tensor_product._codegen
_LEFT_RIGHT = "_compiled_main_left_right."
_RIGHT = "_compiled_main_right."


def did_compile_right(module: Any) -> bool:
    """Return whether the state dict of a module of e3nn has the constants of `right`."""
    # e3nn 0.4 has no such attribute. Without constants in its code for `right` there are none to write.
    code = getattr(module, _RIGHT.rstrip("."), None)
    return getattr(module, "_did_compile_right", code is not None and any(True for _ in code.buffers()))


def drop_constants(state: dict[str, Any], prefix: str) -> None:
    """Remove e3nn's constants from a state dict."""
    for key in [k for k in state if k.startswith((prefix + _LEFT_RIGHT, prefix + _RIGHT))]:
        del state[key]


def add_constants(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Add the constants that e3nn would keep to a state dict."""
    mask = module.output_mask
    if not hasattr(module, "_constants"):
        parts = ((_LEFT_RIGHT, module._did_compile_left_right), (_RIGHT, module._did_compile_right))
        codes = {part: _code(module, part) for part, compiled in parts if compiled}
        buffers = {part: code.named_buffers() for part, code in codes.items() if code is not None}
        module._constants = [part + name for part, named in buffers.items() for name, _ in named]
    for name in module._constants:
        numbers = [int(number) for number in name.split("_") if number.isdigit()]
        if "w3j" in name:
            value = o3.wigner_3j(*numbers, dtype=mask.dtype, device=mask.device)
        else:
            value = torch.triu_indices(numbers[0], numbers[0], 1, device=mask.device)
        state[prefix + name] = value


def _code(module: Any, part: str) -> Any:
    """Return a part of e3nn's code; `None`: e3nn has no `right` of modes with pairs."""
    generate = getattr(_codegen, f"codegen_tensor_product_{part.partition('main_')[2].rstrip('.')}")
    irreps = (module.irreps_in1, module.irreps_in2, module.irreps_out)
    try:
        with torch.device("cpu"):
            return generate(*irreps, module.instructions, module.shared_weights, module._specialized_code, False)
    except NotImplementedError:
        return None


class _NoRight(torch.nn.Module):
    def forward(self, y: Tensor, weight: Tensor) -> Tensor:
        torch._assert(False, "e3nn has no `right` of modes with pairs")
        return y


def generate_code(module: Any) -> None:
    """Give a module of e3nn with the attributes of ours the code that it runs, its constants in full precision."""
    codes = {part.rstrip("."): _code(module, part) for part in (_LEFT_RIGHT, _RIGHT)}
    module._codegen_register({name: code.to(module.output_mask) for name, code in codes.items() if code is not None})
    module._did_compile_right = hasattr(module, "_compiled_main_right")
    if not module._did_compile_right:
        module._compiled_main_right = _NoRight()
    module._constants = [name for name, _ in module.named_buffers() if "." in name]
    constants: dict[str, Any] = {}
    add_constants(module, constants, "")
    module.load_state_dict(constants, strict=False)
