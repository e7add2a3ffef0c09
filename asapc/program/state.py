"""State: what code reads besides its arguments, as paths from a module to plain values.

    self.ctx.tau     [("attr", "ctx"), ("attr", "tau")]                  0.5
    TAU of the file  [("attr", "forward"), ("global", "TAU")]            0.5
    tau of a factory [("attr", "forward"), ("cell", "tau")]              0.5
    TAU.get()        [("attr", "forward"), ("global", "TAU"), ("part", "get")]

A trace holds all of it as constants. Walking a path only reads dicts, lists and cells: no property and no
code of the user's runs, and nothing is imported, because a manifest is not trusted.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import enum
import functools
import hashlib
import inspect
import itertools
import math
import operator
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from asapc.formats.records import APART, Record
from asapc.program.call import shortened

Step = tuple[str, str | int]
Steps = tuple[Step, ...]
Value = bool | int | float | str | None | tuple[str, str]
"""A plain value; of anything else its kind, and what identifies it."""

Caches = dict[nn.Module, dict[str, Any]]
"""The attributes of modules; GONE stands for a missing one."""
_Known = dict[int, tuple[Any, str]]
"""Digests by the ids of objects. The objects are kept so that their ids stay theirs."""
GONE = object()
MOST = 2000  # values of one module
DEEPEST = 12  # steps
LONGEST = 64  # containers whose items are read one by one; longer ones are compared as a whole
FEW = 16  # entries of a tensor compared at every call: a write to `.data` leaves no other trace
_KINDS = ("attr", "key", "item", "cell", "global", "default", "part", "environ", "import")
_PARTS = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget")
_WRAPPED = ("__wrapped__", "_torchdynamo_orig_callable")  # the functions that a wrapper calls
_ALL_PARTS = {*_PARTS, *_WRAPPED}
BASES = "bases"  # a part of a class: the classes that super() may reach
HOOKS = "hooks"  # a part of a module: all of its hooks, in order
_HOOK_LISTS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
TRAINED = "requires_grad"  # a part of a module: which of its weights require a gradient, in order
OPERATORS = "asapc"  # a submodule: the tensors that operators were fitted with
STRUCTURE = "structure"  # a part of a module: all that it holds, where code iterates over that
WEIGHTS = "weights"  # a part of a module that no other registers: its weights, constants of a trace
_OF_STRUCTURE = {"state_dict", "_parameters", "_buffers", "_modules", *(
    named + what for named in ("", "named_") for what in ("parameters", "buffers", "modules", "children")
)}  # fmt: skip
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
ABSENT = ("attribute", "absent")  # the value of a missing attribute that code asks for
# Modules of Python whose objects show all of their value in their text.
_SHOWN = {"re", "itertools", "decimal", "fractions", "datetime", "uuid", "pathlib", "ipaddress"}
_ALWAYS_OTHERS = itertools.count()
_ADDRESS = re.compile(r" (at|@) 0x[0-9a-f]+")
_NO_STATE = {"logging", "os", "io", "_io", "types", "typing", "weakref", "contextvars", "_contextvars"}
_NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local)  # read attribute by attribute
_WITH_PARTS = (
    MethodType, functools.partial, property, staticmethod, classmethod, BuiltinFunctionType,
)  # fmt: skip
# The attributes that torch keeps on a module, and those that are read live or have their own guard.
_OF_TORCH = {*vars(nn.Module()), "training", "_replicate_for_data_parallel", "__signature__"}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, ModuleType)  # what code may replace in a library
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta)  # a class of which shows attributes, and runs no code


@dataclass(frozen=True)
class Names:
    """The names that the code of one module loads.

    attributes: None for all, if code makes names while it runs.  said: those written in the code.
    code: of the functions that ran.
    environ: environment variables.  imported: modules that were imported while it ran.
    modes: whether it asks for the mode of other modules.  asked: attributes that may be absent.
    homes: (module, global) pairs of functions that no path leads to, such as those in a set.
    """

    attributes: frozenset[str] | None = frozenset()
    globals: frozenset[str] = frozenset()
    code: frozenset[CodeType] = frozenset()
    environ: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    modes: bool = False
    said: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    homes: frozenset[tuple[str, str]] = frozenset()


class TooMuch(Exception):
    """There are more values than a guard can check."""


def reachable(
    root: nn.Module, names: Names, besides: Mapping[nn.Module, Any] = {},
    registered: Collection[nn.Module] | None = None, reached: set[CodeType] | None = None,
) -> dict[Steps, Value]:  # fmt: skip
    """The plain values, by path, that code which loads these names can read from a module.

    besides: attributes of modules to leave out.  registered: the modules of the model, None if unknown.
    reached: takes the code of the functions on these paths.  Raises TooMuch.
    """
    values: dict[Steps, Value] = {}
    known: dict[int, Any] = {id(root): root}  # kept, so that identities are
    files: set[int] = set()  # whose globals have been looked at
    queue: deque[tuple[Steps, Any]] = deque([((), root)])
    for home, name in sorted(names.homes):
        path: Steps = (("import", home), ("attr", name))
        inner = found(root, path)
        if not isinstance(inner, ModuleType) and inner is not GONE:
            values[path] = encoded(inner)
            known[id(inner)] = inner
            queue.append((path, inner))
    while queue:
        steps, thing = queue.popleft()
        if reached is not None and isinstance(thing, FunctionType):
            reached.update(_codes_in(thing.__code__))
        left_out: Any = besides.get(thing, ()) if isinstance(thing, nn.Module) else ()
        for step in _steps(thing, names, not steps, files):
            inner = _stepped(thing, step)
            if step[1] in left_out:
                continue
            if inner is GONE and step[0] == "attr" and step[1] in names.asked:
                values[(*steps, step)] = ABSENT
            if inner is GONE:
                continue
            if isinstance(inner, operator.attrgetter) and names.attributes is not None:
                asked = frozenset(name for text in inner.__reduce__()[1] for name in text.split("."))
                if asked - names.attributes:
                    names = replace(names, attributes=names.attributes | asked)
                    return reachable(root, names, besides, registered, reached)
            path, value = (*steps, step), encoded(inner)
            of_module = isinstance(inner, nn.Module) and not isinstance(inner, _HOLDERS)
            of_library = isinstance(inner, ModuleType) and _is_librarys(inner)
            if not of_module and not of_library:
                values[path] = value
            if of_module and registered is not None and inner not in registered:
                values[(*path, ("part", WEIGHTS))] = _stepped(inner, ("part", WEIGHTS))
            if isinstance(value, tuple) and id(inner) not in known and len(path) < DEEPEST:
                known[id(inner)] = inner
                queue.append((path, inner))
        if len(values) > MOST:
            raise TooMuch(f"its code may read more than {MOST} values besides its arguments")
    for part, words in ((TRAINED, {TRAINED}), (STRUCTURE, _OF_STRUCTURE)):
        if words & names.said or (part == STRUCTURE and isinstance(root, _HOLDERS) and names.code):
            values[(("part", part),)] = encoded(_stepped(root, ("part", part)))
    return values


def encoded(thing: Any, around: tuple[int, ...] = (), known: _Known | None = None) -> Value:
    """A plain value itself; of anything else its kind, and what tells it from others.

    around: ids of the objects around it.  known: digests of the objects that were visited.
    """
    kind, known = type(thing), {} if known is None else known
    if thing is None or kind in (bool, int) or (kind is float and math.isfinite(thing)):
        return thing
    if kind is torch.Size:
        return ("shape", " ".join(map(str, thing)))
    if isinstance(thing, _HOLDERS):
        return ("modules", _digest(repr([*thing._modules, *thing._parameters]).encode()))
    if kind is str:
        return str(thing) if len(thing) <= 200 else ("text", _digest(thing.encode()))
    if isinstance(thing, Tensor):
        return ("tensor", _tensor_digest(thing))
    if kind.__module__ == "numpy" and hasattr(thing, "tobytes"):
        return ("array", _digest(f"{thing.dtype} {thing.shape}".encode() + thing.tobytes()))
    if isinstance(thing, list | tuple | deque | dict):
        text = repr(list(thing)) if isinstance(thing, dict) and _are_plain(thing) else str(len(thing))
        others = [key for key in thing if type(key) not in (str, int)] if isinstance(thing, dict) else []
        if others:  # no way leads there
            text += repr([(repr(key), _held(thing[key], around, known)) for key in others])
        if len(thing) > LONGEST:
            held = thing.values() if isinstance(thing, dict) else thing
            text = repr([*(_held(item, around, known) for item in held), text])
        return (kind.__name__, text if len(text) <= 200 else _digest(text.encode()))
    if isinstance(thing, set | frozenset):
        items = sorted(repr(_held(item, around, known)) for item in thing)
        return ("set", _digest(repr(items).encode()))
    if isinstance(thing, FunctionType):
        home = str(thing.__globals__.get("__name__"))
        if home.partition(".")[0] in _LIBRARIES:
            return ("named", f"{home}.{thing.__qualname__}")
        return ("function", f"{thing.__qualname__} {_code_digests(thing.__code__)}")
    if isinstance(thing, BuiltinFunctionType | type | ModuleType):
        return ("named", str(getattr(thing, "__qualname__", None) or thing.__name__))
    for plain in (float, complex, bytes, int, str):  # or a class of the user's that is one
        if isinstance(thing, plain) and not isinstance(thing, enum.Enum):
            return ("value", _digest(plain.__repr__(thing).encode()))
    top = kind.__module__.partition(".")[0]
    of_torch = top == "torch" and not hasattr(thing, "__dict__")
    if of_torch or top in _SHOWN or isinstance(thing, enum.Enum):
        text = repr(thing)[:200]
        if " at 0x" not in text:
            return ("value", text)
    return _state(thing, top, around, known)


def _state(thing: Any, top: str, around: tuple[int, ...], known: _Known) -> tuple[str, str]:
    """An object of Python's own, which no steps lead into, by what it would be pickled as."""
    kind = type(thing)
    walked = kind in (*_NAMESPACES, *_WITH_PARTS) or _is_container(thing)
    if walked or id(thing) in around or top not in sys.stdlib_module_names - _NO_STATE:
        return ("object", kind.__qualname__)
    inside: list[Any] = [dict(_dict_of(thing))]
    try:
        inside.append([*thing.items()] if kind is MappingProxyType else thing.__reduce_ex__(4))
    except Exception:  # of what cannot be pickled its text may tell, as of a lock that is held
        text = "" if hasattr(kind, "__iter__") else _ADDRESS.sub("", repr(thing))  # no code of items
        is_shown = text not in ("", _ADDRESS.sub("", object.__repr__(thing)))
        inside.append(text if is_shown or inside[0] else next(_ALWAYS_OTHERS))
    return ("state", f"{kind.__name__} {_held(inside, (*around, id(thing)), known)}")


def _held(thing: Any, around: tuple[int, ...], known: _Known) -> str:
    """A digest of an object that no steps lead to, with all that it holds."""
    if id(thing) not in known:
        known[id(thing)] = thing, type(thing).__qualname__  # where it holds itself
        known[id(thing)] = thing, _digest(repr(_all_held(thing, around, known)).encode())
    return known[id(thing)][1]


def _all_held(thing: Any, around: tuple[int, ...], known: _Known) -> Any:
    if id(thing) in around or len(around) > DEEPEST:
        return type(thing).__qualname__
    around = (*around, id(thing))
    value = encoded(thing, around, known)
    if isinstance(thing, list | tuple | deque):
        return value, [_held(item, around, known) for item in thing]
    if isinstance(thing, dict):
        return value, [(repr(key), _held(item, around, known)) for key, item in thing.items()]
    if isinstance(value, tuple) and value[0] == "object" and not isinstance(thing, nn.Module):
        slots = [str(name) for kind in _mro(thing) for name in getattr(kind, "__slots__", ())]
        attributes = {**_dict_of(thing), **{name: attribute(thing, name) for name in slots}}
        return value, [(name, _held(item, around, known)) for name, item in attributes.items()]
    return value


def _code_digests(code: CodeType) -> str:
    """Two digests: one of names and numbers, for all versions of Python, one of all, for this version."""
    parts = [*_codes_in(code)]
    constants = {x for part in parts for x in part.co_consts if isinstance(x, float | str)}
    loaded = {*(name for part in parts for name in part.co_names), *constants}
    exact = [(part.co_code, part.co_names, part.co_varnames, *map(_constant, part.co_consts))
             for part in parts]  # fmt: skip
    shown = sorted(repr(x) for x in loaded if isinstance(x, float) or x.isidentifier())
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{_digest(repr(shown).encode())} {version}-{_digest(repr(exact).encode())}"


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        yield from _codes_in(inner) if isinstance(inner, CodeType) else ()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return value.co_name
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same, as far as can be told of functions of two versions of Python."""
    if type(one) is type(other) is tuple and one[0] == other[0] == "function":
        (*names, code), (*others, other_code) = one[1].split(" "), other[1].split(" ")
        if code.partition("-")[0] != other_code.partition("-")[0]:
            return bool(names == others)
    return type(one) is type(other) and bool(one == other)


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
    """The steps from an object to all that can be read from it; some may lead nowhere."""
    if isinstance(thing, Tensor | str | bytes | torch.Size):
        return
    if isinstance(thing, FunctionType):
        yield from (("part", part) for part in _WRAPPED if part in vars(thing))
        loaded = vars(thing).keys() if names.attributes is None else names.attributes & vars(thing).keys()
        yield from (("attr", name) for name in sorted(loaded - {*_WRAPPED}))
        if thing.__code__ in names.code:
            yield from (("cell", name) for name in thing.__code__.co_freevars)
            if id(thing.__globals__) not in files:
                yield from (("global", name) for name in sorted(names.globals & thing.__globals__.keys()))
            files.add(id(thing.__globals__))
            yield from (("default", place) for place in range(len(thing.__defaults__ or ())))
            yield from (("default", name) for name in thing.__kwdefaults__ or ())
        return
    if isinstance(thing, ContextVar):
        yield "part", "get"
    if isinstance(thing, weakref.ref):
        yield "part", "ref"
    if is_root:
        yield from (("environ", name) for name in sorted(names.environ))
        yield from (("import", name) for name in sorted(names.imported))
    if is_root and _stepped(thing, ("part", HOOKS)):
        yield "part", HOOKS
    if isinstance(thing, dict) and len(thing) <= LONGEST:
        yield from (("key", key) for key in list(thing) if type(key) in (str, int))
    if isinstance(thing, list | tuple | deque) and len(thing) <= LONGEST:
        yield from (("item", place) for place in range(len(thing)))
    if isinstance(thing, _WITH_PARTS):
        parts = ((part, getattr(thing, part, None)) for part in _PARTS)
        yield from (("part", part) for part, x in parts if not isinstance(x, type | ModuleType | None))
    if isinstance(thing, ModuleType) and _is_librarys(thing):
        kinds = ((name, vars(thing).get(name)) for name in sorted(names.said))
        yield from (("attr", name) for name, inner in kinds if isinstance(inner, _FUNCTIONS))
    elif not _is_librarys(thing):
        if isinstance(thing, type) and "super" in names.globals:
            yield "part", BASES
        yield from (("attr", name) for name in _attributes(thing, names, is_root))


def _is_librarys(thing: Any) -> bool:
    """Whether an object belongs to torch or Python, so that no guard can or need know its attributes."""
    if isinstance(thing, nn.Module):
        return False
    named = isinstance(thing, type | ModuleType)
    home = (thing.__name__ if isinstance(thing, ModuleType) else thing.__module__) if named else (
        type(thing).__module__)  # fmt: skip
    top = str(home).partition(".")[0]
    return top in (_LIBRARIES if named else {"torch", "numpy", "itertools"})


def _attributes(thing: Any, names: Names, is_root: bool) -> Iterator[str]:
    """The names of the attributes that code may load from an object."""
    own, lists = _dict_of(thing), isinstance(thing, _HOLDERS)
    of_torch = isinstance(thing, nn.Module) and type(thing).__module__.startswith("torch.")
    if names.modes and isinstance(thing, nn.Module) and not is_root:
        yield "training"
    parts: dict[str, Any] = {}
    if isinstance(thing, nn.Module):
        parts = {**thing._modules, **thing._parameters, **thing._buffers}
    if of_torch and not is_root and not lists:  # a layer that is called, as it is then
        plain = {name for name in own.keys() - _OF_TORCH if _are_plain([own[name]])}
        yield from sorted(plain if names.attributes is None else names.attributes & (plain | {*parts}))
        return
    classes = [kind for kind in _mro(thing) if kind.__module__.partition(".")[0] not in _LIBRARIES]
    ran = {  # by their names or without, as __call__ and __getitem__ are
        name for kind in classes for name, value in vars(kind).items()
        if getattr(getattr(value, "__func__", value), "__code__", None) in names.code
    }  # fmt: skip
    if names.attributes is None or _is_container(thing):
        loaded = [*own, *(
            name for kind in classes for name, value in vars(kind).items()
            if name not in own and not name.startswith("__") and _are_plain([value])
        ), *parts, *sorted(ran)]  # fmt: skip
    else:
        of_class = {name for kind in classes for name in vars(kind)}
        stored = own.keys() | of_class | parts.keys() | names.asked
        loaded = sorted((names.attributes & stored) | ran)
    yield from (name for name in loaded if name not in _OF_TORCH or not isinstance(thing, nn.Module))
    if lists:
        yield from (name for name in parts if name not in (names.attributes or ()))
    if is_root:
        yield "forward"


def _is_container(thing: Any) -> bool:
    """Whether it is a container written in Python, such as UserDict, whose methods nobody sees run."""
    return not isinstance(thing, type) and any(kind.__module__ == "collections" for kind in _mro(thing))


def _dict_of(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, type):
        return vars(thing)
    try:
        kind = threading.local if isinstance(thing, threading.local) else object
        attributes = kind.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, Mapping) else {}


def _mro(thing: Any) -> tuple[type, ...]:
    return thing.__mro__ if isinstance(thing, type) else type(thing).__mro__


def own_forward(thing: Any) -> Any:
    """The forward that was set on an instance, or None; not the one that stands for it meanwhile."""
    value = _dict_of(thing).get("forward")
    while value is not None and "before" in _dict_of(value):
        value = _dict_of(value)["before"]
    return value


def attribute(thing: Any, name: str) -> Any:
    """An attribute as it is stored, on the object or its class, or GONE."""
    own = _dict_of(thing)
    if name in own.get("_former_parameters", ()):  # of a replica, which has tensors in their places
        return own[name].shape
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
        for weights in (thing._parameters, thing._buffers):  # which are read where they are, of one shape
            if name in weights:
                weight = weights[name]
                return None if weight is None else weight.shape
        return thing._modules.get(name, GONE)
    return GONE


def _stepped(thing: Any, step: Step) -> Any:
    """The object that one step leads to, or GONE."""
    kind, name = step
    match kind:
        case "attr":
            return attribute(thing, str(name))
        case "key" if isinstance(thing, dict):
            return dict.get(thing, name, GONE)  # a subclass may have a `get` of its own, which is not run
        case "item" if isinstance(thing, list | tuple | deque) and int(name) < len(thing):
            return thing[int(name)]
        case "part":
            return _part(thing, str(name))
        case "import":
            return sys.modules.get(str(name), GONE)
        case "environ":  # told apart, and never shown: it may be a secret
            value = os.environ.get(str(name))
            return None if value is None else _digest(value.encode(errors="surrogateescape"))
        case "global" if isinstance(thing, FunctionType):
            return thing.__globals__.get(str(name), GONE)
        case "default" if isinstance(thing, FunctionType):
            named = isinstance(name, str)
            return (thing.__kwdefaults__ or {}).get(str(name), GONE) if named else (
                _stepped(thing.__defaults__ or (), ("item", name)))  # fmt: skip
        case "cell" if isinstance(thing, FunctionType):
            cells = dict(zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False))
            with contextlib.suppress(KeyError, ValueError):  # nothing is in it yet
                return cells[str(name)].cell_contents
    return GONE


def _part(thing: Any, name: str) -> Any:
    """A part of an object that is no attribute of it, or GONE."""
    if isinstance(thing, nn.Module):
        return _PARTS_OF_MODULES[name](thing) if name in _PARTS_OF_MODULES else GONE
    if name == BASES and isinstance(thing, type):
        return tuple(kind for kind in thing.__mro__[1:] if not _is_librarys(kind))
    if name == "get" and isinstance(thing, ContextVar):
        try:
            return thing.get()
        except LookupError:
            return GONE
    if name == "ref" and isinstance(thing, weakref.ref):
        return thing()
    has_parts = isinstance(thing, (FunctionType, *_WITH_PARTS)) and name in _ALL_PARTS
    return getattr(thing, name, GONE) if has_parts else GONE


def _structure(module: nn.Module) -> str:
    parts = [
        (path, type(part).__qualname__, [
            (name, None if x is None else [*x.shape])
            for weights in (part._parameters, part._buffers) for name, x in weights.items()
        ])
        for path, part in module.named_modules() if OPERATORS not in path.split(".")
    ]  # fmt: skip
    return _digest(repr(parts).encode())


# Their texts are one object while they are equal, by which a guard compares them.
_PARTS_OF_MODULES: dict[str, Callable[[nn.Module], Any]] = {
    HOOKS: lambda module: tuple(
        hook for key in _HOOK_LISTS for hook in (vars(module).get(key) or {}).values()),
    TRAINED: lambda module: sys.intern("".join("01"[x.requires_grad] for x in module.parameters())),
    WEIGHTS: lambda module: sys.intern(_digest(
        " ".join(map(_tensor_digest, (*module.parameters(), *module.buffers()))).encode())),
    STRUCTURE: lambda module: sys.intern(_structure(module)),
}  # fmt: skip


def found(module: nn.Module, steps: Steps) -> Any:
    """The object at the end of these steps, or GONE."""
    thing: Any = module
    for step in steps:
        thing = _stepped(thing, step)
    return thing


def can_be_taken_away(steps: Steps) -> bool:
    """Whether the steps lead through attributes and items to an attribute that is the user's own."""
    ways = {kind for kind, _ in steps} <= {"attr", "key", "item"} and 0 < len(steps) <= DEEPEST
    names = {str(name) for kind, name in steps if kind == "attr"}
    reserved = names & {*_OF_TORCH, "forward"} or any(name.startswith("__") for name in names)
    return ways and steps[-1][0] == "attr" and not reserved


def take_away(module: nn.Module, steps: Steps) -> None:
    """Delete the attribute at the end of these steps, for which can_be_taken_away holds.

    In plain Python, which torch.compile follows, and running no code of the user's. Nothing is deleted if
    a step leads nowhere, or to an object without attributes of its own.
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
    """Whether code sets attributes of it: it is no class, function, tensor or module of Python."""
    kinds = (type, ModuleType, FunctionType, MethodType, Tensor)
    return hasattr(thing, "__dict__") and not isinstance(thing, kinds)


@contextlib.contextmanager
def holding(caches: Caches) -> Iterator[None]:
    """Set these attributes for a while, and then restore what was there."""
    before = {m: {key: vars(m).get(key, GONE) for key in names} for m, names in caches.items()}
    try:
        _hold(caches)
        yield
    finally:
        _hold(before)


def _hold(caches: Caches) -> None:
    for module, kept in caches.items():
        for key, value in kept.items():
            vars(module).pop(key, None)
            vars(module).update({} if value is GONE else {key: value})


def text_of(steps: Steps) -> str:
    """The steps as they would be written in code: ctx.tau, opts['n'], TAU."""
    text = ""
    for place, (kind, name) in enumerate(steps):
        if kind in ("cell", "global", "import"):
            text = str(name)
        elif kind in ("key", "item"):
            text += f"[{name!r}]"
        elif (kind, name) == ("part", TRAINED):
            text = f"{TRAINED} of its weights"
        elif kind == "part" and name in (HOOKS, STRUCTURE):
            text = str(name)
        elif (kind, name) == ("part", WEIGHTS):
            text = f"the weights of {text} (not registered in the model)"
        elif kind == "environ":
            text = f"os.environ[{name!r}]"
        elif kind == "attr" and not (name == "forward" and place + 1 < len(steps)):
            text += f".{name}" if text else str(name)
    return text or "an argument's default"


@dataclass(frozen=True)
class Reads(Record):
    """The values that a module's code read when it was captured.

    questions: about a mode, all answered with no, see QUESTIONS, or about a setting, with the answer:
               "get_default_dtype()=torch.float32", see SETTINGS.
    """

    values: tuple[tuple[Steps, Value], ...] = ()
    questions: tuple[str, ...] = ()
    _watched: list[Any] = field(
        default_factory=lambda: [None, (), ()], init=False, repr=False, compare=False,
        metadata=APART,
    )
    # torch.compile guards every entry that it visits: these are the ones that it can compare.
    _traced: tuple[tuple[Steps, Value], ...] = field(
        init=False, repr=False, compare=False, metadata=APART
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_traced", tuple(read for read in self.values if _is_traced(*read)))
        for kind, name in (step for steps, _ in self.values for step in steps):
            if kind not in _KINDS or (kind == "item" and not (isinstance(name, int) and name >= 0)):
                raise ValueError(f"a step is one of {', '.join(_KINDS)}, and a name or a place")
        if not all(map(is_question, self.questions)):
            raise ValueError(f"a question is one of {', '.join((*QUESTIONS, *SETTINGS))}")

    @property
    def of_structure(self) -> bool:
        """Whether its code iterates over what the module holds."""
        return any(steps == (("part", STRUCTURE),) for steps, _ in self.values)

    def difference(self, module: nn.Module) -> tuple[str, str] | None:
        """(what, how it differs) for the first value that differs in this module, or None.

        Nothing is compared as long as every object on the way is the same object as before.
        """
        if torch.compiler.is_compiling():
            return self._traced_difference(module)
        watched, objects, values = self._watched
        with contextlib.suppress(ValueError):  # of a cell that is empty now
            same = watched is module and all(get() is value for get, value in objects)
            if same and all(get() == value for get, value in values):
                return None
        for steps, expected in self.values:
            value = found(module, steps)
            now = ABSENT if value is GONE else encoded(value)
            if not same_value(now, expected):
                text = "is gone" if value is GONE else f"is {_shown(value)}"
                captured = repr(expected) if not isinstance(expected, tuple) else " ".join(expected)
                return text_of(steps), f"was captured as {captured}, but {text}"
        self._watched[:] = [module, *_checks(module, [steps for steps, _ in self.values])]
        return None

    def _traced_difference(self, module: nn.Module) -> tuple[str, str] | None:
        """The same in plain Python, which torch.compile follows and turns into guards."""
        for steps, expected in self._traced:
            if isinstance(expected, tuple) or steps[-1] == ("part", WEIGHTS):
                kind = expected[0] if isinstance(expected, tuple) else WEIGHTS
                return text_of(steps), f"is of the kind {kind}, which torch.compile does not guard"
            value: Any = module
            for kind, name in steps:
                value = getattr(value, str(name), GONE) if kind == "attr" else value[name]
            if type(value) is not type(expected) or value != expected:
                return text_of(steps), f"was captured as {expected!r}"
        return None

    def __reduce__(self) -> Any:
        return Reads, (self.values, self.questions)


def _is_traced(steps: Steps, expected: Value) -> bool:
    """Whether torch.compile can follow the steps to a value."""
    compared = not isinstance(expected, tuple) or expected[0] in ("tensor", "array")
    steps = steps[:-1] if steps[-1] == ("part", WEIGHTS) else steps
    return compared and all(kind in ("attr", "key", "item") for kind, _ in steps)


def _shown(found: Any) -> str:
    value = encoded(found)
    return " ".join(value) if isinstance(value, tuple) and value[0] == "object" else shortened(found)


_Check = tuple[functools.partial[Any], Any]


def _checks(module: nn.Module, paths: Sequence[Steps]) -> tuple[list[_Check], list[_Check]]:
    """Pairs (get, value): nothing on these paths has changed if get() is the value for all of the first
    list, and equal to it for all of the second.  They run at every call, nearly all of them in C."""
    objects: list[_Check] = []
    values: list[_Check] = []
    checked: set[Steps] = set()
    for steps in paths:
        thing: Any = module
        for place, step in enumerate(steps):
            inner, prefix = _stepped(thing, step), steps[: place + 1]
            if prefix not in checked:
                checked.add(prefix)
                take = functools.partial(_stepped, thing, step)
                if step == ("part", WEIGHTS):
                    values.append((functools.partial(_versions, thing), _versions(thing)))
                elif isinstance(inner, torch.Size) or step in (("part", HOOKS), ("environ", step[1])):
                    values.append((take, inner))
                else:
                    held = _held_by(thing, step, inner)
                    objects += [(take, inner)] if held is None else held
                if isinstance(inner, FunctionType):  # whose code is replaced where a file is loaded again
                    objects.append((functools.partial(getattr, inner, "__code__"), inner.__code__))
                look = _changed_in_place(inner)
                if look is not None:
                    values.append((look, look()))
            thing = inner
    return [*{(get.func, *map(id, get.args)): (get, value) for get, value in objects}.values()], values


def _held_by(thing: Any, step: Step, inner: Any) -> list[_Check] | None:
    """Pairs as above, which hold as long as the step leads to the same object; None where only taking the
    step can tell.  None of them runs code of the user's."""
    kind, name = step
    read = functools.partial(getattr, thing, str(name), GONE)
    if kind == "global" and isinstance(thing, FunctionType):
        return [_entry(thing.__globals__, name)]
    if kind == "key" and isinstance(thing, dict):
        return [_entry(thing, name)]
    if kind == "item" and type(thing) is tuple:
        return []
    if kind == "default" and isinstance(thing, FunctionType) and isinstance(name, int):
        return [(functools.partial(getattr, thing, "__defaults__"), thing.__defaults__)]
    if kind == "cell" and isinstance(thing, FunctionType) and inner is not GONE:
        cell = (thing.__closure__ or ())[thing.__code__.co_freevars.index(str(name))]
        return [(functools.partial(getattr, cell, "cell_contents"), inner)]
    if step == ("part", BASES) and isinstance(thing, type):
        return [(functools.partial(getattr, thing, "__mro__"), thing.__mro__)]
    if kind == "part" and name in _ALL_PARTS and inner is not GONE and not isinstance(thing, nn.Module):
        return [(read, inner)] if read() is inner else None
    if step == ("attr", "forward") and _of_class(thing) is inner:
        return [(functools.partial(_of_class, thing), inner)]
    runs_code = hasattr(type(inner), "__get__") and not isinstance(inner, FunctionType | property)
    metaclass = type(thing if isinstance(thing, type) else type(thing))
    if kind != "attr" or runs_code or metaclass not in _METACLASSES:
        return None
    if isinstance(thing, type):
        return [(read, inner)] if read() is inner else None
    own, of_class = _dict_of(thing), functools.partial(getattr, type(thing), str(name), GONE)
    if type(own) is not dict or "_former_parameters" in own or isinstance(thing, threading.local):
        return None
    entries = [_entry(own, name)]
    if name not in own:
        entries += [(functools.partial(type, thing), type(thing)), (of_class, of_class())]
        if of_class() is GONE and isinstance(thing, nn.Module):
            entries += [_entry(x, name) for x in (thing._parameters, thing._buffers, thing._modules)]
    values = (value for get, value in entries if get.func is not type and value is not GONE)
    return entries if next(values, GONE) is inner else None


def _entry(holder: dict[Any, Any], name: Any) -> _Check:
    return functools.partial(dict.get, holder, name, GONE), dict.get(holder, name, GONE)


def _of_class(thing: Any) -> Any:
    """The forward of the class, over which others may put their own."""
    return getattr(type(thing), "forward", GONE)


def _versions(module: nn.Module) -> list[tuple[int, Any]]:
    """What a write to its weights changes."""
    return [(id(x), _glance(x)) for x in (*module.parameters(), *module.buffers())]


def _glance(tensor: Tensor) -> tuple[int, Any]:
    """The version, which a write changes, and a few entries, which a write to `.data` may."""
    version = 0 if tensor.is_inference() else tensor._version
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return version, None
    return version, tensor.detach().view(-1)[:: tensor.numel() // FEW + 1].tolist()


def _changed_in_place(thing: Any) -> functools.partial[Any] | None:
    """A function that tells whether an object was changed in place, or None if it cannot be."""
    if thing is GONE or isinstance(thing, FunctionType):
        return None
    if isinstance(thing, Tensor):
        return functools.partial(_glance, thing)
    plain_keys = not isinstance(thing, dict) or all(type(key) in (str, int) for key in thing)
    if isinstance(thing, list | deque | dict) and len(thing) <= LONGEST and plain_keys:
        return functools.partial(len, thing)
    if isinstance(thing, _HOLDERS):
        return functools.partial(encoded, thing)
    is_array = type(thing).__module__ == "numpy" and hasattr(thing, "tobytes")
    whole = is_array or isinstance(thing, list | deque | dict | set)
    value = ("state",) if whole else encoded(thing)
    return functools.partial(encoded, thing) if isinstance(value, tuple) and value[0] == "state" else None


_TRACED = "torch._subclasses"  # the module of the tensors of a trace
# What code may ask about the mode it runs in. A captured program holds where every answer is no.
QUESTIONS: dict[str, tuple[str, Callable[[nn.Module, Sequence[Any]], bool]]] = {
    "grad": ("gradients are recorded", lambda *_: torch.is_grad_enabled()),
    "inference": ("inference_mode is on", lambda *_: torch.is_inference_mode_enabled()),
    "autocast": ("autocast is on", lambda *_: any(
        torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))),
    "inputs": ("an input requires a gradient", lambda _, flat: any(
        isinstance(x, Tensor) and x.requires_grad for x in flat)),
    "layout": ("an input is not contiguous", lambda _, flat: any(
        isinstance(x, Tensor) and not x.is_contiguous() for x in flat)),
    "view": ("an input is a part of a tensor", lambda _, flat: any(
        isinstance(x, Tensor) and (x._is_view() or x.storage_offset()) for x in flat)),
    "kind": ("an input is no plain tensor", lambda _, flat: any(
        isinstance(x, Tensor) and not type(x).__module__.startswith(_TRACED)
        and (type(x) is not Tensor or (
            not torch.compiler.is_compiling() and any("dynamo" not in name for name in vars(x))))
        for x in flat)),
    "training": ("it is in training mode", lambda module, _: module.training and not (
        isinstance(module, _DropoutNd) and module.p == 0)),
}  # fmt: skip


def _floats(module: nn.Module, flat: Sequence[Tensor]) -> str:
    return _kinds(x for x in (*module.parameters(), *flat) if x.is_floating_point())


def _kinds(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(x.dtype) for x in tensors}))


# What code may ask about weights and inputs, with the answer for a call.
PRECISION, MIXED, INTEGERS, DEVICES, SAME, GRADIENTS = (
    "precision", "mixed_precision", "integers", "devices", "same_objects", "gradients")  # fmt: skip
_OF_A_CALL: dict[str, Callable[[nn.Module, Sequence[Any]], Any]] = {
    PRECISION: lambda module, flat: _floats(module, flat) + (
        " under autocast" if QUESTIONS["autocast"][1](module, flat) else ""),
    MIXED: lambda module, flat: "no" if QUESTIONS["autocast"][1](module, flat) or (
        "," not in (kinds := _floats(module, flat))) else kinds,
    INTEGERS: lambda _, flat: _kinds(
        x for x in flat if not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)),
    DEVICES: lambda module, flat: ", ".join(
        sorted({x.device.type for x in (*module.parameters(), *flat)})),
    SAME: lambda _, flat: [next(i for i, x in enumerate(flat) if x is one) for one in flat],
    GRADIENTS: lambda module, _: any(x.grad is not None for x in module.parameters()),
}  # fmt: skip
SETTINGS = (  # named after the functions of torch that return them
    *_OF_A_CALL, "get_default_dtype", "get_default_device", "get_num_threads", "get_num_interop_threads",
    "get_float32_matmul_precision", "are_deterministic_algorithms_enabled", "is_anomaly_enabled",
    "initial_seed", "distributed.is_initialized", "distributed.is_available", "cuda.is_available",
)  # fmt: skip


def setting(name: str) -> Any:
    """The function of torch that returns the setting, or None."""
    home: Any = torch
    for part in name.split("."):
        home = getattr(home, part, None)
    return home


def is_question(text: str) -> bool:
    name, equals, _ = text.partition("()=")
    return text in QUESTIONS or (bool(equals) and name in SETTINGS)


def answered(name: str, module: nn.Module, flat: Sequence[Any]) -> str:
    """A question; about a setting, with its answer now.  flat: the tensors of the call."""
    if name in QUESTIONS:
        return name
    return f"{name}()={_OF_A_CALL[name](module, flat) if name in _OF_A_CALL else setting(name)()}"


def asked(questions: Sequence[str], module: nn.Module, flat: Sequence[Any]) -> str | None:
    """What its code asks about and differs from when the program was captured, or None."""
    for question in questions:
        if question not in QUESTIONS:
            now = answered(question.partition("()=")[0], module, flat)
            if now != question:
                return f"its code queries {question}, which is now {now.partition('=')[2]}"
            continue
        text, is_so = QUESTIONS[question]
        if is_so(module, flat):
            return f"{text}, unlike at capture, and its code queries that"
    return None
