"""Loops: where a graph normalises the rows and the columns of one matrix in turn.

before: a functional graph
after:  every chain of sums over rows and columns that are divided by, or whose logarithms are subtracted,
        with the tensors at which its scores may be complete and those that may be its plan

Only sums are recognised by their operators, and only chained ones: one softmax is no loop, and neither
are two side by side. What a loop computes is for experiments to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from asapc.passes.cut import (
    ancestors,
    behind,
    data_dependent,
    depends_on_data,
    descendants,
    is_tensor,
    reached,
    reaches,
)
from asapc.passes.products import (
    BARRIERS,
    SOFTMAXES,
    SQUEEZES,
    VIEWS,
    einsum_of_two,
    is_vector,
    padding_of,
    product_of,
    rank_of,
    same,
)

aten = torch.ops.aten

SUMS = {aten.sum.dim_IntList, aten.nansum.default, aten.mean.dim}
NORMS = {  # the place of the order
    aten.linalg_vector_norm.default: 1, aten.linalg_norm.default: 1, aten.norm.ScalarOpt_dim: 1,
}  # fmt: skip
PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.mv.default, aten.einsum.default}
DIVISIONS = {aten.div.Tensor, aten.reciprocal.default, aten.log.default, aten.pow.Tensor_Scalar}
TURNS = {aten.transpose.int, aten.permute.default}
STEPS = {  # of one value, entry by entry: what is done to a sum before it divides
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar,
    aten.clamp.default, aten.clamp_min.default, aten.maximum.default, aten.expand.default,
    aten.where.self, aten.masked_fill.Scalar, aten.select.int, aten.slice.Tensor, *SQUEEZES, *VIEWS,
}  # fmt: skip
MOST_ENDS = 8  # tensors that are tried as scores, and as plans


@dataclass(frozen=True)
class Loop:
    """sums: in the order of the graph.  matrix: what the first is over.  axes: of rows and columns of it,
    from the end; None with `why` where it is not known which they are.  slack: whether a row and a column
    that are never normalised stand beside the matrix."""

    sums: tuple[Node, ...]
    matrix: Node
    axes: tuple[int, int] | None
    why: str = ""
    slack: bool = False

    @property
    def at(self) -> Node:
        return self.sums[0]


@dataclass(frozen=True)
class _Sum:
    node: Node
    matrix: Node
    axis: int  # from the end


def find_loops(graph: GraphModule) -> list[Loop]:
    """All of a graph, in its order."""
    sums = {one.node: one for node in graph.graph.nodes if (one := _sum_of(node)) is not None}
    if len(sums) < 2:
        return []
    chained = _chains(sums)
    loops = []
    for chain in chained:
        if len(chain) < 2:
            continue
        members = [sums[node] for node in chain]
        axes = {one.axis for one in members}
        between = descendants(chain[:1]) & ancestors(chain[-1])
        turned = any(node.target in TURNS for node in between)
        if len(axes) == 1 and not turned and len({*map(_turns, members)}) == 1:
            continue  # the same side again: no loop of rows and columns
        if axes <= {-1, -2}:
            axes = {-1, -2}
        if len(axes) == 2:
            low, high = sorted(axes)
            loops.append(Loop(tuple(chain), members[0].matrix, (low, high)))
        else:
            why = "its sums are over more than two axes, or over axes that swap places in the loop"
            loops.append(Loop(tuple(chain), members[0].matrix, None, why))
    known = {node for loop in loops for node in loop.sums}
    loops += _of_parts({node: one for node, one in sums.items() if node not in known})
    return sorted(loops, key=lambda loop: loop.at)


def behind_softmax(loop: Loop) -> Loop | None:
    """The rest of a loop that begins with a softmax, which may be a kernel of its own."""
    first, *rest = loop.sums
    if first.target not in SOFTMAXES or len(rest) < 2:
        return None
    second = _sum_of(rest[0])
    return None if second is None else replace(loop, sums=tuple(rest), matrix=second.matrix)


def before_last(loop: Loop) -> tuple[Loop, Node] | None:
    """A loop but for its last sum, and the matrix that this is over: a plan of given masses, whose rows
    are divided by theirs."""
    last = _sum_of(loop.sums[-1])
    if len(loop.sums) < 3 or last is None:
        return None
    return replace(loop, sums=loop.sums[:-1]), last.matrix


def _of_parts(sums: Mapping[Node, _Sum]) -> list[Loop]:
    """Chains of sums over parts of one matrix, such as all but a slack row and all but a slack column.

    A slack of one number, or of one weight, that is never normalised adds it to every sum.
    """
    slices = {aten.slice.Tensor}
    whole = {node: replace(one, matrix=behind(one.matrix, slices)) for node, one in sums.items()}
    why = (
        "each of its sums leaves out a row or column, which is not normalised itself: its plan is not a "
        "row and column scaling with marginals"
    )
    loops = []
    for chain in _chains(whole):
        leaves_out = any(whole[node].matrix is not sums[node].matrix for node in chain)
        if len(chain) < 3 or {sums[node].axis for node in chain} != {-1, -2} or not leaves_out:
            continue
        padded = behind(whole[chain[0]].matrix, {*SQUEEZES, *VIEWS})
        scores = padded.all_input_nodes[0] if padding_of(padded) is not None else _beside_slack(padded)
        if scores is not None:
            loops.append(Loop(tuple(chain), scores, (-2, -1), slack=True))
        else:
            loops.append(Loop(tuple(chain), sums[chain[0]].matrix, None, why))
    return loops


def _beside_slack(matrix: Node) -> Node | None:
    """The scores that a matrix is but for its last row and column, which are made of no data."""
    scores = matrix
    while scores.target is aten.cat.default:
        moving = [node for node in scores.all_input_nodes if depends_on_data(node)]
        if len(moving) != 1 or scores.all_input_nodes[0] is not moving[0]:
            return None
        (scores,) = moving
    sizes, wholes = (node.meta["val"].shape[-2:] for node in (scores, matrix))
    beside = all(same(size + 1, whole) for size, whole in zip(sizes, wholes, strict=True))
    return scores if beside else None


def _sum_of(node: Node) -> _Sum | None:
    """A sum over one axis of something with at least two that is normalised by it."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target in SOFTMAXES or node.target is aten.logsumexp.default:
        return _sum_over(node, node.args[1])
    one: _Sum | None = None
    if node.target in PRODUCTS:
        one = _vector_product(node)
    elif node.target in SUMS:
        one = _spread_sum(node) or _sum_over(node, node.args[1])
    elif node.target in NORMS and node.args[1:2] == (NORMS[node.target],):
        one = _sum_over(node, node.args[2] if len(node.args) > 2 else None)
    return one if one is not None and is_divided_by(node) else None


def _sum_over(node: Node, dims: Any) -> _Sum | None:
    matrix = node.args[0] if node.args else None
    if not isinstance(matrix, Node) or not is_tensor(matrix) or rank_of(matrix) < 2:
        return None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    return _Sum(node, matrix, dims[0] if dims[0] < 0 else dims[0] - rank_of(matrix))


def _vector_product(node: Node) -> _Sum | None:
    """K b, a sum over the columns of K: a step of a loop in the exp domain."""
    if node.target is aten.einsum.default:
        terms = einsum_of_two(node)
        if terms is None:
            return None
        one, other, out, *operands = terms
        pairs = sorted(zip((one, other), operands, strict=True), key=lambda pair: len(pair[0]))
        (few, _), (many, matrix) = pairs
        summed = [letter for letter in many if letter not in out]
        if not set(few) <= set(many) or len(many) != len(out) + 1 or len(summed) != 1:
            return None
        return _Sum(node, matrix, many.index(summed[0]) - len(many))
    left, right = node.args[0], node.args[1]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    product = product_of(node)
    narrow = rank_of(right) == 1 or (rank_of(right) == 2 and same(right.meta["val"].shape[-1], 1))
    if (product is not None and is_vector(product)) or (narrow and rank_of(left) >= 2):
        return _Sum(node, left, -1)
    if rank_of(left) >= 2 and same(left.meta["val"].shape[-2], 1) and rank_of(right) == rank_of(left):
        return _Sum(node, right, -2)
    return None


def _spread_sum(node: Node) -> _Sum | None:
    """sum_k W_ik K_kj for all i, j, spelt out over three axes, where W is made of no data: a sum over K's
    columns that is repeated for every row, of ones."""
    product: Any = node.args[0]
    dims: Any = node.args[1]
    factors = product.args[:2] if isinstance(product, Node) and product.target is aten.mul.Tensor else ()
    spread = [x for x in factors if isinstance(x, Node) and x.target is aten.unsqueeze.default]
    moving = [x for x in spread if depends_on_data(x)]
    if len(spread) != 2 or len(moving) != 1 or not isinstance(dims, list) or len(dims) != 1:
        return None
    matrix: Any = moving[0].args[0]
    inserted: Any = moving[0].args[1]
    rank = rank_of(product)
    axis, added = dims[0] % rank, inserted % rank
    if rank < 3 or axis == added:
        return None
    return _Sum(node, matrix, axis - (axis > added) - (rank - 1))


def _turns(one: _Sum) -> frozenset[Node]:
    """Where what a sum is over was transposed, as scores are for one of two sums over the same axis."""
    above = reached([one.matrix], lambda node: node.all_input_nodes if _is_local(node) else ())
    return frozenset(node for node in above if node.target in TURNS)


def is_divided_by(node: Node) -> bool:
    """Whether something is divided by a sum, or its logarithm is taken, after steps entry by entry."""
    visited: set[Node] = set()
    stack = [(node, user) for user in node.users]
    while stack:
        source, user = stack.pop()
        if user.target in DIVISIONS:
            by = user.args[1] if len(user.args) > 1 else source
            if by is source or user.target is aten.pow.Tensor_Scalar:
                return True
        if user.target in STEPS and user not in visited:
            visited.add(user)
            stack += [(user, other) for other in user.users]
    return False


def _is_local(node: Node) -> bool:
    """Whether a loop may go on behind a node: no layer, and no product of two matrices."""
    if not is_tensor(node) or node.op != "call_function" or node.target in BARRIERS:
        return False
    product = product_of(node)
    return not _is_by_weight(node) if product is None else is_vector(product)


def _is_by_weight(node: Node) -> bool:
    """Whether a product that is none of two batches of matrices is one of matrices all the same."""
    if node.target is aten.einsum.default:
        inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
        one, *others = (set(letters) for letters in inputs.split(","))
        return any(one - other and other - one and one & other - set(out) for other in others)
    factors: Any = node.args[:2] if node.target is aten.matmul.default else ()
    return bool(factors) and all(rank_of(x) > 1 and not same(x.meta["val"].shape[-1], 1) for x in factors)


def _chains(sums: Mapping[Node, _Sum]) -> list[list[Node]]:
    """Sums that are computed from one another, over matrices of one size, without a layer between."""
    group: dict[Node, int] = {}
    members: dict[int, list[Node]] = {}
    sizes: dict[tuple[Node, Node], bool] = {}

    def alike(one: Node, other: Node) -> bool:
        first, second = sums[one].matrix, sums[other].matrix
        if (first, second) not in sizes:
            sizes[first, second] = bool(same(first.meta["val"].numel(), second.meta["val"].numel()))
        return sizes[first, second]

    for node in sums:  # in the order of the graph
        before = [other for other in _sums_above(node, sums) if other in group and alike(node, other)]
        if len({group[other] for other in before if len(members[group[other]]) > 1}) > 1:
            continue  # a sum of what several loops have made, as of the product of their plans
        mine = min((group[other] for other in before), default=len(members))
        for number in {group[other] for other in before} - {mine}:
            for other in members.pop(number):
                group[other] = mine
                members[mine].append(other)
        members.setdefault(mine, []).append(node)
        group[node] = mine
    return [sorted(chain) for chain in members.values()]


def _sums_above(node: Node, sums: Mapping[Node, _Sum]) -> set[Node]:
    """The sums that a sum is computed from, each without another between."""
    def onward(current: Node) -> list[Node]:
        return current.all_input_nodes if current not in sums and _is_local(current) else []

    return reached(node.all_input_nodes, onward) & sums.keys()


# Where a loop begins and ends


@dataclass(frozen=True)
class Borders:
    """starts: tensors at which the scores of a loop may be complete, the likeliest first.
    ends: those that may be its plan, the earliest first; empty with `why`, at `at`.
    """

    starts: tuple[Node, ...]
    ends: tuple[Node, ...]
    why: str = ""
    at: Node | None = None


def borders(graph: GraphModule, loop: Loop) -> Borders:
    """All that a loop takes passes through a start, and all that is made of it through an end.

    Where several matrices enter it, such as scores and a bias in every half-step, the last of those that
    the fewest others enter beside.
    """
    below = descendants(loop.sums)
    core = (below & ancestors(*loop.sums)) | set(loop.sums)
    entries = {
        source for node in core for source in node.all_input_nodes
        if source not in core and is_tensor(source)
    }  # fmt: skip
    size = loop.matrix.meta["val"].numel()
    data = data_dependent(graph)

    def is_matrix(node: Node) -> bool:
        value = node.meta["val"]
        return value.is_floating_point() and value.dim() >= 2 and bool(same(value.numel(), size))

    above = _above(entries, None)
    if not above & data:  # a static mixer: its plan is the same for all data, until it is trained on
        data = {node for node in above if reaches(node, lambda n: n.op == "get_attr")}
    candidates = sorted((node for node in above if node in data and is_matrix(node)), reverse=True)
    beside = {}
    for start in candidates:
        after = descendants([start])
        others = _above(entries - {start}, start) - after - {start}
        beside[start] = sum(node in data and is_matrix(node) for node in others)
    candidates.sort(key=lambda node: beside[node])
    if not candidates:
        return Borders((), (), "its scores depend on parameters alone", loop.at)
    live = ancestors(graph.graph.output_node())
    ends, used = [], None
    for end in sorted((below | set(loop.sums)) & live):
        if not is_tensor(end) or end in core - {loop.sums[-1]} or not is_matrix(end):
            continue
        within = ancestors(end)
        inside = (core | (below & within)) - {end}
        leaving = next(
            (node for node in sorted(inside)
             for user in node.users if user in live and user not in within), None,
        )  # fmt: skip
        if leaving is None:
            ends.append(end)
        else:
            used = leaving
    if not ends:
        why = "no tensor of its size holds its plan: it continues in sums, or in separate scalings"
        if used is not None:
            why = "a value of the loop other than its plan is also used elsewhere"
        return Borders(tuple(candidates[:MOST_ENDS]), (), why, used or loop.sums[-1])
    return Borders(tuple(candidates[:MOST_ENDS]), tuple(ends[:MOST_ENDS]))


def _above(nodes: Iterable[Node], until: Node | None) -> set[Node]:
    """What nodes are computed from within the loop's kind of code, them included; not through `until`."""
    above = reached(
        nodes, lambda node: node.all_input_nodes if node is not until and _is_local(node) else ()
    )
    return {node for node in above if node is not until and is_tensor(node)}
