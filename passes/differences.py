"""Differences: values are multiplied with each of the maps that are added, not with their sum.

before: (c1 A1 + c2 A2) V
after:  c1 (A1 V) + c2 (A2 V)

of coefficients that are the same for all keys: numbers, one a head, one a query. A1 and A2 may be heads
of one map: A [B, 2H, N, M] is seen as [B, H, 2, N, M] and one half is subtracted from the other. Then
the values are repeated for its heads, and what was done to the map's axes is done to the product's:

before: (A.view(B, H, 2, N, M)[:, :, 0] - c A.view(B, H, 2, N, M)[:, :, 1]) V
after:  O = A V2;  O.view(B, H, 2, N, E)[:, :, 0] - c O.view(B, H, 2, N, E)[:, :, 1]

Neither map is multiplied with values by itself before, so no operator that never forms it can take its
place. The sum is split only where that shows a site; the program stays as it was everywhere else.
Source: Differential Transformer (arXiv 2410.05258), as compared with in ESPFormer, Appendix.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from asapc.ir import Program
from asapc.passes.cut import ancestors, is_tensor
from asapc.passes.lift import INERT
from asapc.passes.masks import varies
from asapc.passes.match import Outcomes, match
from asapc.passes.observe import gives_its_input
from asapc.passes.plan.loops import find_loops
from asapc.passes.products import (
    BARRIERS,
    COPIES,
    RESHAPES,
    SCALINGS,
    SORTS,
    SQUEEZES,
    Product,
    product_of,
    rank_of,
    same,
)
from asapc.passes.site import Site
from asapc.passes.written import moved, written
from asapc.program.calls import copied

aten = torch.ops.aten

ROUNDS = 4  # sums of sums that are split
OTHER_SHAPES = {*RESHAPES, *SQUEEZES}
LAYOUTS = {
    aten.permute.default, aten.transpose.int, aten.neg.default, aten.select.int, aten.slice.Tensor,
    *OTHER_SHAPES,
}  # fmt: skip
SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor}
PARTS = {
    aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.chunk.default: 2, aten.unbind.int: 1,
}  # the place of their axis


class _Stuck(Exception):
    """A sum that cannot be split: something in it is not linear in the maps, or not of known sizes."""


def maps_apart(program: Program, outcomes: Outcomes) -> tuple[Program, Outcomes]:
    """With sums of maps split, where that shows a site.  outcomes: of the program as it is."""
    opened = {node: frozenset({total}) for node, total in _sums_of_maps(program, outcomes).items()}
    tried: dict[Node, frozenset[Node]] = {}
    for _ in range(ROUNDS):
        opened = {node: totals for node, totals in opened.items() if _splits(program, node, totals)}
        if opened == tried:
            break
        tried = opened
        split = _split(program, opened)
        again = match(split.program)
        shown = split.shown(again)
        opened = {
            node: totals | {
                total for term in split.terms[node] if term.product not in shown
                and (total := _total(term.map)) is not None
            }
            for node, totals in opened.items()
        }  # fmt: skip
    if not tried:
        return program, outcomes
    needed: dict[Node, frozenset[Node]] = {}
    for node, terms in split.terms.items():
        within = [term.within for term in terms if term.product in shown]
        if within:
            needed[node] = frozenset().union(*within)
    if not needed:
        return program, outcomes
    if needed != tried and all(_splits(program, *pair) for pair in needed.items()):
        split = _split(program, needed)
        again = match(split.program)
    return split.program, again


# Which products


def _sums_of_maps(program: Program, outcomes: Outcomes) -> dict[Node, Node]:
    """The sum in the map of every product that no family explains, where a loop or a sort enters."""
    known = explained(outcomes)
    loops = {total for loop in find_loops(program.graph) for total in loop.sums}
    sums = {}
    for node in program.graph.graph.nodes:
        product = product_of(node)
        if product is None or node in known:
            continue
        total = _total(product.left)
        if total is None:
            continue
        above = ancestors(total, until=BARRIERS)
        if above & loops or any(source.target in SORTS for source in above):
            sums[node] = total
    return sums


def explained(outcomes: Outcomes) -> set[Node]:
    """Products with values of the sites that know their queries and keys."""
    outputs = [
        site.part().output for site in outcomes if isinstance(site, Site) and site.head_dim is not None
    ]
    return {node for output in outputs for node in (output, *output.users)}


def _total(node: Node) -> Node | None:
    """The sum that a map is, but for what is done to its axes and coefficients."""
    current: Node | None = node
    while current is not None:
        if _operands(current):
            return current
        current = _through(current)
    return None


def _through(node: Node) -> Node | None:
    """The map that a node scales or lays out anew; None where it does something else to one."""
    if _is_copy(node) or node.target in LAYOUTS:
        source = _args(node)[0]
    elif node.target is operator.getitem:
        parts = _args(node)[0]
        source = _args(parts)[0] if isinstance(parts, Node) and parts.target in PARTS else None
    else:
        source = _scaled(node) if node.target in SCALINGS else None
    return source if isinstance(source, Node) and is_tensor(source) else None


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: Node) -> Sequence[Any]:
    return node.meta["val"].shape


def _is_copy(node: Node) -> bool:
    whole = node.target is aten.slice.Tensor and _is_shape(node, _shape(_args(node)[0]))
    return whole or node.target in COPIES or gives_its_input(node)


def _operands(node: Node) -> list[Node]:
    """The maps that are added; empty where it is no sum of maps."""
    maps = [*_args(node)[:2]]
    if node.target in (aten.lerp.Scalar, aten.lerp.Tensor):
        weight = _args(node)[2]
        if isinstance(weight, Node) and not all(_is_free(weight, x) for x in maps if isinstance(x, Node)):
            return []
    elif node.target is aten.addcmul.default:
        maps = [_args(node)[0], _scaled(node, 1)]
    elif node.target is aten.sum.dim_IntList and _summed_axis(node) is not None:
        return [_args(node)[0]]
    elif node.target not in SUMS:
        return []
    alike = [x for x in maps if isinstance(x, Node) and is_tensor(x) and _is_shape(x, _shape(node))]
    return alike if len(alike) == len(maps) else []


def _summed_axis(node: Node) -> int | None:
    """The one axis, from the start, that a sum without `keepdim` takes away, unless a map's own."""
    source, dims, *rest = _args(node)
    if not isinstance(source, Node) or not isinstance(dims, (list, tuple)) or len(dims) != 1 or any(rest):
        return None
    (axis,) = dims
    if not isinstance(axis, int) or node.kwargs.get("dtype") is not None:
        return None
    axis %= rank_of(source)
    return axis if axis < rank_of(source) - 2 else None


def _scaled(node: Node, first: int = 0) -> Node | None:
    """The map in a product of two arguments, the first at `first`; None where none is a coefficient."""
    one, other = _args(node)[first : first + 2]
    shape = _shape(node)
    pairs = [(one, other)]
    if node.target not in (aten.div.Tensor, aten.div.Scalar):
        pairs.append((other, one))
    for scaled, by in pairs:
        if not isinstance(scaled, Node) or not is_tensor(scaled) or not _is_shape(scaled, shape):
            continue
        if not isinstance(by, Node) or not is_tensor(by) or _is_free(by, scaled):
            return scaled
    return None


def _taken(node: Node) -> tuple[int, slice | None] | None:
    """The axis of its source that a node takes a part of, and the range: None for one place alone; None
    where it takes no part.

    x.select(axis, i), x.unbind(axis)[i], x.chunk(n, axis)[i], x[:, start:stop]
    """
    args = _args(node)
    if node.target is aten.select.int:
        return int(args[1]) % rank_of(args[0]), None
    if node.target is aten.slice.Tensor:
        _, axis, start, stop, step = args + (None, 0, None, None, 1)[len(args) :]
        return axis % rank_of(args[0]), slice(start, stop, step)
    if node.target is not operator.getitem:
        return None
    parts, index = args
    if parts.target not in PARTS:
        return None
    arguments = [*_args(parts), *parts.kwargs.values()]
    place = PARTS[parts.target]
    axis = int(arguments[place]) % rank_of(arguments[0]) if len(arguments) > place else 0
    if parts.target is aten.unbind.int:
        return axis, None
    sizes = [value.shape[axis] for value in parts.meta["val"]]
    start = sum(sizes[:index])
    return axis, slice(start, start + sizes[index], 1)


def _is_shape(node: Node, shape: Sequence[Any]) -> bool:
    """Of a map: at least three axes, all of these sizes."""
    return len(_shape(node)) == len(shape) >= 3 and all(map(same, _shape(node), shape))


def _is_free(coefficient: Node, scaled: Node) -> bool:
    """Whether it is the same for all keys, and made of nothing that the map is made of: a plan is scaled
    by its potentials, too."""
    if varies(coefficient, -1):
        return False
    matrices = {
        node for node in ancestors(scaled, until=BARRIERS) if is_tensor(node) and rank_of(node) >= 2
    }
    alike = {node for node in matrices if all(map(same, _shape(node)[-2:], _shape(scaled)[-2:]))}
    return not alike & ancestors(coefficient, until=BARRIERS)


# Splitting


@dataclass(frozen=True)
class _Term:
    """map: that of the original that is multiplied with values now, by the product `product`.
    within: the sums of the original that it is a part of."""

    map: Node
    product: Node
    within: frozenset[Node]


@dataclass(frozen=True)
class _Split:
    """A rewritten program, and by the products of the original what became of them."""

    program: Program
    terms: Mapping[Node, Sequence[_Term]]

    def shown(self, outcomes: Outcomes) -> set[Node]:
        """The new products that are a site's."""
        return {term.product for terms in self.terms.values() for term in terms} & explained(outcomes)


def _splits(program: Program, node: Node, totals: frozenset[Node]) -> bool:
    """Whether a product's sums can be split, into no more work than one product for every map."""
    try:
        split = _split(program, {node: totals})
    except _Stuck:
        return False
    maps = 1 + sum(_count(total) - 1 for total in totals)
    products = {term.product for term in split.terms[node]}
    return sum(map(_matrices, products)) <= maps * _matrices(node)


def _count(total: Node) -> int:
    """How many maps are added."""
    axis = _summed_axis(total) if total.target is aten.sum.dim_IntList else None
    return 2 if axis is None else _hint(_shape(_operands(total)[0])[axis])


def _matrices(node: Node) -> int:
    """How many are multiplied in the captured example."""
    return math.prod(map(_hint, _shape(node)[:-2]))


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _split(program: Program, opened: Mapping[Node, frozenset[Node]]) -> _Split:
    """The program with these sums split, by the product that they are in.  Raises _Stuck."""
    graph, nodes = copied(program.graph)
    terms: dict[Node, Sequence[_Term]] = {}
    became: dict[Node, Node] = {}
    for node, totals in opened.items():
        product = product_of(node)
        assert product is not None
        writer = _Writer(graph, nodes, product, totals)
        became[nodes[node]] = writer.write()
        terms[node] = writer.terms
    return _Split(moved(program, graph, nodes, became, "differences"), terms)


class _Writer:
    """Writes A V in front of what was done to A, for every map A of one product's sums."""

    def __init__(
        self, graph: GraphModule, nodes: Mapping[Node, Node], product: Product, totals: frozenset[Node]
    ) -> None:
        self.graph, self.nodes, self.product, self.totals = graph, nodes, product, totals
        self.terms: list[_Term] = []
        self.passed: set[Node] = set()
        self._parted: set[Node] = set()  # of which parts are taken: the rest is the map's
        self._known: dict[tuple[Any, str], Node] = {}

    def write(self) -> Node:
        """What gives the product now, in its place.  Raises _Stuck."""
        product, node = self.product, self.product.node
        if product.map.order is not None:
            raise _Stuck
        with self.graph.graph.inserting_before(self.nodes[node]):
            values = self.nodes[product.right]
            turned = product.values.order
            if turned is not None:
                values = self.call(aten.permute.default, values, list(turned))
            values = self.spread(values, _shape(product.left)[:-2])
            result = self.pushed(product.left, values, frozenset())
            back = product.result.order
            if back is not None:
                inverse = [back.index(axis) for axis in range(len(back))]
                result = self.call(aten.permute.default, result, inverse)
        for source in (*self.passed, *(term.map for term in self.terms)):
            # Not an assertion on a tensor's type, and no dropout whose result is not used.
            readers = {user for user in source.users if user.users or user.target not in INERT}
            if readers - self.passed - {node}:
                raise _Stuck  # a sum or a map that is read otherwise, too
        self.nodes[node].replace_all_uses_with(result)
        return result

    def pushed(self, node: Node, values: Node, within: frozenset[Node]) -> Node:
        """node @ values, of values with all the axes before the last two that the node has."""
        sources: Sequence[Node | None] = [_through(node)]
        taken = _taken(node)
        if node in self.totals:
            sources, within = _operands(node), within | {node}
        elif sources == [None] or (within and node.target in SCALINGS and self._is_whole(node)):
            return self._map(node, values, within)
        elif taken is not None or node in self._parted:
            self._parted.update(x for x in sources if x is not None)
        self.passed |= {node, *(x for x in node.all_input_nodes if x.target in PARTS)}
        made: dict[Node, Node] = {}
        for source in sources:
            assert source is not None
            made[source] = self.pushed(source, self._before(node, source, values), within)
        return self._again(node, made)

    def _map(self, node: Node, values: Node, within: frozenset[Node]) -> Node:
        if not within or rank_of(node) not in (3, 4):
            raise _Stuck
        made = self.call(aten.matmul.default, self.nodes[node], values)
        self.terms.append(_Term(node, made, within))
        return made

    def _is_whole(self, node: Node) -> bool:
        """Whether a scaling is of a map whose heads are taken apart later, and not of one of them."""
        return node in self._parted and not ancestors(node, until=BARRIERS) & self.totals

    def _before(self, node: Node, source: Node, values: Node) -> Node:
        """The values of a map's source, of those of the map: every head has those of the head that it
        becomes."""
        shape, rank = _shape(source), rank_of(source)
        if _is_copy(node):
            return values
        taken = _taken(node)
        if taken is not None:
            return self._spread(values, *taken, shape)
        if node.target is aten.sum.dim_IntList:
            axis = _summed_axis(node)
            assert axis is not None
            return self._repeated(values, axis, shape[axis])
        if node.target in OTHER_SHAPES:
            if rank < 3 or not all(map(same, _shape(node)[-2:], shape[-2:])):
                raise _Stuck
            return self.shaped(values, shape[:-2])
        if node.target not in (aten.permute.default, aten.transpose.int):
            return values
        order = [axis % rank for axis in _args(node)[1]] if node.target is aten.permute.default else None
        if order is None:
            order = [*range(rank)]
            one, other = (axis % rank for axis in _args(node)[1:])
            order[one], order[other] = other, one
        if order[-2:] != [rank - 2, rank - 1]:
            raise _Stuck
        return self.call(aten.permute.default, values, [order.index(axis) for axis in range(rank)])

    def _again(self, node: Node, made: Mapping[Node, Node]) -> Node:
        """What a node does, done to products.  made: those of its maps."""
        if _is_copy(node):
            return made[_args(node)[0]]
        if node.target in OTHER_SHAPES:
            return self.shaped(made[_args(node)[0]], _shape(node)[:-2])
        if node.target is operator.getitem:
            parts, index = _args(node)
            return self.call(operator.getitem, self._again(parts, made), index)

        def now(argument: Any) -> Any:
            is_map = isinstance(argument, Node) and argument in made
            return made[argument] if is_map else self.coefficient(argument)

        return self.call(node.target, *map(now, _args(node)), **node.kwargs)

    def _spread(self, values: Node, axis: int, part: slice | None, shape: Sequence[Any]) -> Node:
        """Values of a part of a map's heads, for all of them: one of several parts next to each other, or
        every second or third."""
        size = shape[axis]
        if axis >= len(shape) - 2:
            raise _Stuck
        if part is None:
            return self._repeated(values, axis, size)
        ends = (size, part.start, part.stop, part.step)
        if not all(end is None or isinstance(end, int) for end in ends):
            raise _Stuck
        start, stop, step = part.indices(size)
        length = len(range(start, stop, step))
        count = size // length
        together = step == 1 and start % length == 0
        if length * count != size or not (together or step == count):
            raise _Stuck
        spread = self._repeated(values, axis if together else axis + 1, count)
        return self.call(aten.flatten.using_ints, spread, axis, axis + 1)

    def _repeated(self, values: Node, axis: int, count: Any) -> Node:
        """With a new axis, the same along it."""
        wider = self.call(aten.unsqueeze.default, values, axis)
        sizes = [-1] * rank_of(wider)
        sizes[axis] = self.size(count)
        return self.call(aten.expand.default, wider, sizes)

    # Writing

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of what is there already, if it is; its value is known, as a captured one's."""
        key = (target, repr((args, kwargs)))
        if key not in self._known:
            self._known[key] = written(self.graph, self.nodes[self.product.node], target, *args, **kwargs)
        return self._known[key]

    def coefficient(self, by: Any) -> Any:
        """One number for all keys, as it multiplies what has no keys any more."""
        if not isinstance(by, Node):
            return by
        node = self.nodes[by]
        if not is_tensor(by) or not rank_of(by) or same(by.meta["val"].shape[-1], 1):
            return node
        return self.call(aten.slice.Tensor, node, -1, 0, 1)

    def spread(self, values: Node, leads: Sequence[Any]) -> Node:
        """[*leads, M, E] of values that are repeated along some of these axes."""
        shape = values.meta["val"].shape
        missing = len(leads) - (len(shape) - 2)
        sizes: list[Any] = []
        for axis, lead in enumerate(leads):
            there = axis >= missing and same(shape[axis - missing], lead)
            if axis >= missing and not there and not same(shape[axis - missing], 1):
                raise _Stuck
            sizes.append(-1 if there else self.size(lead))
        if all(size == -1 for size in sizes):
            return values
        return self.call(aten.expand.default, values, [*sizes, -1, -1])

    def shaped(self, tensor: Node, leads: Sequence[Any]) -> Node:
        """[*leads, X, Y] of a tensor whose other axes are others."""
        shape = _shape(tensor)
        if len(shape) == len(leads) + 2 and all(map(same, shape, leads)):
            return tensor
        known = map(self._known_size, leads)
        sizes = [-1 if size is None else size for size in known]
        if sizes.count(-1) > 1:
            raise _Stuck
        last = [
            size if isinstance(size, int) else self.call(aten.sym_size.int, tensor, axis)
            for axis, size in ((-2, shape[-2]), (-1, shape[-1]))
        ]
        return self.call(aten.reshape.default, tensor, [*sizes, *last])

    def size(self, size: Any) -> Any:
        known = self._known_size(size)
        if known is None:
            raise _Stuck
        return known

    def _known_size(self, size: Any) -> Any:
        """A number, or where the graph has one: of the values, or of an input of the program."""
        if isinstance(size, int):
            return size
        right = self.product.right
        inputs = (node for node in right.graph.nodes if node.op == "placeholder" and is_tensor(node))
        for node in (right, *inputs):
            for axis, other in enumerate(node.meta["val"].shape):
                if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                    return self.call(aten.sym_size.int, self.nodes[node], axis)
        return None
