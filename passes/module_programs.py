"""Module programs: what one module of a captured model computes, cut out of the model's program.

before: the program of a model, its sites, and the calls of its modules (asapc.passes.observe)
after:  a program of the smallest module around each site, its inputs and outputs those of the module's
        call, its weights named as in the module, its layers marked (asapc::child)

What a module computes is what its outputs depend on, back to its inputs. Where that reaches further, to
what the module was given other than by its arguments, or where something inside it is read outside, the
module around it is taken instead, and in the end the captured model itself. A module that is called more
than once has one forward for all its calls, and one that is called differently when the model is not
traced would not run it: they are left to the module around them, too.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules.dropout import _DropoutNd

from asapc.ir import ModuleCall, Program
from asapc.measure.differences import largest_difference
from asapc.passes.branches import HOLDS
from asapc.passes.capture import size_hint
from asapc.passes.cut import ancestors, depends_on_data, holds_tensors, moved_nodes, reaches, recorded
from asapc.passes.decisions import CASTS
from asapc.passes.lift import lift
from asapc.passes.observe import EagerCall, gives_its_input, is_within
from asapc.passes.plan.hidden import may_hide, summed_in
from asapc.passes.plan.site import PlanSite
from asapc.passes.products import VIEWS
from asapc.passes.site import Site
from asapc.passes.state import Observed
from asapc.passes.verify import check_graph
from asapc.program.call import (
    Call,
    Child,
    Constant,
    Group,
    Leaf,
    Tree,
    Undescribable,
    described,
    known_of,
    parameters_of,
)
from asapc.program.code import tensors_of
from asapc.program.compiled import is_another_in_training, is_without_share

aten = torch.ops.aten
_OF_MAP = {  # what a map may go through before the values are multiplied by it
    *VIEWS, aten.transpose.int, aten.permute.default, aten.mT.default, aten.type_as.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.mul.Tensor, aten.div.Tensor,
    aten.mul.Scalar, aten.div.Scalar, aten.matmul.default, aten.bmm.default,
}  # fmt: skip
MASK_AXES = 4  # [B, 1 | H, 1 | N, M]
NEUTRAL = 1e-6  # relative difference of outputs without a mask, and with one that hides nothing
EagerCalls = Mapping[str, Sequence[EagerCall | None]]


@dataclass(frozen=True)
class ModuleProgram:
    """What one module computes, as the teacher has it.

    program:   its name is that of the module in the model.
    sites:     in it.
    children:  the calls of layers that are marked.
    constants: names of what it reads that the module does not have.
    modes:     paths of the modules in it that would compute something else in training mode, and are no
               longer called.  drops: of those that would drop entries of a map, which it does not have.
    """

    program: Program
    sites: Sequence[Site]
    call: Call
    children: tuple[Child, ...]
    constants: tuple[str, ...]
    modes: frozenset[str]
    drops: frozenset[str]


@dataclass(frozen=True)
class _Inside:
    """What a call computes: nodes in graph order, without its inputs.

    sizes: of the model, that are sizes of an input: (input, axis).
    """

    call: ModuleCall
    nodes: tuple[Node, ...]
    sizes: Mapping[Node, tuple[int, int]]
    known: frozenset[Node] = field(init=False)

    def __post_init__(self) -> None:
        known = frozenset((*self.nodes, *self.call.inputs, *self.sizes))
        object.__setattr__(self, "known", known)


def module_programs(
    model: nn.Module, program: Program, sites: Sequence[Site], eager: EagerCalls, observed: Observed,
    mapless: Collection[str] = (),
) -> tuple[list[ModuleProgram], dict[str, str]]:  # fmt: skip
    """The programs of the modules around the sites, and by site the reason where there is none.

    eager: what the model's modules are called with when it runs.  mapless: names of sites that will not
    have a map.
    """
    reader = _Reader(model, program, eager, observed)
    around = {site.name: reader.around(site, site.name in mapless) for site in sites}
    left = {name: why for name, why in around.items() if isinstance(why, str)}
    # Of two modules one inside the other the outer one holds the sites of both.
    insides = {inside.call.name: inside for inside in around.values() if isinstance(inside, _Inside)}
    held: dict[str, list[Site]] = {}
    for site in sites:
        inside = around[site.name]
        if isinstance(inside, _Inside):
            outermost = min((n for n in insides if is_within(inside.call.name, n)), key=len)
            held.setdefault(outermost, []).append(site)
    values = reader.values([insides[name] for name in held])
    made = []
    for name, its_sites in held.items():
        try:
            made.append(reader.cut(insides[name], its_sites, values))
        except Undescribable as problem:
            left |= {site.name: f"{name or 'the model'}: {problem}" for site in its_sites}
    return made, left


class _Reader:
    """One captured program, and the model that it was captured from."""

    def __init__(self, model: nn.Module, program: Program, eager: EagerCalls, observed: Observed) -> None:
        self.model, self.observed = model, observed
        self.eager = eager
        self.program = program
        self.nodes = list(program.graph.graph.nodes)
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.used = ancestors(*self.nodes[-1].all_input_nodes) | {self.nodes[-1]}  # of the outputs
        self.weights = tensors_of(model)
        self._insides: dict[int, _Inside | str] = {}
        self._counts = Counter(call.name for call in program.calls if not call.hooked)
        self._known: dict[int, Call] = {}  # by the identity of a ModuleCall of the program

    def around(self, site: Site, mapless: bool) -> _Inside | str:
        """The smallest module around a site that can be called by itself, or why there is none.

        mapless: the site will have no map, so that no module may give it.
        """
        if not self.program.calls:
            return "the model's own code is not at hand"
        needed = set(_nodes_of(site))
        last = max(needed, key=self.order.__getitem__)
        reason = "no module holds it"
        smallest: _Inside | None = None
        for number, call in enumerate(self.program.calls):  # inner calls come first
            if call.hooked or not call.start <= self.order[last] < call.end:
                continue
            writes = None in self.eager.get(self._full(call.name), ())
            inside = "writes into its inputs" if writes else self._inside(number)
            if isinstance(inside, str):
                reason = f"{call.name or 'the model'} {inside}"
            elif needed <= inside.known and last in inside.nodes:
                problem = self._differs(call)
                if problem is None and _takes_for_granted(site, call):
                    problem = "is given a constant of its loop, which may be another in other calls"
                if problem is None and isinstance(site, PlanSite) and _are_hidden_elsewhere(site, call):
                    problem = "is given scores that may hide tokens in other calls"
                if problem is None and mapless and self._gives_the_map(site, inside):
                    problem = "returns its attention map, which a convolution on the values leaves out"
                if problem is None and (smallest or not self._gives_unread_steps(site, call)):
                    return inside
                smallest = inside if problem is None else smallest
                reason = f"{call.name or 'the model'} {problem}"
            if smallest is not None and inside is not smallest:
                break  # the rest of the model is not taken for the sake of speed
        return smallest or reason

    def _gives_unread_steps(self, site: Site, call: ModuleCall) -> bool:
        """Whether a module returns duals of the loop that nothing outside reads. Its program would run
        the loop as written for them, beside the operator; in the module around it they are dead code."""
        part = site.part()
        return any(
            node in part.inside and node is not part.output
            and not any(self.order[user] >= call.end for user in node.users)
            for node in call.outputs
        )

    def _gives_the_map(self, site: Site, inside: _Inside) -> bool:
        """Whether a module gives the site's map, or what is made of it, where the model reads neither."""
        if site.takes_values:
            return False
        attention, mine = site.part().output, set(inside.nodes)
        read = {user for user in attention.users if user in mine}
        is_returned = attention in inside.call.outputs
        return not read <= self.used or (is_returned and not attention.users.keys() & (self.used - mine))

    def _differs(self, call: ModuleCall) -> str | None:
        """Why the module, when the model runs, is not called as it was in the trace."""
        if self._counts[call.name] > 1:
            return f"is called {self._counts[call.name]} times"
        name = self._full(call.name)
        calls = self.eager.get(name, ())
        if len(calls) != len(self.eager.get(self.program.name, ())):
            return f"is called {len(calls)} times where the model is not traced"
        for args, kwargs in filter(None, calls):
            try:
                problem = self._call(call).flat(args, kwargs)[1]
            except (Undescribable, TypeError) as error:
                problem = str(error)
            if problem is not None:
                return f"is called otherwise where it is not traced: {problem}"
        return None

    def _call(self, call: ModuleCall) -> Call:
        """How its module is called, when the model runs, too.  Raises Undescribable and TypeError."""
        if id(call) not in self._known:
            name = self._full(call.name)
            module = self.model.get_submodule(name)
            args, kwargs = next(filter(None, self.eager.get(name, ())), ((), {}))
            self._known[id(call)] = _with_neutral(module, _call_of(module, call), args, kwargs)
        return self._known[id(call)]

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.program.name, name) if part)

    def _inside(self, number: int) -> _Inside | str:
        """What a call computes, or why that is not known from its arguments."""
        if number not in self._insides:
            self._insides[number] = self._read(self.program.calls[number])
        return self._insides[number]

    def _read(self, call: ModuleCall) -> _Inside | str:
        inputs, outputs = set(call.inputs), set(call.outputs)
        axes: dict[str, tuple[int, int]] = {}
        for place, node in enumerate(call.inputs):
            for axis, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    axes.setdefault(str(size.node.expr), (place, axis))
        computed: set[Node] = set()
        sizes: dict[Node, tuple[int, int]] = {}
        stack = [node for node in call.outputs if node not in inputs]
        stack += [node for node in self.nodes[call.start : call.end] if node.target is HOLDS]
        while stack:
            node = stack.pop()
            if node in computed or node in sizes:
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and str(value.node.expr) in axes:
                sizes[node] = axes[str(value.node.expr)]
                continue
            if node.op == "placeholder":
                return f"reads {node.name} other than through its arguments"
            computed.add(node)
            stack.extend(n for n in node.all_input_nodes if n not in inputs)
        for node in self.nodes[call.start : call.end]:
            if node.op != "call_function" or not holds_tensors(node):
                continue  # sizes are shared by all of the trace
            if node not in outputs and any(
                not call.start <= self.order[user] < call.end for user in node.users
            ):
                return f"computes {node.name}, which is read outside and not returned"
        return _Inside(call, tuple(sorted(computed, key=self.order.__getitem__)), sizes)

    def values(self, insides: Sequence[_Inside]) -> dict[Node, Tensor]:
        """What the modules' inputs were on the example call."""
        wanted = {node for inside in insides for node in inside.call.inputs}
        call = (self.program.args, self.program.kwargs)
        return recorded(self.program.graph, wanted, call) if wanted else {}

    def cut(self, inside: _Inside, sites: Sequence[Site], values: Mapping[Node, Tensor]) -> ModuleProgram:
        """The module's program with its layers marked.  Raises Undescribable."""
        traced = inside.call
        name = self._full(traced.name)
        module = self.model.get_submodule(name)
        call = self._call(traced)
        graph, nodes = Graph(), dict[Node, Node]()
        attributes: dict[str, Tensor] = {}
        constants: list[str] = []
        for place, node in enumerate(traced.inputs):
            placeholder = graph.placeholder(f"input_{place}")
            placeholder.meta = dict(node.meta)
            nodes.setdefault(node, placeholder)
        placeholders = list(graph.nodes)
        for node, (place, axis) in inside.sizes.items():
            nodes[node] = graph.call_function(aten.sym_size.int, (placeholders[place], axis))
        for node in inside.nodes:
            if node.op == "get_attr":
                target, value = self._attribute(node, module)
                if target is None:
                    target = f"asapc_constant_{len(constants)}"
                    constants.append(target)
                attributes[target] = value
                nodes[node] = graph.get_attr(target)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
                nodes[node] = graph.create_node(node.op, node.target, args, kwargs)
        for node, new in nodes.items():
            new.meta = dict(node.meta)
        graph.output(tuple(nodes[node] for node in traced.outputs))
        made = GraphModule(dict(attributes), graph)
        program = Program(
            name, made, tuple(values[node] for node in traced.inputs), {},
            tuple(_axes(node) for node in traced.inputs),
        )  # fmt: skip
        rewritten = lift(program, [moved_nodes(site, nodes) for site in sites])
        kept = {node.name for node in rewritten.graph.graph.nodes}
        called: set[Node] = set()
        children = tuple(self._mark_layers(inside, nodes, kept, called))
        made.recompile()
        check_graph(made, "module_programs", [name])
        moved = [moved_nodes(site, nodes) for site in sites]
        of_maps = {node for site in sites for node in _after_loop(site)}
        active = [
            node for node in inside.nodes if is_another_in_training(node) and not is_without_share(node)
            and (node in of_maps or node not in called)
        ]  # fmt: skip  # a call on a map is dead code
        modes = {*self._homes(inside, (node for node in active if node not in of_maps))}
        drops = {*self._homes(inside, (node for node in active if node in of_maps))}
        places = [self.order[site.part().output] for site in sites]
        for path, on_map in self._dropping(inside, called, children, of_maps, places):
            (drops if on_map else modes).add(path)
        return ModuleProgram(
            program, moved, call, children, tuple(constants), frozenset(modes), frozenset(drops)
        )  # fmt: skip

    def _dropping(
        self, inside: _Inside, called: set[Node], children: Sequence[Child], of_maps: set[Node],
        places: Sequence[int],
    ) -> Iterator[tuple[str, bool]]:  # fmt: skip
        """Paths of dropout layers that are not called, and whether they are on a map.  A graph of
        evaluation mode may show none: code that writes in place leaves none, and their share may be
        changed.  And of torch's attention that is inlined without its dropout, in which there is no site.
        of_maps, places: nodes between loops and values, and where the sites' maps are."""
        for call in self.program.calls:
            module = self.model.get_submodule(self._full(call.name))
            path = call.name[len(inside.call.name) :].lstrip(".")
            on_map = not of_maps.isdisjoint(call.outputs)
            if not is_within(call.name, inside.call.name):
                continue
            if isinstance(module, _DropoutNd):
                if on_map or not any(is_within(path, child.name) for child in children):
                    yield path, on_map
            elif isinstance(module, nn.MultiheadAttention) and module.dropout and (
                called.isdisjoint(self.nodes[call.start : call.end])
                and not any(call.start <= place < call.end for place in places)
            ):
                yield path, False

    def _homes(self, inside: _Inside, nodes: Iterable[Node]) -> Iterator[str]:
        """Paths of the innermost modules whose code computes these in training mode, otherwise."""
        for node in nodes:
            place = self.order[node]
            name = next(call.name for call in self.program.calls if call.start <= place < call.end)
            yield name[len(inside.call.name) :].lstrip(".")

    def _attribute(self, node: Node, module: nn.Module) -> tuple[str | None, Tensor]:
        """What a node reads, with its name in the module; None for a constant of the trace."""
        value: Any = operator.attrgetter(str(node.target))(self.program.graph)
        if not isinstance(value, Tensor):
            raise Undescribable(f"reads {node.target}, which is not a tensor")
        full = self._full(str(node.target))
        theirs = self.weights.get(full)
        if theirs is None:
            return None, value
        for name, tensor in tensors_of(module).items():
            if tensor is theirs:
                return name, value
        raise Undescribable(f"reads {full}, a weight of another module")

    def _mark_layers(
        self, inside: _Inside, nodes: dict[Node, Node], kept: set[str], done: set[Node]
    ) -> Iterator[Child]:
        """Mark the outermost layers that are called with tensors and constants, in place.

        kept: names of what lifting leaves; a layer that runs a part of the loop is no longer called.
        nodes: what stands for a layer's output becomes what the mark gives.  done: what they compute, is
        added to.
        """
        outer = inside.call.name
        hooked = {call.name for call in self.program.calls if call.hooked}
        cast = [call.name for number, call in enumerate(self.program.calls) if self._is_cast(number)]
        count = 0
        for number in reversed(range(len(self.program.calls))):  # outer calls first
            call, layer = self.program.calls[number], self._inside(number)
            if call.name == outer or not is_within(call.name, outer) or isinstance(layer, str):
                continue
            if call.name in hooked and not call.hooked:
                continue  # a call of the layer runs its hooks, too
            if any(is_within(name, call.name) for name in cast):
                continue  # its call would not be under the autocast that the code around it switched on
            if self.observed.reads_what_is_set(self._full(call.name), self._full(outer), self.model):
                continue
            # A layer that gives what it was given: a later use could be of either.
            passed = [node for node in call.outputs if node in call.inputs or _is_ambiguous(node, call)]
            gives = bool(layer.nodes) and not passed
            computed = [node for node in layer.nodes if node.op == "call_function"]
            if not gives or not layer.known <= inside.known or done & set(computed):
                continue
            if any(nodes[node].name not in kept for node in computed):
                continue
            child = _child_of(call.name[len(outer) :].lstrip("."), call)
            if child is None:
                continue
            done.update(computed)
            _mark(call, nodes, {nodes[node] for node in computed}, str(count))
            count += 1
            yield child

    def _is_cast(self, number: int) -> bool:
        """Whether a layer of torch's computes in another dtype than its weights': under autocast."""
        call, layer = self.program.calls[number], self._inside(number)
        torchs = type(self.model.get_submodule(self._full(call.name))).__module__.startswith("torch.nn.")
        return torchs and not isinstance(layer, str) and any(
            source.op == "get_attr" and node.target in CASTS
            and node.meta["val"].dtype != source.meta["val"].dtype
            for node in layer.nodes for source in node.all_input_nodes
        )  # fmt: skip


def _takes_for_granted(site: Site, call: ModuleCall) -> bool:
    """Whether the site itself makes what the module is given: from a mask, or from sizes or weights
    alone, such as a mask that hides nothing where the model was given none."""
    part = site.part()
    outside = {x for inner in part.inside for x in inner.all_input_nodes} - {*part.inside, *part.inputs}
    constants = (node for node in outside if not depends_on_data(node))
    made = any(node in part.inside for node in call.inputs)
    return made or any(reaches(node, call.inputs.__contains__) for node in constants)


def _are_hidden_elsewhere(site: PlanSite, call: ModuleCall) -> bool:
    """Whether the module is given the scores of a loop that was only seen where they hide nothing."""
    if site.kernel or site.convention.stabiliser is not None:
        return False  # what is hidden is 0 there, in whatever order sums are taken
    scores = [site.start.node, *(node for node, _ in site.biases)]
    given = any(not summed_in(node).isdisjoint(call.inputs) for node in scores)
    return given and not any(map(may_hide, scores))


def _after_loop(site: Site) -> Iterator[Node]:
    """From the map that multiplies the values back to the loop's: nodes that nothing else reads."""
    part = site.part()
    node: Any = part.output
    while node in part.inside and (node is part.output or len(node.users) == 1):
        yield node
        if node.target not in _OF_MAP and "dropout" not in str(node.target):
            break
        node = node.args[0]


def _is_ambiguous(output: Node, call: ModuleCall) -> bool:
    """An input that the layer gave back as it was, which is read more than once."""
    source = output
    while gives_its_input(source):
        (source,) = source.all_input_nodes[:1]
    read: list[Node] = []
    for user in output.users:
        map_arg((user.args, user.kwargs), read.append)
    return source in call.inputs and read.count(output) > 1  # x + x reads twice


def _mark(call: ModuleCall, nodes: dict[Node, Node], inside: set[Node], number: str) -> None:
    """y = W x  ->  y = child([x], [W x], number)[0], for all that read it outside the layer."""
    inputs, outputs = ([nodes[node] for node in side] for side in (call.inputs, call.outputs))
    graph = outputs[0].graph
    after = max(outputs)
    with graph.inserting_after(after):
        marked = graph.call_function(torch.ops.asapc.child.default, (inputs, outputs, number))
    after = marked
    for index, (node, output) in enumerate(zip(call.outputs, outputs, strict=True)):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (marked, index))
        after.meta = dict(output.meta)
        output.replace_all_uses_with(
            after, delete_user_cb=lambda user: user is not marked and user not in inside
        )
        nodes[node] = after


def _call_of(module: nn.Module, call: ModuleCall) -> Call:
    tensors: list[Tensor] = []
    try:
        signature = inspect.signature(module.forward)
        parameters = parameters_of(signature, call.args, call.kwargs, tensors)
    except (TypeError, ValueError) as error:
        raise Undescribable(f"its call fits no signature: {error}") from error
    if len(tensors) != len(call.inputs):
        raise Undescribable("its arguments hold tensors where pytree sees none")
    results: list[Tensor] = []
    output = described(call.output, results, output=True)
    if len(results) != len(call.outputs):
        raise Undescribable("its outputs hold tensors where pytree sees none")
    first = [call.inputs.index(node) for node in call.inputs]
    same = [earlier if earlier < place else None for place, earlier in enumerate(first)]
    known, limits = known_of([node.meta["val"] for node in call.inputs], same)
    return Call(parameters, output, known, limits)


def _with_neutral(module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """With the masks that may be None, where the module does with None what it does with a mask that
    hides nothing: libraries leave a mask out where a batch has no padding.  args, kwargs: of a call."""
    for parameter in call.parameters:
        leaf = parameter.captured
        if not isinstance(leaf, Leaf) or parameter.kind.startswith("VAR"):
            continue
        like = call.tensors[leaf.index]
        if len(like.sizes) != MASK_AXES or like.kind not in ("bool", "float"):
            continue
        trial = dataclasses.replace(call, neutral=(*call.neutral, leaf.index))
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        outputs = []
        try:
            bound.arguments[parameter.name] = None
            filled = trial.flat(bound.args, bound.kwargs)[0][leaf.index]
            for mask in (None, filled):
                bound.arguments[parameter.name] = mask
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    outputs.append(module(*bound.args, **bound.kwargs))
            same = largest_difference(*outputs) <= NEUTRAL
        except Exception:  # of the module: it must have its mask
            same = False
        call = trial if same else call
    return call


def _child_of(name: str, call: ModuleCall) -> Child | None:
    """The call of a layer, None where it is given or gives more than tensors and constants."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    try:
        args = tuple(described(value, inputs) for value in call.args)
        kwargs = {key: described(value, inputs) for key, value in call.kwargs.items()}
        output = described(call.output, outputs)
    except Undescribable:
        return None
    if (len(inputs), len(outputs)) != (len(call.inputs), len(call.outputs)) or not outputs:
        return None
    if not all(_is_plain(tree) for tree in (*args, *kwargs.values(), output)):
        return None
    gives, _ = known_of([node.meta["val"] for node in call.outputs])
    return Child(name, args, kwargs, output, gives)


def _is_plain(tree: Tree) -> bool:
    if isinstance(tree, Group):
        return all(_is_plain(item) for item in tree.items)
    return isinstance(tree, Leaf | Constant)


def _axes(node: Node) -> dict[int, Any]:
    """For torch.export: free where the model's program has a free size."""
    return {axis: size_hint(size) or Dim.AUTO for axis, size in enumerate(node.meta["val"].shape)}


def _nodes_of(value: Any) -> Iterator[Node]:
    """Nodes that a site names; sets of what is inside it are left out."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from _nodes_of(getattr(value, entry.name))
