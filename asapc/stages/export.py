"""Export: model.onnx beside an artefact, run on examples that calibration and selection have not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asapc.artifact import Artifact, read_artifact
from asapc.errors import InputError
from asapc.inputs.data import Batch, DataSource
from asapc.inputs.onnx.settings import OnnxSettings, require_extra
from asapc.report.evaluate import Unseen
from asapc.stages.rewrite import Compilation
from asapc.terminal.progress import Progress

VERIFIED_EXAMPLES = 16  # that a file is run on, at many shapes


def write_edited_or_whole(
    folder: Path, c: Compilation, settings: OnnxSettings, progress: Progress
) -> None:
    """The teacher's file with its loops replaced; the whole program where it cannot be edited."""
    from asapc.onnx.export import write_edited

    captured, compiled = c.analysis.capture.untouched[0].graph, c.compiled[0].graph
    batches = _unseen(read_artifact(folder, ()), c.source)
    try:
        write_edited(folder, c.teacher, captured, compiled, batches, settings, progress)
    except InputError as error:
        progress.note(f"writing the whole program anew: the teacher's file cannot be edited: {error}")
        write_verified(read_artifact(folder, ("graph",), trust=True), c.source, settings, progress)


def write_verified(
    artifact: Artifact, source: DataSource, settings: OnnxSettings, progress: Progress
) -> dict[str, Any]:
    """The compiled program as OUT/model.onnx, run and compared; returns what OUT/onnx.json holds.

    Raises VerificationError where the file computes something else; nothing is written then.
    """
    require_extra()
    from asapc.onnx.export import write_onnx

    return write_onnx(artifact, _unseen(artifact, source), settings, progress)


def _unseen(artifact: Artifact, source: DataSource) -> list[Batch]:
    """Examples that calibration and selection have not seen."""
    select = Unseen(artifact, source).select
    return list(source.batches(VERIFIED_EXAMPLES, select=select, limit=VERIFIED_EXAMPLES))
