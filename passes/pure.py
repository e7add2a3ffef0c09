"""Pure: whether the code of a model surely leaves nothing behind for its next call.

before: a model, and the functions of the user's that ran in it
after:  True only where no line could keep anything

A model that keeps something has to be called with longer and louder inputs, to see whether it then is
another. Most keep nothing, and those calls take seconds. What is not known to be harmless is not.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from asapc.passes.bytecode import OF_ATTRIBUTES, OF_GLOBALS, arguments_of, instructions_of

_STORES = (
    "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_NAME", "STORE_SLICE", "DELETE_", "SEND",
    "IMPORT_", "LOAD_BUILD_CLASS", "BEFORE_ASYNC",
)  # fmt: skip
_BUILTINS = {
    "AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError", "abs", "all",
    "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max",
    "min", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super",
    "tuple", "zip",
}  # fmt: skip
# Containers that outlive a call are not harmless, wherever they are kept, so that these change locals.
_OF_LOCALS = {"append", "get", "indices", "items", "keys", "values"}
_OF_CONTAINERS = {*dir(list), *dir(dict), *dir(set)} - {"sort", "index", "count", "copy", "union"}
_IMPURE = {
    "backward", "compile", "embedding", "embedding_bag", "export", "initial_seed", "instance_norm",
    "load", "manual_seed", "numpy", "record_stream", "register_hook", "retain_grad", "rrelu", "save",
    "seed", "storage", "tolist", "untyped_storage",
}  # fmt: skip
_PARTS = {"amp", "autograd", "fft", "func", "functional", "linalg", "nn", "special"}  # of torch
_HOMES = (torch, Tensor, nn.functional, nn)
_OF_TORCH = {
    name for home in _HOMES for name in dir(home)
    if not name.startswith(("_", "set_", "register_", "use_")) and not name.endswith("_")
    and "batch_norm" not in name and "moving_avg" not in name
    and (name in _PARTS or not isinstance(vars(home).get(name), ModuleType))
}  # fmt: skip
_CALLED = ((_OF_TORCH - _IMPURE - _OF_CONTAINERS) | _OF_LOCALS) | {*dir(math)}
_MODULES = (torch, nn, nn.functional, math)
_CHANGING_LAYERS = _CALLED & {*dir(nn.Module)} - {*dir(object)}  # as `to`, which leaves a tensor as it is
_IN_PLACE = {"out", "inplace", "max_norm"}  # arguments that let torch's functions write


def _place_of_writing(function: Any) -> int | None:
    """Of the argument that lets a function write, if it may be given without its name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of torch's own C++, where it has a name
        return None
    places = (place for place, one in enumerate(parameters) if one.name in _IN_PLACE)
    return next(places, None)


_WRITES_AT = {
    name: place for home in _HOMES for name in dir(home) if name in _CALLED
    if (place := _place_of_writing(getattr(home, name))) is not None
}  # fmt: skip
_SETTINGS = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, Tensor, nn.Module,
)  # fmt: skip


def leaves_nothing(
    model: nn.Module, codes: Collection[CodeType], spaces: Iterable[Mapping[str, Any]]
) -> bool:
    """codes: of the functions that ran.  spaces: their globals."""
    modules = list(model.modules())
    if not all(map(_is_plain, modules)):
        return False
    every = (kind for module in modules for kind in type(module).__mro__)
    classes = {kind: vars(kind) for kind in every if not kind.__module__.startswith("torch.")}
    spaces = list(spaces)
    values = [plain_function(value) for home in (*spaces, *classes.values()) for value in home.values()]
    functions = {value.__code__: value for value in values if isinstance(value, FunctionType)}
    # By name, whether what the modules have is harmless.
    attributes = dict.fromkeys((code.co_name for code in codes), True)
    for module in modules:
        for home in (vars(module), *(classes[x] for x in type(module).__mro__ if x in classes)):
            for name, value in home.items():
                attributes[name] = attributes.get(name, True) and _is_harmless(value, codes)
        for name in (*module._modules, *module._parameters, *module._buffers):
            attributes.setdefault(name, True)
    layers = {"self"}.union(*(module._modules for module in modules))
    return not any(_changes_layers(instructions_of(code), layers) for code in codes) and all(
        _is_pure(code, functions, attributes, spaces, codes) for code in codes
    )


def _changes_layers(steps: Sequence[dis.Instruction], layers: Container[Any]) -> bool:
    """Whether `self.linear.to(...)` is called, or on one of several.  layers: names."""
    return any(
        step.opname in OF_ATTRIBUTES and step.argval in _CHANGING_LAYERS
        and (before.opname == "BINARY_SUBSCR" or before.argval in layers)
        for before, step in itertools.pairwise(steps)
    )  # fmt: skip


def _is_pure(
    code: CodeType, functions: Mapping[CodeType, FunctionType], attributes: Mapping[str, bool],
    spaces: Collection[Mapping[str, Any]], codes: Collection[CodeType],
) -> bool:  # fmt: skip
    function = functions.get(code)
    if function is None and not any(code in outer.co_consts for outer in codes):
        return False  # nobody knows what it holds; what is made inside another function holds its locals
    if function is not None:
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        held += [value for value in cells if not isinstance(value, type)]  # those are for super()
        if not all(_is_harmless(value, codes) for value in held):
            return False
    keywords = (x for x in code.co_consts if isinstance(x, tuple))
    if any(text in _IN_PLACE for texts in keywords for text in texts if isinstance(text, str)):
        return False
    instructions = instructions_of(code)
    for place, step in enumerate(instructions):
        if _may_keep(step, code):
            return False
        name = str(step.argval)
        if step.opname in OF_ATTRIBUTES and name in _WRITES_AT:
            arguments = arguments_of(instructions[place + 1 :])
            if arguments is None or len(arguments) > _WRITES_AT[name]:
                return False
        if step.opname in OF_ATTRIBUTES and not attributes.get(name, name in _CALLED):
            return False
        if step.opname in OF_GLOBALS:
            values = [space[name] for space in spaces if name in space]
            if not values and (name not in _BUILTINS or not hasattr(builtins, name)):
                return False
            if not all(_is_harmless(value, codes) for value in values):
                return False
    return True


def _may_keep(step: dis.Instruction, code: CodeType) -> bool:
    """Whether an instruction stores in what is no local, or calls with arguments that cannot be seen."""
    if step.opname.startswith(_STORES):
        return True
    if step.opname == "STORE_DEREF":
        return step.argval in code.co_freevars  # of a function around it
    if step.opname == "CALL_FUNCTION_EX":
        return step.arg != 0
    if step.opname.startswith("BINARY_OP"):
        return step.argrepr.endswith("=")
    return step.opname.startswith("YIELD") and code.co_name != "<genexpr>"


def _is_harmless(value: Any, codes: Collection[CodeType]) -> bool:
    """Whether nothing can be kept in a value, and calling it keeps nothing but what its code shows."""
    if isinstance(value, nn.ParameterList | nn.ParameterDict):
        return False
    if isinstance(value, _SETTINGS):
        return True
    if isinstance(value, tuple | frozenset):
        return all(_is_harmless(part, codes) for part in value)
    if isinstance(value, ModuleType):
        return value in _MODULES
    value = plain_function(value)
    if isinstance(value, FunctionType) and value.__code__ in codes:
        return True
    home = str(getattr(value, "__module__", "")).partition(".")[0]
    if isinstance(value, FunctionType | BuiltinFunctionType):
        by_name = _CALLED - _WRITES_AT.keys()  # of which the arguments are looked at where they stand
        return value is cast or (value.__name__ in by_name and home in ("torch", "math"))
    return isinstance(value, type) and home == "torch" and value.__name__ in _CALLED


def plain_function(value: Any) -> Any:
    """What a static method, a class method or a property calls."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing but its forward runs when it is called, in code that can be read, and torch's own
    layers write into nothing."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    hidden = isinstance(module, torch.jit.ScriptModule) or nn.utils.parametrize.is_parametrized(module)
    home = type(module).__module__
    other = home.startswith("torch.") and not home.startswith("torch.nn.modules.")  # such as observers
    writes = getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None
    return not (hooked or hidden or other or writes or module.training)
