"""Batches: `torch.vmap`, and gradients of many vectors at once, `is_grads_batched=True` and `vectorize=True`.

For these autograd runs one backward pass, or one forward-mode pass, with tensors that represent a batch. Most of
torch's own operators have rules for them, and kernels have none: what such a tensor shows is one vector of many, and it
has no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from insum_nn.compiler.lang.syntax import Access, Index, Statement, Subscript, Term

__all__ = ["batched_access", "each_vector", "factors_of_entries"]

Backward = Callable[..., tuple[Tensor | None, ...]]

# Depths to which batches are nested at most, which is more than torch's functions do.
_DEEPEST = 16


def each_vector(backward: Backward, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Run a backward or forward-mode pass for gradients some of which represent a batch, or are lazily negated.

    Negated ones arrive as they are worth: kernels read memory as it is.
    """
    for grad in grads:
        if grad is not None and is_legacy_batchedtensor(grad):
            return _one_by_one(backward, ctx, grads)
    return backward(ctx, *(None if each is None else each.resolve_neg() for each in grads))


def _one_by_one(backward: Backward, ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    opened = [None if grad is None or not is_legacy_batchedtensor(grad) else _open(grad) for grad in grads]
    level, first = next(each for each in opened if each is not None)
    found = [
        backward(ctx, *(grad if many is None else many[1][at] for grad, many in zip(grads, opened, strict=True)))
        for at in range(first.shape[0])
    ]
    made: list[Tensor | None] = []
    for parts in zip(*found, strict=True):
        # An unused gradient may have been computed for some vectors, and not for others.
        present = [part for part in parts if part is not None]
        whole = torch.stack(present) if len(present) == len(parts) else None
        made.append(None if whole is None else torch._add_batch_dim(whole, 0, level))
    return tuple(made)


def _open(tensor: Tensor) -> tuple[int, Tensor]:
    """Return the depth of a batch, and its tensors, stacked."""
    for level in range(1, _DEEPEST + 1):
        # At another depth the tensor becomes a row of itself.
        stacked = torch._remove_batch_dim(tensor, level, 1, 0)
        if not is_legacy_batchedtensor(stacked):
            return level, stacked
    raise NotImplementedError(
        "gradients of batches within batches are not supported: take one of the derivatives without "
        "is_grads_batched=True or vectorize=True"
    )


# Statements of a batch, under `torch.vmap`.


def batched_access(access: Access, names: set[str], batch: str) -> Access:
    """Return the access with a leading batch subscript on every batched tensor, nested ones too."""

    def inner(term: Term) -> Term:
        return replace(term, atom=batched_access(term.atom, names, batch)) if isinstance(term.atom, Access) else term

    subscripts = tuple(replace(each, terms=tuple(map(inner, each.terms))) for each in access.subscripts)
    if access.name in names:
        span = access.span
        subscripts = (Subscript((Term(1, Index(batch, span), span),), 0, span), *subscripts)
    return replace(access, subscripts=subscripts)


def factors_of_entries(statement: Statement, batched: set[str]) -> set[str]:
    """The factors without a batch that belong to entries with one: what misses differs, and with it what matters."""
    entries = [a for a in statement.accesses() if a.name in batched and a.name in statement.index_tensors()]
    found: set[str] = set()
    for read in statement.reads:
        own = {term.atom.name for s in read.subscripts for term in s.terms if isinstance(term.atom, Index)}
        if read.name not in batched and any(own.issuperset(i.name for i in entry.indices()) for entry in entries):
            found.add(read.name)
    return found - set(statement.index_tensors())
