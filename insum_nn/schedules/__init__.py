"""Measured schedules: `export` writes this machine's to one file, `load` reads such a file.

Files `*.json` in this folder are part of the package and are read by themselves.

    insum_nn.schedules.export("h200.json")          # where the model was run once
    insum_nn.schedules.load("h200.json")            # where it shall start without measuring
"""

from insum_nn.compiler.tuning.database import export, load, unload

__all__ = ["export", "load", "unload"]
