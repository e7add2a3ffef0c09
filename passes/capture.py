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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from asapc.errors import BranchError, InputError
from asapc.formats.limits import MOST, demand, fixed_size, free_sizes, limits_of
from asapc.inputs.data import Batch
from asapc.inputs.faults import argument_names, batch_fault, data_fault
from asapc.ir import Program, Stop
from asapc.measure.differences import equal, largest_difference, tensor_outputs
from asapc.passes.branches import (
    CDIST,
    Answers,
    Trace,
    asking_for_types,
    check_branches,
    own_lines,
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
from asapc.passes.observe import (
    Leave,
    Observer,
    entering,
    is_within,
    replaced_forward,
    replaced_forwards,
    written,
)
from asapc.passes.regions import holds_attention
from asapc.passes.size_functions import free_functions, free_lengths, kinds_of_sizes, texts_of_sizes
from asapc.passes.size_guards import keep_to_guards, noting_questions
from asapc.passes.spellings import one_spelling
from asapc.passes.state import LOUD, Observed, emptied, is_the_same_traced, observed, others_for, untraced

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
FEW_SIZES = 5  # up to which two at once are tried, and not all
_PLACES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}  # or lengths, or tokens
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
    example = Batch(args, kwargs, None, [])
    if isinstance(model, ExportedProgram):
        _refuse_writes(model)
        program = program_of(model, args, kwargs)
        _run_example(program.graph, example)
        return Capture("whole", [program])
    with _undisturbed(model):
        larger = _larger(example)
        try:
            state = observed(model, [example, *more[:1], example], larger)
        except Exception:
            _run_example(model, example)
            state = observed(model, [example, example], larger)  # more data fails, which is told later
        whole = _whole(model, example, state, more)
        if isinstance(whole, str) and state.eager and is_the_same_traced(model, example):
            state.eager = False  # what it does where it is traced may be easier to follow
            whole = _whole(model, example, state, more)
    if isinstance(whole, Capture):
        if not _keeps_to_batch(whole.programs[0]):
            return whole
        captured = capture_modules(model, example, ONE_BATCH, state)
        return captured if captured.programs else whole
    captured = capture_modules(model, example, whole, state)
    if not captured.programs and not captured.skipped:
        captured.skipped.append((type(model).__name__, whole))
    return captured


def _keeps_to_batch(program: Program) -> bool:
    """Whether it holds only for as many examples as the example call has, as after a loop over them."""
    inputs = [node.meta["val"] for node in program.graph.graph.find_nodes(op="placeholder")]
    batches = [value.shape[0] for value in inputs if isinstance(value, Tensor) and value.dim()]
    return any(size != 1 and size_hint(size) is Dim.STATIC for size in batches)


def _whole(model: nn.Module, example: Batch, state: Observed, more: Sequence[Batch]) -> Capture | str:
    """The model as one program, or why it cannot be one."""
    with _as_eager(model, state):
        try:
            reason = state.reason("", one_program=False)
            if reason is not None:
                return reason
            return Capture("whole", [_export("", model, example, state, more)], observed=state)
        except Exception as error:  # torch.export raises many types; the reason is kept and shown
            return reason_of(error)


@contextlib.contextmanager
def _as_eager(model: nn.Module, state: Observed) -> Iterator[None]:
    """Tell code that asks whether it is traced that it is not. What it caches by the type of a tensor, as
    einops does, forgets the trace's tensors afterwards."""
    spaces = [value for space in state.spaces for name, value in space.items() if name[:2] != "__"]
    caches = [(value, {**value}) for value in spaces if type(value) is dict]
    with contextlib.ExitStack() as stack:
        if state.eager:
            around = lambda _, *args, **named: untraced(*args, **named)  # noqa: E731
            stack.enter_context(replaced_forwards(model, around))
        try:
            yield
        finally:
            for cache, before in caches:
                for key in cache.keys() - before.keys():
                    del cache[key]


def capture_modules(model: nn.Module, example: Batch, reason: str, state: Observed) -> Capture:
    """The smallest modules that hold attention, each by itself.  reason: why the model is not whole."""
    with _undisturbed(model), _as_eager(model, state):
        programs, skipped = _capture_modules(model, example, state)
    return Capture("module", programs, reason, skipped, state)


def program_of(exported: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """A Program from an ExportedProgram that already exists (a .pt2 file)."""
    exported, call = functional(exported), Batch(args, kwargs, None, [])
    keep_to_guards(exported, call)
    graph = _graph_of(exported)
    return Program("", graph, args, kwargs, _nested(_bounded(_free_axes(call), exported), call))


def _graph_of(exported: ExportedProgram) -> GraphModule:
    graph = exported.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    one_spelling(graph)
    split_einsums(graph)
    return graph


def _refuse_writes(exported: ExportedProgram) -> None:
    """Raises InputError for a program that writes into what it is given, or into its weights."""
    for spec in functional(exported).graph_signature.output_specs:
        what, _, is_written = spec.kind.name.rpartition("_")  # BUFFER_MUTATION
        if is_written == "MUTATION":
            raise InputError(
                "an exported program must leave its weights and inputs as they are",
                got=f"it writes into the {what.lower().replace('_', ' ')} {spec.target}",
                help="export the model without what writes there, such as a counter of calls",
            )


def _run_example(model: nn.Module, example: Batch) -> None:
    """Raises InputError, which says what the model raises on the first examples."""
    try:
        model(*example.args, **example.kwargs)
    except InputError:
        raise
    except Exception as error:
        values = (*example.args, *example.kwargs.values())
        first = next((value for value in values if isinstance(value, Tensor)), None)
        count = len(first) if first is not None and first.dim() else 0
        batch = replace(example, hashes=[0] * count, numbers=[*range(count)])
        call = lambda tried: model(*tried.args, **tried.kwargs)  # noqa: E731
        fault = data_fault(error, batch, call, argument_names(model))
        raise fault or batch_fault(error, count) from error


def export_graph(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """torch.export without strict mode, functional, high-level ATen operators kept whole."""
    return functional(_traced(module, args, kwargs, dynamic_shapes))


def _traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), unchanged(module), own_lines():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def _export(
    name: str, module: nn.Module, call: Batch, state: Observed, more: Sequence[Batch] = ()
) -> Program:
    """Trace a module. Where that stops at code that asks for the type of a tensor, trace it again with
    the plain answer; where it stops at a number of the data, with the numbers of the example.

    more: other calls, whose sizes are free where they differ from those of `call`."""
    # Of a part of a larger tensor, strides would tie sizes to those of the example.
    tracing = _Tracing(name, module, call.mapped(Tensor.contiguous), state, more=more)
    first: Exception | None = None
    while True:
        try:
            return tracing.program()
        except Exception as error:
            first = first or error
            asking = asking_for_types(error)
        if not all(any(space is known for known in tracing.spaces) for space in asking):
            tracing = replace(tracing, spaces=(*tracing.spaces, *asking))
            first = None  # of tensors that are not plain in a trace alone
        elif not tracing.numbers and tracing.asks_for_numbers():
            tracing = replace(tracing, numbers=True)
        else:
            raise first  # it says what the model does


@dataclass(frozen=True)
class _Tracing:
    """How a module is traced on a call.

    numbers: whether those of the data are those of the example.  spaces: see plain_types.  functions:
    whether those of sizes are computed by the program.  axes: that are free, where that is known.
    more: see _export.
    """

    name: str
    module: nn.Module
    call: Batch
    state: Observed
    numbers: bool = False
    spaces: Sequence[dict[str, Any]] = ()
    functions: bool = True
    axes: Axes | None = None
    more: Sequence[Batch] = ()

    def program(self) -> Program:
        """Raises what the module or torch.export raises, and ValueError for what no program can hold."""
        module, call, state = self.module, self.call, self.state
        axes = self.axes or _with_lengths(module, _free_axes(call, self.more), call)
        answers, output = self.answers()
        observer, budget = Observer(), Trace(answers=answers)
        used, taken = budget.of_sizes, list[str]()
        try:
            with (
                budget, plain_types(self.spaces), FreeIndices(), free_lengths(), quiet_torch(),
                observer.watching(module), noting_questions() as questions,
                free_functions(used, taken, state.spaces, state.codes)
                if self.functions else contextlib.nullcontext(),
                texts_of_sizes(), kinds_of_sizes(state.spaces), _keywords_named(module, call.kwargs),
                emptied(state.caches),
            ):  # fmt: skip
                shapes = _nested(axes, call, module.forward)
                exported = _traced(module, call.args, call.kwargs, shapes)
            exported = functional(exported)  # which asks of sizes what guards ask, not the model's code
        except Exception as error:
            may_be_ours = self.functions and isinstance(error, TypeError)  # code passes float as a dtype
            if not used and not taken and not may_be_ours:
                raise
            return replace(self, functions=False, axes=axes).program()
        graph = _graph_of(exported)
        keep_to_guards(exported, call, questions, partial(self.holds_at, graph))
        # A symbol of one number alone, as n where 256 entries are n x n: numbers tell shapes apart.
        alone = any(size_hint(size) == Dim.STATIC for size in free_sizes(exported.graph).values())
        if self.axes is None and alone:
            return replace(self, axes=_bounded(axes, exported)).program()
        check_branches(graph)
        _check_kinds(graph, unknown=None in budget.thresholds)
        layers = observer.calls(graph)
        of_weights = any(budget.thresholds[number] is not None and not depends_on_data(node)
                         for number, node in observer.residuals)  # fmt: skip
        if of_weights and not self.numbers:  # which may change: such a branch is held to its answer
            return replace(self, numbers=True, axes=axes).program()
        if used and not _alike(output, self.output_of(graph)):
            return replace(self, functions=False, axes=axes).program()
        self.check_sizes(graph, budget.widened)
        shapes = _nested(_bounded(axes, exported), call, module.forward)
        self.check_stops(observer.residuals)
        stops = tuple(Stop(x, budget.thresholds[number], number) for number, x in observer.residuals)
        return Program(self.name, graph, call.args, call.kwargs, shapes, stops, layers)

    def output_of(self, module: nn.Module) -> Any:
        """What the module, or a graph of it, gives on the call."""
        run = module.forward if isinstance(module, GraphModule) else module  # which prints no traceback
        with torch.random.fork_rng(devices=[]):
            return run(*copy.deepcopy(self.call.args), **copy.deepcopy(self.call.kwargs))

    def answers(self) -> tuple[Answers, Any]:
        """What the example answers to the module's Python, and what that gives."""
        with Trace(numbers=self.numbers) as asking, torch.random.fork_rng(devices=[]):
            copies = copy.deepcopy((self.call.args, self.call.kwargs))
            before = written(copies)
            output = self.module(*copies[0], **copies[1])
        if before[:2] != written(copies)[:2]:  # what is written into tensors, the graph has
            raise ValueError("writes into a list or dict that it is given")
        return asking.answers, output

    def asks_for_numbers(self) -> bool:
        with_numbers = replace(self, numbers=True)
        answers = with_numbers.answers()[0].given
        try:
            return answers != self.answers()[0].given
        except TypeError:  # of a tensor and what stands for a number, which has to be one of weights
            others = replace(with_numbers, call=self.call.mapped(others_for))
            return bool(answers) and answers == others.answers()[0].given

    def check_sizes(self, graph: GraphModule, widened: bool) -> None:
        """Exclude the sizes at which torch's own code takes another branch.

        A trace takes every free size to be 2 or more, and has no guard for a branch on less: none and one
        are tried, and two sizes of one at once, of which the length is limited; of many examples, on two.
        widened: torch.cdist was traced past its branch on a size.
        """
        free = _free_sizes(graph)
        batch = next(iter(free), None)
        least = 2 if batch is None else limits_of(free[batch].node.shape_env, batch)[0]
        two = {} if batch is None or least > 2 else {batch: 2}
        alone = [(symbol,) for symbol in free]
        together = itertools.combinations(free, 2) if len(free) < FEW_SIZES else [tuple(free)]
        pairs = ((1, pair) for pair in together)
        for count, symbols in (*((n, one) for n in (0, 1) for one in alone), *pairs):
            environment = free[symbols[-1]].node.shape_env
            if any(limits_of(environment, symbol)[0] > count for symbol in symbols):
                continue
            if self.alike_at(graph, two | dict.fromkeys(symbols, count), ALIKE) is False:
                demand(environment, symbols[-1], count + 1)
        for symbol, size in free.items() if widened else ():
            ranges = size.node.shape_env.var_to_range
            few = size.node.hint <= CDIST
            count = CDIST + 5 if few else CDIST - 5
            if not ranges[symbol].lower <= count <= ranges[symbol].upper:
                continue
            if not self.alike_at(graph, {symbol: count}, SAME):
                ranges[symbol] &= ValueRanges(2, CDIST) if few else ValueRanges(CDIST + 1, int_oo)

    def alike_at(self, graph: GraphModule, counts: Mapping[Any, int], tolerance: float) -> bool | None:
        """Whether both give the same at these sizes; None where the module gives nothing, or the program
        says that its examples answer otherwise.  tolerance: see _alike."""
        there = replace(self, call=_resized(graph, self.call, counts))
        with warnings.catch_warnings(action="ignore"):
            try:
                with Trace(numbers=self.numbers):
                    expected = there.output_of(self.module)
            except Exception:
                return None
            try:
                return _alike(expected, there.output_of(graph), tolerance)
            except BranchError:
                return None
            except Exception:  # the graph cannot: the program must not be asked
                return False

    def holds_at(self, graph: GraphModule, counts: Mapping[Any, int]) -> bool:
        """Whether both give the same at these sizes, or neither gives anything, whatever the numbers: a
        place beyond a shorter input is moved into it, and a gate that is shut is opened."""
        near = self.call.mapped(lambda x: x.clamp(max=1) if x.dtype in _PLACES else x)
        for tracing in (self, replace(self, call=near)):
            alike = tracing.alike_at(graph, counts, ALIKE)
            if alike is not None:
                with _no_zeros(self.module):
                    return alike and tracing.alike_at(graph, counts, ALIKE) is not False
        try:
            replace(tracing, call=_resized(graph, tracing.call, counts)).output_of(graph)
        except BranchError:  # which tells nothing of sizes
            return False
        except Exception:
            return True
        return False

    def check_stops(self, residuals: Sequence[tuple[int, Node]]) -> None:
        """Raises ValueError where a comparison with a residual does something else than to end its loop.

        The module is run with one comparison after the other answered as at the end of a loop: either
        less is computed, or, at the last of a loop, nothing changes. Numbers that a graph would hold
        never change.
        """

        def run(ends_at: int | None) -> tuple[list[Tensor], list[int], int]:
            with Trace(ends_at) as budget, torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                leaves = pytree.tree_leaves(self.output_of(self.module))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
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
                raise ValueError(
                    "returns a number that tells where a loop ends early: return only tensors"
                )
            same = len(other) == len(full) and all(map(equal, full, other))
            if computed >= count and not same:
                raise ValueError(
                    f"branches on {node.name}, a value from the data, other than to end a loop early"
                )


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


def _alike(expected: Any, output: Any, tolerance: float = ALIKE) -> bool:
    """Whether two outputs are the same, in single precision to the tolerance; NaN is NaN, as in a mean of
    no tokens."""
    ours, theirs = tensor_outputs(expected), tensor_outputs(output)
    exact = all(x.dtype in (torch.float32, torch.float64) for x in ours)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return False
    parts = [(x[x != y], y[x != y]) for x, y in zip(ours, theirs, strict=True)]  # no -1e9 of masks
    if not parts or largest_difference(*zip(*parts, strict=True)) <= (tolerance if exact else SAME):
        return True
    return all(map(equal, ours, theirs))


@contextlib.contextmanager
def _no_zeros(module: nn.Module) -> Iterator[None]:
    """Parameters that are zero as ones: a gate before training hides what is behind it."""
    zeros = [x.data for x in module.parameters() if x.is_floating_point() and not x.any()]
    try:
        for parameter in zeros:
            parameter.fill_(1)
        yield
    finally:
        for parameter in zeros:
            parameter.zero_()


def _free_sizes(graph: GraphModule) -> dict[Any, torch.SymInt]:
    """Those of the inputs that are nothing but themselves, by symbol."""
    values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = (value for value in values if isinstance(value, Tensor))
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    return {
        size.node.expr: size for size in sizes
        if isinstance(size, torch.SymInt) and fixed_size(size) is None and size.node.expr.is_Symbol
    }  # fmt: skip


def _resized(graph: GraphModule, call: Batch, counts: Mapping[Any, int]) -> Batch:
    """The example with so many entries, again from the first, along every axis of these sizes."""

    def resized(leaf: Any, traced: Any) -> Any:
        for axis, size in enumerate(traced.shape if isinstance(leaf, Tensor) else ()):
            count = None if fixed_size(size) is not None else counts.get(size.node.expr)
            if count is not None:
                rows = torch.arange(count, device=leaf.device) % max(1, leaf.shape[axis])
                leaf = leaf.index_select(axis, rows[: count if leaf.shape[axis] else 0])
        return leaf

    places = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return call.with_leaves([*map(resized, call.leaves, places)])


Axes = list[dict[int, Any] | None]
"""For torch.export, by axis: of each leaf of the arguments, None of what is no tensor."""


def _free_axes(call: Batch, more: Sequence[Batch] = ()) -> Axes:
    """Batch and length, the first two axes, are dynamic if the model turns out to allow it: the channels
    of a picture are what its first layer takes. Pixels are only where more calls have others. Of
    queries, keys and values [B, H, N, D] heads are not, and the length is the third axis; of a mask
    beside them the fourth too. Of a mask [B, 1, M] or [B, 1, N, M] beside tokens [B, M, ...] every axis
    as long as those is.

    A size of 1 cannot be traced as dynamic.
    """
    tensors = call.tensors()
    of_heads = _of_heads(tensors)
    lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() > 1}

    def dims(value: Any, *others: Any) -> dict[int, Any] | None:
        if not isinstance(value, Tensor):
            return None
        free = {0, 1}
        if of_heads is not None and value.dim() == 4:
            free = {0, 2} if value.shape[3] == of_heads else {0, 2, 3}
        elif not value.is_floating_point() or 1 in value.shape[1:-1]:
            free |= {axis for axis, size in enumerate(value.shape) if size in lengths}
        for other in others:
            if isinstance(other, Tensor) and other.dim() == value.dim():
                free |= {axis for axis, size in enumerate(other.shape) if size != value.shape[axis]}
        return {
            axis: Dim.AUTO if axis in free and value.shape[axis] > 1 else Dim.STATIC
            for axis in range(value.dim())
        }

    return [*map(dims, call.leaves, *(one.leaves for one in more if len(one.leaves) == len(call.leaves)))]


def _with_lengths(module: nn.Module, axes: Axes, call: Batch) -> Axes:
    """Where more axes are as long as a free one, as in [B, D, N] beside [B, N, 2] or in scores [B, N, N],
    they are free as well if the module runs with all of them one shorter."""
    leaves = call.leaves
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
    call = call.with_leaves(shorter)
    try:
        with torch.random.fork_rng(devices=[]), Trace():
            module(*call.args, **call.kwargs)
    except Exception:  # other sizes are none of the module's
        return axes
    return wider


def _nested(axes: Axes, call: Batch, forward: Callable[..., Any] | None = None) -> Any:
    """As torch.export takes them, for a call of `forward`."""
    nested = call.with_leaves(axes)
    if not nested.kwargs:
        return nested.args
    if forward is None:
        return None if nested.args else nested.kwargs
    try:
        return dict(_explicit(forward, call.kwargs).bind(*nested.args, **nested.kwargs).arguments)
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
    with replaced_forward(module, lambda forward, *args, **named: forward(*args, **named)):
        vars(vars(module)["forward"])["__signature__"] = signature
        yield


def _larger(call: Batch) -> list[Batch]:
    """One example with more tokens, and more examples; both with larger numbers."""

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

    return [call.with_leaves([*map(partial(larger, longer=longer), call.leaves, _free_axes(call))])
            for longer in (True, False)]  # fmt: skip


def _of_heads(tensors: Sequence[Tensor]) -> int | None:
    """D, where the first three tensors with four axes are [B, H, N, D], [B, H, M, D] and [B, H, M, E]."""
    four = [x.shape for x in tensors if x.dim() == 4 and x.is_floating_point()][:3]
    if len(four) < 3 or len({shape[:2] for shape in four}) > 1:
        return None
    q, k, v = four
    return int(q[3]) if q[3] == k[3] and k[2] == v[2] else None


def _bounded(axes: Axes, exported: ExportedProgram) -> Axes:
    """The axes with the sizes that the trace holds for.

    A branch on a length is traced on one side only: a program made from the graph refuses the lengths of
    the other side, where it would compute something else.
    """
    names = exported.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.name in names}
    if len(names) != len(axes):
        return axes
    return [
        free and {axis: size_hint(values[name].shape[axis]) or free[axis] for axis in free}
        for name, free in zip(names, axes, strict=True)
    ]


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
    model: nn.Module, example: Batch, state: Observed
) -> tuple[list[Program], list[tuple[str, str]]]:
    """Programs of the smallest modules that hold a site and can be exported."""
    stack: list[str] = []
    calls: dict[str, Batch] = {}
    several: set[str] = set()

    def enter(name: str, call_args: Any, call_kwargs: Any) -> Leave:
        stack.append(name)
        call = Batch(call_args, call_kwargs, None, []).mapped(lambda x: x.detach().clone())
        if _way(calls.setdefault(name, call)) != _way(call):
            several.add(name)
        return stack.pop

    with _Counter(stack) as counter, entering(model, enter):
        model(*copy.deepcopy(example.args), **copy.deepcopy(example.kwargs))
    modules = dict(model.named_modules())
    programs: list[Program] = []
    failed: dict[str, str] = {}
    # Children come before their parents: longer dotted names first. A loop by itself is taken only where
    # no attention around it is: with its products it is worth more.
    deepest = sorted((name for name in modules if name), key=lambda name: (-name.count("."), name))
    attention = [name for name in deepest if counter.products[name] > 1]
    loops = [name for name in deepest if counter.sums[name] > 1]
    for name in dict.fromkeys((*attention, *loops)):
        if any(_related(name, program.name) for program in programs):
            continue
        reason = state.reason(name, one_program=True) or state.unlike_now(name, model)
        reason = f"{name} is called in more than one way" if name in several else reason
        if reason is not None:
            failed[name] = reason
            continue
        try:
            program = _export(name, modules[name], calls[name], state)
        except Exception as error:  # its parent may still cover it; else it is reported
            failed[name] = reason_of(error)
            continue
        if holds_attention(program.graph):
            programs.append(program)
    order = list(modules)
    covered = [program.name for program in programs]
    skipped = [
        (name, reason)
        for name, reason in failed.items()
        if not any(_related(name, other) for other in covered)
        and not any(other != name and is_within(other, name) for other in failed)
    ]
    return sorted(programs, key=lambda program: order.index(program.name)), skipped


def _related(name: str, other: str) -> bool:
    return is_within(name, other) or is_within(other, name)


def _way(call: Batch) -> str:
    """Which arguments a call has, in what containers, and the numbers and texts among them."""
    plain = (bool, int, float, str, type(None))
    spec = pytree.tree_structure((call.args, call.kwargs))
    return repr(([x if isinstance(x, plain) else "" for x in call.leaves], spec))
