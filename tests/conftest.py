"""What all tests share: seeds, devices, the rule for GPU tests, golden files, Hypothesis' settings."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Generator

import hypothesis
import numpy as np
import pytest
import torch

import insum_nn
from insum_nn.compiler.kernels.c_compiler import find_compiler
from insum_nn.compiler.passes import pipeline
from insum_nn.compiler.runtime import backends
from insum_nn.compiler.schedule import plan
from tests.golden_fixture import golden, pytest_addoption

__all__ = ["golden", "pytest_addoption"]

SEED = 20260401

# Case lists are the same on every machine and in every run; a compiled first example may take long.
hypothesis.settings.register_profile(
    "insum", derandomize=True, deadline=None, database=None, print_blob=True, suppress_health_check=[]
)
hypothesis.settings.load_profile("insum")
if torch.cuda.is_available():
    # Calls wait for their kernels, which are what is tested.
    os.environ.setdefault("INSUM_NN_COMPILE_WORKERS", "0")
# A loop nest is verified after each pass, and not only before it is printed.
pipeline.verifies = True


def _gpu_required() -> bool:
    return os.environ.get("INSUM_REQUIRE_GPU", "") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for the GPU by fixture is a GPU test, whether marked or not."""
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among modules and tests, which live to the end: a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 10, 100)


_modules = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _few_to_collect() -> None:
    """What earlier modules left is not looked through again: tests and benchmarks collect hundreds of times.

    After some modules it is, as it may be garbage by now: graphs that were kept, for example.
    """
    if next(_modules) % 8 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def _gpus_of(item: pytest.Item) -> int:
    return 2 if item.get_closest_marker("two_gpus") else 1 if item.get_closest_marker("gpu") else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = _gpus_of(item)
    if needed and (not torch.cuda.is_available() or torch.cuda.device_count() < needed):
        if _gpu_required():
            few = "no CUDA device" if needed == 1 else f"{torch.cuda.device_count()} CUDA devices, not {needed}"
            pytest.fail(f"INSUM_REQUIRE_GPU=1, and torch sees {few}", pytrace=False)
        pytest.skip("needs a CUDA device" if needed == 1 else f"needs {needed} CUDA devices")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under INSUM_REQUIRE_GPU=1 a skipped GPU test is a failure: such a run cannot pass by skipping everything."""
    report = yield
    # An expected failure is reported as skipped too, and is not one.
    if report.skipped and not hasattr(report, "wasxfail") and _gpu_required() and _gpus_of(item):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        # What a case of layers does not promise, it promises on no device.
        if "not promised" not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped under INSUM_REQUIRE_GPU=1: {reason}"
    return report


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan what another process, or a test that changed the compiler, planned before; a module may override this."""
    monkeypatch.setattr(plan, "read", lambda *_: None)
    monkeypatch.setattr(plan, "write", lambda *_: False)


# What tests run on a CPU: library calls, as where there is no compiler; with INSUM_TEST_C=1 C functions, all of them
# compiled before they are called. A test's marks `c` and `library_calls` say which it needs.
_C_EVERYWHERE = os.environ.get("INSUM_TEST_C", "") == "1"


def _no_compiler() -> None:
    return None


@pytest.fixture(autouse=True)
def _what_a_cpu_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = _C_EVERYWHERE or request.node.get_closest_marker("c") is not None
    in_c = in_c and request.node.get_closest_marker("library_calls") is None
    if in_c:
        if find_compiler() is None:
            pytest.skip("there is no C compiler")
        # For processes that the test starts too.
        monkeypatch.setenv("INSUM_NN_COMPILE_WORKERS", "0")
    find = find_compiler if in_c else _no_compiler
    if backends.find_compiler is not find:
        backends.find_compiler = find
        # Programs know which backend they were made for.
        insum_nn.clear_cache()


_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    # A test may have set another number, by which sums are rounded otherwise.
    torch.set_num_threads(_THREADS)
    torch.manual_seed(SEED)
    # NumPy's old global generator is what torch_geometric and scikit-learn draw from.
    np.random.seed(SEED)
    random.seed(SEED)


@pytest.fixture
def gpu() -> torch.device:
    """The CUDA device; a test that takes it is a GPU test."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn: the test runs on the CPU, and once more as a GPU test."""
    return torch.device(request.param)


@pytest.fixture
def made_on(device: torch.device) -> Generator[torch.device]:
    """Each device in turn, where the test makes its tensors and modules, if it names no other."""
    with device:
        yield device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.two_gpus)])
def kind_of_ranks(request: pytest.FixtureRequest) -> str:
    """Where two processes train: on the CPU, and once more on two GPUs."""
    return request.param
