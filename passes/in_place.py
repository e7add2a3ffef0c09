"""In place: a captured graph without operators that write into their inputs, and without vmap.

before: x = zeros(..); slice(x, ..).copy_(y); x.add_(z)
after:  slice_scatter(x, copy(slice(x, ..), y), ..) and add(.., z) in the place of x from there on

torch's own way to this traces the whole graph again, which for a long loop takes two to three times as
long as its first trace. So a write whose every effect is plain to see is respelt here; only a graph with
others goes that way.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Node

from asapc.passes.cut import reached
from asapc.passes.verify import check_graph

aten = torch.ops.aten

VMAP = "torch._functorch.predispatch"  # whose calls stand around what a vmap maps
FILLS = {
    getattr(getattr(aten, f"{name}_"), kind): getattr(getattr(aten, name), kind) for name, kind in (
        ("copy", "default"), ("masked_fill", "Scalar"), ("index_put", "default"), ("fill", "Scalar"),
        ("zero", "default"),
    )
}  # fmt: skip
WRITES = FILLS | {
    getattr(getattr(aten, f"{name}_"), kind): getattr(getattr(aten, name), kind) for name, kind in (
        ("add", "Tensor"), ("sub", "Tensor"), ("mul", "Tensor"), ("div", "Tensor"), ("exp", "default"),
        ("clamp", "default"), ("clamp_min", "default"), ("relu", "default"),
    )
}  # fmt: skip
"""What writes into its first input alone, and its twin that writes nowhere. FILLS keep its dtype."""
PUT_BACK: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default,
}  # fmt: skip
FRESH = {  # composite operators whose result is never one of their inputs
    aten.linear.default, aten.matmul.default, aten.softmax.int, aten.log_softmax.int,
    aten.layer_norm.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Without writes and vmap. Tracing again is slow: a graph without any stays as it is."""
    graph = exported.graph
    nested = {name for name, _ in exported.graph_module.named_children()}
    inner = any(node.op == "get_attr" and node.target in nested for node in graph.nodes)
    mapped = any(getattr(node.target, "__module__", "") == VMAP for node in graph.nodes)
    called = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    writes = [node for node in called if node.target._schema.is_mutable]
    for node in graph.nodes if writes else ():
        if node.target is aten.dropout.default and not node.args[2]:  # its input itself, written or not
            _replace(node, node.all_input_nodes[0], node, exported.graph_signature)
    if inner or mapped or not all(_respelt(node, exported.graph_signature) for node in writes):
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            return exported.run_decompositions({})
    if writes:
        graph.eliminate_dead_code()
        exported.graph_module.recompile()
        check_graph(exported.graph_module, "functional")
    return exported


def _respelt(node: Node, signature: ExportGraphSignature) -> bool:
    """Whether a write could be respelt, and was."""
    written = node.args[0]
    if not isinstance(written, Node):
        return False
    if node.target is aten.detach_.default:  # writes nothing that a graph holds
        _replace(node, written, node, signature)
        node.graph.erase_node(node)
        return True
    if node.target not in WRITES or not _keeps_dtype(node):
        return False
    views, base = [], written
    while base.target in PUT_BACK:
        views.append(base)
        base = base.all_input_nodes[0]
    if not isinstance(base.target, torch._ops.OpOverload) or _may_share(base):
        return False  # something before it has its memory
    sharing = reached([base], lambda one: [user for user in one.users if _may_share(user)])
    others = [one for one in sharing - {base, *views} if one < node]
    if any(user > node for one in others for user in one.users):
        return False
    put = partial(_put, before=node)
    value = put(WRITES[node.target], node.args, node.kwargs, like=written)
    for view in views:
        whole = view.all_input_nodes[0]
        value = put(PUT_BACK[view.target], (whole, value, *view.args[1:]), view.kwargs, like=whole)
    _replace(base, value, node, signature)
    for view in reversed(views):  # what else is written there is to be seen in the whole as well
        value = put(view.target, (value, *view.args[1:]), view.kwargs, like=view)
        _replace(view, value, node, signature)
    _replace(node, value, node, signature)
    node.graph.erase_node(node)
    return True


def _put(target: Any, args: Any, kwargs: Any, like: Node, before: Node) -> Node:
    """A call whose value is of the shape of another's."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args, kwargs)
    made.meta = dict(before.meta) | {"val": like.meta["val"]}
    return made


def _replace(old: Node, new: Node, since: Node, signature: ExportGraphSignature) -> None:
    """In all that comes after a node."""
    later = {user for user in old.users if user > since}
    old.replace_all_uses_with(new, delete_user_cb=later.__contains__)
    if any(user.op == "output" for user in later):
        signature.replace_all_uses(old.name, new.name)


def _keeps_dtype(node: Node) -> bool:
    """Whether an operator that writes nowhere gives what it writes into the dtype that it had."""
    values = [one.meta["val"] for one in node.all_input_nodes]
    written, *others = (one for one in values if isinstance(one, Tensor))
    if node.target in FILLS:
        return True
    return written.is_floating_point() and all(
        one.dtype == written.dtype or not (one.is_floating_point() or one.is_complex()) for one in others
    )


def _may_share(node: Node) -> bool:
    """Whether a result may be memory of an input."""
    operator = node.target
    if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), "CompositeImplicitAutograd"
    )
    aliases = any(one.alias_info is not None for one in operator._schema.returns)
    return aliases or (composite and operator not in FRESH)
