"""The compiled model: an nn.Module that is called, copied, moved and trained as the teacher was.

    CompiledModel(nn.Module)      a whole program, its weights under the teacher's names
    Forward                       what is called: arguments to tensors, the graph, tensors to outputs
    Operators(nn.Module)          what the operators were fitted with, under the name `asapc`

Forward is the `forward` of a compiled model and of a patched module (asapc.program.live). It has the
teacher's signature and reports a call that differs from the captured one: a caller cannot change what
was a constant of the trace.

Moved to another dtype, the graph computes in that dtype, in half precision except on positions. In a
float32 trace `.float()` gives the tensor that it is called on: casts follow, as constants do.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.modules.module import _has_any_global_hook

from asapc.errors import BranchError, InputError
from asapc.formats.records import APART, Record
from asapc.operators.catalogue import by_name
from asapc.program.call import Call, rebuilt, types_at_hand
from asapc.program.code import GraphCode
from asapc.program.constants import Constants, transformed
from asapc.program.state import (
    GONE,
    OPERATORS,
    Reads,
    Steps,
    asked,
    can_be_taken_away,
    holding,
    own_forward,
    take_away,
)

REPLICATE = "_replicate_for_data_parallel"
# The rule for a call, and what helps if it is broken.
AS_CAPTURED = (
    "a compiled model takes the arguments it was captured with",
    "call it as the calibration data did, or compile it on data with these arguments",
)
NO_DROPOUT = "dropout between scores and values is not applied: a compiled layer has no map"
AS_EVALUATED = "computes in training mode as in evaluation mode, without "
_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default  # of code that writes in place
_STATISTICS = {"batch_norm": "batch statistics (batch_norm)",
               "_native_batch_norm_legit_no_training": "batch statistics (batch_norm)",
               "instance_norm": "statistics of the input (instance_norm)"}  # fmt: skip
AS_THE_ORIGINAL = (
    "a compiled model computes what its original does, or nothing",
    "load it with model=, so that the original's code can run, or compile again",
)

CONSTANT = "constant_"  # begins the names of tensors that stand in the code


class OwnCodeWarning(UserWarning):
    """A patched module was called differently from the captured one, and ran its own code."""


class Operators(nn.Module):
    """Coefficients, pivots, slices: buffers of the operators that stand for `sites`.

    They move with the module around them but keep their own dtype: fits are made in float32 or wider,
    and the operators take activations of any dtype. Tensors that are written in the code are not in the
    state dict, as they are not in the original's.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        super().__init__()
        self.sites = tuple(sites)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=not name.startswith(CONSTANT))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Operators:
        before = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def __repr__(self) -> str:
        return "; ".join(self.sites)


@dataclass(frozen=True)
class Inside(Record):
    """A module whose code is part of a compiled forward, and what that code was traced with.

    path:        from the patched module, "" for itself.
    kind:        its class's name.
    own_forward: its instance had a forward that its class does not have.
    hooked:      it had hooks, which the trace has.
    reads:       what its code read besides its arguments.
    keeps:       the steps to attributes in which its code keeps tensors, such as its last map. A compiled
                 forward deletes them: they would be those of another call.
    shared:      parts that are one object: the path of each but the first, and the path of the first.
    caches:      attributes in which its own code keeps what the compiled code computes at every call.
    drops:       in training mode, its code drops entries of a map, which compiled code does not have.
    """

    path: str
    kind: str = field(metadata={"key": "class"})
    own_forward: bool
    hooked: bool
    reads: Reads
    keeps: tuple[Steps, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    caches: tuple[str, ...] = ()
    drops: bool = False
    _names: tuple[str, ...] = field(init=False, repr=False, compare=False, metadata=APART)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", tuple(self.path.split(".")) if self.path else ())
        if not all(can_be_taken_away(steps) for steps in self.keeps):
            raise ValueError("what a module keeps is an attribute that torch does not need")

    @classmethod
    def of(cls, module: nn.Module, path: str, reads: Reads) -> Inside:
        """The module as it is now."""
        kept = own_forward(module) is not None
        firsts: dict[int, str] = {}
        parts = [] if path else [*module.named_modules(remove_duplicate=False)]
        first = {name: firsts.setdefault(id(part), name) for name, part in parts}
        shared = tuple((name, other) for name, other in first.items() if name != other)
        return cls(path, type(module).__qualname__, kept, _is_hooked(module), reads, shared=shared)

    def without(self, ways: Collection[Steps]) -> Inside:
        """The same without guards for what is at the end of these steps."""
        kept = tuple((way, value) for way, value in self.reads.values if way not in ways)
        return replace(self, reads=replace(self.reads, values=kept))

    def difference(self, root: nn.Module, flat: Sequence[Any] = ()) -> str | None:
        """How the module differs from the captured one, or None.  root: the patched module; flat: the
        tensors that it is called with."""
        module = _part(root, self._names)
        if module is None or (self.path and (
            type(module).__qualname__ != self.kind or ("forward" in module.__dict__) != self.own_forward
        )):  # fmt: skip
            return f"its {self.path}, whose code was compiled, is replaced"
        if self.path and _is_hooked(module) != self.hooked:
            return f"its {self.path}, whose code was compiled, has other hooks"
        of_gradients = self.path and (module._backward_hooks or module._backward_pre_hooks)
        if of_gradients and torch.is_grad_enabled():
            return f"its {self.path}, whose code was compiled, has hooks of gradients"
        for name, first in self.shared:
            if _part(module, name.split(".")) is not _part(module, first.split(".")):
                return f"its {name}, whose code was compiled, is no longer its {first}"
        other = self.reads.difference(module)
        if other is not None:
            where, text = other
            return f"{'.'.join((*self._names, where))} {text}"
        problem = asked(self.reads.questions, module, flat) if self.reads.questions else None
        return problem if problem is None or not self.path else f"{self.path}: {problem}"


def _part(module: nn.Module | None, names: Sequence[str]) -> nn.Module | None:
    """The submodule, or None if there is none."""
    for name in names:
        module = module._modules.get(name) if module is not None else None
    return module


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@dataclass(eq=False, repr=False)
class Forward:
    """forward(*args, **kwargs) of a module, computed by a graph.

    live:   the module has code of its own, which runs, with a warning, where the call or the module
            differs from the captured one. Without it that is an InputError.
    before: the forward that was set on the instance, if any.
    inside: the modules whose code the graph has, as they were captured.
    constants: what the graph holds of weights.
    questions: what its code asked about the mode it runs in, if there are no modules (program.state).
    traced: only Dynamo sees it; otherwise the module's own code runs.
    """

    module: nn.Module
    code: GraphCode
    call: Call
    name: str
    live: bool = False
    before: Callable[..., Any] | None = None
    inside: tuple[Inside, ...] = ()
    constants: Constants = field(default_factory=Constants)
    questions: tuple[str, ...] = ()
    traced: bool = False
    warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.types = types_at_hand(self.call.output)

    def __getstate__(self) -> dict[str, Any]:
        """All but the classes of the outputs, which another process may not have."""
        return {name: value for name, value in vars(self).items() if name != "types"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original) if self.live else self.call.signature()

    @property
    def __code__(self) -> CodeType:
        """torch.export names the code that it traces."""
        return type(self).__call__.__code__

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward.  Not stored: pickled, it would be taken for what replaces it."""
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward if self.before is None else self.before

    def bound_to(self, module: nn.Module) -> Forward:
        """The forward of a shallow copy of the module."""
        bound = object.__new__(type(self))
        bound.__dict__.update(vars(self), module=module)
        if isinstance(self.before, MethodType) and self.before.__self__ is self.module:
            bound.before = MethodType(self.before.__func__, module)
        return bound

    def replica(self) -> nn.Module:
        """The copy with its own weights that torch.nn.parallel.replicate asks a patched module for."""
        copied: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        forward = copied.__dict__["forward"] = self.bound_to(copied)
        copied.__dict__[REPLICATE] = forward.replica
        return copied

    def _of_copy(self, frame: FrameType) -> Forward | None:
        """The forward of the caller, if that is a shallow copy of the module, which has this forward
        among its attributes.  frame: of the caller."""
        by_call = frame.f_code.co_filename == nn.modules.module.__file__
        caller = frame.f_locals.get("self") if by_call else None
        if caller is self.module or type(caller) is not type(self.module):
            return None
        attributes, replica = vars(caller), self.replica if self.live else None
        if attributes.get("forward") is not self or attributes.get(REPLICATE) != replica:
            return None
        forward = attributes["forward"] = self.bound_to(caller)
        if self.live:
            attributes[REPLICATE] = forward.replica
        forward.constants = self.constants.of_copy(self.module, caller)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copied = None if torch.compiler.is_compiling() else self._of_copy(sys._getframe(1))
        if copied is not None:
            return copied(*args, **kwargs)
        if self.traced and not torch.compiler.is_dynamo_compiling():
            with self._hidden():
                return self.original(*args, **kwargs)
        flat, problem = self.call.flat(args, kwargs)
        if problem is None and self.questions:
            problem = asked(self.questions, self.module, flat)
        for inside in self.inside:
            problem = inside.difference(self.module, flat) if problem is None else problem
        if problem is not None:
            return self._otherwise(problem, args, kwargs)
        if any(inside.drops for inside in self.inside) and NO_DROPOUT not in self.warned:
            self._warn_of_dropout()
        missing = self.constants.missing(self.module, flat)
        everywhere = "hooks of all modules are registered" if _has_any_global_hook() else None
        of_live = (missing or everywhere) if self.live else None
        problem = self.constants.difference() or transformed() or of_live
        if problem is not None:
            return self._otherwise(problem, args, kwargs, AS_THE_ORIGINAL)
        try:
            outputs = self.code(self.module, flat)
        except BranchError as branch:
            if not self.live:
                raise
            return self._otherwise(f"{branch.rule}: here it is not", args, kwargs)
        if missing is not None:
            outputs = self.constants.refusing(outputs, missing)
        for inside in self.inside:
            for steps in inside.keeps:
                take_away(self.module.get_submodule(inside.path), steps)
        if self.call.casts is not None:
            outputs = self.call.cast(flat, outputs)
        return rebuilt(self.call.output, outputs, self.types)

    def _warn_of_dropout(self) -> None:
        parts = (_part(self.module, inside._names) for inside in self.inside if inside.drops)
        if any(part is not None and asked(("training",), part, ()) for part in parts):
            self.warned.add(NO_DROPOUT)
            warnings.warn(f"{self.name}: {NO_DROPOUT}", UserWarning, stacklevel=4)

    def _otherwise(
        self, problem: str, args: Sequence[Any], kwargs: Mapping[str, Any],
        rule: tuple[str, str] = AS_CAPTURED,
    ) -> Any:  # fmt: skip
        if not self.live:
            raise InputError(f"{self.name}: {rule[0]}", got=problem, help=rule[1])
        if problem not in self.warned:
            self.warned.add(problem)
            warnings.warn(
                f"{self.name}: running the module's own code instead of the compiled code: {problem}",
                OwnCodeWarning,
                stacklevel=3,
            )
        with self._hidden():
            return self.original(*args, **kwargs)

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hide the operators from the module's code, if that iterates over its parts; afterwards caches,
        which are guarded, are as before."""
        looks = any(one.reads.of_structure for one in self.inside)
        parts = [*self.module.modules()] if looks else []
        held = [(one._modules, one._modules.pop(OPERATORS)) for one in parts if OPERATORS in one._modules]
        keeping = {_part(self.module, one._names): one.caches for one in self.inside if one.caches}
        try:
            with holding({
                part: {key: vars(part).get(key, GONE) for key in keys}
                for part, keys in keeping.items() if part is not None
            }):  # fmt: skip
                yield
        finally:
            for modules, operators in held:
                modules[OPERATORS] = operators

    def __repr__(self) -> str:
        return f"<compiled forward of {self.name}>"


class Part(nn.Module):
    """A module of a rebuilt model: one that is put into it would not be called."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_put = isinstance(value, nn.Module) and name != "parametrizations"
        if not self._takes(name, value) or (is_put and type(value) is not type(self._modules.get(name))):
            raise InputError(
                "a layer of a rebuilt model is weights alone: all else is a constant of its code",
                got=f"{name} is set", help="load it with model=, or compile the changed model",
            )  # fmt: skip
        super().__setattr__(name, value)

    def _takes(self, name: str, value: Any) -> bool:
        return name != "__class__" or issubclass(value, Part)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        setattr(self, name, module)


class Layer(Part):
    """The weights of a layer whose code is in the compiled forward, which calls no hooks and reads no
    other attributes."""

    def _takes(self, name: str, value: Any) -> bool:
        of_torch = name == "training" or name.startswith("_") or isinstance(value, (Tensor, nn.Module))
        return super()._takes(name, value) and (of_torch or value is None)

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            "hooks are of the whole model: its layers are not called one by one",
            got="a hook of one of its layers", help="load it with model=, or hook the model itself",
        )  # fmt: skip

    register_forward_pre_hook = register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook


class CompiledModel(Part):
    """A compiled model, rebuilt from an artefact alone.

    weights: the module tree whose attributes the graph reads.  teacher: what it was compiled from, in
    words.  sites: one line each, for repr.  not_applied: what its code does only in training mode, read
    from the graph until it is set to what the teacher does.
    """

    forward: Forward

    def __init__(
        self, weights: nn.Module, code: GraphCode, call: Call, teacher: str, sites: Sequence[str]
    ) -> None:
        super().__init__()
        for ours, theirs in (
            (self._parameters, weights._parameters), (self._buffers, weights._buffers),
            (self._modules, weights._modules),
        ):  # fmt: skip
            ours.update(theirs)  # type: ignore[arg-type]
        self._non_persistent_buffers_set.update(weights._non_persistent_buffers_set)
        for part in self.modules():
            part.__class__ = Layer if type(part) is nn.Module else type(part)
        self.forward = Forward(self, code, call, teacher)
        self._sites = tuple(sites)
        self.not_applied = not_applied([code.graph])
        self.eval()

    def train(self, mode: bool = True) -> CompiledModel:
        if mode and self.not_applied:
            text = f"{self.forward.name}: {AS_EVALUATED}{', '.join(self.not_applied)}"
            warnings.warn(text, UserWarning, stacklevel=2)
        return super().train(mode)

    def _replicate_for_data_parallel(self) -> nn.Module:
        copied: nn.Module = super()._replicate_for_data_parallel()
        copied.__dict__["forward"] = self.forward.bound_to(copied)
        return copied

    def __repr__(self) -> str:
        lines = [f"CompiledModel of {self.forward.name}{self.forward.__signature__}", *self._sites]
        return "\n  ".join(lines)


def is_another_in_training(node: Node) -> bool:
    """Whether a node in evaluation mode would compute something else in training mode."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = {**by_name(node.target, node.args), **node.kwargs}
    modes = ("train", "training", "use_input_stats")
    return node.target is _NORM or any(arguments.get(name, True) is False for name in modes)


def is_without_share(node: Node) -> bool:
    """Whether it is dropout with probability 0."""
    return "dropout" in str(node.target) and node.args[1:2] == (0.0,)


def not_applied(graphs: Iterable[Graph]) -> tuple[str, ...]:
    """What these programs of evaluation mode leave out of training mode."""
    names = {
        str(node.target).split(".")[1] for graph in graphs for node in graph.nodes
        if is_another_in_training(node) and not is_without_share(node)
    }  # fmt: skip
    return tuple(sorted(_STATISTICS.get(name, name) for name in names))


def site_line(site: Mapping[str, Any]) -> str:
    """One line for a site of the manifest: its name, and what runs there."""
    operator = str(site["operator"])
    convention = site["convention"]
    facts = []
    if operator == "teacher":
        facts.append("the teacher's own code")
    elif operator == "asap":
        if site.get("side") is not None:
            facts.append(f"{site['side']} dual")
        if site.get("c_transforms") is not None:
            facts.append(f"{site['c_transforms']} c-transform{'s' if site['c_transforms'] != 1 else ''}")
        facts += [str(name) for name in site.get("features") or ()]
    elif "half_steps" in convention:
        facts.append(f"{convention['half_steps']} half-steps")
    if site.get("no_gradient") is not None:
        facts.append("inference only")
    return f"{site['name']}: {operator}" + (f" ({', '.join(facts)})" if facts else "")
