"""One analysis for all commands that a file of tests runs on the same teacher and first examples.

It is what most of a small command's time goes into (torch.export, and the search for each convention),
and none of those tests is about it: test_match.py, test_probe.py, test_replay.py and test_drop_in.py
are, and test_reproducible.py, whose commands analyse anew each time.
A model that is handed over in memory is analysed each time, too: it may be changed in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from asapc.device import CPU
from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.passes.analyse import Analysis
from asapc.passes.replay import Replayed
from asapc.stages import analyse as stage
from asapc.terminal.progress import SILENT, Progress

MOST = 8  # analyses that are kept: each holds a model and its graphs


@contextlib.contextmanager
def analysed_once() -> Iterator[None]:
    true, known = stage.analyse, dict[str, Analysis]()

    def analyse(
        teacher: Teacher, batch: Batch, drop_maps: bool = False, more: Iterable[Batch] = (),
        progress: Progress = SILENT, replayed: Replayed | None = None, device: torch.device = CPU,
        softmax: bool = False,
    ) -> Analysis:  # fmt: skip
        more, origin = list(more), _origin(teacher)
        if origin is None:
            return true(teacher, batch, drop_maps, more, progress, device=device, softmax=softmax)
        hashes: list[Any] = [given.hashes for given in (batch, *more)]
        key = repr((teacher.fingerprint, origin, drop_maps, hashes, device, softmax))
        if key not in known:
            if len(known) == MOST:
                del known[next(iter(known))]
            known[key] = true(teacher, batch, drop_maps, more, progress, device=device, softmax=softmax)
        return known[key]

    stage.analyse = analyse
    try:
        yield
    finally:
        stage.analyse = true


def _origin(teacher: Teacher) -> list[Any] | None:
    """What else makes a teacher, since equal weights may be another model's; None where no file does."""
    place = Path(teacher.source.rpartition(":")[0] or teacher.source)  # of a factory, its file
    if not place.exists():
        return None
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    stats = [(path.name, path.stat()) for path in files if path.is_file()]
    return [
        teacher.source, teacher.program is None, teacher.onnx, type(teacher.model),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    ]  # fmt: skip
