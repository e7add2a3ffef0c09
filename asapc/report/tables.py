"""What is shown of a result, independent of where: titled tables of already formatted cells.

Results are as in their JSON.  `asapc.report.text` turns tables into Markdown, `asapc.report.console` into
terminal tables, and `asapc.report.html` into HTML.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asapc.metrics import METRIC, METRICS, is_share
from asapc.operators.catalogue import SIZES, TEACHER
from asapc.report.document import (
    ERROR,
    Check,
    GateReport,
    Report,
    SiteReport,
    TriedSite,
    equally_fast,
    positive,
)

Row = tuple[str, ...]
Result = Mapping[str, Any]
Column = str | Callable[[Any], str]  # the key of what its cells show, or what words them

# The colour of a cell that holds one of these words, on a terminal and on the page.
TONES = {
    "ACCEPT": "good", "passed": "good", "matched": "good", "holds": "good", "inside the budget": "good",
    "chosen": "good", "kept": "good", "REGRESSION": "bad", "FAILED": "bad", "violated": "bad",
    "not kept": "bad", "ANOMALOUS": "odd", "vacuous": "odd", "refused": "odd", "cannot be judged": "odd",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """columns: headings; a heading that ends in "|" marks a right-aligned (numeric) column."""

    title: str
    columns: Row
    rows: tuple[Row, ...]

    def headings(self) -> list[tuple[str, bool]]:
        """(heading, right-aligned) per column."""
        return [(name.removesuffix("|"), name.endswith("|")) for name in self.columns]

    @property
    def failing(self) -> bool:
        """Whether there is a row that must not be folded away."""
        return any(TONES.get(cell) == "bad" for row in self.rows for cell in row)


def listed(title: str, items: Iterable[Any], columns: Mapping[str, Column]) -> list[Table]:
    """A row for each item; no table without items.  columns: by heading."""
    rows = tuple(tuple(_cell(item, *column) for column in columns.items()) for item in items)
    return [Table(title, tuple(columns), rows)] if rows else []


def _cell(item: Any, heading: str, column: Column) -> str:
    if not isinstance(column, str):
        return column(item)
    value = item.get(column)
    return "" if value is None and not heading.endswith("|") else metric_text(column, value)


def _pairs(title: str, values: Result) -> list[Table]:
    """A row for each value; no table without values."""
    rows = tuple((key, text_of(value)) for key, value in values.items())
    return [Table(title, ("", ""), rows)] if rows else []


def _metrics(*keys: str) -> dict[str, Column]:
    """A column for each metric."""
    return {f"{METRIC[key].column or METRIC[key].label}|": key for key in keys}


def _parts(sites: Iterable[Result], part: str) -> list[dict[str, Any]]:
    """What sites hold under a key, each item with the name of its `site`."""
    return [{"site": site.get("name"), **item} for site in sites for item in site.get(part) or ()]


# Cells


LABELS = {
    "source": "model",
    "map_examples": "examples, attention compared",
    "sizes": "supported sizes",
    "batch": "batch size",
    "megabytes_teacher": "file, teacher (MB)",
    "megabytes_lossless": "file, lossless loop (MB)",
    "megabytes_compiled": "file, compiled (MB)",
    "lossless_max_abs_error": "largest output difference, lossless",
    "usual_loop_ms": "site: usual loop (ms)",
    "lossless_ms": "site: lossless (ms)",
    "softmax_ms": "site: softmax attention (ms)",
    **{metric.key: metric.label for metric in METRICS if metric.label},
}


def label(key: str) -> str:
    """The name of a value of the whole model, in words."""
    return LABELS.get(key, key.replace("_", " "))


def number(value: Any) -> str:
    """A value as text: integers whole, floats to three significant digits, "-" when absent."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        places = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{places}f}"
    return f"{value:.2e}"


def text_of(value: Any) -> str:
    """A number, or the items of a list or a mapping: "a 1.00, b 2.00"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {metric_text(str(key), item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(text_of, value))
    return number(value)


def metric_text(key: str, value: Any) -> str:
    """A metric: a share in per cent, anything else as it is."""
    share = is_share(key) and isinstance(value, float) and math.isfinite(value)
    return f"{value:.2%}" if share else text_of(value)


def interval_text(key: str, confidence: Mapping[str, Sequence[float | None]]) -> str:
    """"97.92% to 99.80%"; empty where there is none."""
    return " to ".join(metric_text(key, end) for end in confidence.get(key, ()))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def convention_text(convention: Result | None) -> str:
    """One line: "T=20, row first, column last, scale 0.250, factor M, key mask"."""
    if not convention:
        return "-"
    parts = _CONVENTIONS.get(convention.get("operator", "sinkhorn"), _settings)(convention)
    if convention.get("mask", "none") != "none":
        hides_both = convention["mask"] == "both"
        parts.append("queries and keys masked" if hides_both else f"{convention['mask']} mask")
    parts += [key.replace("_", " ") for key in ("bias", "early_stop") if convention.get(key)]
    return ", ".join(parts)


def _loop(c: Result) -> list[str]:
    keys = ("half_steps", "first_side", "last_side", "score_multiplier", "output_factor")
    steps, first, last, scale, factor = (number(c.get(key)) for key in keys)
    parts = [f"T={steps}, {first} first, {last} last, scale {scale}, factor {factor}"]
    stabiliser = c.get("stabiliser")
    if stabiliser:
        sign = "+" if stabiliser.get("kind") == "add" else "at least"
        parts.append(f"sums {sign} {number(stabiliser.get('constant'))}")
    return parts


def _plan(c: Result) -> list[str]:
    parts = [f"{'log plan' if c.get('log') else 'plan'} of given scores", *_loop(c)]
    parts += [f"times {text_of(c['by_head'])} by head"] if c.get("by_head") else []
    parts += [f"ends early at {number(c['ending'].get('threshold'))}"] if c.get("ending") else []
    for symbol, side in (("mu", "source"), ("nu", "target")):
        kind = c.get(f"{side}_marginal")
        parts += [] if kind == "uniform" else [f"{symbol} {'given' if kind == 'input' else kind}"]
    return parts


def _banded(c: Result) -> list[str]:
    ends = (c.get("low"), c.get("high"))
    low, high = (f"{end:+d}" if isinstance(end, int) else f" {end}" for end in ends)
    return [f"window of keys i{low} to i{high}", *_loop(c)]


def _settings(c: Result) -> list[str]:
    """The settings of a kind that has no wording of its own above."""
    apart = ("operator", "mask", "bias", "early_stop")
    return [str(c.get("operator")).replace("_", " ")] + [
        f"{key.replace('_', ' ')} {text_of(value)}" for key, value in c.items()
        if key not in apart and not key.endswith("_terms") and value not in (None, False)
    ]  # fmt: skip


_CONVENTIONS = {"sinkhorn": _loop, "plan": _plan, "banded_sinkhorn": _banded}


def amortised_text(site: Result) -> str:
    """How a site's dual is predicted, "target, 1 c-transform, coarse:32 gaussian", or what it was
    distilled into, "32 pivots, 1 summary token, convolution of 3"; empty if neither."""
    tokens, width = site.get("summary_tokens"), site.get("depthwise")
    for key in SIZES:
        if site.get(key):
            parts = [f"{site[key]} {key.replace('_', '-')}"]
            parts += [counted(tokens, "summary token")] if tokens else []
            return ", ".join(parts + ([f"convolution of {width}"] if width else []))
    if not site.get("features"):
        return ""
    count = site.get("c_transforms")
    c_transforms = f"{number(count)} c-transform{'s' * (count != 1)}"
    return ", ".join([str(site.get("side")), c_transforms, *_choices(site), " ".join(site["features"])])


def _choices(fitted: Result) -> list[str]:
    """What is unusual about a fit, in a few words each."""
    return [
        *(["rows rescaled"] if fitted.get("rescaled") else []),
        *(["from the last dual"] if fitted.get("aim") == "last" else []),
        *(["active points"] if fitted.get("points") == "active" else []),
    ]


def fit_text(site: Result) -> str:
    """"kl per_head", with a note if it did not converge; how close a distilled operator is."""
    if not site.get("fit"):
        return ""
    if site.get("fit_rel_l2") is not None:
        return f"{site['fit']}, output l2 {number(site['fit_rel_l2'])}"
    doubt = " NOT CONVERGED" if site.get("fit_converged") is False else ""
    kept = f" on {site['kl_examples']} examples" if site.get("kl_examples") else ""
    return f"{site['fit']} {site.get('coefficients')}{kept}{doubt}"


# The report


def headline(report: Report) -> str:
    """The result in one line: verdict, speed-up, agreement with its interval."""
    model, key = report.model, "prediction_agreement"
    speedup, agreement = model.metric("speedup"), model.metric(key)
    parts: list[str] = [report.gate.verdict or "no gate set"]
    if speedup is not None:
        parts.append(f"{number(speedup)}x as fast as the teacher")
    if agreement is not None:
        ends = f" ({interval_text(key, model.confidence)})" if model.confidence.get(key) else ""
        parts.append(f"{metric_text(key, agreement)} of predictions kept{ends}")
    return ", ".join(parts)


def layers_table(report: Report) -> list[Table]:
    """Each layer by its errors and by its speed, as selection timed it; the worst first."""
    trail = report.trail
    columns: dict[str, Column] = {
        "layer": lambda site: site.name, "operator": lambda site: site.operator,
        "attention error|": partial(_error_of, ERROR),
        "output error|": partial(_error_of, "output_rel_l2"),
    }  # fmt: skip
    if any(changed(report, ERROR, site.name) for site in report.sites):
        columns["against the baseline|"] = lambda site: changed(report, ERROR, site.name) or "-"
    if trail.sites:
        columns["speed|"] = lambda site: _speed_of(site, trail.of(site.name))
    return listed("Layers, worst first", report.worst_first, columns)


def _error_of(metric: str, site: SiteReport) -> str:
    value, ends = site.metric(metric), interval_text(metric, site.confidence)
    if value is None and site.operator == TEACHER:
        return "0"
    return number(value) + (f" ({ends})" if ends else "")


def changed(report: Report, metric: str, scope: str) -> str:
    """The difference from the baseline, shares in points; empty if the metric was not compared."""
    change = report.change(metric, scope)
    if change is None:
        return ""
    if is_share(metric):
        return f"{change * 100:+.2f} points"
    return f"+{number(change)}" if change > 0 else number(change)


def _speed_of(site: SiteReport, trail: TriedSite) -> str:
    """The speed of a layer against its teacher's: equal if the interval of the ratio holds 1."""
    if site.operator == TEACHER:
        return "equal"
    shape, chosen = trail.largest_shape, trail.chosen
    teacher, compiled = (positive(ms.get(shape)) for ms in (chosen.teacher_ms, chosen.latency_ms))
    if teacher is None or compiled is None:
        return "-"
    equal = equally_fast(chosen.speedup.get(shape))
    times = f"{number(teacher)} -> {number(compiled)} ms at {shape}"
    return f"{'equal' if equal else f'{number(teacher / compiled)}x'}, {times}"


def report_tables(report: Report) -> list[Table]:
    """Every table of a report, see `report_sections`; from the baseline only what is worse."""
    sections = report_sections(report) | {"Gate": gate_table(report.gate, every=False)}
    return [table for tables in sections.values() for table in tables]


def report_sections(report: Report) -> dict[str, list[Table]]:
    """By their heading on the page; a section may be empty."""
    document = report.to_json()
    sites, audit = document["sites"], document.get("soft_to_hard") or {}
    errors = [{**site["metrics"], "name": site["name"], "operator": site["operator"]} for site in sites]
    return {
        "Gate": gate_table(report.gate),
        "Warnings": _warnings(document["warnings"]),
        "Whole model": [_model_table("Model", document["model"])],
        "Layers": [
            *_by_site("Fidelity to the teacher, per site", errors),
            *_certificates(_parts(sites, "certificates")), *_lengths(_parts(sites, "by_length")),
            *_choices_of("Why", sites),
        ],
        "How it was chosen": _selection_tables(document["selection"] or {}),
        "Soft to hard": _soft_to_hard(audit.get("variants", ())),
        "Left alone": _refused(document["refused"]),
        "Refresh": refresh_tables(document["refresh"]) if report.refresh else [],
        "Written as ONNX": onnx_tables(document["onnx"]) if report.onnx else [],
        "Environment and provenance": _pairs("Environment", {
            **{f"examples, {name}": value for name, value in report.splits.items()},
            "report format": report.format_version,
            **{f"fingerprint, {name}": value for name, value in report.fingerprints.items()},
            **report.environment,
            **({"note": report.chosen_elsewhere} if report.chosen_elsewhere else {}),
        }),
    }  # fmt: skip


def _model_table(title: str, model: Result) -> Table:
    intervals = model.get("confidence")
    rows: list[Row] = []
    for key, value in model.items():
        if key not in ("confidence", "confidence_level"):
            times = "x" if key.startswith("speedup") else ""
            rows.append((label(key), metric_text(key, value) + times))
            rows[-1] += (interval_text(key, intervals) or "-",) if intervals else ()
    heading = f"{_percent(model.get('confidence_level', 0.95))} interval|"
    return Table(title, ("", "|", heading) if intervals else ("", ""), tuple(rows))


def _by_site(title: str, sites: Sequence[Result], more: Mapping[str, Column] = {}) -> list[Table]:
    """A column for each metric that any of the sites has."""
    keys = [metric.key for metric in METRICS if metric.column and any(metric.key in x for x in sites)]
    return listed(title, sites, {"site": "name", "operator": "operator", **_metrics(*keys), **more})


_certificates = partial(listed, "Certificates", columns={
    "site": "site", "certificate": "name", "bound|": "bound", "measured|": "measured",
    "holds": lambda x: ("vacuous" if x.get("vacuous") else "holds") if x.get("holds") else "violated",
    "cases|": "cases", "vacuous|": "vacuous_cases", "source": "source",
})  # fmt: skip
_lengths = partial(listed, "By length of the example, per site", columns={
    "site": "site", "active keys": lambda bin: f"{bin['low']} to {bin['high']}",
    "examples|": "examples", **_metrics(ERROR),
})  # fmt: skip
_choices_of = partial(listed, columns={
    "site": "name", "operator": "operator", "predicted": amortised_text,
    "convention": lambda site: convention_text(site.get("convention")), "reason": "reason",
})  # fmt: skip
_refused = partial(listed, "Left unchanged", columns={key: key for key in ("name", "status", "reason")})
_soft_to_hard = partial(listed, "Soft to hard: the model by how it sorts", columns={
    "sorts": "name", **_metrics("accuracy", "prediction_change", "row_err", "col_err"),
    "entropy|": "entropy", "examples/s|": "examples_per_second",
})  # fmt: skip
# Fits that rest on too few examples or regression rows, see asapc.calibration.enough.
_warnings = partial(listed, "Warning: fits on too little data", columns={
    "site": lambda warning: text_of(warning.get("sites", ())[:1]),
    "sites more|": lambda warning: number(max(0, len(warning.get("sites", ())) - 1)),
    "fitted on|": lambda warning: f"{number(warning.get('given'))} {warning.get('of')}",
    "needed|": "needed",
})  # fmt: skip


def _selection_tables(selection: Result) -> list[Table]:
    """What was asked for, what was tried and why it lost, and the rounds of the whole model."""
    unit = "MiB" if selection.get("objective") == "memory" else "ms"
    shapes = ("x".join(map(str, shape)) for shape in selection.get("shapes", ()))
    asked = {key: selection.get(key) for key in ("objective", "budget", "examples")}
    asked |= {"shapes, batch x tokens": ", ".join(shapes), "seconds": selection.get("seconds")}
    rounds = (
        {"number": n, **each, "choice": Counter(each["choice"].values())}
        for n, each in enumerate(selection.get("rounds", ()), 1)
    )
    tried = _parts(selection.get("sites", ()), "candidates")
    return [
        *_pairs("Selection", {k: v for k, v in asked.items() if v not in (None, "", {})}),
        *listed("Selection: the whole model", rounds, {
            "round": "number", "budget": "budget",
            "choice": lambda each: ", ".join(f"{n} x {label}" for label, n in each["choice"].items()),
            "measured": "measured", f"predicted {unit}|": f"predicted_{unit.lower()}",
            "verdict": "verdict",
        }),
        *listed("Selection: candidates", tried, {
            "site": "site", "candidate": "label", "verdict": "verdict",
            **_metrics("attention_rel_l2", "output_rel_l2"), "ms|": "latency_ms",
            "teacher ms|": "teacher_ms", "faster by|": _gains, "MiB|": "memory_mib",
            "whole model with it alone": "alone",
        }),
    ]  # fmt: skip


def _gains(tried: Result) -> str:
    """The interval of its speed-up at each shape, "32x512 2.1x to 2.3x"."""
    ends = (tried.get("speedup") or {}).items()
    return ", ".join(f"{shape} {number(low)}x to {number(high)}x" for shape, (low, high) in ends) or "-"


def gate_table(
    gate: GateReport, title: str = "Gate", words: Mapping[str, str] = {}, every: bool = True
) -> list[Table]:
    """One table of checks, failures first; none if no gate was set.

    every: list every check against a baseline, which compares every metric of every site, and the
    messages; else the baseline is one row, with one for each metric that is worse.  words: for classes.
    """
    rows = [
        (check.metric, check.scope, number(check.value), limit_text(check),
         words.get(check.verdict, check.verdict), check.message)
        for check in sorted(gate.checks, key=lambda check: check.passed)
        if every or check.kind != "baseline" or not check.passed
    ]  # fmt: skip
    if gate.baseline is not None:
        allowed = [f"{_percent(gate.baseline.max_regression)} worse, at most"]
        allowed += [f"{key} {_percent(most)}" for key, most in gate.baseline.max_regression_of.items()]
        compared = f"{number(gate.baseline.compared)} compared"
        rows.append(("baseline", gate.baseline.path, compared, ", ".join(allowed),
                     gate.baseline.verdict, ""))  # fmt: skip
    columns = ("metric", "scope", "value|", "limit", "class", "message")
    shown = len(columns) if every else -1
    return [Table(title, columns[:shown], tuple(row[:shown] for row in rows))] if rows else []


def limit_text(check: Check) -> str:
    """What a check held the value against: "max 0.01", "min 0.99, confident", "0.04 + 2%"."""
    if check.bound is not None:
        return f"{check.bound} {number(check.limit)}{', confident' if check.confidence else ''}"
    if check.allowed is not None:
        return f"baseline {number(check.baseline)}, {_percent(check.allowed)}"
    return "plausible" if check.kind == "plausibility" else "-"


def _percent(value: Any) -> str:
    return f"{value * 100:.4g}%" if isinstance(value, int | float) else number(value)


# Other commands


def inspect_tables(inspection: Result) -> list[Table]:
    """Every attention layer found: convention if it is Sinkhorn, reason if it is not compiled."""
    sites = inspection["sites"]
    title = f"{inspection.get('model')} (capture: {inspection.get('capture')})"
    columns: dict[str, Column] = {
        "site": "name", "status": "status", "heads|": "heads", "dim|": "head_dim",
        "convention": lambda site: convention_text(site.get("convention")),
        "replay error|": "replay_error", "reason": "reason",
    }  # fmt: skip
    replayed = [{"site": site["name"], **site["replay"]} for site in sites if site.get("replay")]
    tried = sorted({name for replay in replayed for name in replay} - {"site"})
    return [
        *(listed(title, sites, columns) or [Table(title, tuple(columns), ())]),
        *listed("Replayed on", replayed, {"site": "site", **{f"{name}|": name for name in tried}}),
    ]


def calibration_tables(summary: Result) -> list[Table]:
    """The fit of every site, if there was any."""
    fits = listed(f"Calibration of {summary.get('model')}, {summary.get('order')}", summary["sites"], {
        "site": "name", "predicted": amortised_text, "fit": fit_text, "examples|": "examples",
        "tokens|": "tokens", **_metrics("r2", "condition_number"), "s|": "fit_seconds",
    })  # fmt: skip
    return [*fits, *_warnings(summary["warnings"])]


def compile_tables(manifest: Result) -> list[Table]:
    """What every site became; with an entry `onnx_file` also what model.onnx is."""
    return [
        *_choices_of("Compiled", manifest["sites"]),
        *_pairs("Holds for", {"sizes": manifest["sizes"]} if manifest.get("sizes") else {}),
        *_refused(manifest.get("refused", ())),
        *_warnings(manifest.get("warnings", ())),
        *(onnx_tables(manifest["onnx_file"]) if "onnx_file" in manifest else []),
    ]


def refresh_tables(entry: Result) -> list[Table]:
    """How a compiled model was trained after the replacement, and its metrics before and after."""
    return _pairs("Refresh", {key.replace("_", " "): value for key, value in entry.items()})


def bench_tables(bench: Result) -> list[Table]:
    """Latencies and ratios, whole model and per site."""
    sites = bench["sites"]
    kernels = {key: key for key in ("site", "operator", "shape", "kernel")} | {"because": "reason"}
    intervals: dict[str, Column] = {}
    if any(site.get("confidence", {}).get("speedup") for site in sites):
        intervals["95% interval|"] = lambda site: interval_text("speedup", site["confidence"]) or "-"
    return [
        _model_table("Whole model", bench["model"]),
        *([_model_table("Whole model, ONNX Runtime", bench["onnx"])] if "onnx" in bench else []),
        *_by_site("Latency, per site", sites, intervals),
        *listed("Kernels", _parts(sites, "kernels"), kernels),
    ]


def onnx_tables(record: Result) -> list[Table]:
    """What was written, and how it compared with the compiled program."""
    return _pairs("ONNX, run with ONNX Runtime against the compiled model", {
        "opset": record.get("opset"),
        "size (MB)": record.get("bytes", 0) / 1e6,
        "float16": record.get("float16"),
        "functions": record.get("functions", ()),
        "largest difference": record.get("largest"),
        "allowed": record.get("tolerance"),
        "shapes run": len(record.get("shapes", ())),
    })


def study_tables(result: Result) -> list[Table]:
    """Baselines, then every row by attention error."""
    baseline = {"sites": len(result["sites"]), **result["baseline"]}
    baseline |= {name: result.get(name) for name in ("examples", "map_examples", "batch")}
    rows = sorted(result["rows"], key=lambda row: float(row["attention_rel_l2"]))
    columns: dict[str, Column] = {
        "": lambda row: "*" if row.get("pareto") else "",
        "features": "features",
        "side": lambda row: str(row.get("side") or "-"),
        "c_transforms|": lambda row: ", ".join([number(row.get("c_transforms")), *_choices(row)]),
        "fit": lambda row: str(row.get("fit") or "-"),
        "shared": lambda row: str(row.get("coefficients") or "-"),
        "ridge|": lambda row: number(row.get("ridge"))
        + (" direct" if row.get("ridge_mode") == "direct" else ""),
        "examples|": "examples",
        **_metrics(*(metric.key for metric in METRICS if metric.study == "table")),
        "site ms|": "site_ms",
        "predict ms|": "predict_ms",
    }
    return [_model_table("Baseline", baseline), *listed("Rows", rows, columns)]


def comparison_table(rows: Iterable[Result]) -> list[Table]:
    """The demo's closing table: usual loop, torch.compile, lossless, amortised."""
    return listed("Usual loop, better loop, no loop", rows, {
        "": "name", "compile s|": "compile_seconds", "latency ms|": "latency_ms",
        "speedup|": lambda row: "-" if row.get("speedup") is None else f"{number(row['speedup'])}x",
        **_metrics("attention_rel_l2", "prediction_agreement", "accuracy"),
    })  # fmt: skip
