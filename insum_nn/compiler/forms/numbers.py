"""The integer parameters of a kernel, and how many programs there are, for one set of shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from insum_nn.compiler.forms.form import Form
from insum_nn.compiler.forms.parameters import Argument
from insum_nn.compiler.forms.points import ENTRY, OWNER
from insum_nn.compiler.forms.source import Source
from insum_nn.compiler.lang.bind import Extents
from insum_nn.compiler.runtime.row_partition import Owners

__all__ = ["Numbers"]


class Numbers:
    """The integer parameters of a kernel for one set of shapes."""

    def __init__(
        self,
        form: Form,
        source: Source,
        tensors: Sequence[Tensor],
        start: Tensor | None,
        extents: Extents,
        owners: Owners | None,
    ) -> None:
        self.form = form
        self.start = start
        self.source = source
        self.tensors = dict(zip(form.bound.layout.tensors, tensors, strict=True))
        self.sizes = dict(zip(form.bound.layout.indices, extents.indices, strict=True))
        self.output = extents.output
        self.owners = owners

    def value(self, argument: Argument) -> int | None:
        """A parameter's number; `None`: it is none."""
        kind, name, axis = argument.kind, argument.name, argument.axis
        if kind == "extent":
            return self.sizes[name]
        if kind == "stride":
            return self.tensors[name].stride(axis)
        if kind == "start_stride":
            assert self.start is not None
            return self.start.stride(axis)
        if kind == "dim":
            return self.output[axis] if name == "@out" else self.tensors[name].shape[axis]
        if kind == "split_stride":
            return math.prod(self.output)
        if kind == "programs_each":
            return self.grid() // self.source.schedule.groups
        if kind == "rows":
            assert self.owners is not None
            return self.owners.rows
        return None

    def grid(self) -> int:
        """The number of programs."""
        programs = 1
        for index, block in self.source.grid:
            if index == "@part":
                count = block
            elif index == "@split":
                count = self.source.schedule.splits
            elif index == OWNER:
                assert self.owners is not None
                count = -(-self.owners.rows // block)
            else:
                assert index != ENTRY
                count = -(-self.sizes[index] // block)
            programs *= count
        return programs
