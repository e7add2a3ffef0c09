"""Gradients: what sites hold of a model's weights, and its derivatives against those of its rewrite.

A graph has lost what the code says of gradients: no_grad, a backward of its own. So the model itself is
differentiated with a random cotangent, of three sizes since a backward may clip, with respect to its
weights and its inputs. Where the lossless rewrite has other gradients it is for inference only.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Node

from asapc.formats.limits import fixed_size, limits, limits_of
from asapc.inputs.data import Batch
from asapc.ir import Program
from asapc.measure.differences import tensor_outputs
from asapc.passes.cut import ancestors, holds_tensors, reached
from asapc.passes.experiment import one_thread
from asapc.passes.first_call import copied
from asapc.passes.site import Site
from asapc.program.code import traced_places, under
from asapc.program.runner import installed
from asapc.terminal.printed import reason

TOLERANCE = 1e-4  # of a gradient, relative to its largest entry
NUDGED = 30  # times what rounding errors of the weights and inputs make of it, which are allowed as well,
MOST = 1e-2  # but never more than this
SHARPER = 2.0  # times the weights and inputs, in float64, where what a loop hides from gradients shows
ROUNDING = 2e-5  # of the largest entry of all gradients, below which a difference may be rounding
SIZES = (1.0, 1e-3, 1e3)  # of the cotangent; in half precision, the first
HALVES = 50.0  # times as much, of a model in half precision
ENOUGH_BYTES = 1 << 27  # that one backward pass keeps, where shorter examples are there
MOST_BYTES = 1 << 31  # that it may keep
EXAMPLES = 2
FLIPPED = 0.2  # of a mask that is the same everywhere
Gradients = Mapping[str, Tensor | None]


def held_by(program: Program, lifted: Program, sites: Sequence[Site]) -> dict[str, dict[str, str]]:
    """The weights whose values each site holds as constants: parameter or buffer, by name.

    Names are those in the model. They enter its part of the graph, and not as an input of it, which its
    call is given. What a rewrite has left out is held by somebody: where no part has it, by all of them.
    A copy of the captured graph has the tensors that are no weights as buffers, too: those are state.
    """
    captured = program.untouched.graph
    kinds = {name: "parameter" for name, _ in captured.named_parameters(remove_duplicate=False)}
    kinds |= {name: "buffer" for name, _ in captured.named_buffers(remove_duplicate=False)}
    prefix = f"{program.name}." if program.name else ""
    read = _weights(ancestors(program.graph.graph.output_node()))
    left = read - _weights(ancestors(lifted.graph.graph.output_node()))
    parts = [site.part() for site in sites]
    within = [_weights(_above(part.output, part.inputs)) for part in parts]
    nobodys = left - {name for names in within for name in names}
    return {
        site.name: {prefix + name: kinds[name] for name in sorted(names | nobodys) if name in kinds}
        for site, names in zip(sites, within, strict=True)
    }


def masks_of(program: Program, sites: Sequence[Site]) -> set[str]:
    """The inputs that reach the outputs only as masks, as _gradients calls them: nobody needs a gradient
    of what hides tokens, and an operator that is told which are hidden has none."""
    masks = {node for site in sites for node, _ in site.part().masks}
    read = reached([program.graph.graph.output_node()], lambda node: [
        x for x in node.all_input_nodes if x not in masks and holds_tensors(x)])  # fmt: skip
    inputs = [place for place in traced_places(program.graph) if place.meta["val"].is_floating_point()]
    return {f"input {number}" for number, place in enumerate(inputs) if place.users and place not in read}


def _weights(nodes: set[Node]) -> set[str]:
    return {str(node.target) for node in nodes if node.op == "get_attr"}


def _above(output: Node, inputs: Container[Node]) -> set[Node]:
    """The nodes that an output is computed from, up to the inputs."""
    return reached([output], lambda node: [x for x in node.all_input_nodes if x not in inputs])


@one_thread()
def no_gradient(
    model: nn.Module, lifted: Sequence[Program], batch: Batch, held: Iterable[str],
    by_dtype: bool = False,
) -> str | None:  # fmt: skip
    """Why the rewrite of a model has other gradients than it, None where it has the same.

    held: constants of the rewrite among the weights, and masks among the inputs; it has no gradient of
    them.  by_dtype: whether the model's code asks for dtypes: it may compute something else in float64.
    """
    few = _few(batch, lifted)
    size = _kept_bytes(lifted) * len(few) / max(1, len(batch))
    if size > ENOUGH_BYTES:
        shorter = _shorter(few, lifted[0], math.ceil(math.sqrt(size / ENOUGH_BYTES)))
        if shorter is not None and not lifted[0].name:
            few = shorter
        elif size > MOST_BYTES:
            return f"its gradient takes {size / 2**30:.0f} GiB on the example, and was not compared"
    model = copied(model)  # code may keep what it computes with gradients alone
    graphs: dict[str, nn.Module] = {program.name: program.graph for program in lifted}
    alone, parts = graphs.get("", model), {} if "" in graphs else graphs
    first = {id(weight): name for name, weight in model.named_parameters()}
    names = {name: first[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False)}
    held = {names.get(name, name) for name in held}
    gradients = functools.partial(_gradients, batch=few, known_as=names)

    try:
        theirs = gradients(model, {})
    except Exception as error:  # the user's code, which may have no gradient at all
        return f"its own gradient fails: {type(error).__name__}: {reason(error, 80)}"
    if theirs is None:
        return "its own outputs have no gradient"
    try:
        ours = gradients(alone, parts) or [{}] * len(theirs)
    except (RuntimeError, NotImplementedError) as error:  # an operator without a gradient
        return f"the compiled code has no gradient: {reason(error, 80)}"
    if _first_difference(theirs, ours, theirs, held) is not None:
        nudged = gradients(model, {}, nudge=True) or theirs
        return _first_difference(theirs, ours, nudged, held)
    if by_dtype or any(program.stops for program in lifted):
        return None
    try:
        theirs = gradients(model, {}, sharper=True, held=held) or []
        ours = gradients(alone, parts, sharper=True, held=held) or []
    except Exception:  # code that takes no float64, or another way with such weights
        return None
    return _first_difference(theirs, ours, theirs, held) if len(theirs) == len(ours) else None


def lively(x: Tensor) -> Tensor:
    """Other numbers where all are the same: nothing shows behind weights that begin at zero, or behind
    a mask that hides nothing yet."""
    if not x.numel() or not bool((x == x.flatten()[0]).all()):
        return x
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    one = float(x.detach().flatten()[0])
    is_mask = x.dtype is torch.bool or (one == 1 and x.dim() > 1 and not isinstance(x, nn.Parameter))
    if is_mask and x.dim():
        flipped = noise < FLIPPED
        flipped[..., 0] = False
        return torch.where(flipped, 1 - one, x).to(x.dtype)
    if not x.is_floating_point():
        return x
    made = x * (1 + noise / 4) if one else (2 * noise - 1) / math.sqrt(x.shape[-1] if x.dim() else 1)
    return made.to(x.dtype)


def _few(batch: Batch, programs: Sequence[Program]) -> Batch:
    """The first examples, as few as the programs take: a loop over examples holds for their number."""
    places = [place for program in programs for place in traced_places(program.graph)]
    least = [limits(place.meta["val"].shape[0])[0] for place in places if place.meta["val"].dim()]
    count = max([EXAMPLES, *(number for number in least if number <= len(batch))])

    few = batch.mapped(lambda x: x[:count] if x.dim() and len(x) == len(batch) else x)
    return replace(few, hashes=batch.hashes[:count])


def _shorter(batch: Batch, program: Program, by: int) -> Batch | None:
    """With lengths that are free divided; None where no length is, or where one follows from another.
    What is left lies evenly: of the first tokens alone, all may be padding."""
    leaves = batch.leaves
    places = iter(traced_places(program.graph))
    cut = False
    for number, x in enumerate(leaves):
        place = next(places, None) if isinstance(x, Tensor) else None
        for axis, size in enumerate(place.meta["val"].shape if place is not None else ()):
            if axis and isinstance(size, torch.SymInt) and fixed_size(size) is None:
                if not size.node.expr.is_Symbol:
                    return None
                least = limits_of(size.node.shape_env, size.node.expr)[0]
                whole = leaves[number].shape[axis]
                kept = torch.linspace(0, whole - 1, max(2, least, whole // by), device=x.device)
                leaves[number] = leaves[number].index_select(axis, kept.long())
                cut = True
    return batch.with_leaves(leaves) if cut else None


def _kept_bytes(programs: Sequence[Program]) -> int:
    """About what the model's own backward pass keeps of the example."""
    total = 0
    for program in programs:
        for node in program.untouched.graph.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor):
                size = 1
                for n in value.shape:
                    size *= (n.node.hint or 1) if isinstance(n, torch.SymInt) else n  # None of data
                total += size * value.element_size()
    return total


def _gradients(
    caller: nn.Module, graphs: Mapping[str, nn.Module], batch: Batch, known_as: Mapping[str, str],
    nudge: bool = False, sharper: bool = False, held: Container[str] = (),
) -> list[Gradients] | None:  # fmt: skip
    """Of a random combination of the outputs, by weight and number of the input, for cotangents of each
    of the sizes; None where no output has any.  The caller's own tensors are left as they are.  graphs:
    put in place of its modules.  known_as: a weight's first name by all of its names, of which programs
    have only some.  nudge: whether weights and inputs are first rounded elsewhere.  sharper: whether
    inputs, and matrices among the weights that are not held, are first multiplied by SHARPER; weights
    that are all the same, and inputs of ones, are made lively."""
    signs = torch.Generator().manual_seed(1)

    def widened(x: Tensor) -> Tensor:
        return x.to(torch.float64, copy=True) if sharper and x.is_floating_point() else x.clone()

    def leaf_like(x: Tensor, fixed: bool = False) -> Tensor:
        leaf = widened(x.detach())
        if sharper and not fixed and leaf.is_floating_point():
            leaf *= SHARPER
        if nudge and leaf.is_floating_point():
            up = torch.randint(2, leaf.shape, generator=signs).to(leaf) - 0.5
            leaf = leaf * (1 + 2 * torch.finfo(leaf.dtype).eps * up)
        return leaf.requires_grad_(leaf.is_floating_point())

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        leaves: dict[int, Tensor] = {}
        names: dict[str, Tensor] = {}
        for name, weight in caller.named_parameters(remove_duplicate=False):
            if id(weight) not in leaves:
                is_held = known_as.get(name, name) in held
                known = weight if not sharper or is_held else lively(weight)
                leaves[id(weight)] = leaf_like(known, fixed=weight.dim() < 2 or is_held)
            names[name] = leaves[id(weight)]
        for name, buffer in caller.named_buffers(remove_duplicate=False):
            names[name] = widened(buffer)
        stack.enter_context(installed(caller, {
            name: functools.partial(_called_with, graph, under(names, f"{name}."))
            for name, graph in graphs.items()
        }))  # fmt: skip
        inputs: dict[str, Tensor] = {}

        def leaf_of(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            hides_nothing = sharper and x.dim() > 1 and bool((x == 1).all())
            return inputs.setdefault(f"input {len(inputs)}", leaf_like(lively(x) if hides_nothing else x))

        call = batch.mapped(leaf_of)
        wanted = {known_as.get(name, name): x for name, x in names.items() if x.requires_grad} | inputs
        outputs = tensor_outputs(_called_with(caller, names, *call.args, **call.kwargs))
        outputs = [x for x in outputs if x.requires_grad]
        if not outputs or not wanted:
            return None
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
        halves = any(x.dtype in (torch.float16, torch.bfloat16) for x in wanted.values())
        sizes = SIZES[:1] if halves else SIZES
        by_size = [
            torch.autograd.grad(
                outputs, list(wanted.values()), [size * x for x in cotangents],
                allow_unused=True, retain_graph=size != sizes[-1],
            )
            for size in sizes
        ]  # fmt: skip
    return [dict(zip(wanted, grads, strict=True)) for grads in by_size]


def _called_with(module: nn.Module, tensors: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
    """A model or a program on these weights, as far as it has them.  A layer in two places is given them
    in the first alone: torch would leave it with those that it was given there."""
    places = (
        name for path, part in module.named_modules()
        for named in (part.named_parameters, part.named_buffers)
        for name, _ in named(path, recurse=False, remove_duplicate=False)
    )  # fmt: skip
    weights = {name: tensors[name] for name in places if name in tensors}
    return functional_call(module, weights, args, kwargs, tie_weights=False)


def _first_difference(
    theirs: Sequence[Gradients], ours: Sequence[Gradients], nudged: Sequence[Gradients],
    held: Container[str],
) -> str | None:  # fmt: skip
    sizes = zip(theirs, ours, nudged, strict=True)
    return next(filter(None, (_difference(*gradients, held) for gradients in sizes)), None)


def _difference(
    theirs: Gradients, ours: Gradients, nudged: Gradients, held: Container[str]
) -> str | None:
    """The gradient that differs most, in words.  What is not finite in the model is left out."""
    finite = {
        name: grad for name, grad in theirs.items()
        if name not in held and grad is not None and bool(grad.isfinite().all())
    }  # fmt: skip
    largest = max((float(grad.abs().max()) for grad in finite.values() if grad.numel()), default=0.0)
    worst, where = 0.0, ""
    for name in sorted(theirs.keys() | ours.keys()):
        if name in held or (theirs.get(name) is not None and name not in finite):
            continue
        known = [grad for grad in (finite.get(name), ours.get(name)) if grad is not None]
        if not known or not known[0].numel():
            continue
        factor = HALVES if known[0].dtype in (torch.float16, torch.bfloat16) else 1.0
        size = max(float(grad.abs().max()) for grad in known)
        error = _apart(finite.get(name), ours.get(name))
        rounding = NUDGED * _apart(finite.get(name), nudged.get(name))
        allowed = min(factor * TOLERANCE * size + rounding, factor * MOST * size)
        allowed += factor * ROUNDING * largest
        if not error <= allowed and error / size > worst:
            worst, where = error / size, name
    return f"its own gradient differs: that of {where} by {worst:.2g}" if where else None


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two gradients, of which one that is not there is 0."""
    known = [grad.double() for grad in (one, other) if grad is not None]
    return float((known[0] - known[-1] if len(known) == 2 else known[0]).abs().max()) if known else 0.0
