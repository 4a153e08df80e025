"""What a step asks of a GPU, found without one: operators it launches, numbers it waits for, numbers it sends."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from insum_nn.compiler.kernels.ahead import collect
from insum_nn.compiler.kernels.launch import Launcher
from insum_nn.compiler.kernels.written import WrittenKernels
from tests.pretended_gpu import H200, Pretence, pretended_gpu

__all__ = ["DeviceCalls", "device_calls"]

# Only another look at memory, or memory itself.
_FREE = frozenset(
    "_reshape_alias _unsafe_view alias as_strided detach diagonal empty empty_like empty_strided expand lift_fresh "
    "new_empty permute select set_ slice split split_with_sizes squeeze t transpose unbind unsqueeze view".split()
)
# Operators whose result has a size, or a number, that only the device knows.
_WAITING = frozenset(
    "_local_scalar_dense _unique2 bincount equal is_nonzero masked_select nonzero unique_consecutive unique_dim".split()
)
_DEVICE_OF: Any = Tensor.device.__get__
_IS_CUDA: Any = Tensor.is_cuda.__get__
_CPU = torch.device("cpu")
_TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.cpu)


def _type(where: str | torch.device) -> str:
    # Not by `torch.device(..)`, which the pretence answers.
    return str(where).partition(":")[0]


def _on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, "_on_host", False)


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        value._on_host = True  # type: ignore[attr-defined]
    elif isinstance(value, (tuple, list)):
        for each in value:
            _mark(each)
    return value


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


class DeviceCalls:
    """What was called.

    Attributes:
        launches: operators by name; of torch's own, each counts as one kernel.
        kernels: launches of generated kernels.
        reads: what the host waited for, by name; to send what lies in ordinary memory waits too.
        answers: what the device was asked for early, so that who waits for it does not wait for what was queued since.
        uploads: tensors that were sent to the device without waiting.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.reads: list[str] = []
        self.answers: list[str] = []
        self.uploads = 0
        self.kernels = 0
        self._here: list[bool] = []

    @property
    def total(self) -> int:
        """Launches of torch's operators."""
        return self.launches.total()


class _Operators(TorchDispatchMode):
    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors([*args, *kwargs.values()])
        name = func.overloadpacket.__name__
        # A number beside tensors is one of the host.
        host = all(map(_on_host, given)) if given else name == "scalar_tensor" or self.calls._here[-1:] == [True]
        if host:
            return _mark(result)
        indexed = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])
        )
        repeated = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _WAITING or indexed or repeated:
            self.calls.reads.append(name)
        if name not in _FREE:
            self.calls.launches[name] += 1
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        of = args[0] if args else None
        if _on_host(of) and func in (_DEVICE_OF, _IS_CUDA):
            return _CPU if func == _DEVICE_OF else False
        if isinstance(of, Tensor) and (func in _TO_HOST or func is Tensor.to):
            where = [each for each in [*args[1:], *kwargs.values()] if isinstance(each, (str, torch.device))]
            target = _type(where[0]) if where else None
            if func in _TO_HOST or target == "cpu":
                if not _on_host(of):
                    later = self.calls.answers if kwargs.get("non_blocking") else self.calls.reads
                    later.append(getattr(func, "__name__", "to"))
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    result = func(*args, **kwargs)
                    # The pretended copy is no copy.
                    return _mark(result.clone()) if isinstance(result, Tensor) else result
            if target is not None and _on_host(of):
                if kwargs.get("non_blocking"):
                    self.calls.uploads += 1
                else:
                    self.calls.reads.append("upload")
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    return func(*args, **kwargs).clone()
        made = not _tensors([*args, *kwargs.values()])
        if made:
            where = kwargs.get("device")
            here = where is None or _type(where) == "cpu"
            if func in (torch.tensor, torch.as_tensor) and not here:
                self.calls.reads.append(func.__name__)
            self.calls._here.append(here)
            try:
                result = func(*args, **kwargs)
            finally:
                self.calls._here.pop()
            return _mark(result) if here else result
        if func is Tensor.new_tensor and not _on_host(of):
            self.calls.reads.append("new_tensor")
        return func(*args, **kwargs)


class _Interpreted:
    """A written kernel that is interpreted; what the interpreter asks of torch is not counted."""

    def __init__(self, calls: DeviceCalls, launch: Launcher) -> None:
        self.calls, self.launch = calls, launch

    def __call__(self, arguments: list[Any], grid: int) -> None:
        self.calls.kernels += 1
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            self.launch(arguments, grid)


@contextlib.contextmanager
def device_calls() -> Generator[DeviceCalls]:
    """Count within; tensors from outside are on the pretended GPU, and kernels are not run, or interpreted."""
    calls = DeviceCalls()
    engine: Any = torch.autograd._engine_run_backward
    with pretended_gpu(), collect(H200) as collection, _Functions(calls), _Operators(calls):
        pretending: Any = torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with Pretence(), _Functions(calls):
                return engine(*args, **kwargs)

        torch.autograd._engine_run_backward = backward
        # To the package there is no mode: what torch runs for itself is what is counted.
        length, torch._C._len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack, lambda: 0
        launchers = WrittenKernels.launchers

        def counted(self: WrittenKernels, device: torch.device) -> tuple[Any, ...] | None:
            found = launchers(self, device)
            return None if found is None else tuple([_Interpreted(calls, each) for each in found])

        WrittenKernels.launchers = counted
        try:
            yield calls
        finally:
            WrittenKernels.launchers = launchers
            torch._C._len_torch_dispatch_stack = length
            torch.autograd._engine_run_backward = pretending
    calls.kernels += collection.launches
