"""Patches: compiled programs of single modules, to be put into a live model.

before: the teacher's program of each module (asapc.passes.module_programs) and one choice per site
after:  the same programs with the chosen operators, and the place of their tensors in the artefact
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from asapc.features.predictor import Amortised
from asapc.inputs.data import Batch, output_of, own
from asapc.ir import Distilled, Program
from asapc.passes.analyse import Analysis
from asapc.passes.bytecode import sets_items, stored_names
from asapc.passes.cut import walked
from asapc.passes.first_call import called, copied, unchanged
from asapc.passes.lift import lift
from asapc.passes.module_programs import ModuleProgram, module_programs
from asapc.passes.observe import Leave, eager_calls, entering, is_within, replaced_forwards
from asapc.passes.rewrite import Replacement, rewritten_programs
from asapc.passes.state import identical
from asapc.program.apply import beyond_map
from asapc.program.call import GRADIENTS, Call, Child, dtypes_of
from asapc.program.calls import Operands, operator_calls, sites_of
from asapc.program.compiled import Inside
from asapc.program.state import Steps, can_be_taken_away
from asapc.program.state import found as found_at

MOST_CELLS = 16  # that are tried one by one


@dataclass(frozen=True)
class CompiledModule:
    """A module of the model and its compiled program, in which the module's own layers are marked.

    sites:     the sites of its operator calls, in graph order.
    constants: tensors that the program reads and the module does not hold, by name.
    fitted:    for each tensor of its operators, by name: the number of the captured program that has the
               same tensor, and its name there.
    dtype:     dtype of the weights that the program was traced with.
    inside:    the modules whose code the program has.
    own_forward: whether the instance has a forward of its own.
    modes:     paths of those inside that compute something else in training mode.  drops: of those that
               drop entries of a map there.
    """

    program: Program
    call: Call
    children: tuple[Child, ...]
    sites: tuple[str, ...]
    constants: Mapping[str, Tensor]
    fitted: Mapping[str, tuple[int, str]]
    dtype: torch.dtype
    inside: tuple[Inside, ...]
    own_forward: bool
    modes: frozenset[str]
    drops: frozenset[str]


def compiled_modules(
    analysis: Analysis, becomes: Mapping[str, Replacement | None], compiled: Sequence[Program],
    example: Batch,
) -> tuple[list[CompiledModule], dict[str, str]]:  # fmt: skip
    """The modules of a live model whose forwards are replaced, and the reason for each site without one.

    becomes: as Analysis.rewritten takes it, which gave `compiled`.  Sites that keep the teacher's own
    code need no module.
    """
    if analysis.model is None:
        return [], {}
    call = own(example)
    eager = eager_calls(analysis.model, call.args, call.kwargs)
    modules: list[CompiledModule] = []
    left: dict[str, str] = {}
    teachers = {site for site, replacement in becomes.items() if replacement is None}
    mapless = {
        site for site, x in becomes.items() if not analysis.drop_maps
        and isinstance(x, Amortised | Distilled) and beyond_map(x)
    }  # fmt: skip
    for number, (part, whole) in enumerate(zip(analysis.parts, compiled, strict=True)):
        sites = [site for site in part.matched if site.name not in teachers]
        observed = analysis.capture.observed
        programs, why = module_programs(analysis.model, part.program, sites, eager, observed, mapless)
        left |= why
        modules += [_compiled(analysis, becomes, program, number, whole) for program in programs]
    return _with_insides(analysis, modules, example), left


def _compiled(
    analysis: Analysis, becomes: Mapping[str, Replacement | None], module: ModuleProgram, number: int,
    whole: Program,
) -> CompiledModule:  # fmt: skip
    """whole: the compiled program of this number, which has the same operators with the same tensors."""
    lossless = lift(module.program, module.sites, analysis.drop_maps)
    replacements = {site: x for site, x in becomes.items() if x is not None}
    (program,) = rewritten_programs([lossless], replacements)
    calls = {o.site: o for o in operator_calls(whole.graph)}
    fitted: dict[str, tuple[int, str]] = {}
    for operands in operator_calls(program.graph):
        pairs = zip(_tensors_of(operands), _tensors_of(calls[operands.site]), strict=True)
        fitted.update((mine.target, (number, theirs.target)) for mine, theirs in pairs)  # type: ignore[misc]
    for name, (_, theirs) in fitted.items():
        assert torch.equal(attrgetter(name)(program.graph), attrgetter(theirs)(whole.graph)), name
    constants = {name: attrgetter(name)(program.graph) for name in module.constants
                 if any(node.target == name for node in program.graph.graph.nodes)}  # fmt: skip
    assert analysis.model is not None
    live = analysis.model.get_submodule(program.name)
    weights = (*live.parameters(), *analysis.model.parameters())
    return CompiledModule(
        program, module.call, module.children, tuple(sites_of(program)), constants, fitted,
        dtype=next((x.dtype for x in weights if x.is_floating_point()), torch.float32),
        inside=(), own_forward="forward" in vars(live), modes=module.modes, drops=module.drops,
    )  # fmt: skip


def _with_insides(
    analysis: Analysis, compiled: Sequence[CompiledModule], example: Batch
) -> list[CompiledModule]:
    """Add what the modules inside are like when they are called, and what their code reads."""
    model, observed = analysis.model, analysis.capture.observed
    assert model is not None
    modes, drops = (
        {_joined(module.program.name, path) for module in compiled for path in getattr(module, kind)}
        for kind in ("modes", "drops")
    )
    paths = {
        module.program.name: _taken_over(model.get_submodule(module.program.name), module)
        for module in compiled
    }
    insides: dict[str, tuple[Inside, ...]] = {}

    def enter(name: str, *call: Any) -> Leave | None:
        if name not in paths or name in insides:
            return None
        modules = {path: model.get_submodule(name).get_submodule(path) for path in paths[name]}
        full = {path: _joined(name, path) for path in modules}
        before = {path: observed.stored(full[path], module) for path, module in modules.items()}
        flat = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
        insides[name] = tuple(
            replace(
                Inside.of(module, path, observed.guard(full[path], module, flat, full[path] in modes)),
                caches=tuple(observed.caches.get(module, ())), drops=full[path] in drops,
            )
            for path, module in modules.items()
        )

        def leave() -> None:
            insides[name] = tuple(
                replace(one, keeps=observed.kept(full[one.path], modules[one.path], before[one.path]))
                for one in insides[name]
            )

        return leave

    if compiled:
        with entering(model, enter), torch.no_grad():
            output_of(model, example)
    for name in insides:
        codes = observed.within(name).codes
        insides[name] = _without_set(model, name, insides[name], codes, example)
    calls = with_casts(model, {module.program.name: module.call for module in compiled}, example)
    return [
        replace(module, inside=insides[module.program.name], call=calls[module.program.name])
        for module in compiled
    ]


_Cell = tuple[Any, Any]  # a dict or list, and where in it


def _without_set(
    model: nn.Module, name: str, insides: Sequence[Inside], codes: Collection[CodeType], example: Batch
) -> tuple[Inside, ...]:
    """Do not guard what the module's code sets before it reads it: that is no state. Tensors that it
    leaves there belong to its last call, and are taken away.  codes: of the functions that ran in it."""
    module = model.get_submodule(name)
    stored, _ = stored_names(codes)
    kinds = {"attr"} if stored else set[str]()
    kinds |= {"key", "item"} if sets_items(codes) else set()
    ways: dict[tuple[int, Any], list[tuple[str, Steps]]] = {}
    cells: dict[tuple[int, Any], _Cell] = {}
    for one in insides:
        for steps, _ in one.reads.values:
            kind, last = steps[-1]
            cell = _cell(module.get_submodule(one.path), steps) if kind in kinds else None
            if cell is not None and (kind != "attr" or last in stored):
                cells[id(cell[0]), last] = cell
                ways.setdefault((id(cell[0]), last), []).append((one.path, steps))
    if not cells:
        return tuple(insides)
    is_set = partial(_are_set, model, name, example=example)
    alone = [
        key for key, (holder, last) in cells.items()
        if len(cells) <= MOST_CELLS or isinstance(holder[last], Tensor)
    ]  # fmt: skip
    set_first = [*cells] if is_set([*cells.values()]) else [
        key for key in alone[:MOST_CELLS] if is_set([cells[key]])]  # fmt: skip
    left = {way for key in set_first for way in ways[key]}
    kept = {ways[key][0] for key in set_first if isinstance(cells[key][0][cells[key][1]], Tensor)}
    return tuple(
        replace(
            one.without([steps for path, steps in left if path == one.path]),
            keeps=(*one.keeps, *(
                steps for path, steps in kept
                if path == one.path and steps not in one.keeps and can_be_taken_away(steps)
            )),
        )
        for one in insides
    )  # fmt: skip


def _cell(module: nn.Module, steps: Steps) -> _Cell | None:
    """Where the value at the end of these steps is, if that can hold another."""
    kind, last = steps[-1]
    holder = found_at(module, steps[:-1])
    holder = getattr(holder, "__dict__", None) if kind == "attr" else holder
    if type(holder) is list:
        return (holder, last) if kind == "item" else None
    return (holder, last) if isinstance(holder, dict) and last in holder else None


def _are_set(model: nn.Module, name: str, cells: Sequence[_Cell], example: Batch) -> bool:
    """Whether a module sets all of these before it reads them: the model gives the same where the module
    is entered with None there, and with what nothing can be done with."""
    unusable = object()
    held = [(holder, key, holder[key]) for holder, key in cells]

    def run(value: Any) -> Any:
        def enter(entered: str, *_: Any) -> Leave | None:
            if entered != name:
                return None
            for holder, key in cells:
                holder[key] = value

            def leave() -> None:
                if any(holder[key] is unusable for holder, key in cells):
                    raise LookupError("not set")  # what follows would tell nothing

            return leave

        with entering(model, enter), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return output_of(model, example)

    with unchanged(model):
        try:
            return identical(run(unusable), run(None))
        except Exception:  # of the model, which reads it, or does not set it
            return False
        finally:
            for holder, key, value in held:
                holder[key] = value


def with_casts(model: nn.Module, calls: Mapping[str, Call], example: Batch) -> dict[str, Call]:
    """Add the dtypes that modules return under autocast.  calls: by the names of modules."""
    device = next((x.device.type for x in pytree.tree_leaves((example.args, example.kwargs))
                   if isinstance(x, Tensor)), "cpu")  # fmt: skip
    casts: dict[str, dict[str, str]] = {}

    def around(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flat = calls[name].flat(args, kwargs)[0] if name in calls else []
        dtypes = dtypes_of(flat, device) if all(isinstance(x, Tensor) for x in flat) else ""
        output = forward(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        if dtypes and name in calls and calls[name].gives(len(tensors)):
            kinds, known = dtypes_of(tensors, device), casts.setdefault(name, {})
            if known.setdefault(dtypes, kinds) != kinds:
                known[dtypes + GRADIENTS] = kinds
        return output

    # A copy may keep what autocast makes of positions; what fails there has no dtypes.
    for grad in (False, True):  # in which torch's encoder layers give others
        with contextlib.suppress(Exception), torch.autocast(device), torch.set_grad_enabled(grad):
            other = copied(model)
            with replaced_forwards(other, around):
                called(other, example, {})
    return {name: replace(call, casts=casts.get(name)) for name, call in calls.items()}


def _joined(outer: str, path: str) -> str:
    return f"{outer}.{path}".strip(".")


def _taken_over(module: nn.Module, compiled: CompiledModule) -> list[str]:
    """Paths of the modules in it that the compiled program does not call, or not every time: of a module
    with a site at least one call is in the program."""
    prefix = f"{compiled.program.name}." if compiled.program.name else ""
    sites = [site.removeprefix(prefix).partition("#")[0] for site in compiled.sites]
    called = {
        child.name for child in compiled.children
        if child.name not in compiled.modes | compiled.drops
        and not any(is_within(site, child.name) for site in sites)
    }  # fmt: skip
    return [
        path for path, _ in module.named_modules(remove_duplicate=False)
        if not any(is_within(path, name) for name in called)
    ]  # fmt: skip


def _tensors_of(operands: Operands) -> list[Node]:
    """The get_attr nodes that a call's settings depend on, in an order independent of the graph's."""
    def onward(node: Node) -> list[Node]:
        return [x for x in reversed(node.all_input_nodes) if x not in stop]

    stop = {*operands.nodes.values()}
    starts = [x for x in pytree.tree_leaves([*operands.settings.values()]) if isinstance(x, Node)]
    above = walked([x for x in reversed(starts) if x not in stop], onward)
    return [node for node in above if node.op == "get_attr"]
