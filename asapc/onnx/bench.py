"""Teacher and compiled model under ONNX Runtime, by turns, on one batch."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch

from asapc.artifact import Artifact, Stage, read_exported
from asapc.errors import InputError
from asapc.formats import places
from asapc.inputs.data import Batch
from asapc.inputs.onnx.load import onnx_teacher
from asapc.inputs.onnx.session import open_session, providers, run
from asapc.inputs.onnx.settings import DEFAULT_OPSET, MODEL
from asapc.measure.timing import interleaved_medians
from asapc.onnx.export import onnx_model, save
from asapc.terminal.hints import command_line
from asapc.terminal.progress import Progress

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

STAGES: tuple[Stage, ...] = ("teacher", "lossless")


def bench_onnx(artifact: Artifact, batch: Batch, repeats: int, progress: Progress) -> dict[str, Any]:
    """Median latencies and sizes of OUT/model.onnx, of the teacher and the lossless loop as ONNX files.

    The teacher is the file it came as, if that is still there; otherwise what torch's exporter makes
    of it, as for the lossless loop.  Raises InputError where model.onnx takes other inputs.
    """
    threads = torch.get_num_threads()
    sessions = {"graph": open_session(artifact.folder / MODEL, threads)}
    _check_inputs(sessions["graph"], artifact, batch)
    sizes = {"graph": _bytes(artifact.folder / MODEL)}
    with tempfile.TemporaryDirectory() as place:
        for stage in STAGES:
            path = _own_file(artifact) if stage == "teacher" else None
            if path is None:
                progress.note(f"writing the {stage} in ONNX, to be timed")
                path = Path(place) / f"{stage}.onnx"
                save(onnx_model(read_exported(artifact, stage), DEFAULT_OPSET), path)
            sessions[stage], sizes[stage] = open_session(path, threads), _bytes(path)
    feeds = {
        stage: dict(zip((value.name for value in session.get_inputs()), batch.tensors(), strict=True))
        for stage, session in sessions.items()
    }
    progress.note("timing ONNX Runtime")
    calls = {stage: partial(run, session, feeds[stage]) for stage, session in sessions.items()}
    times = interleaved_medians(calls, repeats)
    latency = {stage: quartiles["median_ms"] for stage, quartiles in times.items()}
    return {
        "latency_teacher_ms": latency["teacher"],
        "latency_lossless_ms": latency["lossless"],
        "latency_compiled_ms": latency["graph"],
        "speedup": latency["teacher"] / latency["graph"],
        "speedup_lossless": latency["teacher"] / latency["lossless"],
        "megabytes_teacher": sizes["teacher"] / 1e6,
        "megabytes_lossless": sizes["lossless"] / 1e6,
        "megabytes_compiled": sizes["graph"] / 1e6,
        "threads": threads,
        "provider": providers()[0],
    }


def _check_inputs(session: InferenceSession, artifact: Artifact, batch: Batch) -> None:
    """model.onnx must take one input for every tensor of the batch."""
    names, expected = [value.name for value in session.get_inputs()], len(batch.tensors())
    if len(names) != expected:
        raise InputError(
            f"{artifact.folder / MODEL}: must take the {expected} tensors that the compiled model takes",
            got=", ".join(names) or "no inputs",
            help=command_line("export", artifact.folder),
        )


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
