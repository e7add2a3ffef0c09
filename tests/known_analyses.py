"""One analysis for all commands that a file of tests runs on the same teacher and first examples.

It is what most of a small command's time goes into (torch.export), and none of those tests is about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.passes.analyse import Analysis
from asapc.stages import analyse as stage


@contextlib.contextmanager
def analysed_once() -> Iterator[None]:
    true, known = stage.analyse, {}

    def analyse(
        teacher: Teacher, batch: Batch, drop_maps: bool = False, more: Iterable[Batch] = ()
    ) -> Analysis:
        more = list(more)
        hashes: list[Any] = [own.hashes for own in (batch, *more)]
        key = repr((teacher.fingerprint, drop_maps, hashes))
        if key not in known:
            known[key] = true(teacher, batch, drop_maps, more)
        return known[key]

    stage.analyse = analyse
    try:
        yield
    finally:
        stage.analyse = true
