"""State: what the modules of a model read besides their arguments, and whether it stays as it is.

before: an nn.Module and two or three batches
after:  Observed: for every module the plain values that its code reads (asapc.program.state), the modes
        it asks for, and why it is not the same at every call, where it is not

The model runs once while a profile notes which functions run in which module: the names that they load
say what they can read. It runs twice more, and what can be read is noted whenever a module is entered. A
value that differs between two runs is state that a trace would freeze. `self.calls += 1` alone reads
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import asapc.inputs
from asapc.inputs.data import Batch, output_of
from asapc.measure.differences import equal, largest_difference, tensor_outputs
from asapc.passes.bytecode import loaded_names, questions_of, set_globals, sets_items, stored_names
from asapc.passes.first_call import Fresh, called, calls_of, copied
from asapc.passes.observe import Leave, entering, folders, is_within, replaced_forwards
from asapc.program.code import under
from asapc.program.state import (
    DEVICES,
    GONE,
    GRADIENTS,
    MIXED,
    SETTINGS,
    Caches,
    Names,
    Reads,
    Steps,
    TooMuch,
    Value,
    answered,
    can_be_taken_away,
    encoded,
    found,
    holding,
    reachable,
    setting,
    text_of,
)

_NOT_THE_USERS = folders(torch.__file__, __file__, asapc.inputs.__file__)
_OF_SETTINGS = {setting(name): name for name in SETTINGS}
_BY_CALL: dict[Any, str] = {
    **{call: name for call, name in _OF_SETTINGS.items() if isinstance(call, BuiltinFunctionType)},
    torch.is_grad_enabled: "grad", torch.is_inference_mode_enabled: "inference",
    torch.is_autocast_enabled: "autocast", torch.is_autocast_cpu_enabled: "autocast",
    torch.get_autocast_dtype: "autocast",
}  # fmt: skip
_BY_CODE = {call.__code__: name for call, name in _OF_SETTINGS.items() if isinstance(call, FunctionType)}
_BY_NAME = {
    "requires_grad": ("grad", "inputs"), "grad_fn": ("grad", "inputs"), "is_leaf": ("grad", "inputs"),
    "is_inference": ("inference",), "training": ("training",), "is_contiguous": ("layout",),
    "stride": ("layout",), "storage_offset": ("view",), "_is_view": ("view",), "_base": ("view",),
    "untyped_storage": ("view",), "isinstance": ("kind",), "__class__": ("kind",),
    "is_cuda": (DEVICES,), "is_cpu": (DEVICES,), "get_device": (DEVICES,),
    "dtype": (MIXED,), "to": (MIXED,), "type_as": (MIXED,), "type": ("kind", MIXED),
    "grad": (GRADIENTS,), "getattr": ("kind",), "hasattr": ("kind",), "AttributeError": ("kind",),
}  # fmt: skip
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}
_SAME_MAP = {
    Tensor.to, Tensor.type_as, Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.transpose, torch.transpose,
}  # fmt: skip
_OF_MEMORY = {"data_ptr", "_version", "is_shared", "is_pinned", "getrefcount"}  # of a tensor
LOUD = 30  # times the numbers of the example
_LEFT = (
    "which compiled code would leave as it was: set an attribute of an instance, without a default in "
    "its class"
)
_ALIKE = 1e-4  # relative difference up to which another layout only rounds
_COPIES_OR_NOT = {"contiguous", "reshape", "reshape_as", "flatten", "ravel", "unflatten"}
_OF_THE_WORLD = ("random", "numpy.random", "posix", "nt", "io", "_io")
_TRACED = [
    getattr(home, name).__code__
    for home in (torch.compiler, torch._utils, torch._dynamo if "torch._dynamo" in sys.modules else None)
    for name in ("is_compiling", "is_exporting", "is_dynamo_compiling")
    if hasattr(getattr(home, name, None), "__code__")
]
_IN_PYTHON = {*_TRACED, *_BY_CODE}  # of torch, what code asks
_FLAGS = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, name)]
_AUTOCAST = torch.amp.autocast_mode.autocast.__init__.__code__.co_filename
_ENVIRON = os._Environ.__getitem__.__code__
_PYTHON = folders(contextlib.__file__)


@dataclass
class Observed:
    """By the name of a module.

    names:     what its code loads.
    questions: that it asks, of modes and settings; see asapc.program.state: QUESTIONS, SETTINGS.
    values:    that it can read, the same whenever it is entered.
    changing:  why it does not always compute the same, from run to run.
    varying:   why not, from call to call of one run.
    eager:     whether code computes something else where it is told that it is traced.
    spaces:    the globals of its functions.
    caches:    of modules, what they compute of sizes and keep, with what was kept before they ran.
    registered: the modules of the model.
    """

    names: dict[str, Names] = field(default_factory=dict)
    questions: dict[str, frozenset[str]] = field(default_factory=dict)
    values: dict[str, dict[Steps, Value]] = field(default_factory=dict)
    changing: dict[str, str] = field(default_factory=dict)
    varying: dict[str, str] = field(default_factory=dict)
    eager: bool = False
    spaces: list[dict[str, Any]] = field(default_factory=list)
    caches: Caches = field(default_factory=dict)
    registered: frozenset[nn.Module] | None = None

    @property
    def codes(self) -> frozenset[CodeType]:
        return frozenset[CodeType]().union(*(names.code for names in self.names.values()))

    def reason(self, within: str, one_program: bool) -> str | None:
        """Why a program of this module would not be what it computes.

        one_program: for all of its calls, where a program of the whole model has each of them.
        """
        for name, reason in {**(self.varying if one_program else {}), **self.changing}.items():
            if is_within(name, within):
                return f"{name or 'the model'} {reason}"
        return None

    @property
    def advice(self) -> str | None:
        """Where a compiled model differs, the state that may be why."""
        reason = self.reason("", one_program=False)
        return reason and f"the model must give the same for the same inputs: {reason}"

    def unlike_now(self, within: str, model: nn.Module) -> str | None:
        """What a module, or one inside it, reads at every call and would not read now: a trace of it
        alone would hold what the model leaves behind."""
        for name, values in self.values.items():
            if is_within(name, within):
                now = self.reads(name, model.get_submodule(name))
                for steps, value in values.items():
                    if now.get(steps, GONE) != value:
                        return f"{name} reads {text_of(steps)}, which the model sets before it calls it"
        return None

    def reads_what_is_set(self, name: str, outer: str, model: nn.Module) -> bool:
        """Whether code of `outer` around a module may set what it reads. Compiled code sets nothing, so
        the module would read an old value."""
        inner = self.within(name)
        codes = self.within(outer).codes - inner.codes
        stored, _ = stored_names(codes)
        part = model.get_submodule(name)
        read = [_of_torch(part.get_submodule(path)) or names for path, names in inner.names.items()]
        return any((x.code and sets_items(codes)) or stored & (x.attributes or stored) for x in read)

    def guard(self, name: str, module: nn.Module, flat: Sequence[Tensor], of_mode: bool = False) -> Reads:
        """What must be as it was for a compiled forward that has this module's code.

        of_mode: whether that is another in training mode, whatever its code asks.
        Called when the patched module around it is entered, with these tensors. What is another by the
        time that it is entered itself is set on the way, by code that is compiled as well.
        """
        now = self.reads(name, module)
        kept = self.caches.get(module, {})
        with holding({module: kept}):
            before = replace(self, caches={}).reads(name, module) if kept else {}
        steady = self.values.get(name, {}).items()
        values = tuple((steps, value) for steps, value in steady if now.get(steps, GONE) == value)
        values += tuple((steps, value) for steps, value in before.items() if steps[0][1] in kept)
        asked = self.questions.get(name, frozenset()) | ({"training"} if of_mode else set())
        return Reads(values, tuple(sorted(answered(question, module, flat) for question in asked)))

    def stored(self, name: str, module: nn.Module) -> dict[Steps, Any]:
        """What is in the attributes that the module's code sets and does not load: its own, and those of
        objects that it can reach."""
        names = self.names.get(name, Names())
        stored, counted = stored_names(names.code)
        unread = stored - names.said - counted
        try:
            paths = reachable(module, replace(names, attributes=names.said | stored)) if unread else {}
        except TooMuch:
            paths = {(("attr", key),): None for key in vars(module)}
        return {
            steps: found(module, steps) for steps in sorted(paths, key=str)
            if steps[-1][0] == "attr" and steps[-1][1] in unread
        }

    def kept(self, name: str, module: nn.Module, before: dict[Steps, Any]) -> tuple[Steps, ...]:
        """Of these attributes, those in which the code has kept what is of its last call, for others to
        read: in its own anything, such as a length.  before: what was stored when the module was entered;
        what is another object now was set on the way, while an attribute of a shared object may only be
        called like one that is: there, tensors are meant."""
        return tuple(
            steps for steps, value in self.stored(name, module).items()
            if can_be_taken_away(steps)
            and (len(steps) == 1 or _is_new_tensor(value, before.get(steps, GONE)))
        )

    def left_behind(self, name: str, module: nn.Module, before: dict[Steps, Any]) -> str | None:
        """Of what is kept, what would not be missing once it is taken away: nothing takes it from a class
        or a slot, or what its class has shows up.  before: as above."""
        for steps, value in self.stored(name, module).items():
            holder = found(module, steps[:-1])
            attributes, key = getattr(holder, "__dict__", {}), str(steps[-1][1])
            goes = can_be_taken_away(steps) and key in attributes and not hasattr(type(holder), key)
            is_own = len(steps) == 1 and key in attributes
            if not goes and (is_own or _is_new_tensor(value, before.get(steps, GONE))):
                return f"sets {text_of(steps)}, {_LEFT}"
        return None

    def of_copy(self, model: nn.Module, copied: nn.Module) -> Observed:
        """The same of a copy of the model."""
        pairs = zip(model.modules(), copied.modules(), strict=True)
        caches = {other: self.caches[one] for one, other in pairs if one in self.caches}
        return replace(self, caches=caches, registered=frozenset(copied.modules()))

    def within(self, outer: str) -> Observed:
        """Of a module and its parts, by their names in it."""
        inner = {name.removeprefix(outer).removeprefix("."): names for name, names in self.names.items()
                 if is_within(name, outer)}  # fmt: skip
        return Observed(inner, caches=self.caches, registered=self.registered)

    def reads(self, name: str, module: nn.Module) -> dict[Steps, Value]:
        """What the module of this name can read at this moment, besides what it computes anew."""
        names = self.names.get(name, Names())
        return reachable(module, _of_torch(module) or names, self.caches, self.registered)


def _is_new_tensor(value: Any, before: Any) -> bool:
    return value is not before and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def observed(model: nn.Module, batches: Sequence[Batch], larger: Sequence[Batch] = ()) -> Observed:
    """What the model reads on these batches, the first of which is its example.  larger: batches that it
    may take as well; a model that computes something else after them remembers something."""
    state, example = Observed(registered=frozenset(model.modules())), batches[0]
    before, fresh = {module: {**vars(module)} for module in model.modules()}, Fresh(model, _is_users)
    profile = _profiled(model, example)
    if any(code.co_name == "<module>" for codes in profile.codes.values() for code in codes):
        profile = _profiled(model, example)  # what a first call imports is no code of the model
    homes = profile.find_apart(model)
    state.caches = _caches(model, example, profile, before)
    for name, module in model.named_modules():
        codes = profile.codes.get(name, set())
        if module._forward_hooks or module._forward_pre_hooks:  # which run before it is entered, or after
            codes = codes | profile.codes.get(name.rpartition(".")[0], set())
        names = loaded_names(codes)
        state.names[name] = replace(
            names, homes=homes.get(name, frozenset()),
            environ=names.environ | profile.environ.get(name, set()),
        )  # fmt: skip
        unread = set_globals(codes) - state.names[name].globals
        if unread:
            state.changing[name] = f"sets the global {min(unread)}, {_LEFT}"
        asked = profile.questions.get(name, set())
        loaded = state.names[name].said | state.names[name].globals
        asked |= {question for key in loaded & _BY_NAME.keys() for question in _BY_NAME[key]}
        asked = asked.union(*map(questions_of, codes))
        if codes and not _of_torch(module):
            state.questions[name] = frozenset(asked)
        unsteady = profile.unsteady.get(name, set()) | (state.names[name].said & _OF_MEMORY)
        if unsteady:
            state.changing[name] = f"asks for {min(unsteady)}, which is not always the same"
    state.eager = profile.traced
    state.spaces = [*profile.spaces.values()]
    ran = [_entries(model, batch, state) for batch in batches]
    runs = [entries for entries, _ in ran]
    copying = [name for name in state.questions if state.names[name].said & _COPIES_OR_NOT]
    if copying and _depends_on_layout(model, example, ran[0][1]):
        for name in copying:
            state.questions[name] |= {"layout"}
    writes = "writes into weights or buffers when it is first called"
    state.changing |= dict.fromkeys(fresh.written(model), writes)
    _note_memory(model, example, larger, state, ran, fresh)
    for name in state.names:
        _compare(name, [run.get(name, []) for run in runs], state)
    if any("training" in asked for asked in state.questions.values()):
        with fresh.copy(weights=True) as copy:  # code may write into weights in training mode alone
            trained = _training(copy, example) if copy is not model else set(state.names)
        for name in state.questions.keys() - trained:
            state.questions[name] -= {"training"}
    return state


def _profiled(model: nn.Module, example: Batch) -> _Profile:
    profile = _Profile()
    profile.run(model, example)
    return profile


def _caches(
    model: nn.Module, example: Batch, profile: _Profile, before: Mapping[nn.Module, Mapping[str, Any]]
) -> Caches:
    """What modules compute from sizes and buffers and keep, such as positions, and compute again where it
    is missing: the same for all inputs and parameters, however often they ran, with the same outputs.

    profile: of what ran; it takes up the code that computes them.  before: attributes before any run.
    """
    tried: dict[nn.Module, dict[str, Any]] = {}
    for name, module in model.named_modules():
        codes, attributes = profile.codes.get(name, ()), vars(module)
        names = stored_names(codes)[0] & loaded_names(codes).said & attributes.keys()
        kept = {key: attributes[key] for key in sorted(names) if _can_be_emptied(attributes[key])}
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(kept)):
            tried[module] = kept
    if not tried:
        return {}

    def anew(run: Callable[[], Any]) -> tuple[Any, Caches]:
        with emptied(tried):
            return run(), {m: {key: vars(m)[key] for key in kept} for m, kept in tried.items()}

    expected = output_of(model, example)
    try:
        outputs, kept = anew(lambda: (profile.run(model, example), output_of(model, example)))
        _, other = anew(lambda: called(model, example.mapped(others_for), other_weights(model)))
    except Exception:  # of the model, which cannot do without
        return {}
    if not identical(outputs, (expected, expected)):
        return {}
    same = [m for m in kept if identical(kept[m], other[m])]
    return {module: {key: before[module].get(key, GONE) for key in tried[module]} for module in same}


def _can_be_emptied(kept: Any) -> bool:
    leaves = pytree.tree_leaves(kept)
    return all(leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, int) for leaf in leaves)


def others_for(x: Tensor) -> Tensor:
    """Other numbers of the same sizes, and another mask."""
    return ~x if x.dtype is torch.bool else _scaled(3.0, _masked(x))


def emptied(caches: Caches) -> contextlib.AbstractContextManager[None]:
    """With nothing in these attributes: no entries, no length, so that code computes them anew."""
    nothing = lambda x: x[(slice(0, 0),) * x.dim()] if isinstance(x, Tensor) else type(x)()  # noqa: E731
    kept = {module: {key: vars(module)[key] for key in names} for module, names in caches.items()}
    return holding({m: {key: pytree.tree_map(nothing, x) for key, x in values.items()}
                    for m, values in kept.items()})  # fmt: skip


def _of_torch(module: nn.Module) -> Names | None:
    """The names that torch's own layers load: all of their settings."""
    if not type(module).__module__.startswith("torch."):
        return None
    dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    settings = () if dropout else vars(module).items()
    return Names(frozenset(name for name, value in settings if not isinstance(value, Tensor)))


class _Profile:
    """Which of the user's functions run while which module does."""

    def __init__(self) -> None:
        self.codes: dict[str, set[CodeType]] = {}
        self.questions: dict[str, set[str]] = {}
        self.traced = False
        self.spaces: dict[int, dict[str, Any]] = {}
        self.homes: dict[CodeType, str] = {}  # the modules of Python where functions are at home
        self.environ: dict[str, set[str]] = {}  # names that it is asked for, made while it ran or not
        self.unsteady: dict[str, set[str]] = {}
        self._stack: list[str] = []
        self._users = functools.cache(_is_users)

    def find_apart(self, model: nn.Module) -> dict[str, frozenset[tuple[str, str]]]:
        """The globals of functions to which nothing in their module leads. They are taken for code of
        the modules around it as well, which may have passed them in, with what they hold of those."""
        homes: dict[str, frozenset[tuple[str, str]]] = {}
        for name, module in reversed([*model.named_modules()]):  # inner ones first
            reached, codes = set[CodeType](), self.codes.get(name, set())
            with contextlib.suppress(TooMuch):
                reachable(module, loaded_names(codes), reached=reached)
            apart = codes - reached
            if name and apart:
                self.codes.setdefault(name.rpartition(".")[0], set()).update(apart)
            homes[name] = frozenset(
                (self.homes[code], key) for code in apart for key in loaded_names([code]).globals
            )
        return homes

    def enter(self, name: str, *_: Any) -> Leave:
        self._stack.append(name)
        return self._stack.pop

    def run(self, model: nn.Module, example: Batch) -> Any:
        with entering(model, self.enter):
            before = sys.getprofile()
            sys.setprofile(self)
            try:
                return output_of(model, example)
            finally:
                sys.setprofile(before)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._stack or event not in ("call", "c_call") or frame.f_back is None:
            return
        code = frame.f_code
        if event == "call" and code.co_filename == _AUTOCAST:
            self.questions.setdefault(self._stack[-1], set()).add("autocast")
        if event == "call" and code is _ENVIRON:
            self.environ.setdefault(self._stack[-1], set()).add(str(frame.f_locals["key"]))
        if event == "call" and code in _IN_PYTHON:
            if self._users(frame.f_back.f_code.co_filename):
                self.traced |= code in _TRACED
                if code in _BY_CODE:
                    self.questions.setdefault(self._stack[-1], set()).add(_BY_CODE[code])
        elif self._users(code.co_filename):
            if event == "call":
                self.spaces[id(frame.f_globals)] = frame.f_globals
                self.codes.setdefault(self._stack[-1], set()).add(code)
                self.homes[code] = str(frame.f_globals.get("__name__"))
            elif (question := _question(arg)) is not None:
                self.questions.setdefault(self._stack[-1], set()).add(question)
            elif _home(arg).startswith(_OF_THE_WORLD):
                self.unsteady.setdefault(self._stack[-1], set()).add(arg.__name__)
        elif event == "call" and frame.f_globals.get("__name__") in ("random", "genericpath") and (
            self._users(frame.f_back.f_code.co_filename)
        ):
            self.unsteady.setdefault(self._stack[-1], set()).add(code.co_name)


def _is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor Python's own."""
    pythons = file.startswith("<frozen ") or (file.startswith(_PYTHON) and "site-packages" not in file)
    return not pythons and not file.startswith(_NOT_THE_USERS)


def _home(function: Any) -> str:
    """The module of a builtin function, or of the class that it is a method of."""
    owner = getattr(function, "__self__", None)
    bound = owner is not None and not isinstance(owner, ModuleType | type)
    return str((type(owner) if bound else function).__module__)


def _question(function: Any) -> str | None:
    try:
        return _BY_CALL.get(function)
    except TypeError:  # of an object that has no hash
        return None


@dataclass
class _Entry:
    """values: that can be read.  weights: with their versions."""

    values: dict[Steps, Value]
    weights: dict[str, tuple[Tensor, int]]


_Run = tuple[dict[str, list[_Entry]], Any]
"""The entries of every module, in order, and the output."""


def _note_memory(
    model: nn.Module, example: Batch, larger: Sequence[Batch], state: Observed, ran: Sequence[_Run],
    fresh: Fresh,
) -> None:  # fmt: skip
    """Note what makes the model compute something else after other calls.

    ran: of which the first and the last were on the example.  fresh: the model before all of them.
    """
    alone = copied(model)
    (_, again), (entered, expected) = ran[0], ran[-1]
    before = {
        name: _Entry(entries[0].values, _weights(alone.get_submodule(name)))
        for name, entries in entered.items()
    }
    plain = dict[str, Tensor]()
    others = ((batch, plain) for batch in (example.mapped(others_for), *larger))
    for loud, weights in ((example, other_weights(model)), *others):
        for batch in (loud, loud.mapped(lambda x: x / LOUD if x.is_floating_point() else x)):
            is_other = is_finite = False
            with contextlib.suppress(Exception):  # of the model: it takes no such inputs
                output = called(alone, batch, weights)
                is_finite = all(bool(x.isfinite().all()) for x in tensor_outputs(output))
                with fresh.copy() as first:
                    is_other = not identical(called(first, batch, weights), output)
            if is_other:
                _note_first(model, alone, fresh, batch, weights, state)
            if is_other or is_finite:  # NaN is the same whatever came first
                break
    after, output = _entries(alone, example, state.of_copy(model, alone))
    if not identical(output, expected):
        unsteady = {n: why for n, one in before.items() if (why := _difference(one, after[n][0]))}
        if not unsteady and identical(again, expected):
            unsteady = dict.fromkeys(before, "computes something else after calls with other inputs")
        state.changing |= unsteady


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    """Buffers stay, and so do rotary tables that are made of them."""
    return {key: 1.5 * x for key, x in model.named_parameters() if x.is_floating_point()}


def _note_first(
    model: nn.Module, later: nn.Module, fresh: Fresh, batch: Batch, weights: dict[str, Tensor],
    state: Observed,
) -> None:  # fmt: skip
    """Note the modules that keep or compute something else where this data, or weights, come first."""
    reasons, unlike = dict[str, str](), list[str]()
    calls, now_of = calls_of(later, batch, weights), state.of_copy(model, later)
    with fresh.copy() as alone, fresh.copy() as other:
        for now, then in zip(calls, calls_of(other, batch, weights), strict=False):
            inside = any(not now.name or name.startswith(f"{now.name}.") for name in unlike)
            if inside or now.name != then.name:
                continue
            if not identical(now.given, then.given):  # behind another one that is unlike
                module, own = alone.get_submodule(now.name), under(weights, f"{now.name}.")
                then.output = called(module, Batch(now.given[0], now.given[1], None, []), own)
            if not identical(now.output, then.output):
                unlike.append(now.name)
        then_of = state.of_copy(model, other)
        for name, module in other.named_modules():
            with contextlib.suppress(TooMuch):
                first, reads = then_of.reads(name, module), now_of.reads(name, later.get_submodule(name))
                made = [text_of(path) for path in first if first[path] != reads.get(path, GONE)]
                if made:
                    reasons[name] = f"makes {made[0]} once, of what comes first"
    for name in unlike if reasons else unlike or [""]:
        reasons.setdefault(name, "computes something else where other data or weights came first")
    state.changing = {**reasons, **state.changing}


def _entries(model: nn.Module, batch: Batch, state: Observed) -> _Run:
    """What every module can read at each of its calls in one run, and the model's output."""
    entries: dict[str, list[_Entry]] = {}

    def around(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = model.get_submodule(name)
        before, tags = state.stored(name, module), _tags((args, kwargs))
        values: dict[Steps, Value] = {}
        try:
            values = state.reads(name, module)
        except TooMuch as error:
            state.changing[name] = str(error)
        entries.setdefault(name, []).append(_Entry(values, _weights(module)))
        output = forward(*args, **kwargs)
        left = state.left_behind(name, module, before)
        set_now = {key for _, key in _tags((args, kwargs, output)) - tags}
        if set_now:
            left = f"sets an attribute of a tensor, {min(set_now)}, which compiled code would not set"
        if left is not None:
            state.changing[name] = left
        return output

    with replaced_forwards(model, around):
        output = output_of(model, batch)
    return entries, output


def _tags(values: Any) -> set[tuple[int, str]]:
    """The attributes that code has set on tensors."""
    tensors = (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))
    return {(id(x), key) for x in tensors if type(x) is Tensor for key in vars(x) if key[0] != "_"}


def _weights(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    tensors = {**module._parameters, **module._buffers}.items()
    return {key: (x, x._version) for key, x in tensors if x is not None and not x.is_inference()}


def _compare(name: str, runs: Sequence[Sequence[_Entry]], state: Observed) -> None:
    """Note what a module always reads, and what makes it change."""
    everything = [entry for run in runs for entry in run]
    if not everything:
        return
    for entries, reasons in (*((pair, state.changing) for pair in zip(*runs, strict=False)),
                          (everything, state.varying)):  # fmt: skip
        for first, other in ((entries[0], entry) for entry in entries[1:]):
            reason = _difference(first, other)
            if reason is not None:
                reasons.setdefault(name, reason)
    state.values[name] = {
        steps: value for steps, value in everything[0].values.items()
        if all(entry.values.get(steps, GONE) == value for entry in everything)
    }  # fmt: skip


def _difference(one: _Entry, other: _Entry) -> str | None:
    """A value that differs between the two, or a weight that was written between them, in words."""
    for steps in dict.fromkeys((*one.values, *other.values)):
        pair = one.values.get(steps, GONE), other.values.get(steps, GONE)
        if type(pair[0]) is not type(pair[1]) or pair[0] != pair[1]:
            shown = " and ".join(_shown(value) for value in pair)
            return f"reads {text_of(steps)}, which is not always the same ({shown})"
    for key, (tensor, version) in one.weights.items():
        now = other.weights.get(key)
        if now is None or now[0] is not tensor or now[1] != version:
            return f"has a weight or buffer, {key}, that is written while the model runs"
    return None


def _shown(value: Any) -> str:
    if value is GONE:
        return "nothing"
    return " ".join(value) if isinstance(value, tuple) else repr(value)


class _NoDropout(TorchFunctionMode):
    """Dropout keeps everything.

    called: the functions of torch, in order, and whether they drop nothing.  dropped: the results of
    active dropout, of maps on their way to the values excepted, with the modules that it is in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []
        self.within: list[str] = []
        self.dropped: list[tuple[Tensor, list[str]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "dropout" in getattr(func, "__name__", ""):
            whole = args[0] if args else kwargs["input"]
            result = whole.view_as(whole)
            share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            self.called.append((func, share == 0))  # a trace has what is called in evaluation mode
            if share and (args[2] if len(args) > 2 else kwargs.get("training", True)):
                self.dropped.append((result, [*self.within]))
            return result
        share = 0.0
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                share, args = args[4], (*args[:4], 0.0, *args[5:])
            else:
                share, kwargs = kwargs.get("dropout_p", 0.0), {**kwargs, "dropout_p": 0.0}
        self.called.append((func, share == 0))
        result = func(*args, **kwargs)
        operands = pytree.tree_leaves(args)
        for place, (tensor, within) in enumerate(self.dropped):
            if any(x is tensor for x in operands):
                if func in _PRODUCTS and all(x.dim() > 2 for x in operands if isinstance(x, Tensor)):
                    self.dropped.pop(place)
                elif func in _SAME_MAP:
                    self.dropped[place] = (result, within)
                break
        return result


def _depends_on_layout(model: nn.Module, example: Batch, expected: Any) -> bool:
    """Whether the model computes something else where its inputs are not contiguous: code has written
    into what .contiguous() gave, which is a copy only then."""
    leaves = example.leaves
    for axes in ((0, -1), (1, 2), (-2, -1)):
        turned = [
            x.transpose(*axes).contiguous().transpose(*axes)
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > max(1, *axes) else x
            for x in leaves
        ]  # fmt: skip
        if all(map(operator.is_, leaves, turned)):
            continue
        batch = example.with_leaves(turned)
        with contextlib.suppress(Exception):  # of the model: it takes no such inputs
            if not largest_difference(expected, model(*batch.args, **batch.kwargs)) <= _ALIKE:
                return True
    return False


def _training(model: nn.Module, example: Batch) -> set[str]:
    """The modules whose own code computes something else in training mode, apart from dropout of maps
    and torch's modules."""
    before = {module: module.training for module in model.modules()}
    names = {name for name, _ in model.named_modules()}

    def run() -> Any:
        with torch.random.fork_rng(devices=[]), _NoDropout() as mode:
            torch.manual_seed(0)

            def enter(name: str, *_: Any) -> Leave:
                mode.within.append(name)
                return mode.within.pop

            with entering(model, enter):
                return output_of(model, example), mode

    run()  # makes what is made once
    expected, mode = run()
    try:
        for module in before:
            module.training = not type(module).__module__.startswith("torch.")
        output, trained = run()
        if trained.called != mode.called or not identical(output, expected):
            return names
        return {name for _, within in trained.dropped for name in within}
    except Exception:  # of the model, which then is another in training mode
        return names
    finally:
        for module, flag in before.items():
            module.training = flag


# Tracing


def answering(traced: bool) -> contextlib.AbstractContextManager[object]:
    """What torch.compiler.is_compiling and is_exporting answer."""
    flags: dict[str, Any] = dict.fromkeys(_FLAGS, traced)
    return mock.patch.multiple(torch.compiler, **flags) if flags else contextlib.nullcontext()


def untraced(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A forward that is told that it is not traced."""
    with answering(False):
        return forward(*args, **kwargs)


def is_the_same_traced(model: nn.Module, batch: Batch) -> bool:
    """Whether the model computes the same, bit for bit, where it is told that it is being traced: on the
    batch, and on what differs from it in what it hides and in how large its numbers are."""
    leaves = batch.leaves
    changed = (
        [*leaves[:place], change(leaf), *leaves[place + 1 :]] for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) for change in _CHANGES
    )  # fmt: skip
    for tried_on in (batch, *map(batch.with_leaves, changed)):
        outputs = []
        for traced in (False, True):
            try:
                with torch.random.fork_rng(devices=[]), answering(traced):
                    outputs.append(model(*tried_on.args, **tried_on.kwargs))
            except Exception as error:  # of the model: inputs that it does not take
                outputs.append(type(error).__name__)
        if not identical(*outputs):
            return False
    return True


def _masked(x: Tensor) -> Tensor:
    """Another half of the tokens hidden, if it is a mask; other numbers otherwise."""
    if x.dim() < 2:
        return x
    changed = x.clone()
    changed[..., x.shape[-1] // 2 :] = 0
    return changed


def _scaled(scale: float, x: Tensor) -> Tensor:
    if x.dtype is torch.bool:
        return x
    fewer = 2 if scale > 1 else 3  # of lengths, and no unknown word
    return x * scale if x.is_floating_point() else x.div(fewer, rounding_mode="floor")


_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    _masked, *(functools.partial(_scaled, scale) for scale in (1e-3, 3.0, 30.0, 1e3)),
)  # fmt: skip


def identical(one: Any, other: Any) -> bool:
    """Bit for bit; False of what cannot be compared."""
    leaves = pytree.tree_leaves(one), pytree.tree_leaves(other)
    pairs = list(itertools.zip_longest(*leaves, fillvalue=GONE))
    return all(type(x) is type(y) and _plainly_equal(x, y) for x, y in pairs)


def _plainly_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and equal(one, other)
    now = encoded(one)
    if isinstance(now, tuple) and now[0] == "object":  # of the user's
        mine, others = vars(one) if hasattr(one, "__dict__") else None, getattr(other, "__dict__", None)
        return mine is not None and mine.keys() == (others or {}).keys() and identical(mine, others)
    return now == encoded(other)
