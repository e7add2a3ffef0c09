"""Metrics: what is measured of a compiled model, each described once.

Labels, tables, the page, the JSON schema of the report, gates, budgets, baselines and studies are all
derived from METRICS, whose order they keep.  A new metric is one entry here and the line that measures
it, see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MEASURED_EXAMPLES = 512  # by a report or a study, at most, unless told otherwise
MAP_EXAMPLES = 128  # of these, on which attention maps are compared; outputs are compared on all
MAP_ENTRIES = 2**27  # of them, in all layers together: a report of a large model compares fewer examples


@dataclass(frozen=True)
class Metric:
    """One figure of a report.

    key:        its name in report.json, and in gates, budgets and baselines.
    doc:        what it is, in one line: on the page and in the schema.
    direction:  which way is better.
    scope:      what it is measured of.
    label:      in words, of the whole model; without one, the key.
    column:     the heading over it in a table; without one it is in no table of sites.
    low, high:  the least and the greatest value it can have.
    share:      a part of all examples: shown in per cent, compared in points, and too coarse to judge
                on few examples.
    every_site: a site whose code was replaced must have it, and finite: proven bounds and condition
                numbers may overflow, and say so honestly.
    of_fit:     describes a predicted dual, so only a site that predicts one has it.
    untouched:  what it is at a site that was left to the teacher's own code.
    gate:       whether reports have it, so that a gate may limit it.
    compared:   whether a report is compared with its baseline in it.  Absolute times say more about the
                machine than about the model.
    speed:      a ratio of two times, which depends on the machine and is implausible beyond all bounds.
    budget:     whether a recipe's budget may limit it.
    study:      whether a study lists it: in its files alone, or in its table, too.
    """

    key: str
    doc: str
    direction: Literal["min", "max"]
    scope: Literal["site", "model", "both"]
    label: str = ""
    column: str = ""
    low: float | None = 0.0
    high: float | None = None
    share: bool = False
    every_site: bool = False
    of_fit: bool = False
    untouched: float | None = None
    gate: bool = True
    compared: bool = True
    speed: bool = False
    budget: bool = False
    study: Literal["", "files", "table"] = ""

    @property
    def bound(self) -> Literal["min", "max"]:
        """The limit that asks for a good value: more is better, so there is a least."""
        return "min" if self.direction == "max" else "max"

    def schema(self) -> dict[str, Any]:
        """Its property in the JSON schema of the report; null is a value that was NaN or infinite."""
        ends = {"minimum": self.low, "maximum": self.high}
        known = {key: end for key, end in ends.items() if end is not None}
        return {"description": self.doc, "type": ["number", "null"], **known}


METRICS: tuple[Metric, ...] = (
    Metric("examples", "examples measured", "max", "model",
           label="examples, unseen in the fit", compared=False),
    Metric("attention_rel_l2", "|A^ - A|_F / |A|_F, mean over examples and heads", "min", "site",
           column="attention l2", every_site=True, untouched=0.0, budget=True, study="table"),
    Metric("attention_rel_l2_worst", "the same, worst example and head", "min", "site",
           column="worst", every_site=True, untouched=0.0, study="table"),
    Metric("output_rmse", "root mean square difference of the outputs", "min", "both",
           label="output RMSE", untouched=0.0, study="table"),
    Metric("output_rel_l2", "norm of the difference / norm of the teacher's", "min", "both",
           label="output relative l2", column="output l2", every_site=True, untouched=0.0, budget=True,
           study="files"),
    Metric("max_abs_error", "largest absolute difference of the outputs", "min", "both",
           label="largest output difference", untouched=0.0),
    Metric("row_err", "mean |sum_j A^_ij - 1| over queries", "min", "site",
           column="row err", every_site=True, study="files"),
    Metric("row_err_teacher", "row_err of the teacher itself", "min", "site"),
    Metric("col_err", "mean |sum_i A^_ij M/N - 1| over active keys", "min", "site",
           column="col err", every_site=True, study="files"),
    Metric("col_err_teacher", "col_err of the teacher itself", "min", "site"),
    Metric("plan_kl", "generalised KL(P || P^), mean over examples and heads", "min", "site",
           column="plan KL", low=None, every_site=True, untouched=0.0, study="table"),
    Metric("r2", "variance of the teacher's dual that the fit explains, in-sample", "max", "site",
           column="R2 in-sample", low=None, of_fit=True, study="files"),
    Metric("condition_number", "of X'X + lambda I, largest of the head groups", "min", "site",
           column="cond", of_fit=True),
    Metric("row_bound", "proven bound on row_err, exp(max |g+ - g0|) - 1", "min", "site",
           column="row bound", of_fit=True),
    Metric("contraction_bound", "proven contraction of one Sinkhorn iteration, tanh^2(Delta / 4), or "
           "tanh^2(range(S) / 2) where Delta was not computed", "min", "site", column="contraction",
           high=1.0),
    Metric("truncation_bound", "proven range of what further iterations add to the keys' dual", "min",
           "site"),
    Metric("dual_stability", "proven ratio of plan entries, exp(range(f^ - f)), at the dual's error",
           "min", "site", of_fit=True),
    Metric("output_bound", "proven bound on a query's output error over the longest value, from the "
           "dual's error, on the cases checked", "min", "site", of_fit=True),
    Metric("divergence_bound", "proven bound on the mean KL(P^ || P) of one c-transform, from the fit's "
           "residual, on the cases checked", "min", "site", of_fit=True),
    Metric("logit_kl", "KL(teacher || compiled) of the predicted classes", "min", "model",
           label="logit KL", column="logit KL", low=None, budget=True),
    Metric("prediction_agreement", "share of equal predicted classes", "max", "model",
           column="agreement", label="prediction agreement", high=1.0, share=True, budget=True,
           study="table"),
    Metric("accuracy_teacher", "accuracy of the teacher, if labels are given", "max", "model",
           label="accuracy, teacher", high=1.0, share=True),
    Metric("accuracy_compiled", "accuracy of the compiled model", "max", "model",
           label="accuracy, compiled", column="accuracy", high=1.0, share=True, study="table"),
    Metric("accuracy_drop", "accuracy_teacher - accuracy_compiled", "min", "model",
           label="accuracy drop", low=-1.0, high=1.0, share=True, budget=True, study="files"),
    Metric("metric_teacher", "mean of your own metric (--metric), teacher", "max", "model",
           label="own metric, teacher", low=None, compared=False),
    Metric("metric_compiled", "mean of your own metric, compiled model", "max", "model",
           label="own metric, compiled", low=None, compared=False),
    Metric("metric_drop", "how much worse the compiled model is in your own metric", "min", "model",
           label="own metric, drop", low=None),
    Metric("accuracy", "accuracy of one model, in audits and refreshes", "max", "model",
           column="accuracy", high=1.0, share=True, gate=False, compared=False),
    Metric("prediction_change", "share of predicted classes that differ", "min", "model",
           column="predictions changed", high=1.0, share=True, gate=False, compared=False),
    Metric("latency_teacher_ms", "median time of the teacher", "min", "both",
           label="latency, teacher (ms)", column="teacher ms", compared=False),
    Metric("latency_lossless_ms", "median time with lossless operators", "min", "both",
           label="latency, lossless loop (ms)", column="lossless ms", compared=False),
    Metric("latency_compiled_ms", "median time of the compiled model", "min", "both",
           label="latency, compiled (ms)", column="compiled ms", compared=False),
    Metric("speedup_lossless", "latency_teacher_ms / latency_lossless_ms", "max", "both",
           label="speedup, lossless loop", column="lossless x", speed=True),
    Metric("speedup", "latency_teacher_ms / latency_compiled_ms", "max", "both",
           label="speedup, compiled", column="compiled x", speed=True),
    Metric("latency_teacher_torch_compile_ms", "median time of the teacher under torch.compile", "min",
           "model", label="latency, teacher under torch.compile (ms)", compared=False),
    Metric("latency_compiled_torch_compile_ms", "median time of the compiled model under torch.compile",
           "min", "model", label="latency, compiled under torch.compile (ms)", compared=False),
    Metric("speedup_teacher_torch_compile", "latency_teacher_ms / latency_teacher_torch_compile_ms",
           "max", "model", label="speedup, teacher under torch.compile", speed=True, compared=False),
    Metric("speedup_compiled_torch_compile", "latency_teacher_ms / latency_compiled_torch_compile_ms",
           "max", "model", label="speedup, compiled under torch.compile", speed=True, compared=False),
    Metric("torch_compile_seconds", "time torch.compile took for the teacher", "min", "model",
           label="torch.compile of the teacher (s)", compared=False),
    Metric("fit_seconds", "time spent on calibration", "min", "both",
           label="fit (s)", column="fit s", compared=False, study="table"),
    Metric("break_even_batches", "batches after which the time saved exceeds fit_seconds", "min",
           "model", label="batches until the fit pays off", compared=False),
)  # fmt: skip

METRIC: Mapping[str, Metric] = {metric.key: metric for metric in METRICS}


def of(scope: Literal["site", "model"]) -> tuple[Metric, ...]:
    """What a report has of the model, or may have of a site."""
    return tuple(metric for metric in METRICS if metric.gate and metric.scope in (scope, "both"))


# Which side of its limit a budget keeps: a share that must be reached, or an error not to be passed.
BUDGET_BOUNDS = {metric.key: metric.bound for metric in METRICS if metric.budget}


def is_share(key: str) -> bool:
    return key in METRIC and METRIC[key].share
