"""What `import insum_nn` costs beside `import torch`: our own modules, and nothing that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys, time
begin = time.process_time()
import torch
between = time.process_time()
known = set(sys.modules)
import {module}
end = time.process_time()
print(json.dumps([between - begin, end - between, sorted(set(sys.modules) - known)]))
# Subpackages are attributes: the documentation writes them so after `import insum_nn` alone.
insum_nn.models.MinkUNet14, insum_nn.datasets.S3DIS, insum_nn.testing.check_layer
"""
# Each of these takes longer than all of our modules.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "triton", "scipy", "numpy.random")


def imported(module: str) -> tuple[float, float, list[str]]:
    """Processor seconds of `import torch` and of our modules after it, and what the latter load."""
    code = SCRIPT.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch_s, ours_s, loaded = json.loads(done.stdout)
    return torch_s, ours_s, loaded


def test_nothing_heavy_is_imported():
    first, ours, loaded = imported("insum_nn")
    assert [m for m in loaded if m in HEAVY or m.startswith(tuple(f"{each}." for each in HEAVY))] == []
    strangers = {m.partition(".")[0] for m in loaded} - {"insum_nn"} - sys.stdlib_module_names
    assert strangers <= {"torch", "numpy"}, strangers
    assert len([m for m in loaded if m.startswith(("torch.", "numpy."))]) < 10
    # A third of a second on an idle machine, where torch takes two or more; modules say it better than a clock.
    assert ours < max(1.0, first)


def test_layers_import_nothing_heavy():
    """All in one process: what one of them loads, the list shows."""
    _, _, loaded = imported("insum_nn.layers, insum_nn.formats, insum_nn.ops, insum_nn.models")
    assert {"insum_nn.layers", "insum_nn.formats", "insum_nn.ops", "insum_nn.models"} <= set(loaded)
    assert [m for m in loaded if m in HEAVY] == []
