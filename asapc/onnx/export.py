"""A compiled program as OUT/model.onnx, written only after it was run and compared.

    translate   the program by torch's exporter, its asapc calls as calls of model-local functions
    check       onnx.checker with shape inference; weights beyond 2 GB go into model.onnx.data
    verify      asapc.inputs.onnx.verify: ONNX Runtime against the compiled program

OUT/onnx.json says how it was written and what the comparison found.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnx_ir.tape
from onnx_ir.passes import common
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from asapc.artifact import Artifact, read_exported
from asapc.errors import InputError, VerificationError
from asapc.formats.atomic import replace_file
from asapc.formats.limits import MOST, demand, free_sizes, limits
from asapc.formats.places import digest_of
from asapc.inputs.data import Batch
from asapc.inputs.onnx.module import OnnxModule
from asapc.inputs.onnx.settings import DEFAULT_OPSET, MODEL, RECORD, TOLERANCE, OnnxSettings
from asapc.inputs.onnx.verify import Verified, joined, verify
from asapc.inputs.teacher import Teacher
from asapc.onnx.functions import Functions, take_out_calls
from asapc.onnx.half import MARGIN, in_half, rounding
from asapc.onnx.translate import translate
from asapc.passes.branches import HOLDS, held_branches
from asapc.terminal.printed import reason
from asapc.terminal.progress import Progress

DATA = ".data"  # suffix of the file that holds the weights of another
INLINE_BYTES = 1_900_000_000  # of weights: protobuf ends at 2 GiB
_PARTIAL = ".onnx-"


def write_onnx(
    artifact: Artifact, batches: Sequence[Batch], settings: OnnxSettings, progress: Progress
) -> dict[str, Any]:
    """Write OUT/model.onnx from the compiled program; returns what OUT/onnx.json holds.

    artifact: with its compiled program read.  batches: unseen examples that the file is verified on.
    Raises InputError for a model that has no one graph, VerificationError where the file does not
    compute what the compiled program does: nothing is written then, and an earlier file stays.
    """
    if artifact.capture != "whole":
        raise InputError(
            f"{artifact.folder}: one graph of the whole model is what ONNX holds",
            got="a model that torch.export could trace by its modules only",
            help="keep data-dependent Python out of its forward; `asapc inspect` names it",
        )
    _check_place(artifact.folder)
    exported = read_exported(artifact)
    names, outputs = input_names(exported), output_names(exported)
    joined(batches, names)  # raises before the time is spent
    progress.note("writing ONNX")
    called = artifact.manifest.get("onnx", {"inputs": names, "outputs": outputs})
    if (len(called["inputs"]), len(called["outputs"])) != (len(names), len(outputs)):
        raise InputError(
            f"{artifact.folder}: manifest.json names every input and output", got=called,
            help="compile again",
        )  # fmt: skip
    program, tolerance = artifact.programs["graph"][0].graph, settings.tolerance or TOLERANCE
    for graph in (program.graph, exported.graph):  # of files, which do not say what a size is at least
        for symbol, size in free_sizes(graph).items():
            least, _ = artifact.manifest["forward"]["limits"].get(symbol, (0, MOST))
            demand(size.node.shape_env, size.node.expr, least)
    for node in held_branches(program):
        progress.note(f"model.onnx takes the way of the example, and fails on the other: {node.args[2]}")
    if settings.float16:
        half = in_half(exported, names)
        if settings.tolerance is None:
            lost = rounding(program, half, names, batches)
            tolerance = MARGIN * lost
            progress.note(f"float16 in PyTorch: largest relative difference {lost:.2g}")
        exported = half.exported
    ends = called["inputs"], called["outputs"]
    model = onnx_model(exported, settings.opset or DEFAULT_OPSET, ends)
    if "sizes" in model.metadata_props:
        progress.note(f"model.onnx fails at other sizes: {model.metadata_props['sizes']}")
    verified = partial(verify, program=program, names=called["inputs"], batches=batches)
    return place(artifact.folder, model, verified, tolerance, settings.float16, progress)


def write_edited(
    folder: Path,
    teacher: Teacher,
    captured: GraphModule,
    compiled: GraphModule,
    batches: Sequence[Batch],
    settings: OnnxSettings,
    progress: Progress,
) -> dict[str, Any]:
    """The same for an ONNX teacher: its file, with the attention replaced.

    captured: what the teacher's graph was when it was traced; compiled: what the passes made of it.
    """
    from asapc.onnx.edit import edited_model

    progress.note("editing the ONNX graph")
    assert teacher.onnx is not None and isinstance(teacher.model, OnnxModule)
    _check_place(folder)
    model, known = edited_model(teacher.onnx, teacher.model, captured, compiled, settings.opset)
    model.producer_name, model.producer_version = "asapc", None
    names = [value.name for value in teacher.model.inputs]
    verified = partial(verify, program=compiled, names=names, batches=batches, known=known)
    return place(folder, model, verified, settings.tolerance or TOLERANCE, False, progress)


def place(
    folder: Path,
    model: onnx_ir.Model,
    verified: Callable[..., Verified],
    tolerance: float,
    float16: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Check and verify the model in a temporary place, then make it OUT/model.onnx, with OUT/onnx.json.

    verified: asapc.inputs.onnx.verify.verify of a file, given its path, tolerance and progress.
    """
    for left in folder.glob(f"{_PARTIAL}*"):  # of a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_PARTIAL) as aside:
        path = Path(aside) / MODEL
        save(model, path)
        check(path)
        result = verified(path, tolerance=tolerance, progress=progress)
        record = {
            "opset": model.graph.opset_imports[""],
            "float16": float16,
            "bytes": sum(file.stat().st_size for file in path.parent.iterdir()),
            "sha256": digest_of(path),
            "sizes": model.metadata_props.get("sizes", ""),
            "functions": sorted({function.name for function in model.functions.values()}),
            **asdict(result),
        }
        if any((place / (MODEL + DATA)).exists() for place in (folder, path.parent)):
            (folder / MODEL).unlink(missing_ok=True)  # a kill in between leaves none, not a mixed one
            (folder / (MODEL + DATA)).unlink(missing_ok=True)
        for file in sorted(path.parent.iterdir(), reverse=True):  # model.onnx.data first
            file.chmod(0o644)
            os.replace(file, folder / file.name)
    replace_file(folder / RECORD, json.dumps(record, indent=2) + "\n")
    return record


def _check_place(folder: Path) -> None:
    for name in (MODEL, MODEL + DATA, RECORD):
        if (folder / name).is_dir():
            raise InputError(f"{folder / name}: must be a file, or not exist", got="a folder")


def onnx_model(
    exported: ExportedProgram, opset: int, ends: tuple[Sequence[str], Sequence[str]] | None = None
) -> onnx_ir.Model:
    """The program in ONNX; `exported` is taken apart.  ends: the names of its inputs and outputs."""
    functions = Functions(opset)
    known = {symbol: limits(size) for symbol, size in free_sizes(exported.graph).items()}
    limited = {symbol: own for symbol, own in known.items() if own != (0, MOST)}
    answers = _returned(exported)
    take_out_calls(exported, functions)
    model = translate(exported, opset)
    _fail_elsewhere(model, limited, answers)
    if ends is not None:
        _rename(model, *ends)
    functions.put_into(model)  # after the renaming, which names every node: theirs have no names
    _name_sizes(model, limited)
    model.ir_version = 11 if opset >= 23 else 10  # an opset is read by the runtimes of its IR version
    model.producer_name, model.producer_version = "asapc", None
    return model


def _returned(exported: ExportedProgram) -> list[bool]:
    """The answers that the program holds to, whose conditions become its last outputs."""
    held = exported.graph.find_nodes(op="call_function", target=HOLDS)
    whole = exported.module_call_graph[0].signature
    if held and whole is not None:
        output = exported.graph.output_node()
        output.args = ((*output.args[0], *(node.args[0] for node in held)),)
        whole.out_spec = pytree.tree_structure(output.args[0])
    for node in held:
        condition = TensorArgument(node.args[0].name)
        exported.graph_signature.output_specs.append(OutputSpec(OutputKind.USER_OUTPUT, condition, None))
        exported.graph.erase_node(node)
    return [bool(node.args[1]) for node in held]


def _fail_elsewhere(
    model: onnx_ir.Model, limits: Mapping[str, Sequence[int]], answers: Sequence[bool]
) -> None:
    """Take the conditions from the outputs, and make the others an error of the runtime where a size is
    beyond its limits or a condition has another answer: Gather is then asked for entry 1 of 1."""
    outputs, tape = model.graph.outputs, onnx_ir.tape.Tape(model.graph)
    first = len(outputs) - len(answers)
    conditions, wrong = outputs[first:], []
    del outputs[first:]
    for condition, answer in zip(conditions, answers, strict=True):
        other = tape.op("Cast", [condition], {"to": onnx_ir.DataType.BOOL})
        wrong.append(tape.op("Not", [other]) if answer else other)
    places = {str(getattr(size, "value", size)): (value, axis) for value in model.graph.inputs
              for axis, size in enumerate(value.shape or ())}  # fmt: skip
    for symbol in filter(places.__contains__, limits):
        value, axis = places[symbol]
        size = tape.op("Shape", [value], {"start": axis, "end": axis + 1})
        for operator, end in zip(("Less", "Greater"), limits[symbol], strict=True):
            ending = tape.initializer(onnx_ir.tensor([end], name=f"asapc_{operator}_{symbol}"))
            wrong.append(tape.op(operator, [size, ending]))
    if not wrong:
        return
    wrong_at_all = reduce(lambda x, y: tape.op("Or", [x, y]), wrong)
    zero, ends = (tape.initializer(onnx_ir.tensor([n], name=f"asapc_{n}")) for n in (0, -1))
    entry = tape.op("Reshape", [tape.op("Cast", [wrong_at_all], {"to": onnx_ir.DataType.INT64}), ends])
    for index, value in enumerate(outputs):
        chosen = tape.op("Gather", [tape.op("Unsqueeze", [value, zero]), entry])
        outputs[index] = tape.op("Squeeze", [chosen, zero])
        outputs[index].shape, outputs[index].type = value.shape, value.type


def save(model: onnx_ir.Model, path: Path) -> None:
    """Weights go into a separate file where a single one would exceed 2 GB."""
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values()
                  if value.const_value is not None)  # fmt: skip
    if weights <= INLINE_BYTES:
        onnx_ir.save(model, path)
    else:
        onnx_ir.save(model, path, external_data=path.name + DATA)


def check(path: Path) -> None:
    """onnx.checker with strict shape inference.  Raises VerificationError."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # ValidationError and InferenceError share no base class
        raise VerificationError(
            f"{path.name}: the ONNX checker accepts the file", got=reason(error)
        ) from error


def _name_sizes(model: onnx_ir.Model, limits: Mapping[str, Sequence[int]]) -> None:
    """Call dynamic sizes batch, length, length_2 ... in the order of the inputs. Their limits go into the
    file's metadata."""
    names: dict[str, str | int] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            symbol = getattr(size, "value", None)
            if isinstance(symbol, str) and symbol.isdigit():  # a dynamic size that the trace has fixed
                names[symbol] = int(symbol)
            elif isinstance(symbol, str) and symbol not in names:
                known = sum(str(name).startswith("length") for name in names.values())
                if axis == 0 and "batch" not in names.values():
                    names[symbol] = "batch"
                else:
                    names[symbol] = "length" if known == 0 else f"length_{known + 1}"
    if limits:
        model.metadata_props["sizes"] = ", ".join(
            f"{names.get(symbol, symbol)} is {low} to {high if high < MOST else 'any'}"
            for symbol, (low, high) in limits.items()
        )
    graph = model.graph
    inner = (value for node in graph for value in node.outputs)
    for value in (*graph.inputs, *graph.outputs, *inner):
        if value.shape is None:
            continue
        value.shape = onnx_ir.Shape([
            names.get(symbol, symbol) if isinstance(symbol := getattr(size, "value", size), str) else size
            for size in value.shape
        ])  # fmt: skip


# Users of a file rely on the names of its inputs and outputs: inputs are named after forward's arguments,
# outputs after the keys of a returned mapping, otherwise `output`, or `output_0`, `output_1` ...
# An ONNX teacher's names stay (manifest.json, `onnx`).


def input_names(exported: ExportedProgram) -> list[str]:
    """Names of the tensors that the program takes, in order."""
    specs = exported.graph_signature.input_specs
    return [spec.arg.name for spec in specs
            if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)]  # fmt: skip


def output_names(exported: ExportedProgram) -> list[str]:
    """Raises InputError for an output that is not a tensor, which ONNX has no place for."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))[0]
    names: list[str] = []
    taken = input_names(exported)
    for path, _ in paths:
        keys = [str(getattr(key, a)) for key in path for a in ("key", "name", "idx") if hasattr(key, a)]
        named = path and isinstance(path[0], pytree.MappingKey | pytree.GetAttrKey)
        name = "_".join(keys if named else ["output", *keys])
        while name in names or name in taken:
            name += "_"
        names.append(name)
    for name, output in zip(names, exported.graph_signature.output_specs, strict=True):
        if not isinstance(output.arg, TensorArgument):
            value = getattr(output.arg, "value", None)
            kind = "a size" if value is None else f"{type(value).__name__} {value}"
            raise InputError(
                "export: the outputs of the model are tensors", got=f"{name}: {kind}",
                help="wrap the model in one that returns its tensors only",
            )  # fmt: skip
    return names


def _rename(model: onnx_ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give the graph's inputs and outputs these names; other values that have them are renamed."""
    common.OutputFixPass()(model)  # makes every output a separate value: no input, no other output
    ends = [*model.graph.inputs, *model.graph.outputs]
    for number, value in enumerate(ends):  # free names first, so that two values can swap theirs
        value.name = f"asapc_end_{number}"
    for value, name in zip(ends, (*inputs, *outputs), strict=True):
        value.name = name
    common.NameFixPass()(model)
