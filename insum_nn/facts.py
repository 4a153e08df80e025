"""What is known about an index tensor without reading it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNKNOWN", "IndexFacts"]


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """Facts about one index tensor; set by the builder that guarantees them.

    A fact is a promise: the compiler drops checks, masks or atomics because of it.
    `validate()` of a format, or `validate=True` of a call, proves it against the values.

    Attributes:
        sorted: ascending over the flattened tensor; entries of -1 do not count.
        unique: no value other than -1 stands twice.
        masked: `True`: may hold -1 ("no entry"); `False`: holds none; `None`: unknown.
        proven: every entry is -1 or lies inside the axis that it selects along.
    """

    sorted: bool = False
    unique: bool = False
    masked: bool | None = None
    proven: bool = False


UNKNOWN = IndexFacts()
