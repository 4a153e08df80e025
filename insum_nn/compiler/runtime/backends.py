"""The rule that names the backend of a statement."""

from __future__ import annotations

import itertools

import torch

from insum_nn.compiler.kernels import launch
from insum_nn.compiler.kernels.c_compiler import find_compiler
from insum_nn.compiler.lang.bind import Bound
from insum_nn.compiler.lang.syntax import Access, Statement, leaves
from insum_nn.compiler.options import Options
from insum_nn.errors import InsumBackendError

__all__ = ["choose_backend", "is_matrix_product", "require_compiler", "require_triton"]


def choose_backend(bound: Bound, options: Options, *, tables: bool = False) -> tuple[str, str]:
    """Return the backend that runs a statement, and why; `tables`: it reads static tensors, which kernels unroll."""
    if options.backend != "auto":
        return options.backend, "asked for by name"
    product = not tables and is_matrix_product(bound.statement) and _library_is_as_fast(bound, options)
    if product and bound.dtype.is_floating_point:
        return "eager", "a dense matrix product is a library call"
    if bound.device_type == "cpu" and find_compiler() is not None:
        return "c", "on a CPU, one C function gathers, multiplies and sums"
    if bound.device_type != "cuda":
        return "eager", "there is no C compiler" if bound.device_type == "cpu" else "torch's library calls run anywhere"
    if not bound.dtype.is_floating_point:
        return "eager", "integer factors"
    if launch.available():
        return "triton", "on a GPU, one generated kernel gathers, multiplies and sums"
    return "eager", "Triton is not installed"


def is_matrix_product(statement: Statement) -> bool:
    """Return whether a statement multiplies dense matrices.

    Two factors share an index that is summed and have one each that the other lacks; nothing is gathered or scattered.
    A product of a matrix and a vector, or of rows, is bound by memory, and a generated kernel reads it once.
    """
    factors = [[access for access in leaves(each) if isinstance(access, Access)] for each in statement.factors]
    plain = [[subscript.plain for subscript in access.subscripts] for access in statement.accesses()]
    if not statement.combining.adds or any(None in names or len(set(names)) < len(names) for names in plain):
        return False
    written, *read = ({i.name for access in each for i in access.indices()} for each in ([statement.output], *factors))
    return any((a & b) - written and a - b and b - a for a, b in itertools.combinations(read, 2))


def _library_is_as_fast(bound: Bound, options: Options) -> bool:
    """Return whether the library's products fit the options: torch's setting alone decides their precision."""
    return not options.deterministic and (options.precision == "auto" or bound.dtype != torch.float32)


def require_compiler(bound: Bound) -> None:
    """Raise unless C functions can run on the tensors' device."""
    if bound.device_type != "cpu":
        raise InsumBackendError(
            f"C functions run on a CPU, and these tensors are on {bound.device_type}",
            expression=bound.statement.text,
            fix='pass CPU tensors, or choose Options(backend="auto").',
        )
    if find_compiler() is None:
        raise InsumBackendError(
            'Options(backend="c") needs a C compiler, and neither CC nor cc, gcc or clang on the PATH is one',
            expression=bound.statement.text,
            fix='install gcc or clang, or choose Options(backend="auto").',
        )


def require_triton(bound: Bound) -> None:
    """Raise unless generated kernels can run on the tensors' device."""
    if not launch.available():
        raise InsumBackendError(
            'Options(backend="triton") needs the package triton, which is not installed',
            expression=bound.statement.text,
            fix="install a GPU build of torch, which brings triton, and pass GPU tensors, "
            'or choose Options(backend="auto").',
        )
    if bound.device_type != "cuda" and not launch.interpreted():
        raise InsumBackendError(
            f"generated kernels run on a GPU, and these tensors are on {bound.device_type}",
            expression=bound.statement.text,
            fix='pass GPU tensors, or choose Options(backend="auto"); to debug, set TRITON_INTERPRET=1 '
            "before Python starts.",
        )
