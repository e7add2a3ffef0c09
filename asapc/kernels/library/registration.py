"""Registering a reference as torch.ops.asapc.<its name>, and what holds for every operator alike.

An operator computes at the precision of its inputs: in float64 where q is float64, else in float32, in
which half precision is accumulated too. The result has the dtype of v, a map that of q; a dual is
float32 or float64. Autocast never reaches inside. It decides what the operator is given, such as q and
k in bfloat16 from a linear layer beside a float32 bias: any mixture of half precision and float32 is
taken, and each input counts as what it holds. Results are contiguous, whatever the inputs are: a compiled
program counts on the strides that the fake has. Kernels launch on the device of their inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch._library.custom_ops import CustomOpDef

from asapc.operators.catalogue import by_name

Plain = partial[Any]
"""A call of the reference: its name is plain.func.__name__, its arguments by name plain.keywords."""

Run = Callable[..., Any]
"""What computes an operator: (the plain call, **arguments by name) -> result."""


def operator(
    reference: Callable[..., Any], run: Run | None = None, at_once: Callable[..., Any] | None = None
) -> CustomOpDef:
    """torch.ops.asapc.<name of the reference>, with the schema of its signature.

    run: may have a kernel instead; the reference itself without.  at_once: is asked first on a CPU, with
    the arguments as they are; gives None for a call that it does not take.
    Where the reference takes one of a few names, any other is a ValueError.
    """
    signature, kinds = inspect.signature(reference), get_type_hints(reference)
    names = {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}

    def prototype() -> None: ...

    typed = [
        parameter.replace(annotation=str if parameter.name in names else kinds[parameter.name])
        for parameter in signature.parameters.values()
    ]
    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        typed, return_annotation=kinds["return"]
    )

    def at_own_precision(*inputs: Any) -> Any:
        arguments = dict(zip(signature.parameters, inputs, strict=False))
        for name, known in names.items():
            if name in arguments and arguments[name] not in known:
                raise ValueError(f"one of {', '.join(known)} is needed, got {arguments[name]!r}")
        plain = partial(reference, **arguments)
        first = next(x for x in inputs if isinstance(x, Tensor))
        if first.is_cpu and not torch.is_autocast_enabled("cpu"):
            return packed(plain() if run is None else run(plain, **arguments))
        there = torch.cuda.device_of(first) if first.is_cuda else nullcontext()
        with without_autocast(inputs), there:
            return packed(plain() if run is None else run(plain, **arguments))

    def on_cpu(*inputs: Any) -> Any:
        found = None if at_once is None else at_once(*inputs)
        return at_own_precision(*inputs) if found is None else found

    schema = torch.library.infer_schema(prototype, mutates_args=())
    name = f"asapc::{reference.__name__}"
    registered = torch.library.custom_op(name, at_own_precision, mutates_args=(), schema=schema)
    _shorten(registered, "CPU", on_cpu)
    _shorten(registered, "CUDA", at_own_precision)
    return registered


def _shorten(registered: CustomOpDef, device: Literal["CPU", "CUDA"], run: Callable[..., Any]) -> None:
    """A call on such a device that records no gradient and that nothing traces goes to `run` at once.

    custom_op's wrappers and a second pass through torch's dispatcher take longer than a short loop does.
    """
    record = make_autograd_impl(registered._opoverload, registered)
    own, autograd = (getattr(torch._C.DispatchKey, name) for name in (device, f"Autograd{device}"))
    plain = torch._C.DispatchKeySet(own).add(autograd)

    def call(keys: torch._C.DispatchKeySet, *inputs: Any) -> Any:
        if keys != plain or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            return record(keys, *inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    registered._lib.impl(registered._name, run, device)
    registered._lib.impl(registered._name, call, f"Autograd{device}", with_keyset=True)


def packed(results: Any) -> Any:
    """The same, with contiguous tensors."""
    if isinstance(results, tuple):
        return tuple(map(packed, results))
    return results.contiguous() if isinstance(results, Tensor) else results


def bound(registered: CustomOpDef, inputs: Iterable[Any]) -> dict[str, Any]:
    """An operator's arguments by name, with the defaults of those that are left out."""
    return by_name(registered._opoverload, tuple(inputs))


def register_fake(registered: CustomOpDef, fake: Callable[[Mapping[str, Any]], Any]) -> None:
    """fake: (arguments by name) -> tensors of the result's sizes and dtype, without entries."""
    registered.register_fake(lambda *inputs: fake(bound(registered, inputs)))


def without_autocast(given: Iterable[Any]) -> AbstractContextManager[object]:
    """Autocast is off inside, on the device of the first tensor among `given`.

    A kernel's worker threads never see it; without this the same call on one thread would.
    """
    device = next(value.device.type for value in given if isinstance(value, Tensor))
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
