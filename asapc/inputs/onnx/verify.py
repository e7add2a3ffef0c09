"""Comparison of an ONNX file under ONNX Runtime with the program it was written from or read into.

A written file is run at many shapes: on real examples at several batch sizes, which are also cut, or
repeated to lengths that no example has, if the length is dynamic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree

from asapc.errors import InputError, VerificationError
from asapc.formats.limits import limits
from asapc.inputs.data import Batch
from asapc.inputs.onnx.module import OnnxModule
from asapc.inputs.onnx.session import observe, open_session, run
from asapc.inputs.onnx.settings import TOLERANCE
from asapc.terminal.progress import Progress

SHAPES = 20  # tried at most
BATCH = "batch"
LONGER = 1.25
FLOOR = 1e-3  # the least largest entry of an output that differences are relative to

Sizes = dict[str, int]


@dataclass(frozen=True)
class Verified:
    """largest: difference of an output relative to max(FLOOR, its largest entry), over all shapes.

    shapes: the sizes that were run; skipped: sizes that the compiled program does not accept itself.
    """

    tolerance: float
    largest: float
    shapes: list[Sizes]
    skipped: list[Sizes]


def verify(
    path: Path,
    program: GraphModule,
    names: Sequence[str],
    batches: Sequence[Batch],
    tolerance: float,
    progress: Progress,
    known: Mapping[str, Sequence[str]] | None = None,
) -> Verified:
    """Run both at up to SHAPES shapes.

    names: of the program's tensor inputs, in order, as the file has them.  known: the file's values by
    the name of the program's node; None where they have the same names.
    Raises VerificationError, with the first node that differs, where an output does by more than
    `tolerance`; InputError if there is no example to run.
    """
    session = open_session(path)
    axes = {value.name: _named(value.shape) for value in session.get_inputs()}
    inputs = joined(batches, names)
    largest, shapes, skipped = 0.0, list[Sizes](), list[Sizes]()
    for sizes in progress.track(_sizes(inputs, axes), "verifying", SHAPES):
        if len(shapes) == SHAPES:
            break
        if any({**sizes, BATCH: 0} == {**earlier, BATCH: 0} for earlier in skipped):
            continue
        feeds = {name: _resized(tensor, axes[name], sizes) for name, tensor in inputs.items()}
        try:
            ours = run_program(program, feeds)
        except InputError as error:
            progress.note(f"{_sizes_text(sizes)}: not run, PyTorch says {error.got}")
            skipped.append(sizes)
            continue
        try:
            difference = difference_of(ours, run(session, feeds))
        except InputError as error:
            raise VerificationError(
                f"{path.name}: runs wherever the compiled program does",
                got=f"at {_sizes_text(sizes)}: {error.got}",
            ) from error
        if not difference <= tolerance:
            values = _values(program, feeds, known)
            where = first_difference(path, values, feeds, tolerance)
            raise VerificationError(
                f"{path.name}: outputs are those of the compiled program, to {tolerance:g}",
                got=f"{difference:.2g} at {_sizes_text(sizes)}; {where}",
                help="keep the PyTorch artefact, or allow more with --tolerance",
            )
        largest = max(largest, difference)
        shapes.append(sizes)
    if not shapes:
        raise InputError(
            "export: needs examples that the compiled program can be run on", got="none",
            help="pass --data with more examples",
        )  # fmt: skip
    return Verified(tolerance, largest, shapes, skipped)


def check_import(module: OnnxModule, path: Path, batch: Batch) -> float:
    """The largest difference between the module's outputs and onnxruntime's on the batch.

    Raises VerificationError, which names the first node that differs, where it is beyond TOLERANCE, and
    InputError where onnxruntime is missing or does not run the file on this batch.
    """
    by_name = dict(zip(module.names, batch.args, strict=False)) | batch.kwargs
    values = [by_name[name] for name in module.names]
    inputs = {declared.name: value for declared, value in zip(module.inputs, values, strict=True)}
    session = open_session(path)
    try:
        expected = run(session, inputs)
    except InputError as error:
        raise InputError(
            f"{path}: onnxruntime must be able to run it on the given data", got=error.got,
            help="check the data against the model's inputs, a batch of several examples included",
        ) from error
    with torch.no_grad():
        results = module.values(values, module.graph.outputs)
    worst = difference_of(expected, results)
    if not worst <= TOLERANCE:
        nodes = {name: node for node in module.graph.nodes for name in node.outputs if name}
        with torch.no_grad():
            ours = dict(zip(nodes, module.values(values, list(nodes)), strict=True))
        first = first_difference(path, ours, inputs, TOLERANCE, nodes)
        raise VerificationError(
            f"{path}: the imported model computes what onnxruntime computes",
            got=f"relative difference {worst:.2g}; {first}",
            help="this is a defect of asapc: please report the node",
        )
    return worst


def first_difference(
    path: Path, values: Mapping[str, Tensor], feeds: Mapping[str, Tensor], tolerance: float,
    nodes: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Say which value of the file, in its order, is the first to differ from that in `values`.

    nodes: what to call the values, if not by their names.
    """
    try:
        theirs = observe(path, values, feeds)
    except InputError as error:
        return f"no node could be named: {error.got}"
    for name, value in theirs.items():
        difference = difference_of([values[name]], [value])
        if not difference <= tolerance:
            return f"first in {name if nodes is None else nodes[name]}: {difference:.2g}"
    return "no value before the outputs differs"


def _values(
    program: GraphModule, feeds: Mapping[str, Tensor], known: Mapping[str, Sequence[str]] | None
) -> dict[str, Tensor]:
    """Every floating tensor of the program by its names in the file, see verify."""
    interpreter = Interpreter(program, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*feeds.values(), enable_io_processing=False)
    return {
        name: value for node, value in interpreter.env.items()
        if node.op == "call_function" and isinstance(value, Tensor) and value.is_floating_point()
        for name in ([node.name] if known is None else known.get(node.name, ()))
    }  # fmt: skip


def run_program(program: GraphModule, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors it returns.  Raises InputError where it does not accept these sizes."""
    _check_sizes(program, feeds)
    try:
        with torch.no_grad():
            output = Interpreter(program).run(*feeds.values(), enable_io_processing=False)
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        first = " ".join(str(error).split("\n\n")[0].split())
        raise InputError("the program runs at these sizes", got=first[:200]) from error
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def difference_of(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest over all outputs; infinite if shapes or integers differ, NaN if only one holds it."""
    if len(ours) != len(theirs):
        return math.inf
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or (not a.is_floating_point() and not torch.equal(a, b.to(a.dtype))):
            return math.inf
        if a.numel() == 0 or not a.is_floating_point():
            continue
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())  # infinities too
        apart = torch.where(same, 0.0, (a - b).abs())
        finite = a[a.isfinite()].abs()
        scale = max(FLOOR, float(finite.max())) if finite.numel() else 1.0
        value = float(apart.max()) / scale
        if value != value:
            return value
        worst = max(worst, value)
    return worst


def _check_sizes(program: GraphModule, feeds: Mapping[str, Tensor]) -> None:
    """Raises InputError for sizes that the trace does not cover, such as after a branch on a length."""
    places = (node for node in program.graph.nodes if node.op == "placeholder")
    for place, tensor in zip(places, feeds.values(), strict=True):
        for size, length in zip(place.meta["val"].shape, tensor.shape, strict=True):
            low, high = limits(size)
            if not low <= length <= high:
                raise InputError(
                    "the program runs at these sizes",
                    got=f"{place.name}: {length}, traced for {low} to {high}",
                )


def joined(batches: Sequence[Batch], names: Sequence[str]) -> dict[str, Tensor]:
    """The inputs by name, of all batches that have the shapes of the first."""
    rows = [batch.tensors() for batch in batches]
    if not rows:
        raise InputError(
            "export: needs examples that calibration and selection have not seen", got="none",
            help="pass them with --data",
        )  # fmt: skip
    shapes = [tensor.shape[1:] for tensor in rows[0]]
    alike = [row for row in rows if [tensor.shape[1:] for tensor in row] == shapes]
    columns = [torch.cat(column) for column in zip(*alike, strict=True)]
    return dict(zip(names, columns, strict=True))


def _named(shape: Sequence[int | str | None]) -> list[int | str]:
    """The axes of an input. If the first one is dynamic, it counts examples, whatever its name. Others
    without a name keep their sizes, since nothing says which of them belong together."""
    named: list[int | str] = [-1 if size is None else size for size in shape]
    if shape and not isinstance(shape[0], int):
        named[0] = BATCH
    return named


def _sizes(
    inputs: Mapping[str, Tensor], axes: Mapping[str, Sequence[int | str]]
) -> Iterator[dict[str, int]]:
    """Values of the file's dynamic sizes by their names, beginning with those of the examples."""
    known: dict[str, int] = {}
    for name, tensor in inputs.items():
        for size, length in zip(axes[name], tensor.shape, strict=True):
            if isinstance(size, str):
                known.setdefault(size, length)
    lengths = {name: length for name, length in known.items() if name != BATCH}
    choices = [_lengths(length) for length in lengths.values()]
    by_length = [dict(zip(lengths, choice, strict=True)) for choice in zip(*choices, strict=True)] or [{}]
    if BATCH not in known:
        yield from by_length
        return
    for count, sizes in itertools.product(range(1, SHAPES + 1), by_length):
        yield {BATCH: count, **sizes}


def _lengths(length: int) -> tuple[int, ...]:
    """As it is, shorter, very short, longer."""
    return length, max(1, length // 2 + 1), min(length, 3), math.ceil(LONGER * length)


def _resized(tensor: Tensor, axes: Sequence[int | str], sizes: Mapping[str, int]) -> Tensor:
    """Cut, or repeated from the start, to the sizes of its dynamic axes."""
    for axis, size in enumerate(axes):
        if isinstance(size, str):
            tensor = tensor.index_select(axis, torch.arange(sizes[size]) % tensor.shape[axis])
    return tensor


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "the only shape"
