"""Public helpers for tests: laws of formats, layers compared with others, random programs, tolerances."""

from insum_nn.testing.formats import check_format
from insum_nn.testing.layers import check_layer

__all__ = ["check_format", "check_layer"]
