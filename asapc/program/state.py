"""State: what code read besides its arguments, as paths from a module to plain values.

    self.ctx.tau     [("attr", "ctx"), ("attr", "tau")]                  0.5
    TAU of the file  [("attr", "forward"), ("global", "TAU")]            0.5
    tau of a factory [("attr", "forward"), ("cell", "tau")]              0.5

A trace has all of it as constants. Walking a path reads dicts, lists and cells alone: no property and no
code of the user's runs, and nothing is imported, for a manifest is not trusted.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from asapc.formats.records import APART, Record
from asapc.program.call import shortened

Step = tuple[str, str | int]
Steps = tuple[Step, ...]
Value = bool | int | float | str | None | tuple[str, str]
"""A plain value, or what kind of object it is, and which."""

GONE = object()
MOST = 2000  # values of one module
DEEPEST = 8  # steps
LONGEST = 64  # containers whose items are looked at one by one
_KINDS = ("attr", "key", "item", "cell", "global", "default", "part")
_PARTS = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget")
TRAINED = "requires_grad"  # a part of a module: which of its weights require a gradient, in order
_WITH_PARTS = (MethodType, functools.partial, property, staticmethod, classmethod)
# What torch keeps on a module, and what has a guard of its own or is live.
_OF_TORCH = {*vars(nn.Module()), "training", "_replicate_for_data_parallel", "__signature__"}
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}


@dataclass(frozen=True)
class Names:
    """What the code of one module loads.

    attributes: None for all, where names are made while it runs.  code: of the functions that ran.
    """

    attributes: frozenset[str] | None = frozenset()
    globals: frozenset[str] = frozenset()
    code: frozenset[CodeType] = frozenset()


EVERYTHING = Names(None)


class TooMuch(Exception):
    """More values than a guard can look at."""


def reachable(root: nn.Module, names: Names) -> dict[Steps, Value]:
    """The plain values that code which loads these names can read from a module, by path.

    Raises TooMuch.
    """
    values: dict[Steps, Value] = {}
    if TRAINED in (names.attributes or ()):
        values[(("part", TRAINED),)] = encoded(_stepped(root, ("part", TRAINED)))
    known: dict[int, Any] = {id(root): root}  # kept, so that identities are
    files: set[int] = set()  # whose globals have been looked at
    queue: deque[tuple[Steps, Any]] = deque([((), root)])
    while queue:
        steps, thing = queue.popleft()
        for step in _steps(thing, names, not steps, files):
            inner = _stepped(thing, step)
            if inner is GONE or (isinstance(inner, ModuleType) and _is_librarys(inner)):
                continue
            path, value = (*steps, step), encoded(inner)
            ran = isinstance(inner, FunctionType) and inner.__code__ in names.code
            is_name = step[0] == "global" and isinstance(value, tuple) and value[0] == "named"
            if not isinstance(inner, nn.Module) and (ran or not is_name):
                values[path] = value
            if isinstance(value, tuple) and id(inner) not in known and len(path) < DEEPEST:
                known[id(inner)] = inner
                queue.append((path, inner))
        if len(values) > MOST:
            raise TooMuch(f"its code may read more than {MOST} values besides its arguments")
    return values


def encoded(thing: Any) -> Value:
    """A plain value itself; of anything else the kind of it, and what tells it from others."""
    kind = type(thing)
    if thing is None or kind in (bool, int) or (kind is float and math.isfinite(thing)):
        return thing
    if kind is str:
        return str(thing) if len(thing) <= 200 else ("text", _digest(thing.encode()))
    if isinstance(thing, Tensor):
        return ("tensor", _tensor_digest(thing))
    if kind.__module__ == "numpy" and hasattr(thing, "tobytes"):
        return ("array", _digest(f"{thing.dtype} {thing.shape}".encode() + thing.tobytes()))
    if isinstance(thing, list | tuple | deque | dict):
        text = repr(list(thing)) if isinstance(thing, dict) and _are_plain(thing) else str(len(thing))
        return (kind.__name__, text if len(text) <= 200 else _digest(text.encode()))
    if isinstance(thing, set | frozenset):
        return ("set", _digest(repr(sorted(map(repr, thing))).encode()) if _are_plain(thing) else "")
    if isinstance(thing, FunctionType | BuiltinFunctionType | type | ModuleType):
        return ("named", str(getattr(thing, "__qualname__", None) or thing.__name__))
    if isinstance(thing, float | complex | bytes | enum.Enum | range | torch.dtype | torch.device):
        return ("value", repr(thing)[:200])
    if kind.__module__ == "itertools":
        return ("value", repr(thing)[:200])  # a counter shows where it is
    return ("object", kind.__qualname__)


def _are_plain(things: Any) -> bool:
    return all(type(x) in (bool, int, float, str, type(None)) for x in things)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tensor_digest(tensor: Tensor) -> str:
    if torch._C._len_torch_dispatch_stack():  # a trace would take the copy for one of the model's
        return f"{id(tensor)} {tensor._version}"
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return f"{tensor.dtype} {[*tensor.shape]}"
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return _digest(f"{tensor.dtype} {[*tensor.shape]}".encode() + data)


def _steps(thing: Any, names: Names, is_root: bool, files: set[int]) -> Iterator[Step]:
    """The steps from an object to what can be read of it; some may lead nowhere."""
    if isinstance(thing, Tensor | str | bytes):
        return
    if isinstance(thing, FunctionType):
        if thing.__code__ in names.code:
            yield from (("cell", name) for name in thing.__code__.co_freevars)
            if id(thing.__globals__) not in files:
                yield from (("global", name) for name in sorted(names.globals & thing.__globals__.keys()))
            files.add(id(thing.__globals__))
            yield from (("default", place) for place in range(len(thing.__defaults__ or ())))
            yield from (("default", name) for name in thing.__kwdefaults__ or ())
            if "__wrapped__" in vars(thing):
                yield "part", "__wrapped__"
        return
    if isinstance(thing, dict) and len(thing) <= LONGEST:
        yield from (("key", key) for key in list(thing) if type(key) in (str, int))
    if isinstance(thing, list | tuple | deque) and len(thing) <= LONGEST:
        yield from (("item", place) for place in range(len(thing)))
    if isinstance(thing, _WITH_PARTS):
        yield from (("part", part) for part in _PARTS if getattr(thing, part, None) is not None)
    if not _is_librarys(thing):
        yield from (("attr", name) for name in _attributes(thing, names, is_root))


def _is_librarys(thing: Any) -> bool:
    """An object of torch's or Python's own whose attributes no guard can know; nor need it."""
    if isinstance(thing, nn.Module):
        return False
    named = isinstance(thing, type | ModuleType)
    home = (thing.__name__ if isinstance(thing, ModuleType) else thing.__module__) if named else (
        type(thing).__module__)  # fmt: skip
    top = str(home).partition(".")[0]
    return top in (_LIBRARIES if named else {"torch", "numpy", "itertools"})


def _attributes(thing: Any, names: Names, is_root: bool) -> Iterator[str]:
    """The names of its attributes that code may load."""
    own, lists = _dict_of(thing), isinstance(thing, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    of_torch = isinstance(thing, nn.Module) and type(thing).__module__.startswith("torch.")
    if of_torch and not is_root and not lists:
        return  # a layer that is called, as it is then
    parts = thing._modules if isinstance(thing, nn.Module) else {}
    classes = [kind for kind in _mro(thing) if kind.__module__.partition(".")[0] not in _LIBRARIES]
    if names.attributes is None:
        loaded = [*own, *(
            name for kind in classes for name, value in vars(kind).items()
            if name not in own and not name.startswith("__") and _are_plain([value])
        )]  # fmt: skip
    else:
        of_class = {name for kind in classes for name in vars(kind)}
        loaded = sorted(names.attributes & (own.keys() | of_class | parts.keys()))
    yield from (name for name in loaded if name not in _OF_TORCH or not isinstance(thing, nn.Module))
    if lists:
        yield from (name for name in parts if name not in (names.attributes or ()))
    if is_root:
        yield "forward"


def _dict_of(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, type):
        return vars(thing)
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _mro(thing: Any) -> tuple[type, ...]:
    return thing.__mro__ if isinstance(thing, type) else type(thing).__mro__


def own_forward(thing: Any) -> Any:
    """The forward of an instance that its class does not have, or None: not what stands for it."""
    value = _dict_of(thing).get("forward")
    while value is not None and "before" in _dict_of(value):
        value = _dict_of(value)["before"]
    return value


def attribute(thing: Any, name: str) -> Any:
    """As it is stored, on the object or its class, or GONE."""
    own = _dict_of(thing)
    if name in own and not isinstance(thing, type):
        value = own_forward(thing) if name == "forward" else own[name]
        if value is not None or name != "forward":
            return value
    for kind in _mro(thing):
        if name in vars(kind):
            value = vars(kind)[name]
            if inspect.ismemberdescriptor(value) and not isinstance(thing, type):
                try:
                    return value.__get__(thing)  # of __slots__
                except AttributeError:
                    return GONE
            return value
    if isinstance(thing, nn.Module):
        return thing._modules.get(name, GONE)
    return GONE


def _stepped(thing: Any, step: Step) -> Any:
    """What one step leads to, or GONE."""
    kind, name = step
    if kind == "attr":
        return attribute(thing, str(name))
    if kind == "key":
        items: dict[Any, Any] = thing if isinstance(thing, dict) else {}
        return dict.get(items, name, GONE)  # a subclass may have a `get` of its own, which is not run
    if kind == "item":
        place = isinstance(thing, list | tuple | deque) and int(name) < len(thing)
        return thing[int(name)] if place else GONE
    if kind == "part":
        if name == TRAINED and isinstance(thing, nn.Module):
            return sys.intern("".join("01"[weight.requires_grad] for weight in thing.parameters()))
        known = isinstance(thing, (FunctionType, *_WITH_PARTS)) and name in _PARTS
        return getattr(thing, str(name), GONE) if known else GONE
    if not isinstance(thing, FunctionType):
        return GONE
    if kind == "global":
        return thing.__globals__.get(str(name), GONE)
    if kind == "default":
        named = isinstance(name, str)
        return (thing.__kwdefaults__ or {}).get(str(name), GONE) if named else (
            _stepped(thing.__defaults__ or (), ("item", name)))  # fmt: skip
    names = thing.__code__.co_freevars
    if name not in names or thing.__closure__ is None:
        return GONE
    try:
        return thing.__closure__[names.index(str(name))].cell_contents
    except ValueError:  # nothing is in it yet
        return GONE


def found(module: nn.Module, steps: Steps) -> Any:
    """What is at the end of these steps, or GONE."""
    thing: Any = module
    for step in steps:
        thing = _stepped(thing, step)
    return thing


def can_be_taken_away(steps: Steps) -> bool:
    """An attribute, by way of attributes and items; none of torch's or Python's."""
    ways = {kind for kind, _ in steps} <= {"attr", "key", "item"} and 0 < len(steps) <= DEEPEST
    names = {str(name) for kind, name in steps if kind == "attr"}
    reserved = names & {*_OF_TORCH, "forward"} or any(name.startswith("__") for name in names)
    return ways and steps[-1][0] == "attr" and not reserved


def take_away(module: nn.Module, steps: Steps) -> None:
    """Delete the attribute at the end of these steps, for which can_be_taken_away holds.

    In plain Python, which torch.compile follows, and without any of the user's. Nothing where a step
    leads nowhere, or to what is no object with attributes of its own.
    """
    holder: Any = module
    for kind, name in steps[:-1]:
        if kind == "attr":
            holder = _own_attribute(holder, str(name))
        elif type(holder) is dict:
            holder = holder.get(name)
        elif type(holder) in (list, tuple):
            holder = holder[name] if type(name) is int and name < len(holder) else None
        else:
            holder = None
    if _has_own(holder):
        vars(holder).pop(str(steps[-1][1]), None)


def _own_attribute(holder: Any, name: str) -> Any:
    if not _has_own(holder):
        return None
    if name in vars(holder):
        return vars(holder)[name]
    if isinstance(holder, nn.Module) and name in holder._modules:
        return holder._modules[name]
    for kind in type(holder).__mro__:
        if name in vars(kind):
            return vars(kind)[name]
    return None


def _has_own(thing: Any) -> bool:
    """Whether it is an object that code sets attributes of: no class, function or module of Python."""
    kinds = (type, ModuleType, FunctionType, MethodType, Tensor)
    return hasattr(thing, "__dict__") and not isinstance(thing, kinds)


def text_of(steps: Steps) -> str:
    """As code says it: ctx.tau, opts['n'], TAU."""
    text = ""
    for place, (kind, name) in enumerate(steps):
        if kind in ("cell", "global"):
            text = str(name)
        elif kind in ("key", "item"):
            text += f"[{name!r}]"
        elif (kind, name) == ("part", TRAINED):
            text = f"{TRAINED} of its weights"
        elif kind == "attr" and not (name == "forward" and place + 1 < len(steps)):
            text += f".{name}" if text else str(name)
    return text or "an argument's default"


@dataclass(frozen=True)
class Reads(Record):
    """The values that a module's code read when it was captured.

    questions: of a mode, all of which were answered with no; see QUESTIONS.
    """

    values: tuple[tuple[Steps, Value], ...] = ()
    questions: tuple[str, ...] = ()
    _watched: list[Any] = field(
        default_factory=lambda: [None, ()], init=False, repr=False, compare=False,
        metadata=APART,
    )

    def __post_init__(self) -> None:
        for kind, name in (step for steps, _ in self.values for step in steps):
            if kind not in _KINDS or (kind == "item" and not (isinstance(name, int) and name >= 0)):
                raise ValueError(f"a step is one of {', '.join(_KINDS)}, and a name or a place")
        if not all(question in QUESTIONS for question in self.questions):
            raise ValueError(f"a question is one of {', '.join(QUESTIONS)}")

    def difference(self, module: nn.Module) -> tuple[str, str] | None:
        """(what, how it differs) of the first value that is another in this module, or None.

        While every object on the way is the very one that it was, nothing is compared.
        """
        if torch.compiler.is_compiling():
            return self._traced_difference(module)
        watched, checks = self._watched
        if watched is module and all(get() is value for get, value in checks):
            return None
        for steps, expected in self.values:
            value = found(module, steps)
            now = encoded(value)
            if value is GONE or type(now) is not type(expected) or now != expected:
                text = "is gone" if value is GONE else f"is {_shown(value)}"
                captured = repr(expected) if not isinstance(expected, tuple) else " ".join(expected)
                return text_of(steps), f"was captured as {captured}, and {text}"
        self._watched[:] = [module, list(_checks(module, [steps for steps, _ in self.values]))]
        return None

    def _traced_difference(self, module: nn.Module) -> tuple[str, str] | None:
        """The same in plain Python, which torch.compile follows and guards; of attributes and items."""
        for steps, expected in self.values:
            followed = [kind in ("attr", "key", "item") for kind, _ in steps]
            if isinstance(expected, tuple) or not all(followed):
                continue
            value: Any = module
            for kind, name in steps:
                value = getattr(value, str(name), GONE) if kind == "attr" else value[name]
            if type(value) is not type(expected) or value != expected:
                return text_of(steps), f"was captured as {expected!r}"
        return None

    def __deepcopy__(self, memo: Any) -> Reads:
        return Reads(self.values, self.questions)

    def __reduce__(self) -> Any:
        return Reads, (self.values, self.questions)


def _shown(found: Any) -> str:
    value = encoded(found)
    return " ".join(value) if isinstance(value, tuple) and value[0] == "object" else shortened(found)


def _checks(module: nn.Module, paths: Sequence[Steps]) -> Iterator[tuple[Callable[[], Any], Any]]:
    """(get, value): nothing on these paths has changed where get() is the value for all."""
    known: set[Steps] = set()
    for steps in paths:
        thing: Any = module
        for place, step in enumerate(steps):
            inner, prefix = _stepped(thing, step), steps[: place + 1]
            if prefix not in known:
                known.add(prefix)
                own = _dict_of(thing) if step[0] == "attr" and not isinstance(thing, type) else {}
                if isinstance(own, dict) and step[1] in own:  # without the work of a step
                    yield functools.partial(dict.get, own, step[1], GONE), own[step[1]]
                else:
                    yield functools.partial(_stepped, thing, step), inner
                if isinstance(inner, list | deque | dict | set):
                    yield functools.partial(len, inner), len(inner)
                if isinstance(inner, Tensor) and not inner.is_inference():
                    yield functools.partial(getattr, inner, "_version"), inner._version
            thing = inner


# What code asks of the mode it runs in. A captured program is the answer no to each.
QUESTIONS: dict[str, tuple[str, Callable[[nn.Module, Sequence[Any]], bool]]] = {
    "grad": ("gradients are recorded", lambda *_: torch.is_grad_enabled()),
    "inference": ("inference_mode is on", lambda *_: torch.is_inference_mode_enabled()),
    "autocast": ("autocast is on", lambda *_: any(
        torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))),
    "inputs": ("an input requires a gradient", lambda _, flat: any(
        isinstance(x, Tensor) and x.requires_grad for x in flat)),
    "layout": ("an input is not contiguous", lambda _, flat: any(
        isinstance(x, Tensor) and not x.is_contiguous() for x in flat)),
    "training": ("it is in training mode", lambda module, _: module.training),
}  # fmt: skip


def asked(questions: Sequence[str], module: nn.Module, flat: Sequence[Any]) -> str | None:
    """What is otherwise than when the program was captured, whose code asks for it, or None."""
    for question in questions:
        text, is_so = QUESTIONS[question]
        if is_so(module, flat):
            return f"{text}, which its code asks for, and was captured without"
    return None
