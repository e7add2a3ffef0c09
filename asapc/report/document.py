"""A report, typed: what report.json holds, read once, written once, and its JSON schema (see .schema).

Everything that shows or judges a report reads these.  A number is null in the file where it was NaN,
infinite or not measured; before it is written, it may be any of these.  Annotated: text describes a key,
a dictionary limits it further in the schema.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from asapc.errors import InputError
from asapc.formats.records import APART, OPTIONAL, Record, optional, rest
from asapc.metrics import METRIC, METRICS, of
from asapc.operators.catalogue import OUTCOMES, TEACHER
from asapc.terminal.hints import install_line, missing_module

REPORT_FORMAT = 3
ERROR = "attention_rel_l2"  # what sites are ranked by
Class = Literal["ACCEPT", "REGRESSION", "ANOMALOUS"]
CLASSES: tuple[Class, ...] = get_args(Class)  # the worst last
Number = float | None
Numbers = Mapping[str, float | None]
Interval = tuple[float | None, float | None]
Intervals = Annotated[
    Mapping[str, Interval], "metric to its bootstrap interval over examples, [low, high]"
]
COUNT = {"type": "integer", "minimum": 0}
NOT_NEGATIVE = {"minimum": 0}


def finite(value: Number) -> Number:
    """The number, None where it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def positive(value: Number) -> Number:
    """The number, None where it is not finite and above 0."""
    number = finite(value)
    return number if number is not None and number > 0 else None


def equally_fast(interval: Interval | None) -> bool:
    """Whether the interval of a ratio of times holds 1."""
    low, high = (finite(end) for end in interval or (None, None))
    return low is not None and high is not None and low <= 1 <= high


def sizes_of(shape: str) -> list[int]:
    """Of "32x512"; none of anything else."""
    parts = shape.split("x")
    plain = all(part.isascii() and part.isdigit() and len(part) < 12 for part in parts)
    return [int(part) for part in parts] if plain else []


def approximates(operator: str, teacher_operator: str) -> bool:
    """Whether a site that became `operator` computes another map than its teacher, an operator too.

    Lossless is what computes the teacher's map by other kernels.
    """
    return operator not in (TEACHER, teacher_operator)


def worst_class(classes: Iterable[Class]) -> Class:
    """ACCEPT if there is none."""
    return max(classes, key=CLASSES.index, default="ACCEPT")


class Measured:
    """What has metrics with intervals: the model, or a site."""

    confidence: Intervals

    def interval(self, key: str) -> tuple[float, float] | None:
        """The confidence interval of a metric, where it is a proper one."""
        low, high = (finite(end) for end in self.confidence.get(key, (None, None)))
        return None if low is None or high is None or low > high else (low, high)


@dataclass(frozen=True)
class ModelReport(Measured, Record):
    """values: the metrics of the whole model, and what else is told of it."""

    always: ClassVar[tuple[str, ...]] = ("examples", "batch", "speedup")

    source: str | None = None
    capture: Annotated[str | None, {"enum": ["whole", "module"]}] = optional()
    data: str | None = None
    sizes: str | None = optional()
    own_metric: Annotated[str | None, "the function and its direction"] = optional()
    values: Mapping[str, Any] = rest(
        {metric.key: metric.schema() for metric in of("model")}
        | {"examples": COUNT, "map_examples": COUNT, "batch": COUNT}
    )
    confidence: Intervals = field(default_factory=dict)
    confidence_level: Annotated[float, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}] = 0.95

    def metric(self, key: str) -> Number:
        value: Number = self.values.get(key)
        return value


@dataclass(frozen=True)
class LengthBin(Record):
    """Examples whose number of active keys is within low and high."""

    low: int
    high: int
    examples: int | None = None
    attention_rel_l2: Annotated[Number, METRIC[ERROR].schema()] = None


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


@dataclass(frozen=True)
class ConventionReport(Record):
    """What the teacher's layer was found to compute, see asapc.ir."""

    operator: str | None = optional()
    stabiliser: Mapping[str, Any] | None = optional()
    queries: Mapping[str, Any] | None = optional()
    keys: Mapping[str, Any] | None = optional()
    ties: str | None = optional()
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class SiteReport(Measured, Record):
    """A compiled layer: what it became, why, and how near it is to its teacher.  more: times."""

    name: str
    operator: Annotated[
        str, "what the site became; teacher: left as it was", {"enum": [TEACHER, *OUTCOMES]},
    ]  # fmt: skip
    reason: str | None = None
    convention: ConventionReport | None = None
    side: Annotated[str | None, {"enum": ["target", "source", "both", None]}] = None
    c_transforms: int | None = None
    rescaled: bool | None = None
    aim: Annotated[str | None, {"enum": ["aligned", "last", None]}] = "aligned"
    points: Annotated[str | None, {"enum": ["all", "active", None]}] = "all"
    coefficients: str | None = None
    features: tuple[str, ...] | None = None
    pivots: int | None = None
    slices: int | None = None
    half_steps: int | None = optional()
    summary_tokens: int | None = optional()
    depthwise: int | None = optional()
    fit: str | None = None
    fit_converged: bool | None = None
    replay_error: Annotated[Number, NOT_NEGATIVE] = None
    replay: Annotated[
        Numbers, "largest error against the teacher's own code, by what was tried"
    ] = field(default_factory=dict)
    metrics: Annotated[
        Numbers, {"properties": {metric.key: metric.schema() for metric in of("site")}}
    ] = field(default_factory=dict)
    confidence: Intervals = field(default_factory=dict)
    by_head: Annotated[
        Mapping[str, tuple[Number, ...]], "metric to one number per head"
    ] = field(default_factory=dict)
    by_length: tuple[LengthBin, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    more: Mapping[str, Any] = rest(
        {metric.key: metric.schema() for metric in METRICS if metric.scope == "both"}
    )

    @property
    def teacher_operator(self) -> str:
        """The one that computes the teacher's map."""
        return (self.convention and self.convention.operator) or "sinkhorn"

    @property
    def approximate(self) -> bool:
        return approximates(self.operator, self.teacher_operator)

    def metric(self, key: str) -> Number:
        value: Number = self.metrics.get(key, self.more.get(key))
        return value


@dataclass(frozen=True)
class Tried(Record):
    """A candidate of a site, see asapc.passes.select; times in ms by shape, "32x512", and the interval of
    the teacher's over the candidate's."""

    label: str = ""
    operator: str = ""
    attention_rel_l2: Number = None
    output_rel_l2: Number = None
    alone: Numbers = field(default_factory=dict)
    latency_ms: Numbers = field(default_factory=dict)
    teacher_ms: Numbers = field(default_factory=dict)
    speedup: Mapping[str, Interval] = field(default_factory=dict)
    memory_mib: Number = None
    chosen: bool = False
    verdict: str = ""


@dataclass(frozen=True)
class TriedSite(Record):
    """What was tried at a site."""

    name: str = ""
    candidates: tuple[Tried, ...] = ()

    @property
    def chosen(self) -> Tried:
        """An empty one where none is."""
        return next((tried for tried in self.candidates if tried.chosen), Tried())

    @property
    def largest_shape(self) -> str:
        """Of those that candidates were timed at, "32x512"; empty where there is none."""
        shapes = {shape for tried in self.candidates for shape in tried.latency_ms if sizes_of(shape)}
        return max(shapes, key=lambda shape: (math.prod(sizes_of(shape)), shape), default="")


@dataclass(frozen=True)
class Round(Record):
    """A set of candidates that was verified on the whole model."""

    budget: Numbers = field(default_factory=dict)
    choice: Mapping[str, str] = field(default_factory=dict)
    predicted_ms: float | None = optional()
    predicted_mib: float | None = optional()
    measured: Numbers = field(default_factory=dict)
    verdict: str = ""
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class Trail(Record):
    """How the operators were chosen.  Told and never judged."""

    fit_seconds: float | None = optional()
    objective: Annotated[str | None, {"enum": ["latency", "memory"]}] = None
    budget: Numbers = field(default_factory=dict)
    examples: int | None = None
    seconds: Annotated[Number, NOT_NEGATIVE] = None
    device: str | None = optional()
    shapes: tuple[tuple[int, ...], ...] = ()
    sites: tuple[TriedSite, ...] = ()
    rounds: tuple[Round, ...] = ()
    more: Mapping[str, Any] = rest()

    def of(self, name: str) -> TriedSite:
        return next((site for site in self.sites if site.name == name), TriedSite(name))


@dataclass(frozen=True)
class Check(Record):
    """One check of a gate: a limit (min or max), the baseline, or what no sound measurement gives."""

    kind: Annotated[str, {"enum": ["limit", "plausibility", "baseline"]}]
    metric: str
    scope: Annotated[str, '"model", "sites" or the name of a site']
    value: Number = None
    min: float | None = optional()
    max: float | None = optional()
    confidence: Annotated[bool | None, "the limit is on the pessimistic end of the interval"] = optional()
    bound_value: Annotated[float | None, "that end"] = optional()
    baseline: float | None = optional()
    allowed: Annotated[
        float | None,
        "how much worse than the baseline is accepted: points of a share, else a part of its value",
    ] = optional()
    worse_by: Annotated[
        float | None, "difference in the metric's own unit, below 0 where it is better"
    ] = optional()
    verdict: Class = field(default="ACCEPT", metadata={"key": "class"})
    passed: bool = field(init=False)
    message: Annotated[str, {"pattern": "^[^\\n]+$"}] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", self.verdict == "ACCEPT")
        # One line, whatever the names in it are.
        object.__setattr__(self, "message", " ".join(self.message.split()))

    @property
    def bound(self) -> Literal["min", "max"] | None:
        return "min" if self.min is not None else "max" if self.max is not None else None

    @property
    def limit(self) -> Number:
        return self.max if self.min is None else self.min

    def to_json(self) -> dict[str, Any]:
        without = {"bound_value": None} if self.confidence and self.bound_value is None else {}
        return super().to_json() | without


@dataclass(frozen=True)
class Comparison(Record):
    """With a baseline, the report at `path`."""

    path: str
    max_regression: Annotated[Number, {"minimum": 0, "maximum": 1}] = None
    max_regression_of: Numbers = field(default_factory=dict)
    verdict: Class = "ACCEPT"
    compared: int = 0
    skipped: tuple[Annotated[Mapping[str, str], {"required": ["metric", "scope", "why"]}], ...] = ()


@dataclass(frozen=True)
class GateReport(Record):
    """verdict: the worst class of the checks; null where neither a limit nor a baseline was set.
    passed: whether nothing failed; true where nothing was asked."""

    verdict: Class | None = None
    passed: bool = field(init=False)
    checks: tuple[Check, ...] = ()
    baseline: Comparison | None = None

    def __post_init__(self) -> None:
        if self.verdict is None and self.checks:
            object.__setattr__(self, "verdict", worst_class(check.verdict for check in self.checks))
        object.__setattr__(self, "passed", self.verdict in (None, "ACCEPT"))

    @property
    def failures(self) -> list[Check]:
        """The checks that are not accepted, the worst class first."""
        failed = [check for check in self.checks if not check.passed]
        return sorted(failed, key=lambda check: -CLASSES.index(check.verdict))


@dataclass(frozen=True)
class ShortageReport(Record):
    """Sites whose fits rest on too little, see asapc.calibration.enough."""

    sites: tuple[str, ...] = ()
    of: str | None = optional()
    given: int | None = optional()
    needed: int | None = optional()
    text: str = ""
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class SortVariant(Record):
    """The whole model with its sorts done in one way."""

    name: str = ""
    accuracy: float | None = optional()
    prediction_change: float | None = optional()
    row_err: float | None = optional()
    col_err: float | None = optional()
    entropy: float | None = optional()
    examples_per_second: float | None = optional()
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class SoftToHardReport(Record):
    """What exact sorting does to a model that sorts softly, see asapc.passes.audit."""

    variants: tuple[SortVariant, ...] = ()
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class RefreshReport(Record):
    """A training after the replacement, see asapc.training.refresh; metrics of the selection split."""

    mode: str | None = optional()
    best_epoch: int | None = optional()
    before: Numbers | None = field(default=None, metadata=OPTIONAL)
    after: Numbers | None = field(default=None, metadata=OPTIONAL)
    earlier: tuple[Mapping[str, Any], ...] | None = optional()
    soft_to_hard: Mapping[str, Numbers] | None = optional()
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class OnnxReport(Record):
    """model.onnx, and how it compared with the compiled program on examples of these shapes."""

    opset: int | None = optional()
    bytes: int | None = optional()
    float16: bool | None = optional()
    functions: tuple[str, ...] | None = optional()
    largest: float | None = optional()
    tolerance: float | None = optional()
    shapes: tuple[Mapping[str, int], ...] | None = optional()
    more: Mapping[str, Any] = rest()


@dataclass(frozen=True)
class Report(Record):
    """What `asapc report` measured and judged.  pictures: of its sites, for the page alone."""

    format_version: Annotated[int, {"const": REPORT_FORMAT}] = REPORT_FORMAT
    fingerprints: Annotated[
        Mapping[str, str],
        "sha256 of the teacher's weights and of the data: baselines must agree in both",
        {"required": ["teacher", "data"]},
    ] = field(default_factory=dict)
    model: ModelReport = ModelReport()
    sites: tuple[SiteReport, ...] = ()
    refused: Annotated[
        tuple[Annotated[Mapping[str, Any], {"required": ["name", "status"]}], ...],
        "layers that were left as they are",
    ] = ()
    warnings: Annotated[
        tuple[ShortageReport, ...],
        "fits that rest on too few examples, or on too few regression rows for their coefficients",
    ] = ()
    splits: Annotated[
        Mapping[str, int | None],
        "examples of the three disjoint splits, and those the artefact had seen",
    ] = field(default_factory=dict)
    selection: Trail | None = None
    soft_to_hard: Annotated[
        SoftToHardReport | None, "a model that sorts: what exact sorting does to it"
    ] = field(default=None, metadata=OPTIONAL)
    refresh: Annotated[
        RefreshReport | None, "how the compiled model was trained after the replacement"
    ] = field(default=None, metadata=OPTIONAL)
    onnx: Annotated[
        OnnxReport | None, "model.onnx, if there is one, and how it compared with the model"
    ] = field(default=None, metadata=OPTIONAL)
    environment: Mapping[str, Any] = field(default_factory=dict)
    gate: GateReport = GateReport()
    pictures: tuple[Any, ...] = field(default=(), compare=False, metadata=APART)  # SitePictures

    def figure(self, what: str = "errors", site: str | None = None) -> Any:
        """A picture of it as a matplotlib.figure.Figure, see asapc.report.figures.

        what: errors, times, heads, lengths, candidates or maps.  site: of the last four, by its name; the
        one with the largest attention error unless told.  Raises InputError: another word, a site that
        is not there, nothing measured to draw, matplotlib not installed.
        """
        try:
            draw = pkgutil.resolve_name("asapc.report.figures:figure")
        except ModuleNotFoundError as error:
            rule = f"figures need {missing_module(error, 'matplotlib')}, which is not installed"
            raise InputError(rule, help=install_line("report")) from None
        return draw(self, what, site)

    def _repr_html_(self) -> str:
        """What a notebook shows.  By name, like the figures: what draws a report imports this module."""
        shown: str = pkgutil.resolve_name("asapc.report.html:report_html")(self)
        return shown

    @property
    def trail(self) -> Trail:
        return self.selection or Trail()

    @property
    def trained_on_labels(self) -> bool:
        return self.refresh is not None and self.refresh.mode == "labels"

    @property
    def approximated(self) -> list[SiteReport]:
        return [site for site in self.sites if site.approximate]

    @property
    def worst_first(self) -> list[SiteReport]:
        """By attention error: what is not finite first, what was not measured last, ties as they were."""

        def error(site: SiteReport) -> float:
            value = site.metric(ERROR)
            return -1.0 if value is None else math.inf if finite(value) is None else value

        return sorted(self.sites, key=error, reverse=True)

    @property
    def worst_site(self) -> SiteReport | None:
        """Of those whose attention was compared."""
        return next((site for site in self.worst_first if site.metric(ERROR) is not None), None)

    def change(self, metric: str, scope: str = "model") -> Number:
        """The difference of a metric to the baseline, where it was compared."""
        for check in self.gate.checks:
            compared = (check.kind, check.metric, check.scope) == ("baseline", metric, scope)
            if compared and check.value is not None and check.baseline is not None:
                return check.value - check.baseline
        return None

    @property
    def chosen_elsewhere(self) -> str:
        """In a sentence, where operators were chosen by the speeds of another device; else empty."""
        chosen, measured = self.trail.device, self.environment.get("device")
        if not chosen or not measured or chosen == measured:
            return ""
        return (
            f"operators were chosen by their speeds on {chosen}, and this was measured on {measured}: "
            "`asapc compile` there may choose others"
        )
