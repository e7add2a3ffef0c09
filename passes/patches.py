"""Patches: compiled programs of single modules, to be put into a live model.

before: the teacher's program of each module (asapc.passes.module_programs) and one choice per site
after:  the same programs with the chosen operators, and the place of their tensors in the artefact
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from asapc.features.predictor import Amortised
from asapc.inputs.data import Batch
from asapc.ir import Distilled, Program
from asapc.operators.catalogue import TEACHER
from asapc.passes.analyse import Analysis
from asapc.passes.candidates import Choice, chosen_programs
from asapc.passes.capture import Capture
from asapc.passes.first_call import called, copied
from asapc.passes.lift import lift
from asapc.passes.module_programs import ModuleProgram, module_programs
from asapc.passes.observe import Leave, eager_calls, entering, replaced_forwards
from asapc.program.apply import beyond_map
from asapc.program.call import Call, Child, dtypes_of
from asapc.program.calls import Operands, attribute, operator_calls, sites_of
from asapc.program.compiled import Inside
from asapc.program.state import Steps
from asapc.program.state import found as found_at


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
    analysis: Analysis, choices: Sequence[Choice], compiled: Sequence[Program], example: Batch
) -> tuple[list[CompiledModule], dict[str, str]]:
    """The modules of a live model whose forwards are replaced, and the reason for each site without one.

    compiled: the captured programs with the same choices.  Sites that keep the teacher's own code need no
    module.
    """
    if analysis.model is None:
        return [], {}
    eager = eager_calls(analysis.model, example.args, example.kwargs)
    found: list[CompiledModule] = []
    left: dict[str, str] = {}
    start = 0
    captured = zip(analysis.capture.programs, analysis.matched, strict=True)
    for number, (program, matched) in enumerate(captured):
        mine = range(start, start + len(matched))
        start += len(matched)
        wanted = [i for i in mine if choices[i].operator != TEACHER]
        calls = {o.site: o for o in operator_calls(compiled[number].graph)}
        sites = [matched[i - mine.start] for i in wanted]
        mapless = [n for n, i in enumerate(wanted) if not analysis.drop_maps and _is_mapless(choices[i])]
        modules, why = module_programs(analysis.model, program, sites, eager, mapless)
        left |= why
        for module in modules:
            places = [wanted[index] for index in module.sites]
            found.append(_compiled(analysis, choices, module, places, compiled[number], number, calls))
    return _with_insides(analysis, found, example), left


def _is_mapless(choice: Choice) -> bool:
    return isinstance(choice.replacement, Amortised | Distilled) and beyond_map(choice.replacement)


def _compiled(
    analysis: Analysis,
    choices: Sequence[Choice],
    module: ModuleProgram,
    places: Sequence[int],
    whole: Program,
    number: int,
    calls: Mapping[str, Operands],
) -> CompiledModule:
    sites = list(module.sites.values())
    alone = replace(
        analysis, capture=Capture("module", [module.program]), matched=[sites],
        lifted=[lift(module.program, sites, analysis.drop_maps)],
        sites=[analysis.sites[i] for i in places],
    )  # fmt: skip
    (program,) = chosen_programs(alone, [choices[i] for i in places])
    fitted: dict[str, tuple[int, str]] = {}
    for operands in operator_calls(program.graph):
        pairs = zip(_tensors_of(operands), _tensors_of(calls[operands.site]), strict=True)
        fitted.update((mine.target, (number, theirs.target)) for mine, theirs in pairs)  # type: ignore[misc]
    _check_same(program.graph, whole.graph, fitted)
    constants = {name: _tensor(program.graph, name) for name in module.constants
                 if any(node.target == name for node in program.graph.graph.nodes)}  # fmt: skip
    dtype = next(
        (t.dtype for t in _weights(analysis, program.name) if t.is_floating_point()), torch.float32
    )
    assert analysis.model is not None
    own_forward = "forward" in vars(analysis.model.get_submodule(program.name))
    names = tuple(sites_of(program))
    return CompiledModule(
        program, module.call, module.children, names, constants, fitted, dtype, (), own_forward,
        module.modes, module.drops,
    )  # fmt: skip


def _with_insides(
    analysis: Analysis, found: Sequence[CompiledModule], example: Batch
) -> list[CompiledModule]:
    """With what the modules inside are like when they are called, and what their code reads."""
    model, observed = analysis.model, analysis.capture.observed
    assert model is not None
    modes, drops = (
        {_joined(module.program.name, path) for module in found for path in getattr(module, kind)}
        for kind in ("modes", "drops")
    )
    paths = {
        module.program.name: _taken_over(model.get_submodule(module.program.name), module)
        for module in found
    }
    insides: dict[str, tuple[Inside, ...]] = {}
    entered: dict[str, dict[Steps, Any]] = {}  # of tensors, as the outer is called

    def enter(name: str, *call: Any) -> Leave | None:
        set_before = _set_since(model.get_submodule(name), entered.pop(name, {}))
        if set_before:
            for outer, ones in insides.items():
                insides[outer] = tuple(
                    one.without(set_before) if _joined(outer, one.path) == name else one for one in ones
                )
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
        for one in insides[name]:
            if one.path:
                entered[full[one.path]] = _tensors_read(modules[one.path], one)

        def leave() -> None:
            insides[name] = tuple(
                replace(one, keeps=observed.kept(full[one.path], modules[one.path], before[one.path]))
                for one in insides[name]
            )

        return leave

    if found:
        with entering(model, enter), torch.no_grad():
            model(*example.args, **example.kwargs)
    calls = with_casts(model, {module.program.name: module.call for module in found}, example)
    return [
        replace(module, inside=insides[module.program.name], call=calls[module.program.name])
        for module in found
    ]


def with_casts(model: nn.Module, calls: Mapping[str, Call], example: Batch) -> dict[str, Call]:
    """With the dtypes that modules give under autocast.  calls: by the names of modules."""
    device = next((x.device.type for x in pytree.tree_leaves((example.args, example.kwargs))
                   if isinstance(x, Tensor)), "cpu")  # fmt: skip
    casts: dict[str, dict[str, str]] = {}

    def around(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flat = calls[name].flat(args, kwargs)[0] if name in calls else []
        given = dtypes_of(flat, device) if all(isinstance(x, Tensor) for x in flat) else ""
        output = forward(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        if given and name in calls and calls[name].gives(len(tensors)):
            casts.setdefault(name, {})[given] = dtypes_of(tensors, device)
        return output

    # A copy may keep what autocast makes of positions; what fails there has no dtypes.
    with contextlib.suppress(Exception), torch.autocast(device), torch.no_grad():
        other = copied(model)
        with replaced_forwards(other, around):
            called(other, example, {})
    return {name: replace(call, casts=casts.get(name)) for name, call in calls.items()}


def _joined(outer: str, path: str) -> str:
    return f"{outer}.{path}".strip(".")


def _tensors_read(module: nn.Module, inside: Inside) -> dict[Steps, Any]:
    steps = (steps for steps, value in inside.reads.values if isinstance(value, tuple))
    return {way: thing for way in steps if isinstance(thing := found_at(module, way), Tensor)}


def _set_since(module: nn.Module, tensors: Mapping[Steps, Any]) -> set[Steps]:
    """The ways to tensors that are other objects now: what the outer module sets on the way, however
    alike, is no state that a guard has to hold."""
    return {way for way, tensor in tensors.items() if found_at(module, way) is not tensor}


def _taken_over(module: nn.Module, compiled: CompiledModule) -> list[str]:
    """Paths of the modules in it that the compiled program does not call, or not every time: of a module
    with a site at least one call is in the program."""
    prefix = f"{compiled.program.name}." if compiled.program.name else ""
    sites = [site.removeprefix(prefix).partition("#")[0] for site in compiled.sites]
    called = {
        child.name for child in compiled.children
        if child.name not in compiled.modes | compiled.drops
        and not any(site == child.name or site.startswith(f"{child.name}.") for site in sites)
    }  # fmt: skip
    return [
        path for path, _ in module.named_modules(remove_duplicate=False)
        if not any(path == name or path.startswith(f"{name}.") for name in called)
    ]  # fmt: skip


def _weights(analysis: Analysis, name: str) -> Iterator[Tensor]:
    assert analysis.model is not None
    yield from analysis.model.get_submodule(name).parameters()
    yield from analysis.model.parameters()


def _tensors_of(operands: Operands) -> list[Node]:
    """The get_attr nodes that a call's settings depend on, in an order independent of the graph's."""
    stop = {operands.q, operands.k, operands.values, operands.keep, operands.bias, operands.query_keep}
    found: list[Node] = []
    stack: list[Any] = list(reversed([*operands.settings.values()]))
    while stack:
        item = stack.pop()
        if isinstance(item, list | tuple):
            stack.extend(reversed(item))
        elif isinstance(item, Node) and item not in stop:
            if item.op == "get_attr":
                found.append(item)
            stack.extend(reversed(item.args))
    return found


def _check_same(graph: GraphModule, whole: GraphModule, fitted: Mapping[str, tuple[int, str]]) -> None:
    for name, (_, theirs) in fitted.items():
        assert torch.equal(_tensor(graph, name), _tensor(whole, theirs)), name


def _tensor(graph: GraphModule, name: str) -> Tensor:
    node = next(node for node in graph.graph.nodes if node.op == "get_attr" and node.target == name)
    return attribute(graph, node)
