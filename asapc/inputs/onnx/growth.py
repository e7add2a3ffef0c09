"""A limit on the memory that the values of an ONNX model take while it runs.

A few bytes of a file can ask for any amount: a value joined to itself forty times, a column added to a
row. So the first run of a model at any sizes is guarded: the size of every result is computed without
memory (on torch's meta device) and added up before the operator runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from asapc.errors import InputError
from asapc.memory import format_size

LEAST = 1 << 30  # bytes that any model may take
SHARE = 64  # a larger one may take so many times what its weights and inputs take


def allowed_bytes(held: Iterable[Tensor]) -> int:
    """For a model with these weights and inputs."""
    return max(LEAST, SHARE * sum(tensor.nbytes for tensor in held))


class Guard(TorchDispatchMode):
    """Raises InputError before the results that are alive take more than `limit` bytes together."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.alive = limit, 0
        self._known: dict[Any, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(out.alias_info is not None for out in func._schema.returns):  # a view, or in place
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        key = (func, *((x.shape, x.dtype) if isinstance(x, Tensor) else (x,) for x in leaves))
        if key not in self._known:  # once for calls that are alike, as those of a loop are
            self._known[key] = _bytes_of(func, args, kwargs)
        wanted = self._known[key]
        if self.alive + wanted > self.limit:
            raise InputError(
                f"the values of an ONNX model may take {format_size(self.limit)} at once",
                got=f"{format_size(self.alive + wanted)}, in {func}",
                help="use fewer or shorter examples; if the file is your own, pass --trust",
            )
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes()).atexit = False
        return result

    def _freed(self, size: int) -> None:
        self.alive -= size


def _bytes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of a result; 0 if its size depends on values, which is at most that of its inputs."""
    with torch._C._DisableTorchDispatch():
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"),
            (args, kwargs),
        )
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = "meta"
        try:
            result = func(*args, **kwargs)
        except Exception:  # the call itself will report what is wrong with it
            return 0
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
