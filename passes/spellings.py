"""Spellings: what torch can say in several ways is said in one.

before: x.mT, torch.divide(x, y), torch.special.logsumexp(x, -1), torch.inner(x, y)
after:  transpose(x, -2, -1), div(x, y), logsumexp(x, [-1]), matmul(x, transpose(y, 0, 1))

The slice that the colon of x[:, None] makes of everything is left out.
A size that a trace computes anew for every view is computed once.
A mask that a module makes anew for every step of its loop is made once: it is one input of that loop.
Whatever looks for a product, a turn or a division by its operator then knows one of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from asapc.passes.verify import check_graph

aten = torch.ops.aten

ALIASES = {
    aten.divide.Tensor: aten.div.Tensor, aten.divide.Scalar: aten.div.Scalar,
    aten.true_divide.Tensor: aten.div.Tensor, aten.true_divide.Scalar: aten.div.Scalar,
    aten.subtract.Tensor: aten.sub.Tensor, aten.subtract.Scalar: aten.sub.Scalar,
    aten.multiply.Tensor: aten.mul.Tensor, aten.multiply.Scalar: aten.mul.Scalar,
    aten.negative.default: aten.neg.default, aten.absolute.default: aten.abs.default,
    aten.special_logsumexp.default: aten.logsumexp.default, aten.special_exp2.default: aten.exp2.default,
    aten.special_log_softmax.default: aten.log_softmax.int,
    aten.special_softmax.default: aten.softmax.int, aten.linalg_matmul.default: aten.matmul.default,
    aten.swapaxes.default: aten.transpose.int, aten.swapdims.default: aten.transpose.int,
    aten.concat.default: aten.cat.default, aten.concatenate.default: aten.cat.default,
    aten.max.other: aten.maximum.default, aten.min.other: aten.minimum.default,
}  # fmt: skip
"""Operators of one signature that do the same."""

MASS_STEPS = {aten.log.default, aten.add.Tensor, aten.clamp.default, aten.clamp_min.default}
"""What is done to given masses first, as in log(mu + 1e-8)."""


def one_spelling(graph: GraphModule) -> bool:
    """Respell what has another spelling, in place; whether there was anything."""
    changed = merge_masks(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ALIASES:
            node.target = ALIASES[node.target]
            changed = True
        elif _is_whole(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            changed = True
        elif node.target in RESPELT and isinstance(node.meta.get("val"), Tensor):
            changed |= _respell(graph, node)
    if changed:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        check_graph(graph, "one_spelling")
    return changed


def merge_masks(graph: GraphModule) -> bool:
    """Make masks that are computed alike within one call of a module once, in place, and sizes wherever
    they are; whether any were.

    Of masks only what is computed of booleans, integers and given masses, as log(mu + 1e-8): the sums of
    a loop, of which another part of the model may read a copy, stay as they are.
    """
    masks: set[Node] = set()
    first: dict[str, Node] = {}
    merged = False
    for node in list(graph.graph.nodes):
        if node.op == "placeholder" and not _is_float(node):
            masks.add(node)
        is_size = isinstance(node.meta.get("val"), torch.SymInt)
        if node.op != "call_function" or not (is_size or _is_repeatable(node, masks)):
            continue
        masks.add(node)
        modules = [] if is_size else [*(node.meta.get("nn_module_stack") or ())]
        key = repr((node.target, node.args, node.kwargs, modules))
        other = first.setdefault(key, node)
        if other is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(other)
            graph.graph.erase_node(node)
            merged = True
    return merged


def _is_repeatable(node: Node, masks: set[Node]) -> bool:
    """Whether an operator gives the same each time and is given masks alone, or makes one of an input."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    masses = node.target in MASS_STEPS and node.meta["val"].dim() <= 2  # [B, M], scores have more
    of_inputs = (masses or not _is_float(node)) and all(x.op == "placeholder" for x in sources)
    return bool(sources) and (of_inputs or all(source in masks for source in sources))


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_whole(node: Node) -> bool:
    """A slice of everything, as the colon of x[:, None], that the model does not return as its own."""
    if node.target is not aten.slice.Tensor or any(user.op == "output" for user in node.users):
        return False
    start, end, step = [*node.args[2:], None, None, None][:3]
    return start in (None, 0) and end in (None, sys.maxsize) and step in (None, 1)


def _respell(graph: GraphModule, node: Node) -> bool:
    calls: list[tuple[Any, tuple[Any, ...]]] | None = RESPELT[node.target](*node.args, **node.kwargs)
    if calls is None:
        return False
    made = node
    with graph.graph.inserting_before(node):
        for target, args in calls:
            args = pytree.tree_map(lambda x, last=made: last if x is LAST else x, args)
            made = graph.graph.call_function(target, args)
            fakes = torch.fx.node.map_arg(made.args, lambda n: n.meta["val"])
            made.meta = {**node.meta, "val": target(*fakes)}
    node.replace_all_uses_with(made)
    graph.graph.erase_node(node)
    if made.target in RESPELT:
        _respell(graph, made)
    return True


LAST = object()
"""In the arguments of a call: what the call before it gives."""

Calls = list[tuple[Any, tuple[Any, ...]]] | None


def _turned(x: Node) -> Calls:
    """The last two axes change places; of real numbers that is the adjoint."""
    if x.meta["val"].is_complex():
        return None
    return [(aten.transpose.int, (x, -2, -1))]


def _reversed(x: Node) -> Calls:
    return [(aten.permute.default, (x, [*range(x.meta["val"].dim())][::-1]))]


def _moved(x: Node, source: int, destination: int) -> Calls:
    rank = x.meta["val"].dim()
    order = [axis for axis in range(rank) if axis != source % rank]
    order.insert(destination % rank, source % rank)
    return [(aten.permute.default, (x, order))]


def _inner(x: Node, y: Node) -> Calls:
    """sum_k x[.., k] y[j, k]."""
    if x.meta["val"].dim() < 2 or y.meta["val"].dim() != 2:
        return None
    return [(aten.transpose.int, (y, 0, 1)), (aten.matmul.default, (x, LAST))]


def _shared(x: Node, y: Node) -> Calls:
    """A factor that all examples or heads share, for each of them; one of these axes at a time."""
    shapes = x.meta["val"].shape, y.meta["val"].shape
    if len(shapes[0]) != len(shapes[1]) or len(shapes[0]) > 4:
        return None
    for axis, (one, other) in enumerate(zip(*(shape[:-2] for shape in shapes), strict=True)):
        if (str(one) == "1") == (str(other) == "1"):
            continue
        few, many, size = (x, y, other) if str(one) == "1" else (y, x, one)
        kept = size if isinstance(size, int) else LAST
        sizes = [kept if at == axis else -1 for at in range(len(shapes[0]))]
        factors = (LAST, y) if few is x else (x, LAST)
        return [(aten.sym_size.int, (many, axis)), (aten.expand.default, (few, sizes)),
                (aten.matmul.default, factors)]  # fmt: skip
    return None


def _spread(x: Node, y: Node) -> Calls:
    """To the sizes of y, whose numbers do not count; one axis at a time."""
    mine, theirs = x.meta["val"].shape, y.meta["val"].shape
    for axis in range(-1, -len(theirs) - 1, -1):
        if -axis <= len(mine) and str(mine[axis]) == str(theirs[axis]):
            continue
        size, sizes = theirs[axis], [-1] * max(len(mine), -axis)
        sizes[axis] = size if isinstance(size, int) else LAST  # type: ignore[call-overload]
        return [(aten.sym_size.int, (y, len(theirs) + axis)), (aten.expand.default, (x, sizes)),
                (aten.expand_as.default, (LAST, y))]  # fmt: skip
    return [(aten.alias.default, (x,))]


def _added(added: Node, x: Node, y: Node, beta: float = 1, alpha: float = 1) -> Calls:
    """A mask or a bias, and a product: torch's multi-head attention with a mask."""
    if beta != 1:
        return None
    scaled = [] if alpha == 1 else [(aten.mul.Scalar, (LAST, alpha))]
    return [(aten.bmm.default, (x, y)), *scaled, (aten.add.Tensor, (LAST, added))]


def _tensordot(x: Node, y: Node, of_x: list[int], of_y: list[int]) -> Calls:
    """As an einsum."""
    ranks, letters = (x.meta["val"].dim(), y.meta["val"].dim()), "abcdefghijklmnopqrstuvwxyz"
    mine, theirs = [*letters[: ranks[0]]], [*letters[ranks[0] : sum(ranks)]]
    for one, other in zip(of_x, of_y, strict=True):
        theirs[other] = mine[one]
    kept = [*(a for a in mine if a not in theirs), *(a for a in theirs if a not in mine)]
    equation = f"{''.join(mine)},{''.join(theirs)}->{''.join(kept)}"
    return [(aten.einsum.default, (equation, [x, y]))]


RESPELT: dict[Any, Callable[..., Calls]] = {
    aten.mT.default: _turned, aten.mH.default: _turned, aten.adjoint.default: _turned,
    aten.matrix_H.default: _turned, aten.numpy_T.default: _reversed, aten.t.default: _reversed,
    aten.movedim.int: _moved, aten.moveaxis.int: _moved, aten.inner.default: _inner,
    aten.tensordot.default: _tensordot, aten.expand_as.default: _spread, aten.baddbmm.default: _added,
    aten.matmul.default: _shared,
}  # fmt: skip
"""From an operator's arguments to the calls that do the same, None where they would not."""
