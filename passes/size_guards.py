"""Size guards: a program keeps to the sizes that its trace holds for.

torch.export traces a branch on a size one way. Where the branch is an interval of one size, that is its
range. Anything else (`n % 5 == 0`, `n > batch`, `min(12, n // 2)` half-steps) is a guard in text, and a
graph that is run without its guards computes something else where they fail. So the ranges are narrowed
until every guard holds in them; most guards are true of all sizes, and narrow nothing. Nor do those of
torch's own code where the model itself fails without them: a view of `n // 4` windows of 4 has n entries.

torch takes every size to be 2 or more, and has no guard for `B == 1`. So what the model's own code asks
of sizes is noted while it is traced, and a program holds for smaller ones where the answers are the same.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

import asapc.inputs.onnx
from asapc.formats.limits import demand, fixed_size
from asapc.inputs.data import Batch
from asapc.passes.observe import folders

SIZES = range(2, 4097)  # at which a guard on one size is tried
LARGE = (5000, 8192, 10_000, 65_536, 1_000_000)  # besides: where it still holds, it has no upper end
TRIED = 2000  # pairs, or more, of sizes at which a guard on several is tried
FEW = (0, 1, 2, 3, 5, 9, 17, 33, 65, 513)  # the sizes besides one of 0 or 1 at which a question is asked
FEW_TRIED = 200  # of them, where it is of more than two sizes
SMALL, NEAR = 64, 8  # sizes below this, and as near to the example's, at which a guard is seen to fail
FAILING = 6  # of them
MET = 30  # sizes at which the model has what it needs: fewer tell little of a guard
MOST_ENTRIES = 1024  # along all lengths at once, as of 32 x 32 pixels, if the example has no more
# What asks on behalf of torch, or of the operators of an ONNX file: its answers are tried instead.
_NOT_THE_MODELS = folders(torch.__file__, __file__, asapc.inputs.onnx.__file__)
LONGEST = 10_000  # characters of a guard that is read
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.USub: operator.neg,
    ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.BitAnd: operator.and_,
    ast.Pow: math.pow,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "int": int, "round": round, "float": float,
    "math.trunc": math.trunc, "math.floor": math.floor, "math.ceil": math.ceil,
}  # fmt: skip


# Where Python wants to know a condition on sizes: a branch, a key, an index, a number, a text.
_ANSWERS = ("__bool__", "__hash__", "__eq__", "__index__", "__float__", "__repr__")


class _Unreadable(Exception):
    """A guard that is not arithmetic on sizes."""


@dataclass(frozen=True)
class Question:
    """What a model's own code asked of sizes: an expression that is true or not, and what it was."""

    expression: Any
    answer: bool

    def at(self, sizes: Mapping[Any, int]) -> bool | None:
        """The answer for these sizes, None where there is none."""
        try:
            return bool(self.expression.xreplace(sizes))
        except (ZeroDivisionError, TypeError, ValueError):
            return None


@contextlib.contextmanager
def noting_questions() -> Iterator[list[Question]]:
    """All that the model's own code asks of its sizes while it is traced, each once."""
    questions: list[Question] = []
    plain = {name: vars(torch.SymBool).get(name) for name in _ANSWERS}
    asked = torch.SymBool.__bool__

    def answering(name: str) -> Callable[..., Any]:
        def method(self: torch.SymBool, *others: Any) -> Any:
            if not by_the_model():
                known = plain[name]
                return getattr(asked(self), name)(*others) if known is None else known(self, *others)
            answer = asked(self)
            question = Question(self.node.expr, answer)
            if question not in questions:
                questions.append(question)
            return answer if name == "__bool__" else getattr(answer, name)(*others)

        return method

    methods: Any = {name: answering(name) for name in plain}
    with mock.patch.multiple(torch.SymBool, create=True, **methods):
        yield questions


def by_the_model() -> bool:
    """Whether the function that asks this was called by a model's own code."""
    return not sys._getframe(2).f_code.co_filename.startswith(_NOT_THE_MODELS)


def keep_to_guards(
    exported: ExportedProgram, example: Batch, questions: Sequence[Question] = (),
    holds_at: Callable[[Mapping[Any, int]], bool] = lambda sizes: False,
) -> None:  # fmt: skip
    """Narrow the ranges of a program's sizes, in its shape environment, to where its guards hold.

    They hold for the example.  questions: of the model's own code.  holds_at: whether at these sizes the
    program gives what the model gives, or both fail.
    """
    known = _sizes(exported, example)
    fixed = {name: size for name, (size, *_) in known.items() if isinstance(size, int)}
    sizes = {name: entry for name, entry in known.items() if name not in fixed}
    if not sizes:
        return
    environment = next(iter(sizes.values()))[0].node.shape_env
    ranges = environment.var_to_range
    hints = {size.node.expr: hint for size, hint, _ in sizes.values()}
    lengths = {size.node.expr for size, _, axis in sizes.values() if axis > 0}

    def narrow(symbol: Any, low: int, high: int) -> None:
        ranges[symbol] = ranges[symbol] & ValueRanges(low, high)

    asked = [replace(one, expression=environment.replace(one.expression)) for one in questions]
    guards: list[_Guard] = []
    for text in getattr(exported, "_guards_code", ()):
        try:
            value, names = _read(text, fixed)
            guards.append(_Guard(value, {name: sizes[name][0].node.expr for name in names}))
        except (_Unreadable, KeyError):
            for symbol, hint in hints.items():
                narrow(symbol, hint, hint)
    needed: list[_Guard] = []  # by the model itself
    guards = [guard for guard in guards if guard.names and not _always(guard, (), ranges)]
    for guard in guards:
        symbols = sorted({*guard.names.values()}, key=lambda expr: (expr not in lengths, str(expr)))
        if _always(guard, needed, ranges):
            continue
        failing = _failing(guard, guards, ranges, hints, lengths, asked)
        if len(failing) == FAILING and all(map(holds_at, failing)):
            needed.append(guard)
            continue
        *others, last = symbols  # lengths are fixed first, and the number of examples last
        for symbol in others:
            narrow(symbol, hints[symbol], hints[symbol])
        narrow(last, *_around(guard, hints, last))
    for question in asked:
        for symbol, size in _least(question, hints, lengths).items():
            demand(environment, symbol, size)


def _least(question: Question, hints: Mapping[Any, int], lengths: Collection[Any]) -> dict[Any, int]:
    """The least sizes at which a question has the answer that it had; guards cover sizes of 2 and more.

    Of all ways to leave out the small sizes that answer otherwise, the one that leaves out fewest, and
    lengths rather than numbers of examples.
    """
    asked = question.expression
    symbols = sorted(getattr(asked, "free_symbols", ()), key=str)
    if not symbols or not {*symbols} <= {*hints}:
        return {}
    points: Iterable[tuple[int, ...]] = itertools.product(FEW, repeat=len(symbols))
    if len(symbols) > 2:
        draw = random.Random(0)
        points = (tuple(draw.choices(FEW, k=len(symbols))) for _ in range(FEW_TRIED))
    otherwise = [
        point for point in points
        if min(point) < 2 and question.at(dict(zip(symbols, point, strict=True))) is not question.answer
    ]
    ways: list[tuple[int, ...]] = [
        least for least in itertools.product(range(4), repeat=len(symbols))
        if all(size <= max(2, min(3, hints[s])) for s, size in zip(symbols, least, strict=True))
        and all(any(n < size for n, size in zip(point, least, strict=True)) for point in otherwise)
    ]  # fmt: skip

    def loss(least: tuple[int, ...]) -> tuple[int, int]:
        examples = (n for s, n in zip(symbols, least, strict=True) if s not in lengths)
        return sum(least), max(examples, default=0)

    return dict(zip(symbols, sorted(ways, key=loss)[0], strict=True))


_Value = Callable[[Mapping[str, int]], Any]
"""A part of a guard as a function of the sizes by name."""


@dataclass(frozen=True)
class _Guard:
    """The truth of a guard for sizes by symbol.  names: the symbol of each such as `L['x'].size()[1]`."""

    value: _Value
    names: Mapping[str, Any]

    def __call__(self, sizes: Mapping[Any, int]) -> bool:
        try:
            return bool(self.value({name: sizes[symbol] for name, symbol in self.names.items()}))
        except (ArithmeticError, ValueError):  # a power that is none, or is too large
            return False


def _read(text: str, fixed: Mapping[str, int]) -> tuple[_Value, set[str]]:
    """What a guard computes, and the names of the sizes in it."""
    if len(text) > LONGEST:
        raise _Unreadable
    names: set[str] = set()
    try:
        value = _value(ast.parse(text, mode="eval").body, fixed, names)
        value(dict.fromkeys(names, 2))
    except ZeroDivisionError:
        pass
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise _Unreadable from error
    return value, names


def _value(tree: ast.expr, fixed: Mapping[str, int], names: set[str]) -> _Value:
    """What a guard computes.  fixed: sizes that are numbers; names: takes up the others that are read."""

    def of(node: ast.expr) -> _Value:
        return _value(node, fixed, names)

    match tree:
        case ast.Constant(value=int() | float() as value):
            return lambda _: value
        case ast.Subscript(value=ast.Call()):
            name = ast.unparse(tree)  # once, and not wherever the guard is asked
            if name in fixed:
                return lambda _: fixed[name]
            names.add(name)
            return operator.itemgetter(name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], [of(operand)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], [of(left), of(right)])
        case ast.BoolOp(op=op, values=values):
            parts, together = [*map(of, values)], all if isinstance(op, ast.And) else any
            return lambda sizes: together(part(sizes) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= {*_OPERATORS}:
            pairs = itertools.pairwise([of(left), *map(of, others)])
            links = [_applied(_OPERATORS[type(op)], pair) for op, pair in zip(ops, pairs, strict=True)]
            return links[0] if len(links) == 1 else lambda sizes: all(link(sizes) for link in links)
        case ast.IfExp(test=test, body=body, orelse=other):
            condition, then, otherwise = of(test), of(body), of(other)
            return lambda sizes: then(sizes) if condition(sizes) else otherwise(sizes)
        case ast.Call(func=function, args=arguments, keywords=[]):
            name = ast.unparse(function).removeprefix("torch.sym_")  # sym_max since torch 2.14
            if name in _FUNCTIONS:
                return _applied(_FUNCTIONS[name], [*map(of, arguments)])
    raise _Unreadable


def _applied(function: Callable[..., Any], arguments: Sequence[_Value]) -> _Value:
    if len(arguments) == 2:
        first, second = arguments
        return lambda sizes: function(first(sizes), second(sizes))
    return lambda sizes: function(*(argument(sizes) for argument in arguments))


def _always(guard: _Guard, needed: Sequence[_Guard], ranges: Mapping[Any, Any]) -> bool:
    """Whether a guard is true of all sizes that the ranges allow, as far as many of them tell, and at
    which the model has what it needs."""
    of_these = {*guard.names.values()}
    needed = [one for one in needed if of_these & {*one.names.values()}]
    symbols = sorted(of_these.union(*(one.names.values() for one in needed)), key=str)

    def allowed(symbol: Any) -> Sequence[int]:
        low, high = ranges[symbol].lower, ranges[symbol].upper
        return [size for size in (*SIZES, *LARGE) if low <= size <= high]

    choices = [allowed(symbol) for symbol in symbols]
    tried: Iterable[tuple[int, ...]] = zip(*choices, strict=True)
    if len(symbols) > 1:
        draw = random.Random(0)
        small = [choice[:64] for choice in choices]
        tried = (
            tuple(draw.choice(choice) for choice in (small if count % 2 else choices))
            for count in range(TRIED)
        )
    at = [dict(zip(symbols, point, strict=True)) for point in tried]
    met = [sizes for sizes in at if all(one(sizes) for one in needed)]
    return all(map(guard, met if len(met) >= MET else at))


def _failing(
    guard: _Guard, guards: Sequence[_Guard], ranges: Mapping[Any, Any], hints: Mapping[Any, int],
    lengths: Collection[Any], asked: Sequence[Question],
) -> list[dict[Any, int]]:  # fmt: skip
    """Small sizes at which a guard fails although the model's own code is answered as it was: FAILING of
    them where there are so many, and none where it holds for the example alone.

    First those at which the others hold: a model that fails there needs this one, and none of them.
    """
    draw, elsewhere = random.Random(0), False
    own, near, failing = {*guard.names.values()}, dict[Any, list[int]](), list[dict[Any, int]]()
    for symbol, hint in hints.items():
        most = SMALL if symbol in lengths else NEAR
        low, high = max(2, ranges[symbol].lower), ranges[symbol].upper
        sizes = {*range(2, most), *range(hint - NEAR, hint + NEAR)}
        near[symbol] = sorted(size for size in sizes if low <= size <= high) or [hint]
    largest = max(math.prod(hints[symbol] for symbol in lengths), MOST_ENTRIES)
    for count in range(TRIED):
        point = {s: draw.choice(near[s]) if s in own or count % 2 else hint for s, hint in hints.items()}
        if guard(point):
            elsewhere = elsewhere or any(point[symbol] != hints[symbol] for symbol in own)
        elif point not in failing and math.prod(point[symbol] for symbol in lengths) <= largest:
            failing.append(point)
    alone = sorted(failing, key=lambda point: not all(one(point) for one in guards if one is not guard))
    answered = (point for point in alone if all(one.at(point) is one.answer for one in asked))
    return [*itertools.islice(answered, FAILING)] if elsewhere else []


def _around(guard: _Guard, hints: Mapping[Any, int], symbol: Any) -> tuple[int, Any]:
    """The sizes next to the example's at which a guard holds, the others as they are there."""

    def holds(size: int) -> bool:
        return guard({**hints, symbol: size})

    low = high = hints[symbol]
    while low > SIZES.start and holds(low - 1):
        low -= 1
    while high < SIZES.stop and holds(high + 1):
        high += 1
    without_end = high >= SIZES.stop and all(map(holds, LARGE))
    return low, int_oo if without_end else high


def _sizes(exported: ExportedProgram, call: Batch) -> dict[str, tuple[Any, int, int]]:
    """(size, what it is in the example, axis) by the name that guards have for it."""
    places = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    values = [places.get(name) for name in exported.graph_signature.user_inputs]
    signature = exported.module_call_graph[0].signature
    names = None if signature is None else signature.forward_arg_names
    leaves, _ = pytree.tree_flatten_with_path((call.args, call.kwargs))
    by_name: dict[str, tuple[Any, int, int]] = {}
    if len(leaves) != len(values):
        return by_name
    for (path, example), value in zip(leaves, values, strict=True):
        which, first, *rest = path
        name = first.key if which.idx == 1 else None  # type: ignore[attr-defined]
        if name is None and names is not None and first.idx < len(names):  # type: ignore[attr-defined]
            name = names[first.idx]  # type: ignore[attr-defined]
        if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
            continue
        for axis, size in enumerate(value.shape):
            number = fixed_size(size)
            if number is not None or size.node.expr.is_Symbol:  # type: ignore[attr-defined]
                text = f"L[{name!r}]{pytree.keystr(tuple(rest))}.size()[{axis}]"
                by_name[text] = size if number is None else number, int(example.shape[axis]), axis
    return by_name
