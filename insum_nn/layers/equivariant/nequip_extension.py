"""What the package nequip loads of this one: a modifier of its models, `nequip-compile .. --modifiers enable_insum_nn`.

An entry point in the group `nequip.extension` names this module, so nequip imports it; nothing here does.
"""

from __future__ import annotations

from typing import Any

from insum_nn.errors import import_extra
from insum_nn.layers.swap import swap

__all__: list[str] = []

_nn = import_extra("nequip.nn", "its extension")


# Before 0.9 nequip has no modifiers, and is to be imported all the same.
if hasattr(_nn, "model_modifier"):

    @_nn.model_modifier(persistent=False)
    @classmethod
    def enable_insum_nn(cls: type, model: Any) -> Any:
        """Replace convolutions, tensor products, linear layers, gates and harmonics by those of insum_nn."""
        swap(model)
        return model

    # nequip looks for modifiers among the methods of a model's modules; this is the class of all models.
    import_extra("nequip.nn.graph_model", "its extension").GraphModel.enable_insum_nn = enable_insum_nn
