"""Functions of sizes: `math.log(n)` of a length is computed where the program runs, at whatever length.

A trace makes a number of what `math` is given, and a program with it holds for that length alone. As a
tensor of one double it is part of the graph; torch takes such a tensor for the number that it is.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from types import BuiltinFunctionType, CodeType
from typing import Any
from unittest import mock

import torch

from asapc.passes.bytecode import compared_by_identity
from asapc.passes.observe import builtin_replaced
from asapc.passes.size_guards import by_the_model

FUNCTIONS = ("log", "log2", "log10", "log1p", "sqrt", "exp")
ROUNDED = {"__ceil__": "ceil", "__floor__": "floor", "__round__": "round"}  # by what Python calls
KINDS = (int, float)


@contextlib.contextmanager
def free_functions(
    used: list[str], taken: list[str], spaces: Sequence[dict[str, Any]], codes: Collection[CodeType]
) -> Iterator[None]:
    """Let a model's own code take functions of sizes while it is traced, `int(n)` among them.

    used: takes up the names of those that are computed.  taken: of those that leave a size as it is.
    spaces: the globals of the code, which may have them by themselves.  codes: of its functions.
    """
    plain = {getattr(math, name): name for name in FUNCTIONS}
    changed = [
        (space, key, value) for space in (vars(math), *spaces) for key, value in space.items()
        if isinstance(value, BuiltinFunctionType) and value in plain
    ]  # fmt: skip
    rounding: Any = {
        method: _of_sizes(name, getattr(torch.SymFloat, method), used) for method, name in ROUNDED.items()
    }
    of_numpy: Any = {name: _of_sizes(name, function, used) for function, name in plain.items()}
    for space, key, value in changed:
        space[key] = _of_sizes(plain[value], value, used)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.SymFloat, **rounding))
            for size in (torch.SymInt, torch.SymFloat):  # np.log(n) calls n.log()
                stack.enter_context(mock.patch.multiple(size, create=True, **of_numpy))
            for kind in KINDS:
                if not compared_by_identity(codes, kind.__name__):
                    number = _Kind(kind.__name__, (), {"plain": kind, "used": used, "taken": taken})
                    stack.enter_context(builtin_replaced(spaces, kind.__name__, number))
            yield
    finally:
        for space, key, value in changed:
            space[key] = value


@contextlib.contextmanager
def free_lengths() -> Iterator[None]:
    """Let `len(x)` of a tensor be its size, as `x.shape[0]` is: Python makes a number of it.  And let no
    length be that of a table."""
    plain = builtins.len

    def length(x: Any, /) -> Any:
        return x.shape[0] if isinstance(x, torch.Tensor) and x.dim() and by_the_model() else plain(x)

    with mock.patch.object(builtins, "len", length), _free_layouts():
        yield


def _free_layouts() -> contextlib.AbstractContextManager[Any]:
    """Let a part of a table, such as `w[:n, :n]`, not be asked whether it is the whole: torch would take
    n for the length of the table, or for any other."""
    def is_part(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        """Whether a number of entries lies between those along an axis, and a size is within them."""
        free = [type(size) is not int for size in sizes]
        return any(type(stride) is int and any(free[axis + 1 :]) and str(sizes[axis]) != "1"
                   for axis, stride in enumerate(strides))  # fmt: skip

    def asking(of_whole: Callable[..., bool]) -> Any:
        def asks(x: Any, *more: Any, **named: Any) -> bool:
            layout = (x.shape, x.stride()) if isinstance(x, torch.Tensor) else (x, more[0])
            return not is_part(*layout) and of_whole(x, *more, **named)
        return asks

    names, of = ("check_contiguous_sizes_strides", "is_channels_last_contiguous_2d"), torch._prims_common
    there = [name for name in names if hasattr(of, name)]  # torch's own names, which it may change
    replaced: Any = {name: asking(getattr(of, name)) for name in there}
    return mock.patch.multiple(of, **replaced) if there else contextlib.nullcontext()


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

    def text(size: Any) -> str:
        number = int if isinstance(size, torch.SymInt) else float
        return repr(number(size)) if by_the_model() else str(plain[type(size)](size))

    def divided(one: Any, other: Any) -> tuple[Any, Any]:
        return one // other, one % other

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "__repr__", text))
            if not hasattr(kind, "__divmod__"):
                stack.enter_context(mock.patch.object(kind, "__divmod__", divided, create=True))
        yield


class _Kind(type):
    """What stands for int or float: a class that is equal to it, and called with a size gives a size."""

    plain: type
    used: list[str]
    taken: list[str]

    def __call__(cls, *args: Any, **named: Any) -> Any:
        size = args[0] if len(args) == 1 else None
        if not isinstance(size, (torch.SymInt, torch.SymFloat)) or not by_the_model():
            return cls.plain(*args, **named)
        if cls.plain is float:
            cls.used.append("float")
            number: Any = size
            return number * 1.0
        if isinstance(size, torch.SymFloat):
            return _computed("trunc", size, cls.used)
        cls.taken.append("int")
        return size

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls.plain)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.plain)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.plain

    def __hash__(cls) -> int:
        return hash(cls.plain)


def _of_sizes(name: str, plain: Callable[..., float], used: list[str]) -> Callable[..., Any]:
    def function(x: Any, *more: Any) -> Any:
        if more or not isinstance(x, (torch.SymInt, torch.SymFloat)) or not by_the_model():
            return plain(x, *more)
        if x.node.is_constant() or x.node.maybe_as_int() is not None:
            return plain(x)
        return _computed(name, x, used)

    return function


def _computed(name: str, size: Any, used: list[str]) -> Any:
    used.append(name)
    if name == "sqrt":
        return size**0.5  # a trace keeps powers as numbers
    return getattr(torch, name)(torch.scalar_tensor(size, dtype=torch.float64))
