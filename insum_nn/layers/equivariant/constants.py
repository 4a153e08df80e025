"""The constants in the state dict of e3nn's tensor products, so that checkpoints go both ways.

e3nn keeps a dense block of coefficients for each triple of degrees that its generated code reads. The static tables
replace these constants; they are written into a state dict and ignored when one is read.
"""

from __future__ import annotations

from typing import Any

import torch

from insum_nn.layers.equivariant.adoption import o3

__all__ = ["add_constants", "did_compile_right", "drop_constants"]

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
        module._constants = [name for part, compiled in parts if compiled for name in _names(module, part)]
    for name in module._constants:
        numbers = [int(number) for number in name.split("_") if number.isdigit()]
        if "w3j" in name:
            value = o3.wigner_3j(*numbers, dtype=mask.dtype, device=mask.device)
        else:
            value = torch.triu_indices(numbers[0], numbers[0], 1, device=mask.device)
        state[prefix + name] = value


def _names(module: Any, part: str) -> list[str]:
    """Return the names of the constants that a part of e3nn's generated code reads, in its order."""
    generate = getattr(_codegen, f"codegen_tensor_product_{part.partition('main_')[2].rstrip('.')}")
    irreps = (module.irreps_in1, module.irreps_in2, module.irreps_out)
    try:
        with torch.device("cpu"):
            code = generate(*irreps, module.instructions, module.shared_weights, module._specialized_code, False)
    except NotImplementedError:
        # e3nn has no `right` of modes with pairs.
        return []
    return [part + name for name, _ in code.named_buffers()]
