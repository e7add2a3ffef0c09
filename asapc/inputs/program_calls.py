"""Checks of what the nodes of a serialised program call, before torch reads any of it.

Each node is a mapping of torch.export's schema: {"target": "torch.ops.aten.add.Tensor", "inputs":
[{"name": "self", "arg": {"as_tensor": {"name": "x"}}}, ...], "outputs": [...]}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asapc.inputs.program_operators import COMPUTED, allowed_operators, is_operator, refused_call

_OPERATOR = re.compile(r"torch\.ops\.((?:aten|asapc)\.\w+\.\w+)")
_GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"  # runs a graph that is one of its arguments
_GETITEM = "_operator.getitem"
_NUMBERS = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)"
    r"|torch\._?sym_(float|int|max|min|ite|not|sum|sqrt)"
)
_NUMBER_KINDS = {"as_int", "as_ints", "as_float", "as_bool", "as_sym_int", "as_sym_ints", "as_sym_float",
                 "as_sym_bool"}  # fmt: skip
SIZE_BITS = 64  # of a tensor's size, and of any number that is not a product
MAX_BITS = 1024  # of a number that nodes compute: Python's integers have no limit
_MAX_POWER = 64
_DEVICES = {"cpu", "cuda"}
_STRIDED = 7  # of torch._export.serde.schema.Layout; others have kernels that check less
_DEEPEST = 4  # graphs in graphs


class UnsafeError(Exception):
    """What in a file could do harm, or is unknown, in words."""


class UnlistedCallError(Exception):
    """The name of an operator that is not on the list."""


def check_calls(model: Mapping[str, Any], trust: bool = False) -> None:
    """Raises UnsafeError or UnlistedCallError for the first call that is not to be run.

    model: of a model.json.  trust: any operator of ATen or asapc, whatever its arguments.
    """
    module = model.get("graph_module")
    graph = module.get("graph") if isinstance(module, dict) else None
    if not isinstance(graph, dict):
        raise ValueError("no graph")
    checked: set[int] = set()
    _check_graph(graph, trust, SIZE_BITS, checked, 0)
    for _, key, value in walk(model):
        if key == "as_graph" and not (isinstance(value, dict) and id(value.get("graph")) in checked):
            raise UnsafeError("a graph that nothing calls")
        if key == "as_layout" and value != _STRIDED:
            raise UnsafeError(f"a layout that is not strided ({str(value)[:40]})")
        if key in ("as_device", "device") and value is not None:
            kind = value.get("type") if isinstance(value, dict) else value
            if not isinstance(kind, str) or kind not in _DEVICES:
                raise UnsafeError(f"the device {str(kind)[:40]!r}")
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise UnsafeError(f"a number of {value.bit_length()} bits ({key})")


def _check_graph(graph: Mapping[str, Any], trust: bool, given: int, checked: set[int], depth: int) -> int:
    """The most bits that any number of the graph may have.

    given: bits of the numbers it is called with.  seen: ids of the graphs that were checked.
    """
    checked.add(id(graph))
    if depth > _DEEPEST:
        raise UnsafeError(f"graphs nested more than {_DEEPEST} deep")
    bits: dict[str, int] = {}
    most = given
    for node in _list(graph, "nodes"):
        if not isinstance(node, dict) or not isinstance(node.get("target"), str):
            raise ValueError("a node without a target")
        inputs = [entry for entry in _list(node, "inputs") if isinstance(entry, dict)]
        node_bits = _check_node(node["target"], inputs, bits, trust, most, checked, depth)
        most = max(most, node_bits)
        for output in _list(node, "outputs"):
            for name in _names(output):
                bits[name] = node_bits
    return most


def _check_node(
    target: str, inputs: Sequence[Mapping[str, Any]], bits: Mapping[str, int], trust: bool, most: int,
    checked: set[int], depth: int,
) -> int:  # fmt: skip
    """The bits of the node's result, if that is a number."""
    operator = _OPERATOR.fullmatch(target)
    if operator is not None:
        _check_operator(operator[1], inputs, trust)
        return SIZE_BITS
    if target == _GRAD:
        for entry in inputs:
            argument = entry.get("arg")
            inner = argument.get("as_graph") if isinstance(argument, dict) else None
            if isinstance(inner, dict) and isinstance(inner.get("graph"), dict):
                most = max(most, _check_graph(inner["graph"], trust, most, checked, depth + 1))
        return most
    if target == _GETITEM:
        return SIZE_BITS
    if not _NUMBERS.fullmatch(target):
        raise UnsafeError(f"target {target[:80]!r}")
    return _bits(target, inputs, bits, most)


def _check_operator(full: str, inputs: Sequence[Mapping[str, Any]], trust: bool) -> None:
    if not is_operator(full):
        raise UnsafeError(f"target 'torch.ops.{full[:80]}', which no program may call")
    if trust:
        return
    if full not in allowed_operators():
        raise UnlistedCallError(full)
    reason = refused_call(full, {str(entry.get("name")): _constant(entry.get("arg")) for entry in inputs})
    if reason is not None:
        raise UnsafeError(f"{full} with {reason}")


def _constant(argument: Any) -> Any:
    """The list of {"as_floats": [0.5]}; COMPUTED for anything that is not a constant."""
    if not isinstance(argument, dict) or len(argument) != 1:
        return COMPUTED
    ((kind, value),) = argument.items()
    if kind == "as_none":
        return None
    plain = {"as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_string"}
    return value if kind in plain else COMPUTED


def _bits(target: str, inputs: Sequence[Mapping[str, Any]], bits: Mapping[str, int], most: int) -> int:
    """A bound on the bits of what Python computes from numbers."""
    sizes: list[int] = []
    values: list[Any] = []
    for entry in inputs:
        argument = entry.get("arg")
        if not isinstance(argument, dict) or len(argument) != 1 or not _NUMBER_KINDS & {*argument}:
            raise UnsafeError(f"{target} of something other than numbers")
        (value,) = argument.values()
        if isinstance(value, list) and target != "torch.sym_sum":
            raise UnsafeError(f"{target} of a list")
        values.append(value)
        names = [*_names(argument)]
        sizes.append(max((bits.get(name, most) for name in names), default=SIZE_BITS))
    widest = max(sizes, default=SIZE_BITS)
    if target == "_operator.mul":
        widest = sum(sizes)
    elif target == "_operator.pow":
        power = values[1] if len(values) == 2 else None
        if isinstance(power, float):
            widest = SIZE_BITS
        elif type(power) is int and -_MAX_POWER <= power <= _MAX_POWER:
            widest *= max(1, abs(power))
        else:
            raise UnsafeError(f"{target} by something other than a small number")
    else:
        terms = sum(len(value) if isinstance(value, list) else 1 for value in values)
        widest += terms.bit_length()
    if widest > MAX_BITS:
        raise UnsafeError(f"{target} of numbers that grow beyond {MAX_BITS} bits")
    return widest


def _names(item: Any) -> Iterator[str]:
    """The names of values in an argument or an output."""
    for _, key, value in walk(item):
        if key in ("name", "as_name") and isinstance(value, str):
            yield value


def walk(document: Any) -> Iterator[tuple[Any, str, Any]]:
    """(its mapping, its key, the value) of every value; values in lists are under the list's key."""
    stack: list[tuple[Any, str, Any]] = [({}, "", document)]
    while stack:
        owner, key, item = stack.pop()
        yield owner, key, item
        if isinstance(item, dict):
            stack.extend((item, str(name), value) for name, value in item.items())
        elif isinstance(item, list):
            stack.extend((owner, key, value) for value in item)


def _list(node: Mapping[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []
