"""A device that is not there: tensors that say they are on a GPU, computed on the CPU.

As on a real one, an operator takes tensors of one device (numbers apart), `.numpy()` is refused, and a
tensor gets there and back by `.to` alone. What runs without a fault here mixes no devices; how fast
anything is, and what the GPU's kernels compute, it does not tell.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
# What waits for the GPU, beside copies from and to it and indices that are masks.
WAITING = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "argwhere", "equal",
    "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave", "_linalg_check_errors", "_linalg_eigh",
    "_linalg_svd", "linalg_eig",
)  # fmt: skip


class OnGpu(Tensor):
    """inner: the same on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        assert not isinstance(inner, OnGpu)
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype,
            device="meta", requires_grad=inner.requires_grad,  # whose C++ asks for no driver
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner.detach()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.inner!r})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __getitem__(self, index: Any) -> Tensor:  # C++ would put a list on the meta device
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class NeverWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for the GPU; inside, the GPU is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        return _run(func, args, kwargs, self)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    given: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        _inner(x, given)
    there = [isinstance(x, OnGpu) for x in given]
    if func is aten._to_copy.default and kwargs.get("device") is not None:
        return any(there) != _is_gpu(kwargs["device"])
    if not any(there):
        return False
    if func is aten.copy_.default:
        return there[0] != there[1]
    masks = any(x.dtype == torch.bool for x in given[1:])
    if func in (aten.index.Tensor, aten.index_put_.default, aten._unsafe_index.Tensor):
        return masks or not all(there)
    return func._schema.name.removeprefix("aten::") in WAITING


class _Device(TorchDispatchMode):
    """What is made from nothing, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_gpu(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type in ("cuda", "meta")


def _run(func: Any, args: Any, kwargs: dict[str, Any], mode: TorchDispatchMode | None = None) -> Any:
    """mode: which the call came through, and what it makes goes through, too."""
    leaves: list[Tensor] = []
    given = tuple(_inner(x, leaves) for x in args)
    named = {name: _inner(x, leaves) for name, x in kwargs.items()}
    there = [isinstance(x, OnGpu) for x in leaves]
    asked = kwargs.get("device")
    if func is aten._to_copy.default and asked is not None:
        result = func(*given, **{**named, "device": CPU})
        return result if asked.type == "cpu" else OnGpu(result)
    if func is aten.copy_.default:  # between devices too
        func(*given)
        return args[0]
    if any(there):
        for leaf, is_there in zip(leaves, there, strict=True):
            if not is_there and leaf.dim() and not _takes_host_index(func, args, leaf):
                raise RuntimeError(f"{func}: expected all tensors on one device, found cuda:0 and cpu")
        own = OPDEFS.get(func._schema.name)
        if own is not None:  # an operator of ours is no kernel: what it is made of runs here, too
            with mode or _Device():
                return own._init_fn(*args, **kwargs)
    elif not _is_gpu(asked):
        return func(*args, **kwargs)
    result = func(*given, **named)
    if func._schema.is_mutable and not func._schema.name.endswith("_out") and args:
        return args[0] if isinstance(result, Tensor) else result
    return _outer(result)


def _takes_host_index(func: Any, args: Any, leaf: Tensor) -> bool:
    """Indexing takes indices from the CPU."""
    return func in (aten.index.Tensor, aten.index_put_.default) and leaf is not args[0]


def _inner(x: Any, leaves: list[Tensor]) -> Any:
    """An argument for the CPU; the tensors in it are noted."""
    if isinstance(x, Tensor):
        leaves.append(x)
        return x.inner if isinstance(x, OnGpu) else x
    if isinstance(x, list | tuple):
        return [_inner(item, leaves) for item in x]
    return CPU if isinstance(x, torch.device) else x


def _outer(result: Any) -> Any:
    if isinstance(result, Tensor):
        return OnGpu(result)
    return type(result)(map(_outer, result)) if isinstance(result, list | tuple) else result


def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds one GPU, without Triton, as long as a model runs on it (asapc.device.running_on)."""
    from asapc.kernels import dispatch

    for name, value in {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "device": lambda _: _Device(), "current_device": lambda: 0,
        "get_device_name": lambda _: "one GPU",
        "synchronize": lambda: None, "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 0,
        "is_current_stream_capturing": lambda: False, "device_of": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dispatch, "_triton_missing", lambda: "no Triton in this test")
