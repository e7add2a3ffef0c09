"""Functions of sizes: `math.log(n)` of a length is computed where the program runs, at whatever length.

A trace makes a number of what `math` is given, and a program with it holds for that length alone. As a
tensor of one double it is part of the graph; torch takes such a tensor for the number that it is.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch

from asapc.passes.observe import builtin_replaced
from asapc.passes.size_guards import by_the_model

FUNCTIONS = ("log", "log2", "log10", "log1p", "sqrt", "exp")


@contextlib.contextmanager
def free_functions(used: list[str], spaces: Sequence[dict[str, Any]] = ()) -> Iterator[None]:
    """Let a model's own code take functions of sizes while it is traced.  used: takes up their names.
    spaces: the globals of the code, which may have them by themselves."""
    plain = {getattr(math, name): name for name in FUNCTIONS}
    changed = [
        (space, key, value) for space in (vars(math), *spaces) for key, value in space.items()
        if isinstance(value, BuiltinFunctionType) and value in plain
    ]  # fmt: skip
    for space, key, value in changed:
        space[key] = _of_sizes(plain[value], value, used)
    try:
        yield
    finally:
        for space, key, value in changed:
            space[key] = value


@contextlib.contextmanager
def free_lengths() -> Iterator[None]:
    """Let `len(x)` of a tensor be its size, as `x.shape[0]` is: Python makes a number of it."""
    plain = builtins.len

    def length(x: Any, /) -> Any:
        return x.shape[0] if isinstance(x, torch.Tensor) and x.dim() and by_the_model() else plain(x)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = plain


def kinds_of_sizes(spaces: Sequence[dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
    """Let `isinstance(n, int)` be true of a size.  spaces: the globals of the model's code."""
    numbers: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}

    def is_one(x: Any, kinds: Any, /) -> bool:
        return isinstance(x, kinds) or (type(x) in numbers and isinstance(numbers[type(x)], kinds))

    return builtin_replaced(spaces, "isinstance", is_one)


@contextlib.contextmanager
def texts_of_sizes() -> Iterator[None]:
    """Let `f"bias_{n}"` be the text of the number, and not of a symbol: a program with it holds for that
    size alone.  Let `divmod(n, 4)` be its quotient and remainder, which symbols do not know."""
    kinds: tuple[Any, ...] = (torch.SymInt, torch.SymFloat)
    plain = {kind: kind.__repr__ for kind in kinds}
    undivided = [kind for kind in kinds if not hasattr(kind, "__divmod__")]

    def text(size: Any) -> str:
        number = int if isinstance(size, torch.SymInt) else float
        return repr(number(size)) if by_the_model() else str(plain[type(size)](size))

    for kind in plain:
        kind.__repr__ = text
    for kind in undivided:
        kind.__divmod__ = lambda one, other: (one // other, one % other)
    try:
        yield
    finally:
        for kind, own in plain.items():
            kind.__repr__ = own
        for kind in undivided:
            del kind.__divmod__


def _of_sizes(name: str, plain: Callable[..., float], used: list[str]) -> Callable[..., Any]:
    def function(x: Any, *more: Any) -> Any:
        if more or not isinstance(x, (torch.SymInt, torch.SymFloat)) or not by_the_model():
            return plain(x, *more)
        if x.node.is_constant() or x.node.maybe_as_int() is not None:
            return plain(x)
        used.append(name)
        if name == "sqrt":
            return x**0.5  # a trace keeps powers as numbers
        number: Any = x
        return getattr(torch, name)(torch.scalar_tensor(number, dtype=torch.float64))

    return function
