"""Loops that break Dynamo's graphs: their modules are patched, and the graphs are traced again.

before: a forward whose loop asks its data whether to go on, at which each of Dynamo's graphs ends
after:  the module around that loop has a compiled forward, as asapc.load(OUT, model=live) gives it one,
        and Dynamo's graph goes on through it

What was traced until then runs as it is, once, and is forgotten: the next call is traced anew.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import weakref
from collections import OrderedDict
from collections.abc import Callable
from traceback import FrameSummary
from types import CodeType
from typing import Any

from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule

from asapc.api import teacher_of
from asapc.inputs.data import Batch
from asapc.measure.differences import largest_difference
from asapc.passes.analyse import Analysis, analyse
from asapc.passes.dynamo import SAME, Left, running_forwards
from asapc.passes.patches import CompiledModule, compiled_modules
from asapc.program.calls import attribute
from asapc.program.compiled import Forward
from asapc.program.live import Patch, install, installed_patches, prepared
from asapc.program.runner import Runner

SUMS = {"logsumexp", "log_softmax", "softmax", "sum", "normalize"}
_TRIED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def patched(graph: GraphModule) -> tuple[list[CodeType], nn.Module, Analysis] | None:
    """Patch a module whose forward is running, if a loop of sums breaks the graph: the code that Dynamo
    is to trace again, the module, and what was found. None if there is no such loop, or all were tried.

    Modules are tried from the innermost outwards: an outer one may tell more about its masks. Raises
    Left, or what capturing raised, if the loop stays the model's own code.
    """
    why = getattr(graph, "compile_subgraph_reason", None)
    if why is None or not why.graph_break or not why.user_stack or not _is_loop(why.user_stack[-1]):
        return None
    forwards, problem = [*running_forwards()], None
    codes = [InstructionTranslator.current_tx().f_code, *(x["self"].forward.__code__ for x in forwards)]
    for given in forwards:
        model = given["self"]
        patched_before = any(isinstance(vars(x).get("forward"), Forward) for x in model.modules())
        if model in _TRIED or model.training or patched_before:
            continue
        _TRIED.add(model)
        try:
            analysis = _patched(model, _call(model.forward, given))
        except Exception as error:  # of capturing the model's code
            problem = error
            continue
        return codes, model, analysis
    if problem is not None:
        raise problem
    return None


def _patched(model: nn.Module, batch: Batch) -> Analysis:
    """Patch a model, given one call of it.  Raises Left and what analyse raises."""
    analysis = analyse(teacher_of(model), batch)
    modules, left = compiled_modules(analysis, {}, analysis.lifted, batch)
    if any(module.drops for module in modules):
        raise Left("it drops entries of its maps in training mode, which a patched module does not")
    if not modules:
        raise Left("; ".join([*left.values(), *(x.reason for x in analysis.left_alone)]))
    sites = [
        {"name": x.name, "operator": x.convention.operator, "convention": x.convention.to_json(),
         "constants": x.constants, "no_gradient": x.no_gradient}
        for x in analysis.sites
    ]  # fmt: skip
    assert analysis.model is not None
    untouched, made = analysis.untouched(batch), [*map(_patch, modules)]
    with installed_patches(analysis.model, made, sites):
        error = largest_difference(untouched, Runner(analysis.model)(batch))
    if not error <= SAME:
        raise Left(f"patched, its outputs differ by {error:.2g}")
    patches = prepared(model, made, sites)
    for patch in patches:
        patch.forward.traced = True
        patch.operators._non_persistent_buffers_set.update(patch.operators._buffers)
    install(model, patches)
    return analysis


def _is_loop(place: FrameSummary) -> bool:
    """Whether it is in a function with a loop and sums."""
    try:
        tree = ast.parse("".join(linecache.getlines(place.filename)))
    except SyntaxError:
        return False
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    around = [x for x in functions if x.lineno <= (place.lineno or 0) <= (x.end_lineno or 0)]
    inside = [*ast.walk(around[-1])] if around else []
    loops = any(isinstance(node, ast.For | ast.While) for node in inside)
    return loops and any(getattr(node, "attr", None) in SUMS for node in inside)


def _call(forward: Callable[..., Any], given: dict[str, Any]) -> Batch:
    """The call that the frame of a forward was made by; what is a default was not given."""
    signature = inspect.signature(forward)
    bound = inspect.BoundArguments(signature, OrderedDict(
        (name, given[name]) for name, parameter in signature.parameters.items()
        if given[name] is not parameter.default and given[name] != ()  # of *args none may be given
    ))  # fmt: skip
    return Batch(bound.args, bound.kwargs, None, [])


def _patch(module: CompiledModule) -> Patch:
    graph = module.program.graph
    own = {*module.fitted, *module.constants}
    tensors = {str(x.target): attribute(graph, x) for x in graph.graph.nodes if x.target in own}
    return Patch(
        module.program.name, graph, module.call, module.children, tensors, module.sites, module.dtype,
        module.inside, module.own_forward,
    )
