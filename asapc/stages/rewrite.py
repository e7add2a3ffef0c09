"""Rewrite: the chosen operators in the graph, run once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from asapc.artifact import Stage
from asapc.calibration.stored import Calibration
from asapc.errors import VerificationError
from asapc.inputs.data import Batch, DataSource
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.ir import Program
from asapc.measure.differences import tensor_outputs
from asapc.passes.analyse import Analysis
from asapc.passes.select import Selection
from asapc.program.runner import Runner


@dataclass(frozen=True)
class Compilation:
    """What is written.  compiled: the rewritten programs; output: theirs on `example`, see rewrite."""

    teacher: Teacher
    source: DataSource
    recipe: Recipe
    calibration: Calibration
    analysis: Analysis
    chosen: Selection
    example: Batch
    compiled: Sequence[Program] = ()
    output: Any = None

    @property
    def whole(self) -> bool:
        return self.analysis.capture.kind == "whole"

    @property
    def programs(self) -> dict[Stage, Sequence[Program]]:
        return {
            "graph": self.compiled,
            "lossless": self.analysis.lifted,
            "teacher": self.analysis.capture.untouched,
        }


def rewrite(c: Compilation) -> Compilation:
    """The chosen operators in the graph, run once.  Raises VerificationError where that is not finite and
    not what the untouched model gives."""
    compiled = c.analysis.rewritten(c.chosen.becomes)
    output = Runner(c.analysis.model, compiled)(c.example)
    if not all(bool(tensor.isfinite().all()) for tensor in tensor_outputs(output)):
        _verify_infinite(output, c.analysis.untouched(c.example), c.teacher)
    return replace(c, compiled=compiled, output=output)


def _verify_infinite(output: Any, untouched: Any, teacher: Teacher) -> None:
    for ours, theirs in zip(tensor_outputs(output), tensor_outputs(untouched), strict=True):
        if not bool((ours.isfinite() | (ours == theirs)).all()):
            raise VerificationError(
                "the compiled model's outputs are finite",
                got="NaN or infinity",
                help=f"use `operator: sinkhorn` and report {teacher.source}",
            )
