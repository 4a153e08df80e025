"""`Options`: everything that steers a compilation, in one frozen value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from insum_nn.errors import InsumDtypeError
from insum_nn.version import __version__

__all__ = ["DEFAULT", "Options", "require_options"]


@dataclass(frozen=True, slots=True)
class Options:
    """Compile options; hashable, so that they are part of a program's key.

    Attributes:
        backend: `"auto"` follows a rule; `"c"` compiles a C function, on a CPU, before it runs; `"eager"` runs the plan
            with torch's library calls; `"triton"` generates a Triton kernel.
        deterministic: only ways of combining that give the same bits at every run, on one machine with one setting of
            `torch.set_num_threads`. On a CPU, sums over entries of index tensors give the same bits with any number of
            threads. Dense products and sums over whole axes are divided among threads by a library: with another number
            a cell that sums n terms may differ by 2 n eps (sum of the terms' absolute values), eps that of the dtype.
        validate: read every index tensor again at each call, builders' facts included, and forget what was kept of it.
            That is how writes are seen that torch does not count: through `.data`, a NumPy array or DLPack.
        specialize: compile GPU kernels for the extents of dense feature axes and group slots, which belong to a
            model; sizes of the data are never fixed. `False` fixes nothing.
        order: `"cost"` picks the cheapest order of pairwise products; `"left"` keeps the written order.
        accumulate: dtype in which fp16 and bf16 are summed across terms: `"float32"`, or `"storage"` for the
            operands' own dtype, which saves a pass over the output and loses accuracy. Generated kernels always sum in
            float32.
        precision: how a generated kernel's matrix unit multiplies float32: `"ieee"` exactly, `"tf32"` with 10 bits of
            mantissa, `"tf32x3"` in three such products, nearly exactly; `"auto"` follows
            `torch.set_float32_matmul_precision`.
        tune: measure schedules at the first use of a statement and size that is worth it, which takes seconds, and keep
            the fastest on disk. Without it nothing is measured: a schedule is what was stored for this size or a
            similar one, here or by the package, else the default. See `insum_nn.schedules`.
    """

    backend: Literal["auto", "c", "eager", "triton"] = "auto"
    deterministic: bool = False
    validate: bool = False
    specialize: bool = True
    order: Literal["cost", "left"] = "cost"
    accumulate: Literal["float32", "storage"] = "float32"
    precision: Literal["auto", "ieee", "tf32", "tf32x3"] = "auto"
    tune: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "backend": ("auto", "c", "eager", "triton"),
            "order": ("cost", "left"),
            "accumulate": ("float32", "storage"),
            "precision": ("auto", "ieee", "tf32", "tf32x3"),
        }
        for name, choices in allowed.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"Options.{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")

    def to_json(self) -> str:
        """As text, which registered operators carry.

        >>> Options.from_json(Options(tune=True).to_json()).tune
        True
        """
        return _to_json(self)

    @staticmethod
    def from_json(text: str) -> Options:
        """From the text of `to_json`."""
        return _from_json(text)

    def to_dict(self) -> dict[str, object]:
        """As a part of another text.

        It names the release of this package: torch's caches of compiled graphs are keyed by the arguments of operators,
        among which these texts are, and must not serve a release what another one had written.
        """
        return {**asdict(self), "release": __version__}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Options:
        """From what `to_dict` gave, in any release."""
        return Options(**{name: value for name, value in values.items() if name != "release"})


@lru_cache(maxsize=256)
def _to_json(options: Options) -> str:
    return json.dumps(options.to_dict())


@lru_cache(maxsize=256)
def _from_json(text: str) -> Options:
    return Options.from_dict(json.loads(text))


DEFAULT = Options()


def require_options(options: Options) -> Options:
    """Return the argument of a layer's constructor.

    Raises:
        InsumDtypeError: it is no `Options`, a dict of them for instance.
    """
    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InsumDtypeError(
            f"options= must be insum_nn.Options, got {type(options).__name__}",
            fix="write options=insum_nn.Options(deterministic=True), with the options that you mean.",
            expected=Options,
            got=type(options),
        )
    return options
