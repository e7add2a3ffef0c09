"""First call: what a model computes once, when it is first called, and keeps.

before: an nn.Module that has not run
after:  Fresh, of which copies run on other data first

`if self.scale is None: self.scale = x.abs().mean()` gives the same at every call that follows, and
another model where other data came first. Copies share the model's parameters, and the globals of its
code, which hold what they held before while a copy runs.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from asapc.inputs.data import Batch
from asapc.passes.bytecode import sets_items, stored_names
from asapc.passes.observe import replaced_forwards

MOST_FILES = 200
_Holder = Any  # a container, a class or a cell
_EMPTY = object()
_KINDS = (type, FunctionType, ModuleType)
_CONTAINERS = (dict, list, set, deque)
_CHANGES = {
    "add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update",
}  # fmt: skip


class Fresh:
    """A model as it is now.  is_users: whether a file is the user's."""

    def __init__(self, model: nn.Module, is_users: Callable[[str], bool]) -> None:
        self._model = copied(model)
        self._weights, self._writes = _sums(model), False
        values = [value for module in model.modules() for value in pytree.tree_leaves({**vars(module)})]
        files = ((x, getattr(sys.modules.get(x.__module__), "__file__", "")) for x in _kinds_of(model))
        values += (kind for kind, file in files if is_users(file or ""))
        shared = (value for value in values if isinstance(value, _KINDS))  # by all copies
        holders = [holder for value in shared for holder in _holders(value)]
        for space in _spaces(model, is_users):
            holders += [space, *(holder for value in space.values() for holder in _holders(value))]
        self._held = [(holder, _content(holder)) for holder in holders]

    def written(self, model: nn.Module) -> list[str]:
        """The modules whose weights have been written, or whose buffers have other shapes."""
        names = [name for name, now in _sums(model).items() if now != self._weights.get(name)]
        self._writes = bool(names)
        return names

    @contextlib.contextmanager
    def copy(self, weights: bool = False) -> Iterator[nn.Module]:
        """One that has never run.  weights: with parameters of its own, as where they are written."""
        now = [(holder, _content(holder)) for holder, _ in self._held]
        try:
            _put_back(self._held)
            yield copied(self._model, weights or self._writes)
        finally:
            _put_back(now)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """With what is in its attributes as it was afterwards, and the very objects: torch.export puts a copy
    in the place of every container, of one that modules share, too."""
    known: dict[int, _Holder] = {}
    queue = deque[Any](vars(module) for module in model.modules())
    while queue:
        value = queue.popleft()
        of_torch = type(value).__module__.partition(".")[0] == "torch"
        if id(value) not in known and not of_torch and not isinstance(value, (nn.Module, *_KINDS)):
            for holder in _holders(value):
                known[id(holder)] = holder
                queue.extend(holder.values() if isinstance(holder, dict) else holder)
    held = [(holder, _content(holder)) for holder in known.values()]
    try:
        yield
    finally:
        _put_back(held)


def called(model: nn.Module, batch: Batch, weights: Mapping[str, Tensor]) -> Any:
    """What the model gives with these weights, which may write into its inputs, or draw numbers. Ties
    are let alone: torch does not put back the weights of a module that has two names."""
    args, kwargs = copy.deepcopy((batch.args, batch.kwargs))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return functional_call(model, dict(weights), args, kwargs, tie_weights=False)


@dataclass
class Call:
    """What a module was given, and gave.  Copies."""

    name: str
    given: Any
    output: Any = None


def calls_of(model: nn.Module, batch: Batch, weights: Mapping[str, Tensor]) -> list[Call]:
    """The calls of all modules, inner ones first."""
    calls: list[Call] = []

    def around(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        output = forward(*args, **kwargs)
        calls.append(Call(name, inputs, pytree.tree_map_only(Tensor, Tensor.clone, output)))
        return output

    with replaced_forwards(model, around):
        called(model, batch, weights)
    return calls


def copied(model: nn.Module, weights: bool = False) -> nn.Module:
    """With the same parameters, or copies; the model itself where it holds what cannot be copied."""
    shared = () if weights else model.parameters()
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, which copies a graph
            return copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    except Exception:
        return model


def held_apart(model: nn.Module, copies: Mapping[int, Any]) -> str | None:
    """A function that a model keeps, such as a hook, and what it holds of the model, of which a copy has
    its own.  copies: what the copy has, by the identity of the model's."""
    attributes = (value for module in model.modules() for value in pytree.tree_leaves({**vars(module)}))
    queue, known = deque(value for value in attributes if isinstance(value, FunctionType)), set[int]()
    while queue:
        function = queue.popleft()
        known.add(id(function))
        code, space = function.__code__, function.__globals__
        cells = zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True)
        writes = sets_items([code]) or stored_names([code])[0] or _CHANGES & {*code.co_names}
        for name, value in [*cells, *((x, space[x]) for x in code.co_names if x in space)]:
            holder = getattr(value, "__self__", value)  # of a method
            is_apart = copies.get(id(holder), holder) is not holder
            if is_apart and (isinstance(holder, nn.Module) or writes):
                return f"{function.__qualname__} holds {name}"
            if isinstance(value, FunctionType) and id(value) not in known:
                queue.append(value)
    return None


def _sums(model: nn.Module) -> dict[str, list[Any]]:
    """Of the weights of every module, and the shapes of its buffers."""
    return {
        name: [
            repr(float(weight.detach().double().sum())) for weight in module.parameters(recurse=False)
            if not (nn.parameter.is_lazy(weight) or weight.is_meta)
        ] + [(key, getattr(x, "shape", None)) for key, x in module._buffers.items()]
        for name, module in model.named_modules()
    }  # fmt: skip


def _spaces(model: nn.Module, is_users: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """The globals of the classes of a model's modules, and of what is imported there."""
    queue, known = deque[Any](_kinds_of(model)), set[int]()
    while queue and len(known) < MOST_FILES:
        value = queue.popleft()
        home = sys.modules.get(value.__module__) if isinstance(value, type) else value
        space: dict[str, Any] = {}
        if home is not None:
            space = home.__globals__ if isinstance(home, FunctionType) else vars(home)
        name, file = str(space.get("__name__")), space.get("__file__") or ""
        top = name.partition(".")[0]  # nothing of a model is kept in these
        spared = top in ("asapc", "numpy", "scipy", *sys.builtin_module_names)
        if id(space) not in known and space and not spared and is_users(file):
            known.add(id(space))
            queue.extend(x for x in space.values() if isinstance(x, _KINDS))
            yield space


def _kinds_of(model: nn.Module) -> list[type]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return sorted(kinds, key=repr)


def _holders(value: Any, around: tuple[Any, ...] = ()) -> Iterator[_Holder]:
    """What may keep something for a later call: a value, its attributes, the variables around it.

    around: the functions whose variables led to it.
    """
    if isinstance(value, _CONTAINERS):
        yield value
    elif isinstance(value, FunctionType):
        yield vars(value)
        for cell in value.__closure__ or ():
            yield cell
            inner = _content(cell)
            if isinstance(inner, (*_CONTAINERS, FunctionType)) and inner not in (value, *around):
                yield from _holders(inner, (value, *around))
    elif isinstance(value, type):
        yield value
        for inner in map(_plain_function, vars(value).values()):
            yield from _holders(inner) if isinstance(inner, (*_CONTAINERS, FunctionType)) else ()
    elif not isinstance(value, ModuleType) and isinstance(getattr(value, "__dict__", None), dict):
        yield vars(value)


def _plain_function(value: Any) -> Any:
    """What a static method, a class method or a property calls."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _content(holder: _Holder) -> Any:
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:  # nothing is in it yet
            return _EMPTY
    return {**vars(holder)} if isinstance(holder, type) else copy.copy(holder)


def _holds(holder: _Holder, content: Any) -> bool:
    """Whether it still holds the very objects."""
    now = _content(holder)
    if isinstance(holder, CellType):
        return now is content
    if isinstance(holder, type | dict):  # whose subclass may make what it is asked for
        return now.keys() == content.keys() and all(
            dict.get(now, key) is value for key, value in dict.items(content)
        )
    return len(now) == len(content) and all(map(operator.is_, now, content))


def _put_back(held: Sequence[tuple[_Holder, Any]]) -> None:
    with contextlib.ExitStack() as stack:  # every one, also where another refuses
        for holder, content in held:
            if not _holds(holder, content):
                stack.callback(_fill, holder, content)


def _fill(holder: _Holder, content: Any) -> None:
    if isinstance(holder, CellType):
        if content is _EMPTY:
            del holder.cell_contents
        else:
            holder.cell_contents = content
    elif isinstance(holder, type):
        for name in vars(holder).keys() - content.keys():
            delattr(holder, name)
        for name, value in content.items():
            if vars(holder).get(name, _EMPTY) is not value:
                setattr(holder, name, value)
    elif isinstance(holder, dict):  # never empty: other threads may run this code
        for name in holder.keys() - content.keys():
            dict.pop(holder, name)
        dict.update(holder, content)
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(content)
