"""torch.compile(model, backend="asapc"): the finite loops in Dynamo's graphs become asapc's operators.

before: a graph of Dynamo's, of torch functions, with its guards
after:  the same graph, in which the nodes of every loop that was identified are one operator call; the
        inner backend (Inductor, unless told) compiles it

The graph is lowered to ATen and identified there, as a captured model is: matched, and each site held
against its own code on the inputs of this call and beyond them. Weights are inputs of the graph, so no
site holds any. What is put in is then copied back: a node of the lowered graph that was traced from one
of Dynamo's, and holds the same numbers, stands for it. All the rest of Dynamo's graph stays as it was,
with its mutations, random numbers, autocast and gradients.

What cannot be lowered, identified or copied back stays the model's own code, with the reason in
asapc.explain and in the log "asapc".
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext, tracing
from torch.export import Dim
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.fx.traceback import preserve_node_meta

from asapc.errors import InputError
from asapc.formats.limits import MOST, fixed_size, limits_of
from asapc.inputs.data import Batch
from asapc.inputs.teacher import uncompiled
from asapc.inputs.weights import fingerprint
from asapc.ir import Program
from asapc.measure.differences import largest_difference
from asapc.passes.analyse import LeftAlone, Site, judged
from asapc.passes.capture import export_graph, program_of
from asapc.passes.cut import HALVES, ancestors, evaluate
from asapc.passes.differences import matched_program
from asapc.passes.gradients import no_gradient
from asapc.passes.lift import lift
from asapc.passes.regions import Refusal
from asapc.passes.replay import replay
from asapc.passes.site import Site as MatchedSite
from asapc.program.calls import CALLS, copied
from asapc.terminal.printed import reason

LOG = logging.getLogger("asapc")
SILENCE = 15.0  # seconds that nobody should wait without a word
NUMBER = "asapc"  # in node.meta["custom"]: the place of the node of Dynamo's that it was traced from
SAME, SAME_HALF = 1e-3, 4e-2  # relative difference up to which numbers are the same; of halves
LENGTHS = {4: (0, 2)}  # the axes of data that are batch and length, by their number; the first two else
SMALL = 1 << 15  # updates of entries, below which Inductor's fused loop is faster than a call, measured
FEW = 4  # up to which a number is no size
ROWS_ONLY = "not Sinkhorn: rows only"
AUTOCAST = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}
SWITCHES = {torch._C._set_grad_enabled, *AUTOCAST}


class Left(Exception):
    """Why a graph, or a site of it, stays the model's own code."""


@dataclass(frozen=True)
class Identified:
    """What is known of a lowered graph: its sites, as they were matched and judged, and what was left."""

    program: Program
    sites: tuple[tuple[MatchedSite, Site], ...]
    left: tuple[LeftAlone, ...]

    def chosen(
        self, example: Sequence[Tensor], fuses: bool
    ) -> tuple[Program, list[Site], list[LeftAlone]]:
        """The program with operators at the sites that are worth it, those sites, and the others."""
        sizes: dict[Any, int] = {}
        for node, tensor in zip(_inputs(self.program.graph), example, strict=True):
            traced = zip(node.meta["val"].shape, tensor.shape, strict=True)
            sizes |= {size.node.expr: n for size, n in traced if isinstance(size, torch.SymInt)}
        work = [_work(matched, sizes) for matched, _ in self.sites]
        small = [fuses and count is not None and count < SMALL for count in work]
        taken = [pair for pair, is_small in zip(self.sites, small, strict=True) if not is_small]
        left = [
            LeftAlone(site.name, "kept", f"so small that Inductor's own code is faster: {count} updates")
            for (_, site), count, is_small in zip(self.sites, work, small, strict=True) if is_small
        ]
        lifted = lift(self.program, [matched for matched, _ in taken])
        return lifted, [site for _, site in taken], left


def _work(site: MatchedSite, sizes: dict[Any, int]) -> int | None:
    """How often an entry of a loop's matrices is updated, None where a site is no loop."""
    steps = getattr(site.convention, "half_steps", None)
    part = site.part()
    entries = [evaluate(size, sizes) for size in (part.batch, part.queries, part.keys)]
    return None if steps is None else steps * site.heads * math.prod(entries)


@dataclass
class Noted:
    """What a run of a graph notes: numbers that tell tensors apart, of some nodes; and the nodes whose
    tensors were changed in place."""

    wanted: Collection[Node]
    digests: dict[Node, tuple[Any, ...]] = field(default_factory=dict)
    changed: set[Node] = field(default_factory=set)


class Noting(Interpreter):
    """Runs a graph, and notes what its nodes hold."""

    def __init__(self, graph: GraphModule, noted: Noted | None) -> None:
        super().__init__(graph)
        self.noted = noted

    def run_node(self, n: Node) -> Any:
        if self.noted is None:
            return super().run_node(n)
        given = {x: self.env[x]._version for x in n.all_input_nodes if isinstance(self.env[x], Tensor)}
        result = super().run_node(n)
        self.noted.changed |= {x for x, version in given.items() if self.env[x]._version != version}
        if n in self.noted.wanted and isinstance(result, Tensor):
            self.noted.digests[n] = _digest(result)
        return result


class Plain(Noting):
    """Runs Dynamo's graph without switching gradients or autocast.  Numbers that are no sizes are those
    of the example.  sizes: what numbers of the graph are replaced by."""

    sizes: Mapping[int, Any] = MappingProxyType({})

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        given = super().fetch_args_kwargs_from_env(n)
        return map_aggregate(given, lambda x: self.sizes.get(x, x) if type(x) is int else x)

    def run_node(self, n: Node) -> Any:
        if n.target in SWITCHES:
            return None
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            raise Left(f"a part of it is a graph of its own ({n.target})")
        return _number(_value(n)) if n.target == "item" else super().run_node(n)


def _digest(value: Tensor) -> tuple[Any, ...]:
    flat = value.detach().flatten().double().nan_to_num(0.0, 0.0, 0.0).clamp(-1e6, 1e6)
    sums = (float(flat.norm()), float(flat.sum()), float(flat[::3].sum()), float(flat[::7].sum()))
    return (value.shape, value.dtype in HALVES, *sums)


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if one[0] != other[0]:
        return False
    allowed = (SAME_HALF if one[1] or other[1] else SAME) * one[2] + 1e-12
    return all(abs(x - y) <= allowed for x, y in zip(one[2:], other[2:], strict=True))


class Lowerable(nn.Module):
    """Dynamo's graph as a module of its tensors alone: sizes are read from them.

    widen: batch and length of data are free where Dynamo has fixed them, and so are the numbers of the
    graph that are the same. At the sizes of the example that is the same graph, so what is found in it
    holds there; the experiments are small, and another batch is not identified again.
    """

    def __init__(self, graph: GraphModule, widen: bool) -> None:
        super().__init__()
        self.graphs = [graph]  # no child: its constants stay its own
        self.inputs = _inputs(graph)
        tensors = [node for node in self.inputs if isinstance(_value(node), Tensor)]
        self.places = [node for node in tensors if not _read(node)]
        self.shapes = [self._axes(node, widen) for node in self.places]
        self.sizes: dict[Any, tuple[int, int]] = {}  # where a symbol, or a number that is freed, is read
        for place, axes in enumerate(self.shapes):
            for axis, size in enumerate(_value(self.places[place]).shape):
                name = size if isinstance(size, int) else size.node.expr
                if axes[axis] is Dim.AUTO:
                    self.sizes.setdefault(name, (place, axis))

    def _axes(self, node: Node, widen: bool) -> dict[int, Any]:
        """Which are free: what Dynamo's guards leave open, and batch and length of data."""
        value = _value(node)
        data = widen and not re.match(r"L_self_|.*_(modules|parameters|buffers)_", str(node.target))
        lengths = {axis for axis in LENGTHS.get(value.dim(), (0, 1)) if data and axis < value.dim()}

        def is_free(axis: int, size: Any) -> bool:
            return isinstance(size, torch.SymInt) or (axis in lengths and size > FEW)

        return {
            axis: Dim.AUTO if is_free(axis, size) else Dim.STATIC
            for axis, size in enumerate(value.shape)
        }

    def forward(self, tensors: list[Tensor]) -> Any:  # one list: guards name what is in it
        return self.run(tensors)

    def run(self, tensors: Sequence[Tensor], noted: Noted | None = None) -> Any:
        """What the graph gives, its numbers that are sizes of data read from the tensors."""
        plain = Plain(self.graphs[0], noted)
        plain.sizes = {
            size: tensors[place].shape[axis]
            for size, (place, axis) in self.sizes.items() if type(size) is int
        }
        return plain.run(*self.arguments(tensors))

    def example(self, inputs: Mapping[Node, Any]) -> list[Tensor]:
        """Tensors that may be changed, apart from the weights."""
        tensors = [inputs[node] for node in self.places]
        weights = [isinstance(x, nn.Parameter) and not x.is_inference() for x in tensors]
        apart = zip(tensors, weights, strict=True)
        return [x.detach() if weight else x.detach().clone() for x, weight in apart]

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What Dynamo's graph is called with."""
        rest = iter(tensors)
        return [self._argument(node, tensors, rest) for node in self.inputs]

    def named(self, text: str) -> str:
        """With the model's names of the tensors, not those of the lowered graph."""
        def name(number: re.Match[str]) -> str:
            path = str(self.places[int(number[1])].target).removeprefix("L_").rstrip("_")
            return re.sub("_(modules|parameters|buffers)_", ".", path)

        return re.sub(r"\btensors_(\d+)\b", name, text)

    def _argument(self, node: Node, tensors: Sequence[Tensor], rest: Iterator[Tensor]) -> Any:
        value = _value(node)
        if _read(node):
            return torch.tensor(_number(_value(next(iter(node.users)))), dtype=value.dtype)
        if isinstance(value, Tensor):
            return next(rest)
        place = self.sizes.get(value.node.expr) if isinstance(value, torch.SymInt) else None
        return _number(value) if place is None else tensors[place[0]].shape[place[1]]


def _inputs(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _read(node: Node) -> bool:
    """Whether it is a number of the model's, such as an epsilon, which Dynamo has put into a tensor."""
    return bool(node.users) and all(user.target == "item" for user in node.users)


def autocast_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that autocast gives the model's own code there."""
    return value.to(dtype)


class Exact(Interpreter):
    """Runs a graph without what rounds its numbers."""

    def run_node(self, n: Node) -> Any:
        if n.target is autocast_to:
            return self.env[n.all_input_nodes[0]]
        return None if n.target in AUTOCAST else super().run_node(n)


class Whole(nn.Module):
    """A graph of Dynamo's as it will run, called with those of its tensors that have gradients.

    example: all of them.  changed: places of those that it changes, of which it is given copies.
    """

    def __init__(
        self, module: GraphModule, lowerable: Lowerable, example: Sequence[Tensor],
        changed: Container[int],
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.changed = module, changed
        self.others = (lowerable, example)  # no children or buffers: they are not cast
        self.trained = [
            place for place, node in enumerate(lowerable.places) if _value(node).requires_grad
        ]
        self.graph = module.graph
        self.exact = False

    def forward(self, *trained: Tensor) -> Any:
        lowerable, example = self.others
        if any(x.dtype is torch.float64 for x in trained):  # all of it is to be in double precision
            example = [x.double() if x.is_floating_point() else x for x in example]
        tensors = {**dict(enumerate(example)), **dict(zip(self.trained, trained, strict=True))}
        given = [x.clone() if place in self.changed else x for place, x in sorted(tensors.items())]
        with torch.random.fork_rng(devices=[]):
            return (Exact if self.exact else Interpreter)(self.module).run(*lowerable.arguments(given))


def _number(value: Any) -> Any:
    """That of the example.  Raises Left where nobody knows it before the graph runs."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or not value.node.has_hint():
        raise Left("it computes with what is no tensor, or with a number of its data")
    return value.node.hint


def identified(graph: GraphModule, inputs: Mapping[Node, Any]) -> tuple[Lowerable, Identified]:
    """What a graph of Dynamo's computes: with free sizes, and with its own where that may show more."""
    best: tuple[Lowerable, Identified] | None = None
    for widen in (True, False):
        lowerable = Lowerable(graph, widen)
        try:
            known = _known(lowerable, lowerable.example(inputs))
        except Exception:
            if best is None and not widen:
                raise
            continue
        if best is None or len(known.sites) > len(best[1].sites):
            best = lowerable, known
        if all(left.reason.startswith(ROWS_ONLY) for left in known.left):
            break
    assert best is not None
    return best


def _known(lowerable: Lowerable, tensors: Sequence[Tensor]) -> Identified:
    """The same for all graphs that are the same when they are lowered."""
    nodes = list(lowerable.graphs[0].graph.nodes)
    for place, node in enumerate(nodes):
        node.meta["custom"] = {**node.meta.get("custom", {}), NUMBER: place}
    try:
        with preserve_node_meta():
            exported = export_graph(lowerable, ([*tensors],), {}, (lowerable.shapes,))
            program = program_of(exported, ([*tensors],), {})
    finally:
        for node in nodes:
            del node.meta["custom"][NUMBER]
    for node in program.graph.graph.nodes:
        place = node.meta.get("custom", {}).get(NUMBER)
        node.meta["nn_module_stack"] = {} if place is None else _modules(nodes[place])
    key = _key(program)
    if key not in _KNOWN:
        still = "asapc: still finding out what the loops of a graph compute; this is done once"
        notice = threading.Timer(SILENCE, LOG.warning, [still])
        notice.daemon = True
        notice.start()
        try:
            _KNOWN[key] = _identify(program)
        finally:
            notice.cancel()
    return _KNOWN[key]


_KNOWN: dict[str, Identified] = {}


def _limits(size: Any) -> tuple[int, int]:
    """Between which a traced size is free."""
    number = fixed_size(size)
    return limits_of(size.node.shape_env, size.node.expr) if number is None else (number, number)


def _key(program: Program) -> str:
    """Of all that a lowered graph computes."""
    constants = dict(program.graph.named_buffers())
    constants |= {name: x for name, x in vars(program.graph).items() if isinstance(x, Tensor)}
    lines = [fingerprint(constants)]
    for node in program.graph.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, Tensor):
            lines.append(f"{value.shape} {value.dtype} {value.device} {[*map(_limits, value.shape)]}")
        lines.append(f"{node.format_node()} {node.meta.get('custom', {}).get(NUMBER)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _modules(node: Node) -> dict[str, tuple[str, Any]]:
    """The modules that a node of Dynamo's was traced in, by the names that they have in the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", str(stack[-1][0])) if stack else ""
    return {"": (re.sub(r"\._modules\['(\w+)'\]", r".\1", name), None)}


def _identify(program: Program) -> Identified:
    program, outcomes = matched_program(program)
    found = [x for x in outcomes if not isinstance(x, Refusal)]
    left = [LeftAlone(x.name, "refused", x.reason) for x in outcomes if isinstance(x, Refusal)]
    replays = replay(None, [program], [found], [Batch(program.args, program.kwargs, None, [])])
    judgements = [(site, judged(site, replays[site.name])) for site in found]
    sites = [(site, facts) for site, facts in judgements if isinstance(facts, Site)]
    left += [facts for _, facts in judgements if isinstance(facts, LeftAlone)]
    return Identified(replace(program, args=(), kwargs={}, captured=None), tuple(sites), tuple(left))


def _outputs(module: Any) -> list[Any]:
    """What a graph gives: nodes, and constants."""
    (outputs,) = module.graph.output_node().args
    return list(outputs)


class Rewriting:
    """Copies what stands in a lifted graph, and not in Dynamo's, into a copy of Dynamo's.

    stands: the nodes of Dynamo's that nodes of the lifted graph stand for.
    """

    def __init__(self, graph: GraphModule, lifted: GraphModule, stands: Mapping[Node, Node]) -> None:
        self.graph, self.nodes = copied(graph)
        self.lifted, self.stands = lifted, stands
        self.made: dict[Node, Node] = {}
        self.replaced: set[Node] = set()

    def run(self) -> GraphModule:
        """Raises Left where a tensor that is needed has been changed in place."""
        behind = self._behind_operators()
        for node, old in self.stands.items():
            if node in behind:
                self._replace(self.nodes[old], node)
        theirs, ours = _outputs(self.lifted), _outputs(self.graph)
        if len(ours) != len(theirs):
            raise Left("its outputs are not those of the lowered graph")
        output = self.graph.graph.output_node()
        for place, node in enumerate(theirs):
            if isinstance(node, Node) and node in behind and node not in self.stands:
                self.replaced.add(ours[place])
                with self.graph.graph.inserting_before(output):
                    ours[place] = self._put(node, ours[place])
        output.args = (tuple(ours),)
        return self.graph

    def _behind_operators(self) -> set[Node]:
        """The operators' calls, and what is computed of them by nodes that stand for none of Dynamo's."""
        behind: set[Node] = set()
        for node in self.lifted.graph.nodes:
            sources = [source for source in node.all_input_nodes if source not in self.stands]
            if node.target in CALLS or behind & {*sources}:
                behind.add(node)
        return behind

    def _replace(self, old: Node, node: Node) -> None:
        with self.graph.graph.inserting_before(old):
            new = self._put(node, old)
        old.replace_all_uses_with(new)
        self.replaced.add(old)
        self.nodes[self.stands[node]] = new

    def _put(self, node: Node, old: Node) -> Node:
        """The node in the copy, in the dtype of what it is put in place of."""
        new, traced = self._copy(node), node.meta.get("val")
        wanted = _value(old)
        if isinstance(wanted, Tensor) and isinstance(traced, Tensor) and wanted.dtype != traced.dtype:
            new = self.graph.graph.call_function(autocast_to, (new, wanted.dtype))
        return new

    def _made(self, node: Node) -> Node:
        return self.nodes[self.stands[node]] if node in self.stands else self._copy(node)

    def _copy(self, node: Node) -> Node:
        if node in self.made:
            return self.made[node]
        if node.op == "placeholder":
            raise Left("an input that it needs is changed in place")
        if node.op == "get_attr":
            name = f"asapc_{node.name}"
            self.graph.register_buffer(name, getattr(self.lifted, str(node.target)))
            new = self.graph.graph.get_attr(name)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._made)
            if node.target is torch.ops.aten.copy.default:  # it has no gradient
                call = self.graph.graph.call_method
                new = call("type_as", (call("expand_as", (args[1], args[0])), args[0]))
                self.made[node] = new
                return new
            new = self.graph.graph.create_node(node.op, node.target, args, kwargs)
        self.made[node] = new
        return new


def remove_dead(graph: GraphModule, replaced: set[Node], changed: set[Node]) -> list[Node]:
    """Takes out what only the replaced nodes needed, and says what that was.  changed: nodes whose
    tensors are changed in place: what does that goes if nothing else sees the tensor."""
    changing = [node for node in graph.graph.nodes if changed & {*node.all_input_nodes}]
    sharing: dict[Any, set[Node]] = {}
    for node in graph.graph.nodes:
        value = _value(node)
        if isinstance(value, Tensor):
            sharing.setdefault(value.untyped_storage()._cdata, set()).add(node)
    dead = {node for node in (*replaced, *ancestors(*replaced), *changing) if node.op != "placeholder"}

    def touched(node: Node) -> set[Node]:
        """The nodes that see what it changes."""
        values = [_value(x) for x in node.all_input_nodes if x in changed]
        return set().union(*(sharing[value.untyped_storage()._cdata] for value in values))

    while True:
        alive = {
            node for node in dead
            if {*node.users} - dead or (node in changing and touched(node) - dead)
        }  # fmt: skip
        if not alive:
            break
        dead -= alive
    gone = [node for node in graph.graph.nodes if node in dead]
    for node in reversed(gone):
        graph.graph.erase_node(node)
    return gone


def rewritten(graph: GraphModule, inputs: Sequence[Any], facts: Facts) -> GraphModule:
    """Dynamo's graph with operators in place of what was identified; the facts are noted as they come.

    Raises Left where the graph stays as it is.
    """
    given = dict(zip(_inputs(graph), inputs, strict=True))
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    with torch.random.fork_rng(devices=[]), _plainly(tensors):
        lowerable, known = identified(graph, given)
        example = lowerable.example(given)
        lifted, sites, small = known.chosen(example, facts.inner == "inductor")
        facts.sites = tuple(sites)
        facts.left = tuple(replace(x, reason=lowerable.named(x.reason)) for x in (*known.left, *small))
        if not sites:
            return graph
        stands, changed = _stands(lowerable, lifted.graph, example)
    rewriting = Rewriting(graph, lifted.graph, stands)
    made = rewriting.run()
    gone = remove_dead(made, rewriting.replaced, {rewriting.nodes[node] for node in changed})
    made.graph.lint()
    made.recompile()
    copies = {place for place, node in enumerate(lowerable.places) if node in changed}
    _check(*(Whole(whole, lowerable, example, copies) for whole in (graph, made)))
    _keep_to(lowerable, lifted.graph, gone)
    return made


@contextlib.contextmanager
def _plainly(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Without gradients, autocast, and what Dynamo knows of its own trace."""
    with _without_autocast(tensors), tracing(None), torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in {x.device.type for x in tensors}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _stands(
    lowerable: Lowerable, lifted: GraphModule, example: Sequence[Tensor]
) -> tuple[dict[Node, Node], set[Node]]:
    """The nodes of Dynamo's graph by those of the lifted graph that hold the same numbers, and those that
    are changed in place, for which nothing stands."""
    nodes = list(lowerable.graphs[0].graph.nodes)
    inputs = _inputs(lifted)
    places = {node: node.meta.get("custom", {}).get(NUMBER) for node in lifted.graph.nodes}
    last = {nodes[place]: node for node, place in places.items() if place is not None}
    ours, theirs = Noted(last.keys()), Noted({*last.values()})
    lowerable.run([x.clone() for x in example], ours)
    storages = {_storage(node) for node in ours.changed}
    changed = {node for node in nodes if _storage(node) is not None and _storage(node) in storages}
    Noting(lifted, theirs).run([*example])
    stands = {new: old for old, new in zip(lowerable.places, inputs, strict=True)}
    for old, new in last.items():
        digests = ours.digests.get(old), theirs.digests.get(new)
        if digests[0] is not None and digests[1] is not None and _alike(digests[0], digests[1]):
            stands[new] = old
    return {new: old for new, old in stands.items() if old not in changed}, changed


def _storage(node: Node) -> Any:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _check(theirs: Whole, ours: Whole) -> None:
    """Raises Left where outputs, or gradients that are asked for, are not those of the graph."""
    values = [_value(node) for node in theirs.graph.nodes if isinstance(_value(node), Tensor)]
    trained = [theirs.others[1][place] for place in theirs.trained]
    with tracing(None), torch.inference_mode(False), torch.no_grad():
        error = largest_difference(theirs(*trained), ours(*trained))
    if not error <= (SAME_HALF if any(x.dtype in HALVES for x in values) else SAME):
        raise Left(f"with operators its outputs are others, by {error:.2g}")
    outputs = [_value(node) for node in _outputs(theirs) if isinstance(node, Node)]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in outputs):
        program = Program("", ours, (), {}, None)  # type: ignore[arg-type]
        theirs.exact = ours.exact = True  # what autocast rounds is no difference of gradients
        with _without_autocast(trained), tracing(None):
            why = no_gradient(theirs, [program], Batch(tuple(trained), {}, None, []), ())
        if why is not None:
            raise Left(why)


def _keep_to(lowerable: Lowerable, lifted: GraphModule, gone: Sequence[Node]) -> None:
    """Let Dynamo guard the sizes that the lowered graph holds for, and the numbers that the nodes that
    are gone computed with."""
    for old, new in zip(lowerable.places, _inputs(lifted), strict=True):
        for size, traced in zip(_value(old).shape, new.meta["val"].shape, strict=True):
            low, high = _limits(traced)
            if not ((low <= 2 or size >= low) and (high >= MOST or size <= high)):
                raise Left(f"what was identified holds for sizes from {low} to {high}")
    numbers = [_value(source) for node in gone for source in node.all_input_nodes]
    for number in numbers:
        if isinstance(number, torch.SymFloat):
            float(number)
        elif isinstance(number, torch.SymInt) and not number.node.expr.free_symbols <= {*lowerable.sizes}:
            int(number)


@dataclass
class Facts:
    """What became of one of Dynamo's graphs.

    sites: operators now, by the modules that they are in; left: loops that stay the model's own code.
    reason: why all of it does.
    """

    inner: str
    sites: tuple[Site, ...] = ()
    left: tuple[LeftAlone, ...] = ()
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner,
            "sites": [
                {"name": x.name, "replay_error": x.replay_error, "convention": x.convention.to_json()}
                for x in self.sites
            ],
            "left": [{"name": x.name, "reason": x.reason} for x in self.left],
            "reason": self.reason,
        }

    def lines(self) -> Iterator[str]:
        from asapc.report.tables import convention_text

        for site in self.sites:
            convention = site.convention.to_json()
            yield f"  {site.name}: asapc::{convention['operator']}, {convention_text(convention)}"
        for left in self.left:
            yield f"  {left.name}: left as it is: {left.reason}"
        if self.reason is not None:
            yield f"  all of it is left as it is: {self.reason}"
        elif not self.sites and not self.left:
            yield "  no loop of rows and columns, and no attention"


@dataclass(frozen=True)
class Explanation:
    """What the backend did with every graph that Dynamo has given it, in the order of the calls."""

    graphs: tuple[Facts, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"graphs": [facts.to_dict() for facts in self.graphs]}

    def __str__(self) -> str:
        if not self.graphs:
            return 'no graph: compile with torch.compile(model, backend="asapc") and call it first'
        blocks = [
            "\n".join([f"graph {number}, compiled by {facts.inner}", *facts.lines()])
            for number, facts in enumerate(self.graphs, 1)
        ]
        return "\n".join(blocks)

    __repr__ = __str__


@dataclass(frozen=True)
class _Seen:
    """tensors: that the graph was given; kinds: of the modules that its code is in."""

    facts: Facts
    tensors: tuple[weakref.ref[Tensor], ...]
    kinds: frozenset[type]


_SEEN: dict[Any, _Seen] = {}  # by Dynamo's number of the compilation, which it may begin anew


def explain(model: nn.Module | None = None) -> Explanation:
    """What torch.compile(model, backend="asapc") made of a model that was called, or of all models.

    model: the module, or what torch.compile returned. Print it, or take its to_dict().
    """
    if model is None:
        return Explanation(tuple(seen.facts for seen in _SEEN.values()))
    model = uncompiled(model)
    weights = {id(x) for x in (*model.parameters(), *model.buffers())}
    kinds = {type(module) for module in model.modules()}

    def belongs(seen: _Seen) -> bool:
        alive = [x for x in (ref() for ref in seen.tensors) if x is not None]
        if any(isinstance(x, nn.Parameter) for x in alive) or weights:
            return any(id(x) in weights for x in alive)
        return bool(seen.kinds & kinds)

    return Explanation(tuple(seen.facts for seen in _SEEN.values() if belongs(seen)))


def backend(
    graph: GraphModule, inputs: Sequence[Any], *, mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """What torch.compile(model, backend="asapc", options={"inner": "eager"}) calls with every graph.

    options: "inner" compiles the result, "inductor" unless told; the others are Inductor's.
    """
    others = dict(options or {})
    inner = str(others.pop("inner", "inductor"))
    facts = Facts(inner)
    made = _made(graph, inputs, facts)
    stacks = [(node.meta.get("nn_module_stack") or {}).values() for node in graph.graph.nodes]
    kinds = frozenset(kind for stack in stacks for _, kind in stack if isinstance(kind, type))
    tensors = tuple(weakref.ref(x) for x in inputs if isinstance(x, Tensor))
    number = CompileContext.current_compile_id() or object()
    _SEEN.pop(number, None)
    _SEEN[number] = _Seen(facts, tensors, kinds)
    if inner != "inductor":
        return torch._dynamo.lookup_backend(inner)(made, list(inputs))
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    try:
        return torch._TorchCompileInductorWrapper(mode, others, None)(made, list(inputs))
    except InductorError as error:
        if not isinstance(error.inner_exception, InvalidCxxCompiler):
            raise
        raise InputError(
            "Inductor needs a C++ compiler", got=reason(error),
            help='install g++, or torch.compile(model, backend="asapc", options={"inner": "eager"})',
        ) from error  # fmt: skip


def _made(graph: GraphModule, inputs: Sequence[Any], facts: Facts) -> GraphModule:
    """The rewritten graph, or the graph itself: whatever goes wrong, the model runs as without us."""
    try:
        made = rewritten(graph, inputs, facts)
    except Exception as error:
        facts.sites, facts.reason, made = (), reason(error).partition(" While executing %")[0], graph
        if not isinstance(error, Left):
            debug = LOG.isEnabledFor(logging.DEBUG)
            kind = type(error).__name__
            LOG.warning("asapc: a graph is left as it is: %s: %s", kind, facts.reason, exc_info=debug)
            return graph
    LOG.info("asapc: a graph for %s\n%s", facts.inner, "\n".join(facts.lines()))
    return made
