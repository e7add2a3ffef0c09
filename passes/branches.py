"""Branches: what a model's Python asks of its data while it is traced, and what is answered.

    while err.item() > tol: ...          goes on to the end of its budget, and is noted (early stops)
    if torch.any(mask < 0): ...          goes the way of the example, and the way is held to

An answer of the second kind is traced as asapc::holds(what was asked, the answer, the place in the code):
where other data asks for the other way, the program raises BranchError instead of computing something
else. That is for what a model asks about its inputs; a branch on what an attention gives, such as a loop
that ends, would hold for the example alone and is refused.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from asapc.passes.cut import HALVES, ancestors, depends_on_data, reaches
from asapc.passes.observe import STOP, builtin_replaced, folders
from asapc.passes.products import NORMALISERS
from asapc.terminal.printed import first_line

Place = tuple[str, int]
"""File and line."""

_NOT_THE_USERS = folders(torch.__file__, __file__)
_HIDDEN = ("<", *_NOT_THE_USERS)
HOLDS = torch.ops.asapc.holds.default


@dataclass
class Answers:
    """What an example answers, by the place in the code that asks, in order.

    numbers: numbers are answered, too.
    """

    numbers: bool
    given: dict[Place, list[Any]] = field(default_factory=dict)


class Trace(TorchFunctionMode):
    """Answers what Python asks of tensors.

    The number that `err.item()` gives compares as one that never ends a loop. What is compared, and with
    which threshold, is noted: passes.early_stop finds out what stopping would change. Whatever else is
    asked is answered as the example does: with real tensors by these, and kept in `answers`; in a trace
    from the answers of such a run.

    ends_at: the number of the one comparison that does end its loop.
    answers: of a run of the same code on the example; None: this is that run.
    numbers: of that run, whether numbers are answered by the example as well.
    """

    def __init__(
        self, ends_at: int | None = None, answers: Answers | None = None, numbers: bool = False
    ) -> None:
        super().__init__()
        self._ends_at = ends_at
        self._given = answers
        self.answers = Answers(numbers) if answers is None else answers
        self.calls = 0
        self.widened = False  # a branch on a size was left out
        self.of_sizes: list[str] = []  # functions that were taken of sizes, see passes.size_functions
        self.thresholds: list[float | None] = []
        # Kept alive, so that identity is meaningful: (comparison, whether it says go on, left, right).
        self._comparisons: list[tuple[torch.Tensor, bool, torch.Tensor, Any]] = []
        self._in_units: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ASKING or (self.answers.numbers and func in _NUMBERS):
            return self._asked(func, args, kwargs or {})
        if func in _DECIDING and self._is_of_sizes(args[0]):
            raise RuntimeError("decides by a function of a size")
        if func is torch.Tensor.item and args[0].is_floating_point():
            return _Residual(self, args[0])
        if func is torch.Tensor.__float__ and args[0].is_floating_point():
            self.note(args[0], None)  # a plain number: nobody sees what it is compared with
            return math.nan
        if func is torch.Tensor.__bool__:
            for known, goes_on, residual, threshold in self._comparisons:
                if args[0] is known:
                    return self.compared(residual, goes_on, threshold)
            return self._asked(func, args, kwargs or {})
        self.calls += 1
        if func is torch.cdist and self._given is not None:
            kwargs = self._without_size_branch(args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        scalar = isinstance(result, torch.Tensor) and result.dim() == 0
        compares = func in _COMPARISONS and not self.answers.numbers
        if compares and scalar and args[0].is_floating_point():
            if isinstance(args[1], torch.Tensor):
                self.note(args[1], None)  # which of the two is the residual, nobody knows
            self._comparisons.append((result, _COMPARISONS[func], args[0], args[1]))
        return result

    def _is_of_sizes(self, asked: Any) -> bool:
        """Whether it may be a function of a size, which is no residual: those are single doubles."""
        scalar = isinstance(asked, Tensor) and asked.dim() == 0
        return bool(self.of_sizes) and scalar and asked.dtype is torch.float64

    def _without_size_branch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Have torch.cdist compute its distances without products, which it takes for more than CDIST
        points, except in half precision. capture holds them against the module's own at more points."""
        branches = len(args) <= 3 and kwargs.get("compute_mode", _CDIST_BRANCHES) == _CDIST_BRANCHES
        if not branches or args[0].dtype in HALVES:
            return kwargs
        self.widened = True
        return {**kwargs, "compute_mode": "donot_use_mm_for_euclid_dist"}

    def _asked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to a question, a bool or a number; in a trace it is held to."""
        place = _place_of(sys._getframe(2))
        if place is None:
            return func(*args, **kwargs)
        if self._given is None:
            answer = func(*args, **kwargs)
            self.answers.given.setdefault(place, []).append(answer)
            return answer
        left = self._given.given.get(place)
        if not left:
            raise RuntimeError("is asked in the trace and not when the model runs")
        answer = left.pop(0)
        if func in _NUMBERS and not isinstance(answer, bool):
            number = _Number(answer, args[0], place)
            return number if func is torch.Tensor.item else number.known()
        condition = _ASKING[func](*args, **kwargs) if func in _ASKING else args[0]
        holds(condition, answer, place)
        return answer

    def compared(self, residual: torch.Tensor, larger: bool, threshold: object) -> bool:
        """What a comparison says while the loop goes on.  larger: it asks for residual > threshold."""
        # `residual > threshold` may ask if a loop diverges, not if it is to go on.
        if isinstance(threshold, torch.SymInt | torch.SymFloat) and threshold.node.hint > 0:
            # eps * n: what is compared with a number is the residual in this unit.
            low, key = threshold.node.hint < DIVERGES, (id(residual), str(threshold))
            _, residual = self._in_units.setdefault(key, (residual, residual / threshold))
            threshold = 1.0
        else:
            low = isinstance(threshold, int | float) and threshold < DIVERGES
        guard = larger and not low
        ends = len(self.thresholds) == self._ends_at
        self.note(residual, None if guard else threshold)
        return (larger and not guard) != ends

    def note(self, residual: torch.Tensor, threshold: object) -> None:
        """The way that a program takes depends on a residual."""
        torch.ops.asapc.seen([residual], f"{STOP} {len(self.thresholds)}")
        number = threshold if isinstance(threshold, int | float) and math.isfinite(threshold) else None
        self.thresholds.append(None if number is None else float(number))
        if len(self.thresholds) > MOST_CHECKS:
            raise RuntimeError(f"a loop that only a residual ends took more than {MOST_CHECKS} steps")


class _Residual:
    """A number that is larger than every threshold it is compared with: the loop goes on.

    No float, so that whatever reads it otherwise has to ask for one, and is noted.
    """

    def __init__(self, budget: Trace, residual: torch.Tensor) -> None:
        self._budget, self._residual = budget, residual

    def __lt__(self, other: object) -> bool:
        return self._budget.compared(self._residual, False, other)

    def __gt__(self, other: object) -> bool:
        return self._budget.compared(self._residual, True, other)

    __le__, __ge__ = __lt__, __gt__

    def __float__(self) -> float:
        """For what is computed from it, which may be compared with anything; `math.isnan` asks, too."""
        self._budget.note(self._residual, None)
        return math.nan

    def __abs__(self) -> _Residual:
        return self

    def __format__(self, spec: str) -> str:
        return format(math.nan, spec)  # for people: nothing is decided by it

    def __bool__(self) -> bool:
        return bool(float(self))


def _computed(name: str) -> Callable[..., Any]:
    def method(self: _Residual, *others: Any) -> Any:
        return getattr(float(self), name)(*(float(x) if isinstance(x, _Residual) else x for x in others))

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg",
              "eq", "ne", "round", "int"):  # fmt: skip
    setattr(_Residual, f"__{_name}__", _computed(f"__{_name}__"))
_Residual.__hash__ = object.__hash__  # type: ignore[method-assign]


DIVERGES = 1.0
CDIST = 25  # points on either side up to which torch.cdist computes distances one by one
_CDIST_BRANCHES = "use_mm_for_euclid_dist_if_necessary"
MOST_CHECKS = 4096
# A comparison of a residual with a threshold, and what it says while the loop is to go on.
_COMPARISONS = {
    getattr(home, name.format(compared)): compared[0] == "g"
    for compared in ("lt", "le", "gt", "ge")
    for home, name in ((torch.Tensor, "{}"), (torch.Tensor, "__{}__"), (torch, "{}"))
}


def holds(condition: Tensor, answer: bool, place: Place) -> None:
    """Trace that the condition must be what it was."""
    torch.ops.asapc.holds(condition, answer, text_of(place))


class _Number:
    """A number of the data, as in the example.  Where it is compared, the comparison is held to; where it
    is used otherwise, the number itself is."""

    def __init__(self, value: float, tensor: Tensor, place: Place) -> None:
        self._value, self._tensor, self._place = value, tensor, place

    def known(self) -> Any:
        holds(self._tensor == self._value, True, self._place)
        return self._value

    def compared(self, compare: Callable[[Any, Any], Any], other: Any) -> bool:
        if not isinstance(other, _Number | int | float):
            return bool(compare(self.known(), other))
        theirs, tensor = (other._value, other._tensor) if isinstance(other, _Number) else (other, other)
        answer = bool(compare(self._value, theirs))
        holds(compare(self._tensor, tensor), answer, self._place)
        return answer

    def __bool__(self) -> bool:
        return self.compared(operator.ne, 0)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)  # for people: nothing is decided by it


def _uses(name: str) -> Callable[[_Number], Any]:
    return lambda self: getattr(self.known(), name)()


def _combines(name: str, swapped: bool) -> Callable[[_Number, Any], Any]:
    def method(self: _Number, other: Any) -> Any:
        pair = (self.known(), other.known() if isinstance(other, _Number) else other)
        return getattr(operator, name)(*(pair[::-1] if swapped else pair))

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Number, f"__{_name}__", partialmethod(_Number.compared, getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Number, f"__{_name}__", _combines(_name, False))
    setattr(_Number, f"__r{_name}__", _combines(_name, True))
for _name in ("neg", "abs", "round", "int", "float", "index", "trunc", "floor", "ceil", "hash"):
    setattr(_Number, f"__{_name}__", _uses(f"__{_name}__"))


def _is_close(one: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.isclose(one, other, *args, **kwargs).all()


def _is_equal(one: Tensor, other: Tensor) -> Tensor:
    same = one.shape == other.shape
    return (one == other).all() if same else torch.zeros((), dtype=torch.bool)


# What asks for a bool, with the tensor that it asks about.
_ASKING: dict[Any, Callable[..., Tensor]] = {
    torch.equal: _is_equal, torch.Tensor.equal: _is_equal,
    torch.allclose: _is_close, torch.Tensor.allclose: _is_close,
    torch.is_nonzero: lambda tensor: tensor != 0, torch.Tensor.is_nonzero: lambda tensor: tensor != 0,
}  # fmt: skip
_NUMBERS = {torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__}
_DECIDING = {*_COMPARISONS, *_NUMBERS, torch.Tensor.__bool__}


def held_branches(graph: GraphModule) -> list[Node]:
    """The answers that a program holds to."""
    return graph.graph.find_nodes(op="call_function", target=HOLDS)


def check_branches(graph: GraphModule) -> None:
    """Raises ValueError where a branch that is held to depends on what an attention has computed.

    One that depends on no weight and on no input, neither its numbers nor its sizes, is always as it was,
    and is taken out.
    """
    for node in held_branches(graph):
        condition, _, text = node.args
        assert isinstance(condition, Node)
        if not any(n.op in ("placeholder", "get_attr") for n in ancestors(condition)):
            graph.graph.erase_node(node)
        elif reaches(condition, lambda n: n.target in NORMALISERS and depends_on_data(n)):
            raise ValueError(f"branches on a number that comes out of a loop: {text}")
    graph.graph.eliminate_dead_code()
    graph.recompile()


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """No dump of a graph, and no log of torch's; `--debug` asks for them."""
    if logging.getLogger("asapc").isEnabledFor(logging.DEBUG):
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed = io.StringIO()  # torch.export prints the graph of a trace that failed
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        logging.disable(before)


class _TypeOf(type):
    """The metaclass of what stands for `type` in code that compares it with torch.Tensor."""

    def __call__(cls, *args: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            return type(*args)
        parameter = isinstance(args[0], torch.nn.Parameter)
        plain = torch.nn.Parameter if parameter else Tensor
        return plain if isinstance(args[0], FakeTensor) else type(args[0])

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, type)


class _Plain(metaclass=_TypeOf):
    """`type`, to which a tensor of a trace is what it stands for."""


def plain_types(spaces: Sequence[dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
    """type(x) is torch.Tensor, of a tensor in a trace, in the modules of these namespaces."""
    return builtin_replaced(spaces, "type", _Plain)


def asking_for_types(error: BaseException) -> list[dict[str, Any]]:
    """The namespaces of the model's code, on the way to an error, that asks for the type of something."""
    frames = [frame for one in _chain(error) for frame, _ in traceback.walk_tb(one.__traceback__)]
    return [f.f_globals for f in frames if _is_theirs(f) and "type" in f.f_code.co_names]


def text_of(place: Place) -> str:
    """ "`if torch.any(m < 0):` (model.py, line 62)" """
    file, line = place
    code = linecache.getline(file, line).strip()
    where = f"{Path(file).name}, line {line}"
    if len(code) > 80:
        code = f"{code[:80].rsplit(' ', 1)[0]} …"
    return f"`{code}` ({where})" if code else where


def spoken(node: Node) -> str:
    """A value as its author knows it: an input's name, or the model's line that computes it."""
    if node.op == "placeholder":
        return node.name
    trace = str(node.meta.get("stack_trace") or "")
    places = [(file, int(line)) for file, line in _FRAME.findall(trace)]
    theirs = [place for place in places if not place[0].startswith(_HIDDEN)]
    return text_of(theirs[-1]) if theirs else node.name


_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


def own_lines() -> contextlib.AbstractContextManager[Any]:
    """Have torch keep, of each node's stack, the line that `spoken` reads: to word all frames, its own
    too, is a seventh of a trace. What calls the function that asks for this is not the model's."""
    caller = sys._getframe(1)
    def summary() -> traceback.StackSummary:
        frame: Any = sys._getframe(1)
        while frame not in (None, caller) and frame.f_code.co_filename.startswith(_HIDDEN):
            frame = frame.f_back
        if frame in (None, caller):
            return traceback.StackSummary()
        place = frame.f_code.co_filename, frame.f_lineno
        return traceback.StackSummary.from_list([(*place, "forward", "")])  # others torch leaves out

    lines = SimpleNamespace(extract=lambda **_: SimpleNamespace(summary=summary))
    name, of = "CapturedTraceback", torch.fx.proxy  # torch's own name, which it may change
    return mock.patch.object(of, name, lines) if hasattr(of, name) else contextlib.nullcontext()


def reason_of(error: BaseException) -> str:
    """What torch.export says of a failure in one line, after the user's own line that it failed at."""
    reason = first_line(error)
    if any(words in reason for words in _DATA_DEPENDENT) or type(error).__name__ in _DATA_DEPENDENT:
        reason = "depends on a value from the data"
    elif known := [words for part, words in _IN_WORDS.items() if part in reason]:
        reason = known[0]
    elif (unknown := _UNKNOWN_TYPE.match(reason)) is not None:
        where = "is given" if unknown[1] == "Unsupported input type" else "returns"
        reason = f"it {where} a {unknown[2]}, which is not made of tensors"
        if unknown[2].endswith("Cache"):
            reason += ": set config.use_cache = False to compile what keeps keys and values between calls"
    for one in reversed(_chain(error)):
        frames = [f for f in traceback.walk_tb(one.__traceback__) if _is_theirs(f[0])]
        if frames:
            frame, line = frames[-1]
            return f"{text_of((frame.f_code.co_filename, line))}: {reason}"
    return reason


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it came from, but for what a caller of the capture was handling already."""
    caught = error.__traceback__
    callers = [] if caught is None else [f for f, _ in traceback.walk_stack(caught.tb_frame.f_back)]
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        if following.__traceback__ is not None and following.__traceback__.tb_frame in callers:
            break
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain


_UNKNOWN_TYPE = re.compile(r"(Unsupported input type|Found) <class '(?:[\w<>]+\.)*(\w+)'>")
_DATA_DEPENDENT = {
    "GuardOnDataDependentSymNode", "DataDependentOutputException", "data-dependent", "_Residual",
    "_Number", "float NaN to integer", "User output nan",
}  # fmt: skip
_LENGTH_IN_NUMPY = "a length goes into NumPy; compute with it in torch"
_IN_WORDS = {
    "non-nested SymInt": "a length is looked up in a dictionary or cache; compute what is kept there",
    ".numpy() is not supported": "a tensor is read as a NumPy array; compute with it in torch",
    "np.ndarray of type numpy.object_": _LENGTH_IN_NUMPY, "loop of ufunc": _LENGTH_IN_NUMPY,
    "fake tensor in the exported program": "a vmap takes or gives another axis than the first",
    "Couldn't swap": "a layer is cast or moved while the model runs; do it before",
}


def _place_of(frame: FrameType | None) -> Place | None:
    """The innermost line outside of torch, None where it is asapc's own, which asks at its own risk."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None or not _is_theirs(frame):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def _is_theirs(frame: FrameType) -> bool:
    """Whether a line is the model's: of the user, a library or a built-in model."""
    package = str(frame.f_globals.get("__name__", ""))
    if package.startswith("asapc.") and not package.startswith("asapc.models."):
        return False
    return not frame.f_code.co_filename.startswith(_HIDDEN)
