"""A report, typed: what report.json holds, read once and written once.

Everything that shows or judges a report reads these; the JSON schema is in asapc.report.schema.  A number
is null in the file where it was NaN, infinite or not measured; before it is written, it may be any of
these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

from asapc.formats.records import Record, apart, optional, rest
from asapc.metrics import METRIC

REPORT_FORMAT = 2
TEACHER = "teacher"  # the operator of a site that was left as it is
Class = Literal["ACCEPT", "REGRESSION", "ANOMALOUS"]
CLASSES: tuple[Class, ...] = get_args(Class)  # the worst last
Number = float | None
Numbers = Mapping[str, float | None]
Interval = tuple[float | None, float | None]


def finite(value: Number) -> Number:
    """The number, None where it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def approximates(operator: str, own: str) -> bool:
    """Whether a site that became `operator` computes another map than its teacher, whose operator is
    `own`: lossless is what computes the teacher's map from other kernels."""
    return operator not in (TEACHER, own)


def worst_class(classes: Iterable[Class]) -> Class:
    """ACCEPT if there is none."""
    return max(classes, key=CLASSES.index, default="ACCEPT")


class Measured:
    """What has metrics with intervals: the model, or a site."""

    confidence: Mapping[str, Interval]

    def interval(self, key: str) -> tuple[float, float] | None:
        """The confidence interval of a metric, where it is a proper one."""
        low, high = (finite(end) for end in self.confidence.get(key, (None, None)))
        return None if low is None or high is None or low > high else (low, high)


@dataclass(frozen=True)
class ModelReport(Measured, Record):
    """values: the metrics of the whole model, and what else is told of it."""

    source: str | None = optional()
    capture: str | None = optional()
    data: str | None = optional()
    values: Mapping[str, Any] = rest({*METRIC, "batch"})
    confidence: Mapping[str, Interval] = field(default_factory=dict)
    confidence_level: float = 0.95

    def metric(self, key: str) -> Number:
        value: Number = self.values.get(key)
        return value


@dataclass(frozen=True)
class LengthBin(Record):
    """Examples whose number of active keys is within low and high."""

    low: int
    high: int
    examples: int | None = None
    metrics: Mapping[str, Any] = rest(METRIC)


@dataclass(frozen=True)
class Certificate(Record):
    """The largest bound and the largest measured value; holds: in every case."""

    name: str
    source: str | None = None
    bound: Number = None
    measured: Number = None
    holds: bool | None = None
    cases: int | None = None
    vacuous: bool = False
    vacuous_cases: int | None = optional()
    residual: float | None = optional()


@dataclass(frozen=True)
class SiteReport(Measured, Record):
    """A compiled layer: what it became, why, and how near it is to its teacher.

    range: of the scores in calibration.  more: times, where they were taken.
    """

    name: str
    operator: str
    reason: str | None = None
    convention: Mapping[str, Any] | None = None
    side: str | None = None
    closures: int | None = None
    rescaled: bool | None = None
    coefficients: str | None = None
    features: tuple[str, ...] | None = None
    pivots: int | None = None
    slices: int | None = None
    fit: str | None = None
    fit_converged: bool | None = None
    replay_error: Number = None
    replay: Numbers = field(default_factory=dict)
    range: Mapping[str, Any] | None = None
    metrics: Numbers = field(default_factory=dict)
    confidence: Mapping[str, Interval] = field(default_factory=dict)
    by_head: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
    by_length: tuple[LengthBin, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    more: Mapping[str, Any] = rest(METRIC)

    @property
    def own_operator(self) -> str:
        """That computes the teacher's map."""
        return str((self.convention or {}).get("operator", "sinkhorn"))

    @property
    def approximate(self) -> bool:
        return approximates(self.operator, self.own_operator)

    def metric(self, key: str) -> Number:
        value: Number = self.metrics.get(key, self.more.get(key))
        return value


@dataclass(frozen=True)
class Tried(Record):
    """A candidate of a site, see asapc.passes.select; times in ms by shape, "32x512"."""

    lenient: ClassVar[bool] = True

    label: str = ""
    operator: str = ""
    attention_rel_l2: Number = None
    output_rel_l2: Number = None
    alone: Numbers = field(default_factory=dict)
    latency_ms: Numbers = field(default_factory=dict)
    teacher_ms: Numbers = field(default_factory=dict)
    memory_mib: Number = None
    chosen: bool = False
    verdict: str = ""


@dataclass(frozen=True)
class TriedSite(Record):
    lenient: ClassVar[bool] = True

    name: str = ""
    candidates: tuple[Tried, ...] = ()


@dataclass(frozen=True)
class Round(Record):
    """A set of candidates that was verified on the whole model."""

    lenient: ClassVar[bool] = True

    budget: Numbers = field(default_factory=dict)
    choice: Mapping[str, str] = field(default_factory=dict)
    predicted_ms: float | None = optional()
    predicted_mib: float | None = optional()
    measured: Numbers = field(default_factory=dict)
    verdict: str = ""
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class Trail(Record):
    """How the operators were chosen.  Told and never judged: what is not as it should be is left out."""

    lenient: ClassVar[bool] = True

    fit_seconds: float | None = optional()
    objective: str | None = None
    budget: Numbers = field(default_factory=dict)
    examples: int | None = None
    seconds: Number = None
    shapes: tuple[tuple[int, ...], ...] = ()
    sites: tuple[TriedSite, ...] = ()
    rounds: tuple[Round, ...] = ()
    more: Mapping[str, Any] = rest()

    def of(self, name: str) -> TriedSite:
        return next((site for site in self.sites if site.name == name), TriedSite(name))


@dataclass(frozen=True)
class Check(Record):
    """One check of a gate, of a class: a limit, the baseline, or what no sound measurement would give.

    bound, limit: of kind "limit"; confidence: bound_value, an end of the interval, is held against it.
    baseline: the earlier value; allowed: how much worse it may be, worse_by: how much it is.
    """

    kind: str
    metric: str
    scope: str
    value: Number
    verdict: Class
    message: str = ""
    bound: Literal["min", "max"] | None = None
    limit: Number = None
    confidence: bool = False
    bound_value: Number = None
    baseline: Number = None
    allowed: Number = None
    worse_by: Number = None

    @property
    def passed(self) -> bool:
        return self.verdict == "ACCEPT"

    @classmethod
    def from_json(cls, document: Any, where: str) -> Self:
        if isinstance(document, Mapping):
            bound = next((own for own in ("min", "max") if own in document), None)
            old = "ACCEPT" if document.get("passed") else "REGRESSION"  # format 1 had no classes
            verdict = document.get("class", old)
            document = {"kind": "limit", **document, "verdict": verdict, "bound": bound,
                        "limit": None if bound is None else document[bound]}  # fmt: skip
        return super().from_json(document, where)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "kind": self.kind, "metric": self.metric, "scope": self.scope, "value": self.value,
        }  # fmt: skip
        if self.bound is not None:
            document[self.bound] = self.limit
        if self.confidence:
            document |= {"confidence": True, "bound_value": self.bound_value}
        for key in ("baseline", "allowed", "worse_by"):
            if getattr(self, key) is not None:
                document[key] = getattr(self, key)
        return document | {"class": self.verdict, "passed": self.passed, "message": self.message}


@dataclass(frozen=True)
class Comparison(Record):
    """With a baseline: the report at `path`."""

    path: str
    max_regression: Number = None
    max_regression_of: Numbers = field(default_factory=dict)
    verdict: Class = "ACCEPT"
    compared: int = 0
    skipped: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class GateReport(Record):
    """verdict: the worst class of the checks; None where neither a limit nor a baseline was set."""

    verdict: Class | None = None
    checks: tuple[Check, ...] = ()
    baseline: Comparison | None = None

    @property
    def passed(self) -> bool:
        return self.verdict in (None, "ACCEPT")

    @property
    def failures(self) -> list[Check]:
        """The checks that are not accepted, the worst class first."""
        failed = [own for own in self.checks if not own.passed]
        return sorted(failed, key=lambda own: -CLASSES.index(own.verdict))

    @classmethod
    def of(cls, checks: Iterable[Check], baseline: Comparison | None = None) -> Self:
        checks = tuple(checks)
        return cls(worst_class(own.verdict for own in checks), checks, baseline)

    @classmethod
    def from_json(cls, document: Any, where: str) -> Self:
        found = super().from_json(document, where)
        if found.verdict is None and found.checks:  # format 1
            return cls.of(found.checks, found.baseline)
        return found

    def to_json(self) -> dict[str, Any]:
        document = super().to_json()
        return {"verdict": document.pop("verdict"), "passed": self.passed, **document}


@dataclass(frozen=True)
class Report(Record):
    """What `asapc report` measured and judged.  pictures: of its sites, for the page alone."""

    format_version: int = REPORT_FORMAT
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    model: ModelReport = ModelReport()
    sites: tuple[SiteReport, ...] = ()
    by_length: tuple[LengthBin, ...] = ()
    refused: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[Mapping[str, Any], ...] = ()
    splits: Numbers = field(default_factory=dict)
    selection: Trail | None = None
    soft_to_hard: Mapping[str, Any] | None = optional()
    refresh: Mapping[str, Any] | None = optional()
    onnx: Mapping[str, Any] | None = optional()
    environment: Mapping[str, Any] = field(default_factory=dict)
    gate: GateReport = GateReport()
    pictures: tuple[Any, ...] = apart()  # SitePictures, which need torch
