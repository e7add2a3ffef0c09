"""Teacher and compiled model under ONNX Runtime, by turns, on one batch."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch

from asapc.artifact import Artifact, Stage, read_exported
from asapc.errors import InputError
from asapc.formats import places
from asapc.inputs.data import Batch
from asapc.inputs.onnx.load import onnx_teacher
from asapc.inputs.onnx.session import open_session, providers, run
from asapc.inputs.onnx.settings import DEFAULT_OPSET, MODEL
from asapc.measure.timing import interleaved_times, ratios
from asapc.onnx.export import onnx_model, save
from asapc.terminal.hints import command_line
from asapc.terminal.progress import Progress


def bench_onnx(artifact: Artifact, batch: Batch, repeats: int, progress: Progress) -> dict[str, Any]:
    """Median latencies and sizes of OUT/model.onnx, of the teacher and the lossless loop as ONNX files.

    The teacher is the file it came as, if that is still there; otherwise what torch's exporter makes
    of it, as for the lossless loop.  Raises InputError where model.onnx takes other inputs.
    """
    threads, tensors, model = torch.get_num_threads(), batch.tensors(), artifact.folder / MODEL
    compiled = open_session(model, threads)
    names = [value.name for value in compiled.get_inputs()]
    if len(names) != len(tensors):
        raise InputError(
            f"{model}: must take the {len(tensors)} tensors that the compiled model takes",
            got=", ".join(names) or "no inputs", help=command_line("export", artifact.folder),
        )  # fmt: skip
    sessions, megabytes = dict[str, Any](), dict[str, float]()
    stages: tuple[Stage, ...] = ("teacher", "lossless")
    with tempfile.TemporaryDirectory() as place:
        for stage in stages:
            path = _own_file(artifact) if stage == "teacher" else None
            if path is None:
                progress.note(f"writing the {stage} in ONNX, to be timed")
                path = Path(place) / f"{stage}.onnx"
                save(onnx_model(read_exported(artifact, stage), DEFAULT_OPSET), path)
            sessions[stage], megabytes[stage] = open_session(path, threads), _bytes(path) / 1e6
    sessions["compiled"], megabytes["compiled"] = compiled, _bytes(model) / 1e6
    calls = {}
    for name, session in sessions.items():
        inputs = dict(zip((value.name for value in session.get_inputs()), tensors, strict=True))
        calls[name] = partial(run, session, inputs)
    progress.note("timing ONNX Runtime")
    timed = ratios(interleaved_times(calls, repeats))
    del timed["confidence"]
    sizes = {f"megabytes_{name}": size for name, size in megabytes.items()}
    return {**timed, **sizes, "threads": threads, "provider": providers()[0]}


def _bytes(path: Path) -> int:
    """Size of the file and of the files that hold its weights."""
    weights = onnx.load(path, load_external_data=False).graph.initializer
    beside = {
        entry.value for weight in weights for entry in weight.external_data if entry.key == "location"
    }
    return sum(file.stat().st_size for file in (path, *(path.parent / name for name in beside)))


def _own_file(artifact: Artifact) -> Path | None:
    """The teacher's file, if it came as one and is the one that was compiled."""
    teacher = artifact.manifest["teacher"]
    path = Path(places.found(teacher["source"], artifact.folder))
    if path.suffix != ".onnx" or not path.is_file():
        return None
    try:
        same = onnx_teacher(path).fingerprint == teacher["fingerprint"]
    except InputError:
        return None
    return path if same else None
