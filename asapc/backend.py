"""torch.compile(model, backend="asapc"): the finite loops in Dynamo's graphs become asapc's operators.

before: a graph of Dynamo's, of torch functions, with its guards
after:  the same graph, in which every loop that was identified is one operator call; the inner backend
        (Inductor by default) compiles it

The graph is lowered to ATen and identified there like a captured model: matched, and each site compared
with its own code on the inputs of this call and beyond. Weights are inputs of the graph; a site holds
those that it needs as numbers, which every call compares. The operators are then copied back: a node of
the lowered graph that was traced from one of Dynamo's, and holds the same numbers, stands for it. The
rest of Dynamo's graph stays as it was, with its mutations, random numbers, autocast and gradients.

What cannot be lowered, identified or copied back stays the model's own code, with the reason in
asapc.explain and in the log "asapc".
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import tracing
from torch.export import Dim
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils.weak import WeakIdKeyDictionary

from asapc import broken
from asapc.errors import InputError
from asapc.formats.limits import MOST, limits
from asapc.inputs.data import Batch
from asapc.inputs.weights import fingerprint
from asapc.ir import PlanConvention, Program
from asapc.measure.differences import largest_difference
from asapc.passes.analyse import LeftAlone, Site, judged
from asapc.passes.capture import export_graph, program_of
from asapc.passes.cut import HALVES, ancestors, evaluate
from asapc.passes.dynamo import (
    SAME,
    SAME_HALF,
    Exact,
    Left,
    Noting,
    Plain,
    alike,
    example_of,
    number_of,
    storage_of,
)
from asapc.passes.gradients import lively, no_gradient
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.plan.loops import find_loops
from asapc.passes.products import BARRIERS, SORTS
from asapc.passes.put_back import put_back
from asapc.passes.regions import Refusal
from asapc.passes.replay import replay
from asapc.passes.site import Site as MatchedSite
from asapc.program.constants import COMPARED, Compiled
from asapc.report.explained import Facts, broken_at, note
from asapc.terminal.printed import reason

LOG = logging.getLogger("asapc")
SILENCE = 15.0  # seconds without a message that nobody should have to wait
NUMBER = "asapc"  # in node.meta["custom"]: the index of Dynamo's node that it was traced from
LENGTHS = {4: (0, 2)}  # by the number of axes, which are batch and length; otherwise the first two
MOST_KNOWN = 64  # graphs for which the result is kept
# Updates of entries below which Inductor's fused loop is faster than a call, as measured: SMALL for
# attention, with its products, and plain scalings, SMALL_PLAN for loops over logarithms of given scores.
SMALL, SMALL_PLAN = 1 << 16, 1 << 15
FEW = 4  # numbers up to this are not taken for sizes

Judged = tuple[MatchedSite, Site]  # a site as it was matched, and as it was judged


@dataclass(frozen=True)
class Identified:
    """What is known about a lowered graph: its sites, what was left, whether more sites may be found if
    sizes are not free, since it has other loops or sorts, and the places of the inputs of what was
    refused."""

    program: Program
    sites: tuple[Judged, ...]
    left: tuple[LeftAlone, ...]
    may_have_more: bool
    refused_for: frozenset[int]


class Lowerable(nn.Module):
    """Dynamo's graph as a module that only takes tensors; sizes are read from them.

    widen: batch and length of data are free even if Dynamo has fixed them, and so are equal numbers in
    the graph. At the sizes of the example it is the same graph, so what is found in it holds there;
    experiments are small, and another batch is not identified again.
    held: by place, weights whose values are constants of what is lowered.
    """

    def __init__(self, graph: GraphModule, widen: bool, held: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.graphs = [graph]  # no child: its constants stay its own
        self.widen, self.held = widen, {*held} if held else set()
        for place, value in (held or {}).items():
            self.register_buffer(f"held_{place}", value.detach())
        self.inputs = _inputs(graph)
        tensors = [node for node in self.inputs if isinstance(example_of(node), Tensor)]
        self.places = [node for node in tensors if not _read(node)]
        self.shapes = [self._axes(node, widen) for node in self.places]
        self.sizes: dict[Any, tuple[int, int]] = {}  # where a symbol, or a number that is freed, is read
        for place, axes in enumerate(self.shapes):
            for axis, size in enumerate(example_of(self.places[place]).shape):
                name = size if isinstance(size, int) else size.node.expr
                if axes[axis] is Dim.AUTO:
                    self.sizes.setdefault(name, (place, axis))

    def _axes(self, node: Node, widen: bool) -> dict[int, Any]:
        """Which axes are free: those that Dynamo's guards leave open, and batch and length of data."""
        value = example_of(node)
        data = widen and not _is_weight(node)
        lengths = {axis for axis in LENGTHS.get(value.dim(), (0, 1)) if data and axis < value.dim()}

        return {
            axis: Dim.AUTO if not isinstance(x, int) or (axis in lengths and x > FEW) else Dim.STATIC
            for axis, x in enumerate(value.shape)
        }

    def forward(self, tensors: list[Tensor]) -> Any:  # one list: guards name what is in it
        values = [getattr(self, f"held_{i}") if i in self.held else x for i, x in enumerate(tensors)]
        return self.run(Plain(self.graphs[0]), values)

    def run(self, plain: Plain, tensors: Sequence[Tensor]) -> Any:
        """Run the graph; numbers in it that are sizes of data are read from the tensors."""
        plain.sizes = {
            size: tensors[place].shape[axis]
            for size, (place, axis) in self.sizes.items() if type(size) is int
        }
        return plain.run(*self.arguments(tensors))

    def example(self, inputs: Mapping[Node, Any]) -> list[Tensor]:
        """Copies of the tensors, which may be changed; weights are not copied."""
        tensors = [inputs[node] for node in self.places]
        return [
            x.detach().clone() if place in self.held
            else lively(x).detach() if isinstance(x, nn.Parameter) and not x.is_inference()
            else lively(x.detach() if x.is_inference() else x).detach().clone()
            for place, x in enumerate(tensors)
        ]  # fmt: skip

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments for Dynamo's graph."""
        rest = iter(tensors)
        return [self._argument(node, tensors, rest) for node in self.inputs]

    def named(self, text: str) -> str:
        """The text with the model's names of tensors instead of those of the lowered graph."""
        def name(number: re.Match[str]) -> str:
            path = str(self.places[int(number[1])].target).removeprefix("L_").rstrip("_")
            return re.sub("_(modules|parameters|buffers)_", ".", path)

        return re.sub(r"\btensors_(\d+)\b", name, text)

    def _argument(self, node: Node, tensors: Sequence[Tensor], rest: Iterator[Tensor]) -> Any:
        value = example_of(node)
        if _read(node):
            return torch.tensor(number_of(example_of(next(iter(node.users)))), dtype=value.dtype)
        if isinstance(value, Tensor):
            return next(rest)
        place = self.sizes.get(value.node.expr) if isinstance(value, torch.SymInt) else None
        return number_of(value) if place is None else tensors[place[0]].shape[place[1]]


def _inputs(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _is_weight(node: Node) -> bool:
    """Whether an input belongs to a module, by the name that Dynamo gives it."""
    return bool(re.match(r"L_self_|.*_(modules|parameters|buffers)_", str(node.target)))


def _read(node: Node) -> bool:
    """Whether it is a number of the model, such as an epsilon, that Dynamo has put into a tensor."""
    return bool(node.users) and all(user.target == "item" for user in node.users)


class Whole(nn.Module):
    """A graph of Dynamo's as it will run, called with those of its tensors that have gradients.

    example: all of its tensors.  changed: places of those that it changes; it is given copies of them.
    """

    def __init__(
        self, module: GraphModule, lowerable: Lowerable, example: Sequence[Tensor],
        changed: Collection[int],
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.changed = module, changed
        self.others = (lowerable, example)  # no children or buffers: they are not cast
        self.trained = [
            place for place, node in enumerate(lowerable.places) if example_of(node).requires_grad
        ]
        self.graph = module.graph
        self.exact = False

    def forward(self, *trained: Tensor) -> Any:
        lowerable, example = self.others
        if any(x.dtype is torch.float64 for x in trained):  # all of it is to be in double precision
            example = [x.double() if x.is_floating_point() else x for x in example]
        tensors = {**dict(enumerate(example)), **dict(zip(self.trained, trained, strict=True))}
        inputs = [x.clone() if place in self.changed else x for place, x in sorted(tensors.items())]
        with torch.random.fork_rng(devices=[]):
            return (Exact if self.exact else Interpreter)(self.module).run(*lowerable.arguments(inputs))


def identified(
    graph: GraphModule, inputs: Mapping[Node, Any], trains: bool
) -> tuple[Lowerable, Identified]:
    """Identify a graph of Dynamo's with free sizes, with its own if that may find more sites, and with
    small weights that enter what was refused as constants, unless somebody trains them."""
    best: tuple[Lowerable, Identified] | None = None
    for widen in (True, False):
        lowerable = Lowerable(graph, widen)
        try:
            known = _known(lowerable, lowerable.example(inputs))
        except Exception:  # of a graph that does not run at other sizes: at its own it says why
            if best is None and not widen:
                raise
            continue
        if best is None or len(known.sites) > len(best[1].sites):
            best = lowerable, known
        if not known.may_have_more:
            break
    assert best is not None
    lowerable, known = best
    entering = [(place, lowerable.places[place]) for place in known.refused_for]
    held = {
        place: inputs[node] for place, node in entering
        if _is_weight(node) and inputs[node].numel() <= COMPARED and inputs[node] not in _CHANGED
        and not (trains and inputs[node].requires_grad)
    }  # fmt: skip
    if held:
        lowerable = Lowerable(graph, lowerable.widen, held)
        with contextlib.suppress(Exception):  # as where the graph changes one in place
            with_constants = _known(lowerable, lowerable.example(inputs))
            best = (lowerable, with_constants) if len(with_constants.sites) > len(known.sites) else best
    return best


def _known(lowerable: Lowerable, tensors: Sequence[Tensor]) -> Identified:
    """Identify a graph, or look up a graph that is the same when it is lowered."""
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
    known = _KNOWN.pop(key, None) or _identify_aloud(program)
    _KNOWN[key] = known  # the last that was used
    while len(_KNOWN) > MOST_KNOWN:
        del _KNOWN[next(iter(_KNOWN))]
    return known


def _identify_aloud(program: Program) -> Identified:
    """Identify a program, with a line in the log if it takes long."""
    still = "asapc: still identifying the loops of a graph; this happens only once"
    notice = threading.Timer(SILENCE, LOG.warning, [still])
    notice.daemon = True
    notice.start()
    try:
        return _identify(program)
    finally:
        notice.cancel()


_KNOWN: dict[str, Identified] = {}
_CHANGED = WeakIdKeyDictionary()  # weights that were constants of a graph, and then had another value


def _key(program: Program) -> str:
    """A digest of all that a lowered graph computes."""
    lines = [fingerprint(program.constants)]
    for node in program.graph.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, Tensor):
            lines.append(f"{value.shape} {value.dtype} {value.device} {[*map(limits, value.shape)]}")
        lines.append(f"{node.format_node()} {node.meta.get('custom', {}).get(NUMBER)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _modules(node: Node) -> dict[str, tuple[str, Any]]:
    """The modules that a node of Dynamo's was traced in, by their names in the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", str(stack[-1][0])) if stack else ""
    return {"": (re.sub(r"\._modules\['(\w+)'\]", r".\1", name), None)}


def _identify(program: Program) -> Identified:
    program, outcomes = matched_program(program)
    matched = [x for x in outcomes if not isinstance(x, Refusal)]
    left = [LeftAlone(x.name, "refused", x.reason) for x in outcomes if isinstance(x, Refusal)]
    replays = replay(None, [program], [matched], [Batch(program.args, program.kwargs, None, [])])
    judgements = [(site, judged(site, replays[site.name])) for site in matched]
    sites = [(site, facts) for site, facts in judgements if isinstance(facts, Site)]
    kept = [facts for _, facts in judgements if isinstance(facts, LeftAlone)]
    at = {node.name: node for node in program.graph.graph.nodes}
    above = ancestors(*(at[x.node] for x in outcomes if isinstance(x, Refusal)), until=BARRIERS)
    above -= {node for site in matched for node in site.part().inside}
    loops = [loop.sums for loop in find_loops(program.graph) if above & {*loop.sums}]
    may_have_more = bool(kept or loops) or any(node.target in SORTS for node in above)
    above |= ancestors(*itertools.chain(*loops), until=BARRIERS)
    entering = {place for place, node in enumerate(_inputs(program.graph)) if node in above}
    program = replace(program, args=(), kwargs={}, captured=None)
    return Identified(program, tuple(sites), (*left, *kept), may_have_more, frozenset(entering))


def rewritten(
    graph: GraphModule, inputs: Sequence[Any], fuses: bool
) -> tuple[GraphModule, tuple[Site, ...], tuple[LeftAlone, ...], dict[int, Compiled]]:
    """Dynamo's graph with operators for the sites that were identified, those sites, what was left, and
    by the places of inputs what they must hold for that.

    fuses: whether small sites are faster without operators.  Raises Left if the graph stays as it is.
    """
    values = dict(zip(_inputs(graph), inputs, strict=True))
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not tensors:
        raise Left("it is given no tensors")
    trains = torch.is_grad_enabled()
    with torch.random.fork_rng(devices=[]), _plainly(tensors):
        lowerable, known = identified(graph, values, trains)
        example = lowerable.example(values)
    wanted, small = _worth(known, example) if fuses else ([*known.sites], [])
    made, sources, sites, others = _with_most(lowerable, known.program, wanted, example)
    _keep_to(lowerable, known.program.graph, sources)
    named = (replace(x, reason=lowerable.named(x.reason)) for x in (*known.left, *small, *others))
    places = {node: place for place, node in enumerate(_inputs(graph))}
    held = [lowerable.places[place] for place in lowerable.held if sites]
    return made, tuple(sites), tuple(named), {places[node]: Compiled(values[node]) for node in held}


def _worth(known: Identified, example: Sequence[Tensor]) -> tuple[list[Judged], list[LeftAlone]]:
    """The sites that are faster as operators, and the others: small loops."""
    sizes: dict[Any, int] = {}
    for node, tensor in zip(_inputs(known.program.graph), example, strict=True):
        traced = zip(node.meta["val"].shape, tensor.shape, strict=True)
        sizes |= {size.node.expr: n for size, n in traced if isinstance(size, torch.SymInt)}
    wanted: list[Judged] = []
    small: list[LeftAlone] = []
    for matched, site in known.sites:
        part, loop = matched.part(), matched.convention
        steps = getattr(loop, "half_steps", None)
        entries = math.prod(evaluate(size, sizes) for size in (part.batch, part.queries, part.keys))
        in_logs = isinstance(loop, PlanConvention) and loop.stabiliser is None and loop.damping is None
        least = SMALL_PLAN if in_logs else SMALL
        if steps is None or (count := steps * matched.heads * entries) >= least:
            wanted.append((matched, site))
        else:
            why = f"so small that Inductor's own code is faster: {count} updates"
            small.append(LeftAlone(site.name, "kept", why))
    return wanted, small


def _with_most(
    lowerable: Lowerable, program: Program, wanted: Sequence[Judged], example: Sequence[Tensor]
) -> tuple[GraphModule, set[Node], list[Site], list[LeftAlone]]:
    """The graph with all sites that leave its outputs and gradients as they are, the nodes that their own
    code was computed from, those sites, and the others. If all together fail, each is tried."""
    made, sources = lowerable.graphs[0], set[Node]()
    taken: list[Judged] = []
    left: list[LeftAlone] = []
    trials = [[pair] for pair in wanted] if len(wanted) < 2 else [[*wanted], *([x] for x in wanted)]
    for more in trials:
        try:
            made, sources = _with_operators(lowerable, program, [*taken, *more], example)
        except Left as error:
            if len(more) == 1:
                left.append(LeftAlone(more[0][1].name, "kept", str(error)))
            continue
        taken += more
        if len(more) == len(wanted):
            break
    return made, sources, [site for _, site in taken], left


def _with_operators(
    lowerable: Lowerable, program: Program, sites: Sequence[Judged], example: Sequence[Tensor]
) -> tuple[GraphModule, set[Node]]:
    """The graph with operators at all of these sites, and the nodes that their own code started from.

    Raises Left if its outputs or gradients would differ.
    """
    graph = lowerable.graphs[0]
    lifted = lift(program, [matched for matched, _ in sites]).graph
    with torch.random.fork_rng(devices=[]), _plainly(example):
        stands, changed = _stands(lowerable, lifted, example)
    made, sources = put_back(graph, lifted, stands, changed)
    copies = {place for place, node in enumerate(lowerable.places) if node in changed}
    _check(*(Whole(whole, lowerable, example, copies) for whole in (graph, made)))
    return made, sources


@contextlib.contextmanager
def _plainly(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run without gradients, autocast and Dynamo's own tracing context."""
    with _apart(tensors), tracing(None), torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _apart(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run without autocast, and unseen by a checkpoint around the call, which counts what is saved."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach))
        for device in {x.device.type for x in tensors}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _stands(
    lowerable: Lowerable, lifted: GraphModule, example: Sequence[Tensor]
) -> tuple[dict[Node, Node], set[Node]]:
    """The nodes of Dynamo's graph by nodes of the lifted graph that hold the same numbers, and the nodes
    that are changed in place, for which nothing stands."""
    nodes = list(lowerable.graphs[0].graph.nodes)
    inputs = _inputs(lifted)
    places = {node: node.meta.get("custom", {}).get(NUMBER) for node in lifted.graph.nodes}
    last = {nodes[place]: node for node, place in places.items() if place is not None}
    ours, theirs = Plain(lowerable.graphs[0], last.keys()), Noting(lifted, {*last.values()})
    lowerable.run(ours, [x.clone() for x in example])
    storages = {storage_of(node) for node in ours.changed} - {None}
    changed = {node for node in nodes if storage_of(node) in storages}
    theirs.run([*example])
    stands = {new: old for old, new in zip(lowerable.places, inputs, strict=True)}
    for old, new in last.items():
        digests = ours.digests.get(old), theirs.digests.get(new)
        if digests[0] is not None and digests[1] is not None and alike(digests[0], digests[1]):
            stands[new] = old
    return {new: old for new, old in stands.items() if old not in changed}, changed


def _check(theirs: Whole, ours: Whole) -> None:
    """Raises Left if outputs, or gradients that may be needed, are not those of the graph."""
    values = [example_of(node) for node in theirs.graph.nodes if isinstance(example_of(node), Tensor)]
    trained = [theirs.others[1][place] for place in theirs.trained]
    with tracing(None), torch.inference_mode(False), torch.no_grad():
        error = largest_difference(theirs(*trained), ours(*trained))
    if not error <= (SAME_HALF if any(x.dtype in HALVES for x in values) else SAME):
        raise Left(f"with operators, its outputs differ by {error:.2g}")
    outputs = [example_of(node) for node in theirs.graph.output_node().all_input_nodes]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in outputs):
        program = Program("", ours, (), {}, None)  # type: ignore[arg-type]
        theirs.exact = ours.exact = True  # what autocast rounds is no difference of gradients
        with _apart(trained), tracing(None):
            why = no_gradient(theirs, [program], Batch(tuple(trained), {}, None, []), ())
        if why is not None:
            raise Left(why)


def _keep_to(lowerable: Lowerable, lowered: GraphModule, sources: Collection[Node]) -> None:
    """Let Dynamo guard the sources' sizes, for which the lowered graph holds, and the numbers among them,
    which operators hold as constants: at other sizes the graph runs its own code."""
    known = [example_of(node) for node in sources]
    sizes = [size for value in known for size in (value.shape if isinstance(value, Tensor) else [value])]
    free = (size for size in sizes if isinstance(size, torch.SymInt))
    symbols = {symbol for size in free for symbol in size.node.expr.free_symbols}
    for old, new in zip(lowerable.places, _inputs(lowered), strict=True):
        for size, traced in zip(example_of(old).shape, new.meta["val"].shape, strict=True):
            if isinstance(size, torch.SymInt) and not symbols & size.node.expr.free_symbols:
                continue
            low, high = limits(traced)
            if not ((low <= 2 or size >= low) and (high >= MOST or size <= high)):
                raise Left(f"it was identified only for sizes from {low} to {high}")
    for number in known:
        if isinstance(number, torch.SymFloat):
            float(number)
        elif isinstance(number, torch.SymInt) and not number.node.expr.free_symbols <= {*lowerable.sizes}:
            int(number)


def backend(
    graph: GraphModule, inputs: Sequence[Any], *, mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph: torch.compile(model, backend="asapc", options={"inner": "eager"}) calls this.

    options: "inner" names the backend for the result, by default "inductor", which gets the others.
    """
    others = dict(options or {})
    inner = str(others.pop("inner", "inductor"))
    why = None
    try:
        again = _patched(graph, inputs, inner)
        if again is not None:
            return again
    except Exception as error:  # of capturing the model's code, which runs as it is
        why = reason(error)
    made, facts, held = _made(graph, inputs, inner)
    note(replace(facts, broken_for=why), graph, inputs)
    guarded = partial(_while_they_hold, graph, held)
    if inner != "inductor":
        return guarded(torch._dynamo.lookup_backend(inner)(made, list(inputs)))
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    try:
        return guarded(torch._TorchCompileInductorWrapper(mode, others, None)(made, list(inputs)))
    except InductorError as error:
        if not isinstance(error.inner_exception, InvalidCxxCompiler):
            raise
        raise InputError(
            "Inductor needs a C++ compiler", got=reason(error),
            help='install g++, or torch.compile(model, backend="asapc", options={"inner": "eager"})',
        ) from error  # fmt: skip


def _while_they_hold(
    graph: GraphModule, held: Mapping[int, Compiled], fast: Callable[..., Any]
) -> Callable[..., Any]:
    """The compiled graph while its inputs have the values that are constants in it. Then it is traced
    anew, without them."""
    if not held:
        return fast
    code = InstructionTranslator.current_tx().f_code

    def run(*given: Any) -> Any:
        other = [given[place] for place, value in held.items() if not value.is_of(given[place])]
        if not other:
            return fast(*given)
        _CHANGED.update(dict.fromkeys(other))
        torch._C._dynamo.eval_frame.reset_code(code)
        return graph(*given)

    return run


def _patched(graph: GraphModule, inputs: Sequence[Any], inner: str) -> Callable[..., Any] | None:
    """What runs once, where a loop that breaks the graph has been patched; see asapc.broken."""
    with torch.random.fork_rng(devices=[]), _plainly(x for x in inputs if isinstance(x, Tensor)):
        found = broken.patched(graph)
    if found is None:
        return None
    codes, model, analysis = found
    facts = Facts(inner, tuple(analysis.sites), tuple(analysis.left_alone))
    note(facts, graph, inputs, model)

    def run(*given: Any) -> Any:
        for code in codes:
            torch._C._dynamo.eval_frame.reset_code(code)
        return graph(*given)

    return run


def _made(
    graph: GraphModule, inputs: Sequence[Any], inner: str
) -> tuple[GraphModule, Facts, dict[int, Compiled]]:
    """The rewritten graph, or the graph itself: whatever goes wrong, the model runs as without asapc;
    and what its inputs must hold."""
    try:
        made, sites, left, held = rewritten(graph, inputs, inner == "inductor")
        facts = Facts(inner, sites, left, broken_at=broken_at(graph))
    except Exception as error:
        text = reason(error).partition(" While executing %")[0]
        made, facts, held = graph, Facts(inner, reason=text, broken_at=broken_at(graph)), {}
        if not isinstance(error, Left):
            debug = LOG.isEnabledFor(logging.DEBUG)
            kind = type(error).__name__
            LOG.warning("asapc: a graph is left as it is: %s: %s", kind, facts.reason, exc_info=debug)
            return made, facts, held
    LOG.info("asapc: a graph for %s\n%s", inner, "\n".join(facts.lines()))
    return made, facts, held
