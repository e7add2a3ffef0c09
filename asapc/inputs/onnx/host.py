"""Host values: ONNX integers that are shapes in the making, kept as Python numbers.

A graph computes shapes with the same operators as tensors. The result of `Shape` stays an int or SymInt,
or a list of them, through such operators, so that a dynamic size remains a symbol under torch.export.
Only an operator on tensors turns it into a tensor of int64, even if it was int32, or of bool. A `Real` is
a float that is not in a tensor yet: a constant that scales something, or a size cast to float.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
MOST_HOST = 16  # entries of a constant that may be a shape; a longer one is a tensor
MOST_NUMBERS = 1024  # of a host value that other numbers make: a shape has few


def dtype_of(number: int) -> torch.dtype:
    """The torch type of an ONNX element type.  Raises ValueError for one that is not supported."""
    if number not in DTYPES:
        raise ValueError(f"element type {number} is not supported")
    return DTYPES[number]


@dataclass(frozen=True)
class Real:
    """A 0-d float32; its number may be a size."""

    number: Any


def is_host(value: Any) -> bool:
    """Whether this is an integer or bool (0-d), a list of them (1-d), or None for an omitted input."""
    return not isinstance(value, (Tensor, Real))


def tensor_of(value: Any) -> Any:
    """The tensor of a host value; tensors and None (an input that is absent) as they are."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, Real):
        return torch.full((), value.number, dtype=torch.float32)
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            booleans = value and all(isinstance(item, bool) for item in value)
            return torch.tensor(value, dtype=torch.bool if booleans else torch.int64)
        return torch.stack([tensor_of(item) for item in value])
    boolean = isinstance(value, (bool, torch.SymBool))
    return torch.full((), value, dtype=torch.bool if boolean else torch.int64)


def operand_of(value: Any) -> Any:
    """The second operand of a torch function whose first is a tensor: a plain number stays one."""
    number = value.number if isinstance(value, Real) else value
    return number if isinstance(number, (bool, int, float)) else tensor_of(value)


def constant_of(tensor: Tensor) -> Any:
    """The host value of a constant that is one float, or integers that may be a shape; or the tensor."""
    if tensor.dtype == torch.float32 and tensor.dim() == 0:
        return Real(shortest(tensor.item()))
    most = {torch.int64: MOST_HOST, torch.int32: MOST_HOST, torch.bool: 1}.get(tensor.dtype, 0)
    if tensor.dim() > 1 or tensor.numel() > most or (tensor.dtype == torch.bool and not tensor.numel()):
        return tensor
    return tensor.tolist()


def shortest(number: float) -> float:
    """The shortest decimal that rounds to this float32: 0.1 for 0.10000000149."""
    return float(str(np.float32(number)))


def ints(value: Any, what: str) -> list[Any]:
    """The numbers of a host value or of a constant tensor.

    Raises ValueError where they depend on data: `what` names them.
    """
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor):
            raise ValueError(f"{what} must be known before the model runs, and depends on its data")
        checked_numbers(value.numel())
        value = value.tolist()
    if isinstance(value, Real):
        value = value.number
    return [*value] if isinstance(value, (list, tuple)) else [value]


def decided(condition: Any) -> Any:
    """True or False, or the condition itself if it depends on a dynamic size.

    bool() of such a condition would make a trace that holds only for the sizes of the example.
    """
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if statically_known_true(condition):
        return True
    return False if statically_known_true(torch.sym_not(condition)) else condition


def known(condition: Any, what: str) -> bool:
    """The condition as a bool.  Raises ValueError if it depends on data or on a dynamic size."""
    value = decided(ints(condition, what)[0])
    if isinstance(value, torch.SymBool):
        raise ValueError(
            f"{what} must be known before the model runs, and depends on the sizes of its inputs"
        )
    return bool(value)


def chosen(flag: Any, a: Any, b: Any) -> Any:
    """a where the flag is set, else b.  Raises ValueError where the flag is not known."""
    return a if known(flag, "the condition of Where") else b


def checked_numbers(count: int) -> int:
    """How many numbers a host value is about to have.  Raises ValueError if no shape has so many."""
    if count > MOST_NUMBERS:
        raise ValueError(f"{count} numbers, more than {MOST_NUMBERS}, are no shape")
    return count


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """function of numbers, over numbers and lists that broadcast."""

    def apply(*values: Any) -> Any:
        lengths = [len(value) for value in values if isinstance(value, list)]
        if not lengths:
            return function(*values)
        length = 0 if 0 in lengths else max(lengths)
        if not {*lengths} <= {length, 1}:
            raise ValueError(f"lists of {lengths} entries do not broadcast")
        spread = [
            (value * length if len(value) == 1 and length != 1 else value)
            if isinstance(value, list) else [value] * length
            for value in values
        ]  # fmt: skip
        return [function(*items) for items in zip(*spread, strict=True)]

    return apply


def on_host(host: Callable[..., Any] | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an operator: inputs annotated as tensors become tensors; others are shapes, axes and such.

    host: its form for host values, used if every input is one.  If it returns NotImplemented, the
    decorated function runs.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kinds = inspect.signature(function).parameters.values()
        tensors = {i for i, kind in enumerate(kinds) if str(kind.annotation).startswith("Tensor")}

        @functools.wraps(function)
        def apply(*values: Any, **attributes: Any) -> Any:
            result = NotImplemented
            if host is not None and all(is_host(value) for value in values):
                result = host(*values, **attributes)
            if result is NotImplemented:
                converted = (tensor_of(x) if i in tensors else x for i, x in enumerate(values))
                return function(*converted, **attributes)
            for number in result if isinstance(result, list) else [result]:
                if isinstance(number, int) and not -(2**63) <= number < 2**63:
                    raise ValueError(f"a shape of a number of {number.bit_length()} bits")
            return result

        return apply

    return decorate


def truncated_division(a: Any, b: Any) -> Any:
    """a / b rounded towards zero, for numbers and symbolic sizes, which are not negative."""
    quotient = abs(a) // abs(b)
    return quotient if (a >= 0) == (b >= 0) else -quotient


def numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a reduction of a list along its one axis from a function of two numbers."""

    def reduce(value: Any, axes: Any = None, *, keepdims: int = 1, **rest: Any) -> Any:
        if not isinstance(value, list) or not value or rest.get("noop_with_empty_axes"):
            return NotImplemented
        result = functools.reduce(function, value)
        return [result] if keepdims else result

    return reduce
