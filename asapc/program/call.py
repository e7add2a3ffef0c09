"""How a module is called, as plain data: what an artefact knows of a forward without its code.

    forward(self, x, mask=None, *, flag=False) -> {"logits": Tensor}      called as forward(x, flag=False)

    parameters  x: tensor 0;  mask: None, its default;  flag: False, its default
    tensors     0: float [s0, 12]
    output      {"logits": tensor 0}

A call agrees with the captured one if every tensor has its place, kind and sizes, and everything else
has its captured value: the program was traced for nothing else.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from asapc.formats.limits import MOST, limits_of
from asapc.formats.records import APART, OPTIONAL, Record, optional

Kind = Literal["bool", "int", "float", "complex"]
GRADIENTS = " with gradients"
LOW = "autocast"  # the dtype of autocast, whichever it is
_SCALARS = (type(None), bool, int, float, str)


class Undescribable(Exception):
    """Raised for the part of a call that plain data cannot express; the message names it."""


@dataclass(frozen=True)
class Leaf(Record):
    """The index-th tensor of the call, or of the output."""

    index: int = field(metadata={"key": "tensor"})


@dataclass(frozen=True)
class Constant(Record):
    """Exactly this value."""

    value: bool | int | float | str | None = field(metadata={"key": "constant"})


@dataclass(frozen=True, repr=False)
class Default(Record):
    """A default that plain data cannot express: a caller may leave it out but cannot pass it."""

    text: str = field(metadata={"key": "default"})

    def __repr__(self) -> str:
        """Stands in a signature for the value."""
        return self.text


@dataclass(frozen=True)
class Size(Record):
    """An int that equals this free size of the call's tensors."""

    name: str = field(metadata={"key": "size"})


@dataclass(frozen=True)
class Group(Record):
    """A container.

    kind:    list, tuple, dict, namedtuple, or object: any other type registered with torch's pytree.
    keys:    of a dict; the names of fields, where there are any.
    type:    of a namedtuple or an object, its qualified name, found again where the class is at hand.
    context: of an object, what its pytree flattening keeps besides the items, as JSON has it.
    """

    kind: Literal["list", "tuple", "dict", "namedtuple", "object"]
    items: tuple[Tree, ...]
    keys: tuple[str, ...] = ()
    type: str = ""
    context: Any = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        named = self.kind in ("dict", "namedtuple")
        if len(self.keys) not in ((len(self.items),) if named else (0, len(self.items))):
            raise ValueError(f"a {self.kind} has a key for each item")


Tree = Leaf | Constant | Default | Size | Group


@dataclass(frozen=True)
class Tensors(Record):
    """The kind and sizes that a tensor must have.

    kind:    bool, int, float or complex.
    sizes:   an int, or the name of a size that is free within its limits.
    same_as: the earlier argument that is the same object.
    """

    kind: Kind
    sizes: tuple[int | str, ...]
    same_as: int | None = optional()


@dataclass(frozen=True)
class Parameter(Record):
    """One parameter of a forward.

    kind:     as inspect.Parameter names it, such as POSITIONAL_OR_KEYWORD.
    default:  None where it must be given.
    captured: its value when the program was captured, the default if it was left out.
    """

    name: str
    kind: Literal[
        "POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD"
    ]
    default: Tree | None
    captured: Tree

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError("a parameter has a name")
        if not (self.default is None or isinstance(self.default, Default) or _is_plain(self.default)):
            raise ValueError("a default is plain data")


@dataclass(frozen=True)
class Call(Record):
    """A captured call and what it returned.

    limits: smallest and largest value of the free sizes that have limits.
    neutral: tensors that may also be None, which stands for a mask that hides nothing: 0 or True.
    casts: the dtypes that the model's own code returns under autocast, by the device and dtypes of its
           inputs, see dtypes_of. GRADIENTS marks those that differ where gradients are recorded. The
           operators compute in other dtypes.
    """

    parameters: tuple[Parameter, ...]
    output: Tree
    tensors: tuple[Tensors, ...] = ()
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    neutral: tuple[int, ...] = ()
    casts: Mapping[str, str] | None = optional()

    _signature: inspect.Signature = field(init=False, repr=False, compare=False, metadata=APART)

    def __post_init__(self) -> None:
        kinds = {kind for text in (self.casts or {}).values() for kind in text.split(" ")[1:]}
        count = len(self.tensors)
        places = [leaf.index for parameter in self.parameters for leaf in leaves(parameter.captured)]
        rules = {
            "autocast gives tensors dtypes of torch": all(
                kind == LOW or isinstance(getattr(torch, kind, None), torch.dtype) for kind in kinds
            ),
            "every tensor has one place": sorted(places) == [*range(count)],
            "a neutral mask is one of the tensors": all(0 <= index < count for index in self.neutral),
            "a tensor may be the same as an earlier one only": all(
                tensor.same_as is None or tensor.same_as in range(index)
                for index, tensor in enumerate(self.tensors)
            ),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ValueError(broken[0])
        kinds_of = inspect.Parameter
        try:
            signature = inspect.Signature([
                kinds_of(each.name, getattr(kinds_of, each.kind), default=_shown_default(each))
                for each in self.parameters
            ])  # fmt: skip
        except ValueError as error:
            raise ValueError(f"its parameters are a function's: {error}") from None
        object.__setattr__(self, "_signature", signature)

    def cast(self, flat: Sequence[Tensor], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs in the dtypes of the model's own code, or unchanged if those are not known."""
        device = outputs[0].device.type if self.casts and outputs else "meta"
        if not self.casts or device == "meta" or not torch.is_autocast_enabled(device):
            return outputs
        inputs, grad = dtypes_of(flat, device), GRADIENTS * torch.is_grad_enabled()
        kinds = self.casts.get(inputs + grad, self.casts.get(inputs, "")).split(" ")[1:]
        if len(kinds) != len(outputs):
            return outputs
        low = torch.get_autocast_dtype(device)
        dtypes = [low if kind == LOW else getattr(torch, kind) for kind in kinds]
        return tuple(x.to(dtype) for x, dtype in zip(outputs, dtypes, strict=True))

    def signature(self) -> inspect.Signature:
        """The signature of the forward."""
        return self._signature

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], str | None]:
        """Return (the call's tensors in order, None), or (..., why it is not the captured call).

        Raises TypeError where the forward itself would: too many, missing or unknown arguments.
        """
        try:
            arguments = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"forward(): {error}") from None
        flat: list[Any] = [None] * len(self.tensors)
        counts: list[tuple[str, Any, str]] = []
        for parameter in self.parameters:
            name, captured, problem = parameter.name, parameter.captured, None
            neutral = isinstance(captured, Leaf) and captured.index in self.neutral
            if arguments.get(name) is None and neutral:
                continue
            if name in arguments:
                problem = _taken(captured, arguments[name], flat, counts, name)
            elif captured != parameter.default:
                problem = f"{name} was captured as {shown(captured)}, but is missing"
            if problem is not None:
                return flat, problem
        return flat, self._sizes(flat, counts)

    def _sizes(self, flat: list[Any], counts: Sequence[tuple[str, Any, str]]) -> str | None:
        sizes: dict[str, Any] = {}
        for index, (like, tensor) in enumerate(zip(self.tensors, flat, strict=True)):
            problem = None
            if tensor is None:
                continue
            if kind_of(tensor.dtype) != like.kind:
                problem = f"was captured as a tensor of {like.kind}, but is {tensor.dtype}"
            elif tensor.dim() != len(like.sizes):
                problem = f"was captured with {len(like.sizes)} dimensions, but has {tensor.dim()}"
            elif like.same_as is not None and flat[like.same_as] is not tensor:
                problem = f"was captured as the very tensor that {self._name(like.same_as)} is"
            if problem is not None:
                return f"{self._name(index)} {problem}"
            problem = other_size(like, tensor, self.limits, sizes)
            if problem is not None:
                return f"{self._name(index)}: {problem}"
        for name, count, argument in counts:
            if name not in sizes or sizes[name] != count:
                return f"{argument} was captured as a size of the other arguments, but is {count}"
        return self._fill(flat, sizes)

    def _fill(self, flat: list[Any], free: Mapping[str, Any]) -> str | None:
        """Replace None by masks that hide nothing, sized like the other arguments."""
        like = next((t for t in flat if t is not None and t.is_floating_point()), None)
        for index in self.neutral:
            if flat[index] is not None:
                continue
            axes = self.tensors[index].sizes
            sizes: list[Any] = [free.get(size) if isinstance(size, str) else size for size in axes]
            if like is None or None in sizes:
                return f"{self._name(index)} was captured as a tensor, but is None"
            if self.tensors[index].kind == "bool":
                flat[index] = torch.ones(sizes, dtype=torch.bool, device=like.device)
            else:
                flat[index] = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        return None

    def gives(self, count: int) -> bool:
        """Whether each of so many tensors has one place in the output."""
        return sorted(leaf.index for leaf in leaves(self.output)) == [*range(count)]

    def _name(self, index: int) -> str:
        """The argument that holds the index-th tensor."""
        for parameter in self.parameters:
            if any(leaf.index == index for leaf in leaves(parameter.captured)):
                return parameter.name
        return "an argument"


def dtypes_of(tensors: Sequence[Tensor], device: str) -> str:
    """The device and the dtypes, with LOW for the dtype of autocast, which may be set to another."""
    low = torch.get_autocast_dtype(device)
    kinds = [LOW if x.dtype == low else str(x.dtype).removeprefix("torch.") for x in tensors]
    return " ".join([device, *kinds])


@dataclass(frozen=True)
class Child(Record):
    """A call of a layer inside a patched module: its arguments and its output.

    A leaf stands for the index-th tensor of the operator call that marks it, see
    kernels/library/beside.py.  gives: the kinds and sizes of the output's tensors.
    """

    name: str = field(metadata={"key": "layer"})
    args: tuple[Tree, ...]
    kwargs: Mapping[str, Tree]
    output: Tree
    gives: tuple[Tensors, ...] = ()

    def __post_init__(self) -> None:
        if len(self.gives) not in (0, len([*leaves(self.output)])):
            raise ValueError("every tensor of an output is described")
        if not all(name.isidentifier() for name in self.kwargs):
            raise ValueError("a parameter has a name")


def described(value: Any, tensors: list[Tensor], output: bool = False) -> Tree:
    """The tree of a value; its tensors are appended to `tensors`.  Raises Undescribable.

    output: the value is a result, whose objects are built again, not an argument, whose objects would
    have to be taken apart.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Leaf(len(tensors) - 1)
    if isinstance(value, torch.SymInt):
        number = value.node.maybe_as_int()
        if number is not None:
            return Constant(number)
        if output:
            raise Undescribable("a size among the outputs")
        return Size(str(value.node.expr))
    if isinstance(value, _SCALARS) and not (isinstance(value, float) and not math.isfinite(value)):
        return Constant(value)

    def inner(items: Sequence[Any]) -> tuple[Tree, ...]:
        return tuple(described(item, tensors, output) for item in items)

    kind = type(value)
    if kind in (list, tuple, torch.Size):
        return Group("list" if kind is list else "tuple", inner(value))
    if kind is dict or (kind is OrderedDict and not output):
        if not all(isinstance(key, str) for key in value):
            raise Undescribable("a dict with keys that are not text")
        return Group("dict", inner(list(value.values())), tuple(value))
    if output and isinstance(value, tuple) and hasattr(value, "_fields"):
        return Group("namedtuple", inner(value), tuple(value._fields), _qualified(kind))
    if output and kind in pytree.SUPPORTED_NODES:
        items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        try:
            plain = json.loads(json.dumps(context)) == context
        except (TypeError, ValueError):
            plain = False
        if not plain:
            raise Undescribable(f"a {_qualified(kind)} whose structure is not plain data")
        return Group("object", inner(items), _fields(kind, value, len(items)), _qualified(kind), context)
    raise Undescribable(f"a {_qualified(kind)}")


def parameters_of(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]
) -> tuple[Parameter, ...]:
    """The parameters of a forward with their values in a call, whose tensors are in pytree's order of
    (args, kwargs).  Raises Undescribable, and TypeError for a call that the signature does not allow.
    """
    signature.bind(*args, **kwargs)
    positional = signature.bind_partial(*args).arguments  # those of *args as a tuple
    trees = {name: described(value, tensors) for name, value in positional.items()}
    named = {p.name for p in signature.parameters.values() if not p.kind.name.startswith("VAR")}
    extra: dict[str, Tree] = {}
    for name, value in kwargs.items():
        (trees if name in named else extra)[name] = described(value, tensors)
    if extra:
        stars = next(p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD)
        trees[stars] = Group("dict", tuple(extra.values()), tuple(extra))
    parameters = []
    for parameter in signature.parameters.values():
        default: Tree | None = None
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            default = Group("tuple", ())
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            default = Group("dict", ())
        elif parameter.default is not inspect.Parameter.empty:
            default = _default(parameter.default)
        captured = trees.get(parameter.name, default)
        assert captured is not None  # bind has seen to it
        kind: Any = parameter.kind.name
        parameters.append(Parameter(parameter.name, kind, default, captured))
    return tuple(parameters)


def _default(value: Any) -> Tree:
    tensors: list[Tensor] = []
    try:
        tree = described(value, tensors)
    except Undescribable:
        return Default(repr(value)[:80])
    return Default("a tensor") if tensors else tree


def _taken(
    tree: Tree, value: Any, flat: list[Any], counts: list[tuple[str, Any, str]], name: str
) -> str | None:
    """Put the value's tensors into their places; return why it is not what was captured, or None."""
    if isinstance(tree, Leaf):
        if not isinstance(value, Tensor):
            return f"{name} was captured as a tensor, but is {shortened(value)}"
        flat[tree.index] = value
        return None
    if isinstance(tree, Constant):
        captured = tree.value
        if type(value) is type(captured) and value == captured:
            return None
        return f"{name} was captured as {captured!r}, but is {shortened(value)}"
    if isinstance(tree, Size):
        if not isinstance(value, int | torch.SymInt):
            return f"{name} was captured as a size, but is {shortened(value)}"
        counts.append((tree.name, value, name))
        return None
    if isinstance(tree, Default):
        return f"{name} was captured at its default {tree.text}, but is given"
    if tree.kind == "dict":
        alike = isinstance(value, dict) and tuple(value) == tree.keys
    else:
        alike = isinstance(value, list | tuple) and len(value) == len(tree.items)
    if not alike:
        return f"{name} was captured as {shown(tree)}, but is {shortened(value)}"
    parts = [value[key] for key in tree.keys] if tree.kind == "dict" else value
    for item, part in zip(tree.items, parts, strict=True):
        problem = _taken(item, part, flat, counts, name)
        if problem is not None:
            return problem
    return None


def rebuilt(tree: Tree, flat: Sequence[Any], types: Mapping[str, type] = {}) -> Any:
    """The structure, filled with the tensors of `flat`.

    types: classes by qualified name.  Without its class, an object becomes a dict of its fields, or a
    tuple if they have no names, and a named tuple becomes a tuple.
    """
    if isinstance(tree, Leaf):
        return flat[tree.index]
    if isinstance(tree, Constant):
        return tree.value
    if not isinstance(tree, Group):
        raise ValueError("a size or a default of the call, where a value is needed")
    items = [rebuilt(item, flat, types) for item in tree.items]
    if tree.kind == "list":
        return items
    if tree.kind == "dict":
        return dict(zip(tree.keys, items, strict=True))
    cls = types.get(tree.type)
    if cls is not None and tree.kind == "namedtuple":
        return tuple.__new__(cls, items)
    if cls is not None:
        return pytree.SUPPORTED_NODES[cls].unflatten_fn(items, tree.context)
    if tree.kind == "object" and tree.keys:
        return dict(zip(tree.keys, items, strict=True))
    return tuple(items)


def types_at_hand(tree: Tree) -> dict[str, type]:
    """The classes of a tree that this process has already defined, by qualified name.

    Nothing is imported: names of objects are looked up among the types registered with torch's pytree,
    names of named tuples in the modules that are loaded.
    """
    types: dict[str, type] = {}
    registered = {_qualified(cls): cls for cls in pytree.SUPPORTED_NODES}
    for group in groups(tree):
        if group.kind == "object" and group.type in registered:
            types[group.type] = registered[group.type]
        elif group.kind == "namedtuple":
            place, _, name = group.type.rpartition(".")
            cls = vars(sys.modules[place]).get(name) if place in sys.modules else None
            fields = tuple(getattr(cls, "_fields", ()))
            if isinstance(cls, type) and issubclass(cls, tuple) and fields == group.keys:
                types[group.type] = cls
    return types


def plain_spec(spec: Any) -> Any:
    """A pytree spec with the containers that `rebuilt` returns without any classes."""
    children = [plain_spec(child) for child in spec.children()]
    if spec.is_leaf():
        return spec
    if spec.type in (list, tuple, dict):
        return pytree.TreeSpec(spec.type, spec.context, children)
    if spec.type is OrderedDict:
        return pytree.TreeSpec(dict, spec.context, children)
    names = spec.context if isinstance(spec.context, list) else []
    if len(names) == 2 and all(isinstance(part, list) for part in names):
        names = names[0]  # of a dataclass: its fields, and those that are None
    if len(names) == len(children) and all(isinstance(name, str) for name in names):
        return pytree.TreeSpec(dict, names, children)
    return pytree.TreeSpec(tuple, None, children)


def known_of(
    values: Sequence[Tensor], same_as: Sequence[int | None] | None = None
) -> tuple[tuple[Tensors, ...], dict[str, tuple[int, int]]]:
    """What the tensors of a call must be like, and the limits of their free sizes.

    values: the tensors of the trace.
    """
    limits: dict[str, tuple[int, int]] = {}
    tensors = []
    for index, value in enumerate(values):
        sizes: list[int | str] = []
        for size in value.shape:
            if not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None:
                sizes.append(int(size))
                continue
            name = str(size.node.expr)
            sizes.append(name)
            ends = limits_of(size.node.shape_env, size.node.expr)
            if ends != (0, MOST):
                limits[name] = ends
        same = None if same_as is None else same_as[index]
        tensors.append(Tensors(kind_of(value.dtype), tuple(sizes), same))
    return tuple(tensors), limits


def other_size(
    like: Tensors, tensor: Tensor, limits: Mapping[str, tuple[int, int]], free: dict[str, Any]
) -> str | None:
    """Which size of a tensor is not as captured, or None.  free: takes the free sizes of this call."""
    for axis, size in enumerate(like.sizes):
        now = tensor.shape[axis]
        if isinstance(size, int):
            expected = size
        elif size in free:
            expected = free[size]
        else:
            free[size] = expected = now
            low, high = limits.get(size, (0, MOST))
            if (low > 0 and now < low) or (high < MOST and now > high):
                return (
                    f"size {axis} is {now}, outside the range {low} to "
                    f"{high if high < MOST else 'any'} that the program was captured for"
                )
        if now != expected:
            return f"size {axis} was captured as {expected}, but is {now}"
    return None


def leaves(tree: Tree | None) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Group):
        for item in tree.items:
            yield from leaves(item)


def groups(tree: Tree) -> Iterator[Group]:
    if isinstance(tree, Group):
        yield tree
        for item in tree.items:
            yield from groups(item)


def kind_of(dtype: torch.dtype) -> Kind:
    """bool, int, float or complex."""
    if dtype is torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "int"


def shown(tree: Tree) -> str:
    """For messages."""
    if isinstance(tree, Leaf):
        return "a tensor"
    if isinstance(tree, Constant):
        return repr(tree.value)
    if isinstance(tree, Default):
        return tree.text
    if isinstance(tree, Size):
        return "a size"
    if tree.kind == "dict":
        return f"a dict of {', '.join(tree.keys) or 'nothing'}"
    return f"a {tree.kind} of {len(tree.items)}"


def shortened(value: Any) -> str:
    """A value, for messages."""
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def _shown_default(parameter: Parameter) -> Any:
    if parameter.default is None or parameter.kind.startswith("VAR"):
        return inspect.Parameter.empty
    if isinstance(parameter.default, Default):
        return parameter.default
    return rebuilt(parameter.default, ())


def _is_plain(tree: Tree) -> bool:
    return isinstance(tree, Constant) or (isinstance(tree, Group) and all(map(_is_plain, tree.items)))


def _fields(kind: type, value: Any, count: int) -> tuple[str, ...]:
    """Names of the items of a registered object; () where they have none."""
    with_keys = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
    if with_keys is None:
        names: list[Any] = []
        context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)[1]
        if isinstance(context, list | tuple):
            names = list(context)
    else:
        names = [getattr(key, "key", getattr(key, "name", None)) for key, _ in with_keys(value)[0]]
    return tuple(names) if len(names) == count and all(isinstance(n, str) for n in names) else ()


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
