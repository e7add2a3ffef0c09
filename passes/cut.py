"""Cut: a part of a graph as a float64 function of the tensors that enter it.

A matcher never reads what a teacher's code says: it cuts the part out, feeds it tensors of its own
choosing and looks at what comes back.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
OF_SEVERAL = {
    aten.any.dim, aten.any.dims, aten.any.default, aten.all.dim, aten.all.dims, aten.all.default,
}  # fmt: skip

PROBE_LENGTHS = (11, 14)  # queries and keys of a probe where the lengths are dynamic
PROBE_BATCH = 2
POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
FARTHEST = 4096  # a larger number is no position
BENDS = {  # what does something else from some number on
    "clamp", "clamp_min", "clamp_max", "relu", "maximum", "minimum", "gt", "ge", "lt", "le", "eq",
    "ne", "floor_divide", "remainder", "fmod", "floor", "ceil", "round", "trunc", "bucketize",
    "sym_max", "sym_min", "hardtanh", "threshold", "softplus", "sigmoid",
}  # fmt: skip
_BANDS = {"triu", "tril"}
_OF_POSITIONS = {  # what leaves positions what they are, makes distances of them, or holds one number
    "sub", "add", "rsub", "neg", "abs", "view", "unsqueeze", "squeeze", "expand", "to", "_to_copy",
    "select", "slice", "transpose", "permute", "mT", "flip", "clone", "alias", "reshape",
    "sym_size", "mul", "t", "where", "masked_fill", "logical_and", "logical_or", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_not", "ones", "zeros", "full", "eye", "new_ones",
    "new_zeros", "new_full", "ones_like", "zeros_like", "full_like", "scalar_tensor", "triu",
    "tril",
}  # fmt: skip
SHAPE_ONLY = {
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
    aten.full_like.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.new_empty.default,
}  # fmt: skip
MOST_STEPS = 64  # of what a mask is made of, up to which two are compared
HALVES = (torch.float16, torch.bfloat16)
HALF_OR_SINGLE = (torch.float32, *HALVES)


@dataclass(frozen=True)
class Part:
    """The part of a graph that a site stands for, from its queries to its map or output.

    inputs: queries, keys, and whatever else enters, masks last; output: the map, or what a layer without
    one gives; order: brings the output to canonical axes, None where it is; batch, queries, keys: sizes,
    as the graph has them; masks: (node, what it says of a hidden token, None for a low score).
    """

    inputs: tuple[Node, ...]
    output: Node
    inside: frozenset[Node]
    order: tuple[int, ...] | None
    batch: Any
    queries: Any
    keys: Any
    masks: tuple[tuple[Node, bool | None], ...] = ()


class Cut:
    """(inputs, masks) -> output, every lower precision promoted to `precision`.

    inputs: tensors whose values are chosen; masks: boolean data tensors that enter besides.
    inside: what is computed from the inputs; sizes of anything else are numbers from outside.
    precision: float64, or float32 to see what rounding does beside numbers such as -1e9; None leaves
        each as it is.
    """

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[Node],
        output: Node | tuple[Node, ...],
        inside: Container[Node],
        masks: Sequence[Node] = (),
        precision: torch.dtype | None = torch.float64,
    ) -> None:
        self.inputs, self.masks, self.precision = tuple(inputs), tuple(masks), precision
        self.symbols = symbol_hints(graph)
        self._between = [node for node in graph.graph.nodes if node in inside and is_tensor(node)]
        self.module, self.shells, self.sizes = _extract(
            graph, [*inputs, *masks], output, inside, precision
        )

    def shape_of(self, node: Node, lengths: dict[Any, int]) -> tuple[int, ...]:
        """The node's shape under an assignment of symbols."""
        return tuple(evaluate(size, lengths) for size in node.meta["val"].shape)

    def largest(self, lengths: dict[Any, int]) -> int:
        """Entries of the largest tensor on the way to the output."""
        return max((math.prod(self.shape_of(node, lengths)) for node in self._between), default=0)

    def lengths(self, assigned: dict[Any, int] | None = None) -> dict[Any, int]:
        return {**self.symbols, **(assigned or {})}

    def fingerprint(self) -> str:
        """The same for cuts that compute the same of inputs of the same sizes: operator by operator, with
        the same constants. The layers of a model are such cuts."""
        numbers: dict[Node, int] = {}
        digest = hashlib.sha256()

        def number(node: Node) -> str:
            return f"%{numbers[node]}"

        entering = [*self.inputs, *self.masks, *self.shells, *self.sizes]
        for place, node in enumerate(self.module.graph.nodes):
            numbers[node] = place
            if node.op == "placeholder":
                line: object = _described(entering[place].meta["val"])
            elif node.op == "get_attr":
                line = _held(operator.attrgetter(str(node.target))(self.module))
            else:
                given_to_it = torch.fx.node.map_arg((node.args, node.kwargs), number)
                line = (node.op, str(node.target), given_to_it)
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()

    def thresholds(self) -> tuple[set[int], bool]:
        """Numbers that enter what is made of sizes alone: from there on something else may happen; and
        whether it may happen elsewhere, too, since what is compared is not positions as they are."""
        of_inputs = {*list(self.module.graph.nodes)[: len(self.inputs) + len(self.masks)]}
        plain, bounds, elsewhere = set[Node](), set[int](), False  # positions and sizes, and their sums
        for node in self.module.graph.nodes:
            sources, name = {*node.all_input_nodes}, operator_name(node)
            if sources & of_inputs:
                of_inputs.add(node)
                continue
            numbers = [abs(x) for x in pytree.tree_leaves(node.args[1:]) if type(x) in (int, float)]
            scaled = name == "mul" and any(type(x) is float for x in node.args[1:])
            if node.op in ("placeholder", "get_attr") or node.target in POSITIONS or (
                sources <= plain and name in _OF_POSITIONS | BENDS and not scaled
            ):  # fmt: skip
                plain.add(node)
            elif name in BENDS:
                elsewhere = True
            if node.target not in POSITIONS and (sources & plain or name in _BANDS):
                bounds |= {int(n) for n in numbers if max(PROBE_LENGTHS) < n < 2**63 - 1}
        near = {number for number in bounds if number <= FARTHEST}
        return near, elsewhere or near != bounds

    def run(
        self, tensors: Sequence[Tensor], lengths: dict[Any, int], through: Interpreter | None = None
    ) -> Any:
        """The output for inputs and masks in their own layouts, or all where several were asked for.
        through: what runs the module."""
        with torch.no_grad():
            run = self.module if through is None else through.run
            return run(*tensors, *self._given(tensors, lengths))

    def differentiable(self, tensors: Sequence[Tensor], lengths: dict[Any, int]) -> Tensor:
        """The output, with the graph of its gradient."""
        with torch.enable_grad():
            result: Tensor = self.module(*tensors, *self._given(tensors, lengths))
        return result

    def _given(self, tensors: Sequence[Tensor], lengths: dict[Any, int]) -> list[Any]:
        """What the module takes besides: shells and sizes."""
        sizes = [evaluate(node.meta["val"], lengths) for node in self.sizes]
        device = next((x.device for x in tensors), None)  # a band alone is made from sizes
        shells = [
            torch.zeros(
                self.shape_of(x, lengths), dtype=self.precision or x.meta["val"].dtype, device=device
            )
            for x in self.shells
        ]
        return [*shells, *sizes]


def made_alike(node: Node) -> object:
    """The same for nodes that are computed alike from the same, as masks that every layer makes anew;
    the node itself where that is long to say."""
    above = ancestors(node)
    if len(above) > MOST_STEPS:
        return node
    names: dict[Node, str] = {}
    lines: list[str] = []
    for current in node.graph.nodes:
        if current in above:
            made = torch.fx.node.map_arg((current.args, current.kwargs), names.__getitem__)
            called = current.op == "call_function"
            names[current] = f"%{len(lines)}" if called else f"{current.op} {current.target}"
            lines.append(f"{current.target} {made}")
    return tuple(lines)


def _described(value: Any) -> str:
    """What a cut may depend on of a tensor or size that is given to it."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else str(value)


def _held(value: Any) -> str:
    """The content of a constant."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {id(value)}"
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return f"{_described(value)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"


def separate(output: Node, inputs: Sequence[Node]) -> tuple[set[Node], list[Node]] | None:
    """(what lies between inputs and output, masks that enter besides); None if other data enters."""
    downstream = descendants(inputs)

    def is_mask(node: Node) -> bool:
        return node not in downstream and is_bool(node) and depends_on_data(node)

    def onward(node: Node) -> list[Node]:
        sources = [] if node.target in SHAPE_ONLY or is_mask(node) else node.all_input_nodes
        return [source for source in sources if source not in inputs and holds_tensors(source)]

    above = [*walked({output}.difference(inputs), onward)]
    masks = [node for node in above if is_mask(node)]
    if any(node.op == "placeholder" and node not in masks for node in above):
        return None
    return downstream.intersection(above), list(dict.fromkeys(map(mask_root, masks)))


def mask_root(node: Node) -> Node:
    """The boolean tensor that a mask is a view or a negation of."""
    while True:
        sources = [n for n in node.all_input_nodes if is_tensor(n)]
        if len(sources) != 1 or sources[0].meta["val"].dtype != torch.bool or node.target in OF_SEVERAL:
            return node
        node = sources[0]


def behind(node: Node, targets: Container[Any]) -> Node:
    """What operators in `targets`, such as reshapes, were applied to."""
    while node.target in targets:
        (node,) = node.all_input_nodes[:1]
    return node


def descendants(nodes: Sequence[Node]) -> set[Node]:
    """Everything computed from the nodes, without them."""
    return reached((user for node in nodes for user in node.users), lambda node: node.users)


def ancestors(*nodes: Node, until: Container[Any] = ()) -> set[Node]:
    """The nodes and everything they are computed from; operators in `until` are the last on their way."""
    return reached(nodes, lambda node: () if node.target in until else node.all_input_nodes)


def reached(starts: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes, and all that going onward from any of them leads to."""
    return {*walked(starts, onward)}


def walked(starts: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The same, one by one."""
    visited: set[Node] = set()
    stack = [*starts]
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(onward(node))


def depends_on_data(node: Node) -> bool:
    """Whether values, not only shapes, of the model's inputs enter."""
    return reaches(node, lambda n: n.op == "placeholder")


def may_change(node: Node) -> bool:
    """Whether inputs or weights enter, rather than constants of the code alone."""
    module = node.graph.owning_module
    assert module is not None
    weights = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    return reaches(node, lambda n: n.op == "placeholder" or (n.op == "get_attr" and n.target in weights))


def data_dependent(graph: GraphModule) -> set[Node]:
    """All the nodes that depend on data, found in one pass."""
    dependent: set[Node] = set()
    for node in graph.graph.nodes:
        made = node.target not in SHAPE_ONLY and not dependent.isdisjoint(node.all_input_nodes)
        if (made or node.op == "placeholder") and holds_tensors(node):
            dependent.add(node)
    return dependent


def reaches(node: Node, wanted: Any) -> bool:
    """Whether the node is computed from the values of a wanted one."""
    def onward(node: Node) -> Iterable[Node]:
        return node.all_input_nodes if holds_tensors(node) and node.target not in SHAPE_ONLY else ()

    return any(holds_tensors(current) and wanted(current) for current in walked([node], onward))


def operator_name(node: Node) -> str:
    """Of its operator, whatever the kinds of its arguments."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).split(".")[1]
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def holds_tensors(node: Node) -> bool:
    """A tensor, or several from one operator (a sort, a split)."""
    return is_tensor(node) or holds_several(node)


def holds_several(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (tuple, list)) and any(isinstance(x, Tensor) for x in value)


def is_bool(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def constants_entering(
    graph: GraphModule, between: set[Node], lengths: dict[Any, int] | None = None
) -> Iterator[Tensor]:
    """Float64 values of the numbers that enter a part from parameters and sizes alone.

    lengths: as of constant_at.
    """
    in_order = sorted(between, key=lambda n: n.name)
    entering = dict.fromkeys(source for node in in_order for source in node.all_input_nodes)
    numbers = [
        source for source in entering
        if is_tensor(source) and source.meta["val"].is_floating_point()
        and source not in between and not depends_on_data(source)
    ]  # fmt: skip
    values = constants_at(graph, numbers, lengths)
    yield from (value for value in values if value is not None and value.numel())


def constant_at(graph: GraphModule, node: Node, lengths: dict[Any, int] | None = None) -> Tensor | None:
    """The float64 value of a tensor computed from parameters and sizes alone, None if it cannot be run.

    lengths: of the dynamic sizes, those of the captured example by default.
    """
    return constants_at(graph, [node], lengths)[0]


def constants_at(
    graph: GraphModule, nodes: Sequence[Node], lengths: dict[Any, int] | None = None
) -> list[Tensor | None]:
    """constant_at of each; all of them run at once, where they can."""
    try:
        cut = Cut(graph, [], (*nodes,), ())
        return [value.double() for value in cut.run([], cut.lengths(lengths))]
    except Exception:  # the graph is the user's code, in which a constant may fail to compute
        return [constant_at(graph, node, lengths) for node in nodes] if len(nodes) > 1 else [None]


def _extract(
    graph: GraphModule,
    cut: Sequence[Node],
    output: Node | tuple[Node, ...],
    inside: Container[Node],
    precision: torch.dtype | None,
) -> tuple[GraphModule, list[Node], list[Node]]:
    """A GraphModule (*cut, *shells, *sizes) -> output, every lower precision promoted.

    shells: tensors from elsewhere of which only the shape enters; sizes: numbers from elsewhere.
    """
    needed: set[Node] = set()
    stack = [output] if isinstance(output, Node) else list(output)
    likes: dict[Node, None] = {}
    sizes: list[Node] = []
    while stack:
        node = stack.pop()
        if node in needed or node in cut:
            continue
        needed.add(node)
        like = node.all_input_nodes[0] if node.target in SHAPE_ONLY and node.all_input_nodes else None
        if like is not None and like not in inside and like not in cut and depends_on_data(like):
            likes[like] = None
            stack.extend(n for n in node.all_input_nodes if n is not like)
            continue
        if node.target is aten.sym_size.int and node.args[0] not in inside:
            sizes.append(node)
            continue
        stack.extend(node.all_input_nodes)
    shells = [like for like in likes if like not in needed]  # of others, values enter, too

    def promoted(value: Any) -> Any:
        lower = isinstance(value, torch.dtype) and value in HALF_OR_SINGLE
        return precision if lower and precision is not None else value

    copy = Graph()
    env: dict[Node, Node] = {}
    for index, node in enumerate([*cut, *shells, *sizes]):
        env[node] = copy.placeholder(f"input_{index}")
    for node in graph.graph.nodes:
        if node in needed and node not in env:
            new = copy.node_copy(node, env.__getitem__)
            new.args = torch.fx.node.map_aggregate(new.args, promoted)
            new.kwargs = torch.fx.node.map_aggregate(new.kwargs, promoted)
            made = precision is not None and _made(node)
            env[node] = copy.call_function(aten.to.dtype, (new, precision)) if made else new
    copy.output(torch.fx.node.map_arg(output, env.__getitem__))
    held = {str(node.target) for node in copy.nodes if node.op == "get_attr"}
    values = {name: operator.attrgetter(name)(graph) for name in sorted(held)}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dtype in HALF_OR_SINGLE and precision is not None:
            values[name] = value.detach().to(precision)
    module = GraphModule(values, copy)
    return module, shells, sizes


def _made(node: Node) -> bool:
    """Whether a lower precision begins here, in the default dtype: `torch.linspace(0, 1, n)`, a mean of
    integers, a mask times a number. What is computed from promoted tensors is promoted already."""
    if node.op != "call_function" or not _is_lower(node):
        return False
    return not any(_is_lower(source) or holds_several(source) for source in node.all_input_nodes)


def _is_lower(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype in HALF_OR_SINGLE


def recorded(graph: GraphModule, wanted: Container[Node], inputs: Any) -> dict[Node, Tensor]:
    """What these nodes hold when the graph runs on inputs (args, kwargs), into which it may write."""
    values: dict[Node, Tensor] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n in wanted and isinstance(value, Tensor):
                values[n] = value.detach()
            return value

    with torch.no_grad():
        copies = pytree.tree_map_only(Tensor, Tensor.clone, inputs)
        Recorder(graph).run(*pytree.tree_leaves(copies), enable_io_processing=False)
    return values


def moved_nodes(value: Any, nodes: Mapping[Node, Node]) -> Any:
    """What names nodes, such as a site, with other nodes; those inside of it where they are known."""
    if isinstance(value, Node):
        return nodes[value]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(moved_nodes(item, nodes) for item in value)
    if isinstance(value, set | frozenset):
        return type(value)(nodes.get(item, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        values = {f.name: moved_nodes(getattr(value, f.name), nodes) for f in fields(value) if f.init}
        return replace(value, **values)
    return value


def symbol_hints(graph: GraphModule) -> dict[Any, int]:
    """What every dynamic size was in the captured example; none of those that depend on the data."""
    hints: dict[Any, int] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        dims = value.shape if isinstance(value, Tensor) else [value]
        for size in dims:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                hints[size.node.expr] = int(size.node.hint)
    return hints


class Line(NamedTuple):
    """A size: factor * symbol + more."""

    symbol: Any
    factor: int
    more: int


def line_of(size: Any) -> Line | None:
    """None of a number, and of a size that depends on its symbols in another way: as numbers show, since
    n * n // n is n."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    if expression is None or len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    try:
        first, second, *others = ((n, evaluate(size, {symbol: n})) for n in (2, 3, 5, 8, 1009, 1013))
    except ZeroDivisionError:  # it divides by n // 4
        return None
    factor = second[1] - first[1]
    line = Line(symbol, factor, first[1] - factor * first[0])
    return line if factor and all(value == factor * n + line.more for n, value in others) else None


def evaluate(size: Any, lengths: dict[Any, int]) -> int:
    if isinstance(size, torch.SymInt):
        return int(size.node.expr.xreplace(lengths))
    return int(size)
