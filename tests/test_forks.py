"""A process forked while other threads of its parent compile: what they hold must not keep it waiting."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

SCRIPT = """
import faulthandler, os, sys, threading
import torch
from insum_nn import insum, locks
from insum_nn.layers import GCNConv

torch.set_num_threads(1)
ready = threading.Event()


class Lazy:
    def __init__(self, wait=False):
        self.wait = wait

    @locks.cached_property
    def value(self):
        if self.wait:
            ready.set()
            threading.Event().wait()
        return 7


def run(scale):
    rows, values = torch.tensor([0, 1]), torch.ones(2, requires_grad=True)
    y = insum(f"y[R[p]] += v[p] * {scale}", R=rows, v=values, out_shape=(2,))
    y.sum().backward()
    out = GCNConv(2, scale)(torch.ones(2, 2), torch.tensor([[0, 1], [1, 0]]))
    return y.tolist() == [scale, scale] == values.grad.tolist() and out.shape == (2, scale)


def others():
    for lock in locks._locks:
        lock.acquire()
    Lazy(wait=True).value


assert run(2)
count = len(locks._locks)
assert count > 10
threading.Thread(target=others, daemon=True).start()
ready.wait()
own = locks.new_lock()
own.acquire()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(60, exit=True)
    # What the thread that forks holds, it still holds.
    own.release()
    os._exit(0 if run(3) and Lazy().value == 7 else 2)
# Of the parent nothing is released.
assert not next(lock for lock in locks._locks if lock is not own).acquire(blocking=False)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_waits_for_no_thread_of_its_parent():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
