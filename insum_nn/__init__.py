"""Sparse layers for PyTorch, written as indirect einsums."""

from insum_nn import datasets, formats, layers, models, ops, schedules, testing
from insum_nn.compiler.api import Program, compile, insum
from insum_nn.compiler.options import Options
from insum_nn.compiler.runtime.execution import cache_info, clear_cache
from insum_nn.compiler.runtime.prepare import prepare
from insum_nn.compiler.runtime.tuning import tune
from insum_nn.facts import IndexFacts
from insum_nn.layers.swap import swap
from insum_nn.version import __version__ as __version__

__all__ = [
    "IndexFacts",
    "Options",
    "Program",
    "cache_info",
    "clear_cache",
    "compile",
    "datasets",
    "formats",
    "insum",
    "layers",
    "models",
    "ops",
    "prepare",
    "schedules",
    "swap",
    "testing",
    "tune",
]
