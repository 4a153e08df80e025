"""The constants in the state dict of e3nn's tensor products, so that checkpoints go both ways.

e3nn keeps a dense block of coefficients for each triple of degrees that its generated code reads. The static tables
replace these constants; they are written into a state dict and ignored when one is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["add_constants", "did_compile_right", "drop_constants"]

_LEFT_RIGHT = "_compiled_main_left_right."
_RIGHT = "_compiled_main_right."


def did_compile_right(module: Any) -> bool:
    """Return whether the state dict of a module of e3nn has the constants of `right`."""
    known: bool | None = getattr(module, "_did_compile_right", None)
    if known is not None:
        return known
    # e3nn 0.4 has no such attribute. Without constants in its code for `right` there are none to write.
    code = getattr(module, _RIGHT.rstrip("."), None)
    return code is not None and any(True for _ in code.buffers())


def drop_constants(state: dict[str, Any], prefix: str) -> None:
    """Remove e3nn's constants from a state dict."""
    for key in [k for k in state if k.startswith((prefix + _LEFT_RIGHT, prefix + _RIGHT))]:
        del state[key]


def add_constants(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Add the constants that e3nn would keep to a state dict."""
    from e3nn.o3 import wigner_3j

    mask = module.output_mask
    parts = [(_LEFT_RIGHT, module._did_compile_left_right, False), (_RIGHT, module._did_compile_right, True)]
    for name, compiled, right in parts:
        if not compiled:
            continue
        for kind, key in _names(module, right=right):
            if kind == "w3j":
                value = wigner_3j(*key, dtype=mask.dtype, device=mask.device)
                state[f"{prefix}{name}_w3j_{'_'.join(map(str, key))}"] = value
            else:
                pairs = torch.triu_indices(key[0], key[0], 1, device=mask.device)
                state[f"{prefix}{name}_triu_indices_{key[0]}"] = pairs


def _names(module: Any, *, right: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the constants that e3nn's generated code reads, in its order, each once."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for ins in module.instructions:
        a, b, c = module.irreps_in1[ins.i_in1], module.irreps_in2[ins.i_in2], module.irreps_out[ins.i_out]
        if 0 in ins.path_shape or 0 in (a.mul, b.mul, c.mul):
            continue
        found: list[tuple[str, tuple[int, ...]]] = []
        if ins.connection_mode in ("uvu<v", "u<vw"):
            if right:
                continue
            found.append(("triu", (a.mul,)))
        degrees = (a.ir.l, b.ir.l, c.ir.l)
        if not (module._specialized_code and _special(ins.connection_mode, ins.has_weight, degrees, right=right)):
            found.append(("w3j", degrees))
        for item in found:
            if item not in seen:
                seen.add(item)
                yield item


def _special(mode: str, weighted: bool, degrees: tuple[int, int, int], *, right: bool) -> bool:
    """Return whether e3nn has code for these degrees that needs no coefficients."""
    if right:
        general = mode in ("uuw", "uvuv") or (not weighted and mode in ("uvu", "uvv"))
    else:
        general = mode in ("uvuv", "uvu<v", "u<vw") or (not weighted and mode in ("uvu", "uuw"))
    if general:
        return False
    return 0 in degrees or (mode == "uuu" and degrees == (1, 1, 1) and not right)
