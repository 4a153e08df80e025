"""The release that is installed: git's tags say it when a wheel or an editable installation is built."""

from __future__ import annotations

import importlib.metadata

__all__ = ["UNKNOWN", "__version__"]

UNKNOWN = "0+unknown"


def _installed() -> str:
    try:
        return importlib.metadata.version("insum-nn")
    except importlib.metadata.PackageNotFoundError:
        # A source tree on the path, never installed.
        return UNKNOWN


__version__ = _installed()
