"""Capture: a model becomes functional ATen graphs, whole where torch.export allows, per module otherwise.

before: an nn.Module with Python control flow
after:  Capture(kind, programs): one Program for the whole model, or one for each smallest nn.Module
        that holds an attention site

The user's model, hooks, training flags, gradients, random state and global torch state are left as
they were.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch._dynamo import config as torch_config
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from asapc.errors import BranchError, InputError
from asapc.formats.limits import MOST, demand, fixed_size, limits_of
from asapc.inputs.data import Batch
from asapc.inputs.faults import HELP, RULE, argument_names, data_fault
from asapc.ir import Program, Stop
from asapc.measure.differences import equal, largest_difference, tensor_outputs
from asapc.passes.branches import (
    CDIST,
    Answers,
    Trace,
    asking_for_types,
    check_branches,
    plain_types,
    quiet_torch,
    reason_of,
    spoken,
)
from asapc.passes.cut import depends_on_data
from asapc.passes.early_stop import firsts_and_lasts
from asapc.passes.einsum import split_einsums
from asapc.passes.experiment import LONGEST, MANY
from asapc.passes.first_call import unchanged
from asapc.passes.in_place import functional
from asapc.passes.indices import FreeIndices
from asapc.passes.observe import Leave, Observer, entering, replaced_forward, replaced_forwards, written
from asapc.passes.regions import holds_attention
from asapc.passes.repeated import Repeated
from asapc.passes.size_functions import free_functions, free_lengths, kinds_of_sizes, texts_of_sizes
from asapc.passes.size_guards import keep_to_guards, noting_questions
from asapc.passes.spellings import one_spelling
from asapc.passes.state import LOUD, Observed, emptied, is_the_same_traced, observed, others_for, untraced
from asapc.terminal.printed import first_line

ONE_BATCH = "traced whole, it is for one number of examples alone, as after a loop over them"


@dataclass
class Capture:
    """programs: one with name "" for kind "whole", else one per captured module.

    reason:  why the whole forward could not be exported, for kind "module".
    skipped: (module name, why) of modules with attention-like products that no program covers.
    observed: what the model's code reads besides its arguments.
    """

    kind: Literal["whole", "module"]
    programs: list[Program]
    reason: str | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    observed: Observed = field(default_factory=Observed)

    @property
    def untouched(self) -> list[Program]:
        """The programs as they were captured, before any was rewritten for matching."""
        return [program.untouched for program in self.programs]


SAME = 1e-3  # relative difference up to which a graph computes what the module does
ALIKE = 1e-5  # the same in single precision, where both run the same operators
SHORT = 40  # tokens at most, of many examples
FEW_CALLS = 150  # of operators: up to here torch's memory of their shapes takes longer than it spares
FEW_SIZES = 5  # up to which two at once are tried, and not all
MOST_TRIED = 48  # comparisons that are all tried the other way; of more, the first and last of a loop


_scripted = torch.jit.ScriptFunction.__call__


def _as_written(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A scripted function by its Python code: itself, it makes numbers of sizes where it returns several
    tensors.  What torch.jit has traced has none."""
    written = getattr(function, "_torchdynamo_inline", None)
    return _scripted(function, *args, **kwargs) if written is None else written(*args, **kwargs)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and everything as it was afterwards.  What its user has compiled
    or scripted runs as Python, and is seen."""
    training = {module: module.training for module in model.modules()}
    eager = torch.compiler.set_stance("force_eager")
    unscripted = mock.patch.object(torch.jit.ScriptFunction, "__call__", _as_written)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), eager, unscripted:
        try:
            model.eval()
            yield
        finally:
            for module, flag in training.items():
                module.training = flag


def capture(
    model: nn.Module | ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any],
    more: Sequence[Batch] = (),
) -> Capture:  # fmt: skip
    """Capture `model` on one example call; batch and length stay dynamic where the model allows.

    more: batches on which its state is looked at, besides the example.
    Raises InputError if the model fails on the example. What cannot be exported, neither whole nor by a
    module with two activation products, is among `skipped`.
    """
    if isinstance(model, ExportedProgram):
        _refuse_writes(model)
        program = program_of(model, args, kwargs)
        run_example(program.graph, args, kwargs)
        return Capture("whole", [program])
    with _undisturbed(model):
        example = Batch(args, kwargs, None, [])
        larger = _larger(args, kwargs)
        try:
            state = observed(model, [example, *more[:1], example], larger)
        except Exception:
            run_example(model, args, kwargs)
            state = observed(model, [example, example], larger)  # more data fails, which is told later
        whole = _whole(model, args, kwargs, state)
        if isinstance(whole, str) and state.eager and is_the_same_traced(model, example):
            state.eager = False  # what it does where it is traced may be easier to follow
            whole = _whole(model, args, kwargs, state)
    if isinstance(whole, Capture):
        if not _keeps_to_batch(whole.programs[0]):
            return whole
        captured = capture_modules(model, args, kwargs, ONE_BATCH, state)
        return captured if captured.programs else whole
    captured = capture_modules(model, args, kwargs, whole, state)
    if not captured.programs and not captured.skipped:
        captured.skipped.append((type(model).__name__, whole))
    return captured


def _keeps_to_batch(program: Program) -> bool:
    """Whether it is for as many examples as the example call alone, as after a loop over them."""
    inputs = [node.meta["val"] for node in program.graph.graph.find_nodes(op="placeholder")]
    batches = [value.shape[0] for value in inputs if isinstance(value, torch.Tensor) and value.dim()]
    return any(size != 1 and size_hint(size) is Dim.STATIC for size in batches)


def _whole(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: Observed
) -> Capture | str:
    """The model as one program, or why it cannot be one."""
    with _as_eager(model, state):
        try:
            reason = state.reason("", one_program=False)
            if reason is not None:
                return reason
            return Capture("whole", [_export("", model, args, kwargs, state)], observed=state)
        except Exception as error:  # torch.export raises many types; the reason is kept and shown
            return reason_of(error)


@contextlib.contextmanager
def _as_eager(model: nn.Module, state: Observed) -> Iterator[None]:
    """Code that asks whether it is traced is told that it is not; what it keeps by the kind of a tensor,
    as einops does, does not know of a trace's tensors afterwards."""
    spaces = [value for space in state.spaces for name, value in space.items() if name[:2] != "__"]
    caches = [(value, {**value}) for value in spaces if type(value) is dict]
    with contextlib.ExitStack() as stack:
        if state.eager:
            around = lambda _, *given, **named: untraced(*given, **named)  # noqa: E731
            stack.enter_context(replaced_forwards(model, around))
        try:
            yield
        finally:
            for cache, before in caches:
                for key in cache.keys() - before.keys():
                    del cache[key]


def capture_modules(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, state: Observed
) -> Capture:
    """The smallest modules that hold attention, each by itself.  reason: why the model is not whole."""
    with _undisturbed(model), _as_eager(model, state):
        programs, skipped = _capture_modules(model, args, kwargs, state)
    return Capture("module", programs, reason, skipped, state)


def program_of(exported: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """A Program from an ExportedProgram that already exists (a .pt2 file)."""
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        exported = functional(exported)
        keep_to_guards(exported, args, kwargs)
        graph = exported.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    one_spelling(graph)
    split_einsums(graph)
    shapes = _nested(_bounded(_free_axes(args, kwargs), exported), args, kwargs)
    return Program("", graph, args, kwargs, shapes)


def _refuse_writes(exported: ExportedProgram) -> None:
    """Raises InputError for a program that writes into what it is given, or into its weights."""
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        signature = functional(exported).graph_signature
    for spec in signature.output_specs:
        what, _, is_written = spec.kind.name.rpartition("_")  # BUFFER_MUTATION
        if is_written == "MUTATION":
            raise InputError(
                "an exported program must leave its weights and inputs as they are",
                got=f"it writes into the {what.lower().replace('_', ' ')} {spec.target}",
                help="export the model without what writes there, such as a counter of calls",
            )


def run_example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own output on the first examples, or an InputError that says what it raised."""
    try:
        return model(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        count = len(tensors[0]) if tensors and tensors[0].dim() else 0
        batch = Batch(args, kwargs, None, [0] * count, [*range(count)])
        call = lambda given: model(*given.args, **given.kwargs)  # noqa: E731
        fault = data_fault(error, batch, call, argument_names(model))
        raise fault or InputError(
            RULE, got=f"{type(error).__name__}: {first_line(error)}", help=HELP
        ) from error


def export_graph(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """torch.export without strict mode, functional, high-level ATen operators kept whole."""
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), unchanged(module):
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        return functional(exported)


def _export(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: Observed
) -> Program:
    """A trace; where it stops at code that asks for the type of a tensor, again with the plain answer;
    where it stops at a number of the data, again with the numbers of the example."""
    spaces: list[dict[str, Any]] = []
    numbers = False
    first: Exception | None = None
    while True:
        try:
            return _traced(name, module, args, kwargs, numbers, spaces, state)
        except Exception as error:
            first = first or error
            asking = asking_for_types(error)
        if not all(any(space is known for known in spaces) for space in asking):
            spaces.extend(asking)
            first = None  # of tensors that are not plain in a trace alone
        elif not numbers and _asks_for_numbers(module, args, kwargs):
            numbers = True
        else:
            raise first  # it says what the model does


def _asks_for_numbers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = _answers(module, args, kwargs, numbers=True)[0].given
    try:
        return given != _answers(module, args, kwargs, numbers=False)[0].given
    except TypeError:  # of a tensor and what stands for a number, which has to be one of weights
        args, kwargs = pytree.tree_map(others_for, (args, kwargs))
        return bool(given) and given == _answers(module, args, kwargs, numbers=True)[0].given


def _answers(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: bool
) -> tuple[Answers, Any, int]:
    """What the example answers to the module's Python, what it gives, and how many calls that took."""
    with Trace(numbers=numbers) as asking, torch.random.fork_rng(devices=[]):
        given = copy.deepcopy((args, kwargs))
        before = written(given)
        output = module(*given[0], **given[1])
    if before[:2] != written(given)[:2]:  # what is written into tensors, the graph has
        raise ValueError("writes into a list or dict that it is given")
    return asking.answers, output, asking.calls


def _same_output(
    expected: Any, graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    with torch.random.fork_rng(devices=[]):
        found = graph(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    return _alike(expected, found)


def _traced(
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: bool,
    spaces: Sequence[dict[str, Any]],
    state: Observed,
    copies: bool = True,
    functions: bool = True,
    axes: Axes | None = None,
) -> Program:
    """numbers: of the data are those of the example.  spaces: see plain_types.  copies: whether modules
    that are alike are traced once.  functions: whether those of sizes are computed by the program.
    axes: that are free, where that is known."""
    args, kwargs = pytree.tree_map(_packed, (args, kwargs))
    are_known, observer = axes is not None, Observer()
    axes = axes or _with_lengths(module, _free_axes(args, kwargs), args, kwargs)
    answers, output, calls = _answers(module, args, kwargs, numbers)
    watching, plain = observer.watching(module), plain_types(spaces)
    used: list[str] = []
    taken: list[str] = []
    free = contextlib.nullcontext() if not functions else (
        free_functions(used, taken, state.spaces, state.codes))  # fmt: skip
    try:
        with Trace(answers=answers) as budget, plain, FreeIndices(), free_lengths(), quiet_torch():
            budget.of_sizes = used
            repeated = Repeated(budget, observer, state.within(name))
            once = repeated.tracing(module) if copies else contextlib.nullcontext()
            remembered = torch_config.patch(fake_tensor_cache_enabled=calls > FEW_CALLS)
            texts, kinds = texts_of_sizes(), kinds_of_sizes(state.spaces)
            named = _keywords_named(module, kwargs)
            with (once, watching, noting_questions() as questions, free, remembered, texts, kinds,
                  named, emptied(state.caches)):  # fmt: skip
                exported = export_graph(module, args, kwargs, _nested(axes, args, kwargs, module.forward))
    except Exception as error:
        may_be_ours = functions and isinstance(error, TypeError)  # of code that passes float as a dtype
        if not used and not taken and not may_be_ours:
            raise
        return _traced(name, module, args, kwargs, numbers, spaces, state, copies, False, axes)
    keep_to_guards(exported, args, kwargs, questions)
    if not are_known and _fixes_symbols(exported):  # as numbers they tell shapes apart
        axes = _bounded(axes, exported)
        return _traced(name, module, args, kwargs, numbers, spaces, state, copies, functions, axes)
    graph = exported.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    one_spelling(graph)
    split_einsums(graph)
    check_branches(graph)
    _check_kinds(graph, unknown=None in budget.thresholds)
    layers = observer.calls(graph)
    of_weights = [node for number, node in observer.residuals if budget.thresholds[number] is not None
                  and not depends_on_data(node)]  # fmt: skip
    if of_weights and not numbers:  # which may change: such a branch is held to its answer
        return _traced(name, module, args, kwargs, True, spaces, state, copies, functions, axes)
    if (repeated.copied or used) and not _same_output(output, graph, args, kwargs):
        copies = copies and bool(used)
        return _traced(name, module, args, kwargs, numbers, spaces, state, copies, not used, axes)
    _check_sizes(module, graph, args, kwargs, budget.widened, numbers)
    shapes = _nested(_bounded(axes, exported), args, kwargs, module.forward)
    stops = tuple(Stop(node, budget.thresholds[number], number) for number, node in observer.residuals)
    _check_stops(module, args, kwargs, observer.residuals)
    return Program(name, graph, args, kwargs, shapes, stops, layers)


_UNWRITTEN: Mapping[Any, str] = {
    round: "rounds a size: divide with //", math.floor: "rounds a size: divide with //",
    math.ceil: "rounds a size: write -(-n // 4)", operator.rshift: "shifts a size: divide with //",
    operator.lshift: "shifts a size: multiply it", operator.abs: "takes abs of a size: write max(n, -n)",
}  # fmt: skip
"""What torch, or what reads its files, does not know of sizes."""


def _check_kinds(graph: GraphModule, unknown: bool) -> None:
    """Raises ValueError for what no file of a program can hold.  unknown: whether the trace had NaN for
    numbers of the data."""
    if any(isinstance(leaf, str) for leaf in pytree.tree_leaves(graph.graph.output_node().args)):
        raise ValueError("returns a string: return only tensors and numbers")
    for node in graph.graph.nodes:
        if node.target in _UNWRITTEN:
            raise ValueError(f"{spoken(node)} {_UNWRITTEN[node.target]}")
        if unknown and any(leaf != leaf for leaf in pytree.tree_leaves((node.args, node.kwargs))):
            raise ValueError(f"{spoken(node)} computes with a number of the data")
        held = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Generator):
            raise ValueError("draws from its own random generator: store the numbers in a buffer")


def _check_sizes(
    module: nn.Module, graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], widened: bool,
    numbers: bool,
) -> None:  # fmt: skip
    """Where torch's own code takes another way for a size, it is none of the program's.

    A trace takes every free size to be 2 or more, and has no guard for a branch on less: none and one are
    tried, and two sizes of one at once, of which the length is limited; of many examples, on two.
    widened: torch.cdist was traced past its branch on a size.  numbers: see _traced.
    """
    free = _free_sizes(graph)
    batch = next(iter(free), None)
    two = {batch: 2} if batch is not None and limits_of(free[batch].node.shape_env, batch)[0] <= 2 else {}
    alone = [(symbol,) for symbol in free]
    together = itertools.combinations(free, 2) if len(free) < FEW_SIZES else [tuple(free)]
    pairs = ((1, pair) for pair in together)
    for count, symbols in (*((n, one) for n in (0, 1) for one in alone), *pairs):
        environment = free[symbols[-1]].node.shape_env
        if any(limits_of(environment, symbol)[0] > count for symbol in symbols):
            continue
        counts = two | dict.fromkeys(symbols, count)
        if _alike_at(module, graph, args, kwargs, counts, ALIKE, numbers) is False:
            demand(environment, symbols[-1], count + 1)
    for symbol, size in free.items() if widened else ():
        ranges = size.node.shape_env.var_to_range
        few = size.node.hint <= CDIST
        count = CDIST + 5 if few else CDIST - 5
        if not ranges[symbol].lower <= count <= ranges[symbol].upper:
            continue
        if not _alike_at(module, graph, args, kwargs, {symbol: count}, SAME, numbers):
            ranges[symbol] &= ValueRanges(2, CDIST) if few else ValueRanges(CDIST + 1, int_oo)


def _alike_at(
    module: nn.Module, graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any],
    counts: Mapping[Any, int], tolerance: float, numbers: bool,
) -> bool | None:  # fmt: skip
    """Whether both give the same at these sizes; None where the module gives nothing, or the program says
    that its examples answer otherwise.  tolerance: see _alike.  numbers: see _traced."""
    args, kwargs = _resized(graph, args, kwargs, counts)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        try:
            with Trace(numbers=numbers):
                expected = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except Exception:
            return None
        try:
            return _alike(expected, graph(*args, **kwargs), tolerance)
        except BranchError:
            return None
        except Exception:  # the graph cannot: the program must not be asked
            return False


def _alike(expected: Any, found: Any, tolerance: float = ALIKE) -> bool:
    """Whether two outputs are the same, in single precision to the tolerance; NaN is NaN, as in a mean of
    no tokens."""
    ours, theirs = tensor_outputs(expected), tensor_outputs(found)
    exact = all(x.dtype in (torch.float32, torch.float64) for x in ours)
    if largest_difference(expected, found) <= (tolerance if exact else SAME):
        return True
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))


def _free_sizes(graph: GraphModule) -> dict[Any, torch.SymInt]:
    """Those of the inputs that are nothing but themselves, by symbol."""
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    return {
        size.node.expr: size for size in sizes
        if isinstance(size, torch.SymInt) and fixed_size(size) is None and size.node.expr.is_Symbol
    }  # fmt: skip


def _resized(
    graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Mapping[Any, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with so many entries, again from the first, along every axis of these sizes."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]

    def resized(given: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
        for axis, size in enumerate(traced.shape):
            count = None if fixed_size(size) is not None else counts.get(size.node.expr)  # type: ignore[attr-defined]
            if count is not None:
                rows = torch.arange(count, device=given.device) % max(1, given.shape[axis])
                given = given.index_select(axis, rows[: count if given.shape[axis] else 0])
        return given

    changed = [
        resized(leaf, place.meta["val"]) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, place in zip(leaves, places, strict=True)
    ]
    resized_args, resized_kwargs = pytree.tree_unflatten(changed, spec)
    return resized_args, resized_kwargs


def _check_stops(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    residuals: Sequence[tuple[int, Node]],
) -> None:
    """Raises ValueError where a comparison with a residual does something else than to end its loop.

    The module is run with one comparison after the other answered as at the end of a loop: either less is
    computed, or, at the last of a loop, nothing changes. Numbers that a graph would hold never change.
    """

    def run(ends_at: int | None) -> tuple[list[torch.Tensor], list[int], int]:
        with Trace(ends_at) as budget, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            output = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        leaves = pytree.tree_leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return tensors, [leaf for leaf in leaves if isinstance(leaf, int)], budget.calls

    ends: Sequence[int] = range(len(residuals))
    if len(residuals) > MOST_TRIED:
        ends = firsts_and_lasts([node for _, node in residuals])
    if not ends:
        return
    full, numbers, count = run(None)
    for place in ends:
        number, node = residuals[place]
        other, others, computed = run(number)
        if others != numbers:
            raise ValueError("returns a number that tells where a loop ends early: return only tensors")
        same = len(other) == len(full) and all(map(equal, full, other))
        if computed >= count and not same:
            raise ValueError(
                f"branches on {node.name}, a value from the data, other than to end a loop early"
            )


Axes = list[dict[int, Any] | None]
"""For torch.export, by axis: of each leaf of the arguments, None of what is no tensor."""


def _free_axes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Axes:
    """Batch and length, the first two axes, are dynamic if the model turns out to allow it: the channels
    of a picture are what its first layer takes. Pixels are not. Of queries, keys and values
    [B, H, N, D] heads are not, and the length is the third axis; of a mask beside them the fourth too.
    Of a mask [B, 1, M] or [B, 1, N, M] beside tokens [B, M, ...] every axis as long as those is.

    A size of 1 cannot be traced as dynamic.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    of_heads = _of_heads(tensors)
    lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() > 1}

    def dims(value: Any) -> dict[int, Any] | None:
        if not isinstance(value, torch.Tensor):
            return None
        free = {0, 1}
        if of_heads is not None and value.dim() == 4:
            free = {0, 2} if value.shape[3] == of_heads else {0, 2, 3}
        elif not value.is_floating_point() or 1 in value.shape[1:-1]:
            free |= {axis for axis, size in enumerate(value.shape) if size in lengths}
        return {
            axis: Dim.AUTO if axis in free and value.shape[axis] > 1 else Dim.STATIC
            for axis in range(value.dim())
        }

    return [*map(dims, leaves)]


def _with_lengths(module: nn.Module, axes: Axes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Axes:
    """Where more axes are as long as a free one, as in [B, D, N] beside [B, N, 2] or in scores [B, N, N],
    they are free as well if the module runs with all of them one shorter."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    static, free = (
        {
            leaf.shape[axis] for leaf, dims in zip(leaves, axes, strict=True)
            for axis, dim in (dims or {}).items() if axis and dim == hint and leaf.shape[axis] > 2
        } for hint in (Dim.STATIC, Dim.AUTO)
    )  # fmt: skip
    both = static & free
    if not both:
        return axes
    wider, shorter = [*axes], [*leaves]
    for number, dims in enumerate(axes):
        as_long = [axis for axis in dims or () if axis and leaves[number].shape[axis] in both]
        wider[number] = dims and {**dims, **dict.fromkeys(as_long, Dim.AUTO)}
        for axis in as_long:
            shorter[number] = shorter[number].narrow(axis, 1, leaves[number].shape[axis] - 1)
    args, kwargs = pytree.tree_unflatten(shorter, spec)
    try:
        with torch.random.fork_rng(devices=[]), Trace():
            module(*args, **kwargs)
    except Exception:  # other sizes are none of the module's
        return axes
    return wider


def _nested(
    axes: Axes, args: tuple[Any, ...], kwargs: dict[str, Any],
    forward: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """As torch.export takes them, for a call of `forward`."""
    of_args, of_kwargs = pytree.tree_unflatten(axes, pytree.tree_structure((args, kwargs)))
    if not kwargs:
        return of_args
    if forward is None:
        return None if args else of_kwargs
    try:
        return dict(_explicit(forward, kwargs).bind(*of_args, **of_kwargs).arguments)
    except TypeError:
        return None  # the model itself will say what is wrong with the call


def _explicit(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a forward, with a parameter for each of these that its `**kwargs` take."""
    signature = inspect.signature(forward)
    plain = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    if len(plain) < len(signature.parameters):
        known, only = {each.name for each in plain}, inspect.Parameter.KEYWORD_ONLY
        plain += [inspect.Parameter(name, only) for name in kwargs if name not in known]
    return signature.replace(parameters=plain)


@contextlib.contextmanager
def _keywords_named(module: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """torch.export finds the sizes of keywords by the names in a signature: `**kwargs` have some."""
    signature = _explicit(module.forward, kwargs)
    if signature.parameters.keys() == inspect.signature(module.forward).parameters.keys():
        yield
        return
    with replaced_forward(module, lambda forward, *args, **given: forward(*args, **given)):
        vars(vars(module)["forward"])["__signature__"] = signature
        yield


def _larger(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Batch]:
    """One example with more tokens, and more examples; both with larger numbers."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    axes = _free_axes(args, kwargs)

    def larger(leaf: Any, free: dict[int, Any] | None, longer: bool) -> Any:
        if free is None:
            return leaf
        for axis in (axis for axis, size in free.items() if size is not Dim.STATIC):
            most = max(LONGEST, leaf.shape[axis] + MANY) if longer and axis else MANY if not axis else 1
            if axis and not longer:  # many that are long would take minutes
                leaf = leaf.narrow(axis, 0, min(SHORT, leaf.shape[axis]))
            count = max(most, leaf.shape[axis])
            leaf = torch.cat([leaf] * math.ceil(most / leaf.shape[axis]), axis).narrow(axis, 0, count)
            leaf = leaf[:1] if longer else leaf
        return LOUD * leaf if leaf.is_floating_point() else leaf

    made = []
    for longer in (True, False):
        changed = [larger(leaf, free, longer) for leaf, free in zip(leaves, axes, strict=True)]
        args, kwargs = pytree.tree_unflatten(changed, spec)
        made.append(Batch(args, kwargs, None, []))
    return made


def _of_heads(tensors: Sequence[torch.Tensor]) -> int | None:
    """D, where the first three tensors with four axes are [B, H, N, D], [B, H, M, D] and [B, H, M, E]."""
    four = [x.shape for x in tensors if x.dim() == 4 and x.is_floating_point()][:3]
    if len(four) < 3 or len({shape[:2] for shape in four}) > 1:
        return None
    q, k, v = four
    return int(q[3]) if q[3] == k[3] and k[2] == v[2] else None


def _bounded(axes: Axes, exported: ExportedProgram) -> Axes:
    """With the sizes that the trace holds for.

    A branch on a length is traced on one side only: a program that is made from the graph refuses the
    lengths of the other side, as torch.export has it, where it would compute something else.
    """
    names = exported.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.name in names}
    if len(names) != len(axes):
        return axes
    return [
        free and {axis: size_hint(values[name].shape[axis]) or free[axis] for axis in free}
        for name, free in zip(names, axes, strict=True)
    ]


def _fixes_symbols(exported: ExportedProgram) -> bool:
    """Whether a size that is a symbol may be one number alone, as n where 256 entries are n x n."""
    values = (node.meta["val"] for node in exported.graph.find_nodes(op="placeholder"))
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return any(size_hint(size) == Dim.STATIC for size in sizes if fixed_size(size) is None)


def size_hint(size: int | torch.SymInt) -> Any:
    """Dim.STATIC for a number, Dim.AUTO with the limits of a size, None if it has none."""
    if isinstance(size, int) or fixed_size(size) is not None:
        return Dim.STATIC
    low, high = limits_of(size.node.shape_env, size.node.expr)
    if (low, high) == (0, MOST):
        return None
    if low == high:
        return Dim.STATIC
    return Dim.AUTO(min=low or None, max=high if high < MOST else None)


class _Counter(TorchDispatchMode):
    """Counts products of activations, and sums of rows or columns, under each module of a stack."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack = stack
        self.products, self.sums = Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        counts = self.products if packet in _PRODUCTS else self.sums if packet in _SUMS else None
        if counts is not None:
            counts.update(self.stack)
        return func(*args, **(kwargs or {}))


_PRODUCTS = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}
_SUMS = {
    torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.logsumexp, torch.ops.aten._softmax,
    torch.ops.aten._log_softmax, torch.ops.aten.linalg_vector_norm, torch.ops.aten.norm,
    torch.ops.aten.mv,
}  # fmt: skip


def _capture_modules(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: Observed
) -> tuple[list[Program], list[tuple[str, str]]]:
    """Programs of the smallest modules that hold a site and can be exported."""
    stack: list[str] = []
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    several: set[str] = set()

    def enter(name: str, call_args: Any, call_kwargs: Any) -> Leave:
        stack.append(name)
        given = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (call_args, call_kwargs))
        if _way(calls.setdefault(name, given)) != _way(given):
            several.add(name)
        return stack.pop

    with _Counter(stack) as counter, entering(model, enter):
        model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    modules = dict(model.named_modules())
    found: list[Program] = []
    failed: dict[str, str] = {}
    # Children come before their parents: longer dotted names first. A loop by itself is taken only where
    # no attention around it is: with its products it is worth more.
    deepest = sorted((name for name in modules if name), key=lambda name: (-name.count("."), name))
    attention = [name for name in deepest if counter.products[name] > 1]
    loops = [name for name in deepest if counter.sums[name] > 1]
    for name in dict.fromkeys((*attention, *loops)):
        if any(_related(name, program.name) for program in found):
            continue
        call_args, call_kwargs = calls[name]
        reason = state.reason(name, one_program=True) or state.unlike_now(name, model)
        reason = f"{name} is called in more than one way" if name in several else reason
        if reason is not None:
            failed[name] = reason
            continue
        try:
            program = _export(name, modules[name], call_args, call_kwargs, state)
        except Exception as error:  # its parent may still cover it; else it is reported
            failed[name] = reason_of(error)
            continue
        if holds_attention(program.graph):
            found.append(program)
    order = list(modules)
    covered = [program.name for program in found]
    skipped = [
        (name, reason)
        for name, reason in failed.items()
        if not any(_related(name, other) for other in covered)
        and not any(other != name and other.startswith(f"{name}.") for other in failed)
    ]
    return sorted(found, key=lambda program: order.index(program.name)), skipped


def _related(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _way(given: Any) -> str:
    """Which arguments a call has, in what containers, and the numbers and texts among them."""
    plain = (bool, int, float, str, type(None))
    leaves, spec = pytree.tree_flatten(given)  # a PackedSequence could not be made again of texts
    return repr(([x if isinstance(x, plain) else "" for x in leaves], spec))


def _packed(value: Any) -> Any:
    """A part of a larger tensor by itself: its strides would tie sizes to those of the example."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value
