"""What report and bench measure on an artefact: fidelity of every site, run times, the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from asapc.artifact import Artifact, Stage
from asapc.calibration.collect import pieces
from asapc.calibration.teacher import TeacherDuals
from asapc.device import CPU, described
from asapc.features.clouds import shown_queries
from asapc.features.predictor import Aim, transform_plan
from asapc.formats.records import json_fields
from asapc.inputs.data import Batch
from asapc.ir import Convention, PlanConvention, SiteTensors
from asapc.kernels.dispatch import explained
from asapc.measure.fidelity import AttentionFidelity, TensorFidelity
from asapc.measure.timing import ENOUGH, interleaved_times, ratios
from asapc.measure.torch_compiled import torch_compiled
from asapc.metrics import METRICS
from asapc.operators.catalogue import TEACHER, convention_from_json
from asapc.operators.sinkhorn import clean_values, widen
from asapc.program.calls import predicted_duals, site_function
from asapc.program.runner import Runner
from asapc.report.certificates import SiteCertificates
from asapc.report.document import SiteReport, approximates
from asapc.report.pictures import SitePictures

# What is timed, and its name in metrics.
NAMES: Mapping[Stage, str] = {"teacher": "teacher", "lossless": "lossless", "graph": "compiled"}
UNDER: tuple[Stage, ...] = ("teacher", "graph")  # what is timed under torch.compile, too


def time_model(
    runners: Mapping[Stage, Runner], batch: Batch, repeats: int = 7, warmup: int = 2,
    torch_compile: bool = False, twin: Stage | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Medians and ratios of the whole model, with the intervals of the ratios as `confidence`.

    twin: the stage that makes the same calls as the compiled model: the two are timed as one.
    torch_compile: time teacher and compiled model under torch.compile, too, and how long that took for
    the teacher; if it fails, `torch_compile_failed` says why.
    """
    if torch_compile:
        torch._dynamo.reset()  # what was compiled for an earlier model is not this one's
    calls: dict[str, Any] = {
        NAMES[stage]: partial(run, batch)
        for stage, run in runners.items() if twin is None or stage != "graph"
    }  # fmt: skip
    built = {NAMES[stage]: torch_compiled(runners[stage], batch) for stage in UNDER if torch_compile}
    under = {f"{name}_torch_compile": partial(its.call, batch)
             for name, its in built.items() if its.call is not None}  # fmt: skip
    for call in under.values():
        call()  # uncounted: the compilation of one model may have made another's guards fail
    rounds = interleaved_times(calls | under, repeats=repeats, warmup=warmup, enough=ENOUGH)
    if twin is not None:
        rounds["compiled"] = rounds[NAMES[twin]]
    figures = ratios(rounds)
    if built:
        figures["torch_compile_seconds"] = built["teacher"].seconds
        failed = [f"{name}: {its.failed}" for name, its in built.items() if its.failed]
        figures |= {"torch_compile_failed": "; ".join(failed)} if failed else {}
    return figures


def twin_of(artifact: Artifact) -> Stage | None:
    """The stage that makes the same calls as the compiled model, if nothing was approximated."""
    entries = artifact.manifest["sites"]
    if "refresh" in artifact.manifest or not entries:
        return None
    if all(entry["operator"] == TEACHER for entry in entries):
        return "teacher"
    return "lossless" if all(e["operator"] == e["convention"]["operator"] for e in entries) else None


def explain_site(artifact: Artifact, index: int, t: SiteTensors) -> list[dict[str, Any]]:
    """Which kernels the compiled site runs on these tensors, in order, and why; none if untouched."""
    if artifact.manifest["sites"][index]["operator"] == TEACHER:
        return []
    function = site_function(artifact.programs["graph"], artifact.site_names[index])
    with torch.no_grad(), explained() as choices:
        function(t, t.k)
    return [asdict(choice) for choice in choices]


def time_site(artifact: Artifact, index: int, t: SiteTensors, repeats: int) -> dict[str, Any]:
    """Medians of the plain PyTorch meaning (the usual loop), the lossless and the compiled operator.

    A site that selection left as it was runs the teacher's own code.
    """
    entry = artifact.manifest["sites"][index]
    lossless = artifact.programs["lossless"], artifact.site_names[index]
    functions: dict[str, Any] = {
        "teacher": partial(site_function(*lossless, plain=True), t, t.k),
        "lossless": partial(site_function(*lossless), t, t.k),
    }
    if approximates(entry["operator"], entry["convention"]["operator"]):
        function = site_function(artifact.programs["graph"], artifact.site_names[index])
        functions["compiled"] = partial(function, t, t.k)
    with torch.no_grad():
        times = interleaved_times(functions, repeats=repeats)
    times.setdefault("compiled", times["teacher" if entry["operator"] == TEACHER else "lossless"])
    return ratios(times)


# These compare sums with 1, which says nothing if marginals are given.
OF_UNIFORM_MARGINALS = ("row_err", "row_err_teacher", "col_err", "col_err_teacher")


class SiteFidelity:
    """Streams one site's activations through the teacher's meaning and its compiled operator.

    A site that selection left as it was is its teacher: nothing is run, and its errors are zero.
    """

    def __init__(self, artifact: Artifact, index: int, fast: bool = False) -> None:
        """fast: without certificates and pictures."""
        self.entry = artifact.manifest["sites"][index]
        self.convention = convention_from_json(self.entry["convention"])
        self.attention, self.output = AttentionFidelity(), TensorFidelity()
        self.pictures = None if fast else SitePictures(str(self.entry["name"]))
        self.certificates: SiteCertificates | None = None
        if self.entry["operator"] == TEACHER:
            return
        name = artifact.site_names[index]
        compiled = artifact.programs["graph"], name
        # Rows sum to about 1, whatever the teacher's factor; plain: independent of the kernels.
        self.compiled_site = site_function(*compiled, unit=True)
        self.teacher_site = site_function(artifact.programs["lossless"], name, unit=True, plain=True)
        if isinstance(self.convention, Convention) and not fast:
            source, key = predicted_duals(*compiled)
            plan = None
            if source is not None or key is not None:
                aim: Aim = self.entry.get("aim") or "aligned"
                count, side = self.entry["c_transforms"], self.entry["side"]
                plan = transform_plan(self.convention, count, side, aim)
            self.certificates = SiteCertificates(self.convention, plan, source, key)

    def update(self, t: SiteTensors) -> None:
        if self.entry["operator"] == TEACHER:
            return
        with torch.no_grad():
            if isinstance(self.convention, Convention) and self.convention.stabiliser is None:
                for piece in pieces(t, every=True):
                    duals = TeacherDuals(piece, self.convention)
                    self._compare(piece, duals.attention())
                    if self.certificates is not None:
                        self.certificates.add(duals)
                return
            self._compare(t, self.teacher_site(t, None))
            if self.certificates is not None:
                self.certificates.update(t)

    def _compare(self, t: SiteTensors, teacher: Tensor) -> None:
        """Compare what the compiled site computes with the teacher's map."""
        compiled = self.compiled_site(t, None)
        keeps, c = (t.keep, t.query_keep), self.convention
        if isinstance(c, Convention) and c.hides_queries:
            keeps = t.keep, shown_queries(t.bias)
            if c.last_side == "column":  # rows are then 1 on average among those that are shown
                every = teacher.new_ones(1, 1)
                keys, queries = ((every if x is None else x.float()).mean(1) for x in keeps)
                balance = (queries / torch.where(keys > 0, keys, 1.0))[:, None, None, None]
                teacher, compiled = teacher * balance, compiled * balance
        self.attention.update(teacher, compiled, *keeps)
        if self.pictures is not None:
            self.pictures.update(teacher, compiled, *keeps)
        # Where the model returns the map itself, the keys stand in for the values.
        if not isinstance(self.convention, PlanConvention):  # which has no values, nor keys
            values = widen(clean_values(t.k if t.v is None else t.v, t.keep))
            exact, applied = (widen(of).to(values.dtype) @ values for of in (teacher, compiled))
            if self.entry.get("depthwise"):  # a convolution on the values, which the map does not show
                applied = self.compiled_site(t, values).to(values.dtype)
            self.output.update(exact, applied)

    def result(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            **self.attention.metrics(),
            "output_rel_l2": self.output.metrics().get("output_rel_l2"),
        }
        if isinstance(self.convention, PlanConvention) and not self.convention.balanced:
            for key in OF_UNIFORM_MARGINALS:
                metrics.pop(key, None)
        certificates: list[dict[str, Any]] = []
        if self.certificates is not None:
            metrics |= self.certificates.metrics()
            certificates = self.certificates.result()
            if self.certificates.plan is not None:
                metrics["r2"] = self.entry["r2"]
                metrics["condition_number"] = self.entry["condition_number"]
        if self.entry["operator"] == TEACHER:
            known = (metric for metric in METRICS if metric.every_site and metric.untouched is not None)
            metrics = {metric.key: metric.untouched for metric in known}
        return {
            **{key: self.entry.get(key) for key in json_fields(SiteReport) if key != "more"},
            "metrics": metrics,
            "confidence": self.attention.confidence(),
            "by_head": self.attention.by_head(),
            "by_length": self.attention.by_length(),
            "certificates": certificates,
        }


def environment(device: torch.device = CPU) -> dict[str, Any]:
    """What a measurement was made on.  device: where the models ran."""
    return {
        "asapc": version("asapc"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": described(device),
    }
