"""What is shown of a result, independent of where: titled tables of already formatted cells.

`asapc.report.text` turns them into Markdown, `asapc.report.console` into terminal tables, and
`asapc.report.html` into HTML.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from asapc.metrics import METRIC, METRICS, is_share
from asapc.operators.catalogue import SIZES
from asapc.report.document import Certificate, Check, GateReport, Report, SiteReport, Trail

Row = tuple[str, ...]

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


Item = TypeVar("Item")


def listed(
    title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]]
) -> list[Table]:
    """A row for each item; no table without items.  columns: by its heading, what a cell says."""
    rows = tuple(tuple(text(item) for text in columns.values()) for item in items)
    return [Table(title, tuple(columns), rows)] if rows else []


def _text_of(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: str(item.get(key) or "")


def _number_of(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: number(item.get(key))


def _metrics_of(
    keys: Iterable[str], value: Callable[[Any, str], Any] = lambda item, key: item.get(key)
) -> dict[str, Callable[[Any], str]]:
    """A column for each metric."""
    return {_heading(key): partial(_metric_cell, key, value) for key in keys}


def _metric_cell(key: str, value: Callable[[Any, str], Any], item: Any) -> str:
    return metric_text(key, value(item, key))


MODEL_LABELS = {
    "source": "model",
    "capture": "capture",
    "examples": METRIC["examples"].label,
    "map_examples": "examples, attention compared",
    "data": "data",
    "sizes": "holds for sizes",
    "batch": "batch size",
    **{metric.key: metric.label for metric in METRICS if metric.label},
    "megabytes_teacher": "file, teacher (MB)",
    "megabytes_lossless": "file, lossless loop (MB)",
    "megabytes_compiled": "file, compiled (MB)",
    "threads": "threads",
    "provider": "provider",
    "lossless_max_abs_error": "largest output difference, lossless",
    "calibration_order": "calibration order",
    "usual_loop_ms": "site: usual loop (ms)",
    "lossless_ms": "site: lossless (ms)",
    "softmax_ms": "site: softmax attention (ms)",
}
REFRESH_LABELS = {
    "best_epoch": "epoch kept",
    "learning_rate": "learning rate",
    "batch_size": "batch size",
    "examples": "examples trained on",
    "selection_examples": "examples selected on",
    "parameters": "trained",
}
# Shown beside the values they belong to.
APART = ("confidence", "confidence_level")


def metric_text(key: str, value: Any) -> str:
    """A metric: a share in per cent, anything else as a number."""
    share = is_share(key) and isinstance(value, float) and math.isfinite(value)
    return f"{value:.2%}" if share else number(value)


def number(value: Any, *, digits: int = 3) -> str:
    """A value as text: integers whole, floats to `digits` significant digits, "-" when absent."""
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
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{places}f}"
    return f"{value:.{digits - 1}e}"


def convention_text(convention: Mapping[str, Any] | None) -> str:
    """One line: "T=20, row first, column last, scale 0.250, factor M, key mask"."""
    if not convention:
        return "-"
    parts = _CONVENTION_TEXTS.get(convention.get("operator", "sinkhorn"), _settings_text)(convention)
    if convention.get("mask", "none") != "none":
        parts.append(f"{convention['mask']} mask")
    parts += [text for text, key in _FLAGS if convention.get(key)]
    return ", ".join(parts)


def _loop_text(c: Mapping[str, Any]) -> list[str]:
    return [
        f"T={c.get('half_steps')}", f"{c.get('first_side')} first", f"{c.get('last_side')} last",
        f"scale {number(c.get('score_multiplier'))}", f"factor {c.get('output_factor')}",
        *_stabiliser_text(c.get("stabiliser")),
    ]  # fmt: skip


def _stabiliser_text(stabiliser: Mapping[str, Any] | None) -> list[str]:
    if not stabiliser:
        return []
    sign = "+" if stabiliser.get("kind") == "add" else "at least"
    return [f"sums {sign} {number(stabiliser.get('constant'))}"]


def _sliced_text(c: Mapping[str, Any]) -> list[str]:
    temperature = c.get("softsort_temperature")
    slices = c.get("slices")
    cost = "squared distance" if c.get("squared_cost") else "distance"
    exact = f"exact sorting, {_TIES.get(c.get('ties', 'shared'), c.get('ties'))}"
    coupling = c.get("coupling")
    return [
        exact if temperature is None else f"SoftSort t={number(temperature)}",
        *([] if coupling is None else [f"{coupling} coupling"]),
        "axis-aligned slices" if slices is None else f"{slices} slices",
        f"tau={number(c.get('inverse_temperature'))} of the {'mean' if c.get('mean_cost') else 'summed'}"
        f" {cost}",
        f"factor {number(c.get('output_factor'))}",
    ]  # fmt: skip


_TIES = {
    "shared": "ties share mass", "descending": "ties in token order",
    "ascending": "ties in token order from the smallest",
    "open": "ties in token order, where the layer's own sort is not stable",
}  # fmt: skip


def _glued_text(c: Mapping[str, Any]) -> list[str]:
    parts = [f"{c.get('pivots')} pivots"]
    for side in ("queries", "keys"):
        half = c.get(side) or {}
        first = side if half.get("tokens_first") else "pivots"
        scale = number(half.get("score_multiplier"))
        parts.append(f"{side}: T={half.get('half_steps')}, {first} first, scale {scale}")
    return [*parts, f"factor {c.get('output_factor')}"]


def _plan_text(c: Mapping[str, Any]) -> list[str]:
    given = [
        f"{symbol} {_MARGINALS.get(str(kind), kind)}"
        for symbol, kind in (("mu", c.get("source_marginal")), ("nu", c.get("target_marginal")))
        if kind != "uniform"
    ]
    by_head = c.get("by_head")
    scales = [] if not by_head else ["times " + " ".join(number(x) for x in by_head) + " by head"]
    what = "log plan" if c.get("log") else "plan"
    first, *rest = _loop_text(c)
    return [f"{what} of given scores", first, *rest, *scales, *given]


def _banded_text(c: Mapping[str, Any]) -> list[str]:
    low, high = c.get("low"), c.get("high")
    return [f"window of keys i{_signed(low)} to i{_signed(high)}", *_loop_text(c)]


def _signed(offset: Any) -> str:
    return f"{offset:+d}" if isinstance(offset, int) else f" {offset}"


_MARGINALS = {"constant": "constant", "input": "given"}


def _settings_text(c: Mapping[str, Any]) -> list[str]:
    """Of a kind that is not worded above."""
    settings = ((key, value) for key, value in c.items() if key not in ("operator", "mask"))
    return [f"{key.replace('_', ' ')} {number(value)}" for key, value in settings]


_CONVENTION_TEXTS = {
    "sinkhorn": _loop_text, "esp_soft": _sliced_text, "esp_hard": _sliced_text, "lot": _glued_text,
    "plan": _plan_text, "banded_sinkhorn": _banded_text,
}  # fmt: skip
_FLAGS = (("bias", "bias"), ("early stop", "early_stop"))


def headline(report: Report) -> str:
    """The result in one line: verdict, speed-up, agreement with its interval."""
    model = report.model
    speedup, agreement = model.metric("speedup"), model.metric("prediction_agreement")
    parts: list[str] = [report.gate.verdict or "no gate set"]
    if speedup is not None:
        parts.append(f"{number(speedup)}x as fast as the teacher")
    if agreement is not None:
        ends = interval_text("prediction_agreement", model.confidence)
        within = f" ({ends})" if ends != "-" else ""
        shown = metric_text("prediction_agreement", agreement)
        parts.append(f"{shown} of predictions kept{within}")
    return ", ".join(parts)


def report_tables(report: Report) -> list[Table]:
    """Every table of a report, see `report_sections`; of the comparison with a baseline what is worse."""
    sections = report_sections(report) | {"Gate": gate_table(report.gate)}
    return [table for tables in sections.values() for table in tables]


def report_sections(report: Report) -> dict[str, list[Table]]:
    """By their heading on the page; a section may be empty."""
    sites, trail = report.sites, report.selection or Trail()
    as_json = [site.to_json() for site in sites]
    audit, refresh, onnx = report.soft_to_hard, report.refresh, report.onnx
    return {
        "Gate": gate_table(report.gate, every=True),
        "Warnings": warnings_table([warning.to_json() for warning in report.warnings]),
        "Whole model": [_model_table("Model", report.model.to_json())],
        "Layers": [
            *_fidelity_table(sites), *certificates_table(sites), *length_tables(report),
            *_latency_table(as_json), *_choice_table("Why", as_json),
        ],
        "How it was chosen": selection_tables(trail),
        "Soft to hard": soft_to_hard_tables(audit.to_json()) if audit else [],
        "Left alone": refused_table(report.refused),
        "Trained after the replacement": refresh_tables(refresh.to_json()) if refresh else [],
        "Written as ONNX": onnx_tables(onnx.to_json()) if onnx else [],
        "Environment and provenance": _environment_table(report),
    }  # fmt: skip


def _environment_table(report: Report) -> list[Table]:
    rows: dict[str, Any] = {f"examples, {name}": value for name, value in report.splits.items()}
    rows |= {"report format": report.format_version}
    rows |= {f"fingerprint, {name}": value for name, value in report.fingerprints.items()}
    rows |= report.environment
    rows |= {"note": report.chosen_elsewhere} if report.chosen_elsewhere else {}
    return _pairs("Environment", rows)


def _pairs(title: str, values: Mapping[str, Any]) -> list[Table]:
    """A row for each value; no table without values."""
    rows = tuple((str(key), _cell(value)) for key, value in values.items())
    return [Table(title, ("", ""), rows)] if rows else []


def certificates_table(sites: Sequence[SiteReport]) -> list[Table]:
    """Proven bounds beside what was measured; none in a report without."""
    return listed(
        "Certificates",
        ((site.name, certificate) for site in sites for certificate in site.certificates),
        {
            "site": lambda row: row[0],
            "certificate": lambda row: row[1].name,
            "bound|": lambda row: number(row[1].bound),
            "measured|": lambda row: number(row[1].measured),
            "holds": lambda row: _holds(row[1]),
            "cases|": lambda row: number(row[1].cases),
            "vacuous|": lambda row: number(row[1].vacuous_cases),
            "source": lambda row: row[1].source or "",
        },
    )


def _holds(certificate: Certificate) -> str:
    return "violated" if not certificate.holds else "vacuous" if certificate.vacuous else "holds"


def length_tables(report: Report) -> list[Table]:
    """Errors by the length of an example: the model's predictions, and attention per site."""
    of_model = ((report.model.source, length_bin) for length_bin in report.by_length)
    of_sites = ((site.name, length_bin) for site in report.sites for length_bin in site.by_length)
    lengths: dict[str, Callable[[Any], str]] = {
        "active keys": lambda row: f"{row[1].low} to {row[1].high}",
        "examples|": lambda row: number(row[1].examples),
    }

    def metrics(*keys: str) -> dict[str, Callable[[Any], str]]:
        return _metrics_of(keys, lambda row, key: row[1].metrics.get(key))

    title, site = "By length of the example", {"site": lambda row: row[0]}
    return [
        *listed(title, of_model, lengths | metrics("prediction_agreement", "logit_kl")),
        *listed(f"{title}, per site", of_sites, site | lengths | metrics("attention_rel_l2")),
    ]


def _heading(key: str) -> str:
    return f"{METRIC[key].column or METRIC[key].label}|"


def selection_tables(selection: Trail) -> list[Table]:
    """What was asked for, what was tried and why it lost, and the rounds of the whole model; none without
    a selection."""
    unit = "mib" if selection.objective == "memory" else "ms"
    shapes = ("x".join(map(str, shape)) for shape in selection.shapes)
    asked = {
        "objective": selection.objective,
        "budget": selection.budget,
        "examples": selection.examples,
        "shapes, batch x tokens": ", ".join(shapes),
        "seconds": selection.seconds,
    }
    tried = listed(
        "Selection: candidates",
        ((site.name, candidate) for site in selection.sites for candidate in site.candidates),
        {
            "site": lambda row: row[0],
            "candidate": lambda row: row[1].label,
            "verdict": lambda row: row[1].verdict,
            _heading("attention_rel_l2"): lambda row: number(row[1].attention_rel_l2),
            _heading("output_rel_l2"): lambda row: number(row[1].output_rel_l2),
            "ms|": lambda row: _cell(row[1].latency_ms),
            "teacher ms|": lambda row: _cell(row[1].teacher_ms),
            "MiB|": lambda row: number(row[1].memory_mib),
            "whole model with it alone": lambda row: _cell(row[1].alone),
        },
    )
    rounds = listed(
        "Selection: the whole model",
        enumerate(selection.rounds, 1),
        {
            "round": lambda row: str(row[0]),
            "budget": lambda row: _cell(row[1].budget),
            "choice": lambda row: ", ".join(
                f"{count} x {label}" for label, count in Counter(row[1].choice.values()).items()
            ),
            "measured": lambda row: _cell(row[1].measured),
            f"predicted {unit.replace('mib', 'MiB')}|": lambda row: number(
                getattr(row[1], f"predicted_{unit}")
            ),
            "verdict": lambda row: row[1].verdict,
        },
    )
    known = {key: value for key, value in asked.items() if value not in (None, "", {})}
    return [*_pairs("Selection", known), *rounds, *tried]


def soft_to_hard_tables(audit: Mapping[str, Any]) -> list[Table]:
    """What making sorts exact does to the whole model; none for a model without soft sorts."""
    return listed(
        "Soft to hard: the model by how it sorts",
        audit.get("variants", ()),
        {
            "sorts": lambda variant: str(variant.get("name")),
            **_metrics_of(("accuracy", "prediction_change")),
            _heading("row_err"): _number_of("row_err"),
            _heading("col_err"): _number_of("col_err"),
            "entropy|": _number_of("entropy"),
            "examples/s|": _number_of("examples_per_second"),
        },
    )


def gate_table(gate: GateReport, every: bool = False) -> list[Table]:
    """One table of checks, failures first; none if no gate was set.

    A baseline compares every metric of every site: unless every, it takes one row, and one for each that
    is worse.  every: with the messages, too.
    """
    rows = [
        (check.metric, check.scope, number(check.value), limit_text(check), check.verdict, check.message)
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
    return [Table("Gate", columns[:shown], tuple(row[:shown] for row in rows))] if rows else []


def limit_text(check: Check) -> str:
    """What a check held the value against: "max 0.01", "min 0.99, confident", "0.04 + 2%"."""
    if check.bound is not None:
        confident = ", confident" if check.confidence else ""
        return f"{check.bound} {number(check.limit)}{confident}"
    if check.allowed is not None:
        return f"baseline {number(check.baseline)}, {_percent(check.allowed)}"
    return "plausible" if check.kind == "plausibility" else "-"


def _percent(value: Any) -> str:
    return f"{value * 100:.4g}%" if isinstance(value, int | float) else number(value)


def refused_table(refused: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Layers that were left as they are, with the reason."""
    columns = {key: _text_of(key) for key in ("name", "status", "reason")}
    return listed("Left as they were", refused, columns)


def warnings_table(warnings: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Fits that rest on too few examples or regression rows, see asapc.calibration.enough."""
    return listed(
        "Warning: fits that rest on too little data",
        warnings,
        {
            "site": lambda warning: _cell(warning.get("sites", ())[:1]),
            "sites more|": lambda warning: number(max(0, len(warning.get("sites", ())) - 1)),
            "fitted on|": lambda warning: f"{number(warning.get('given'))} {warning.get('of')}",
            "needed|": _number_of("needed"),
        },
    )


def inspect_tables(inspection: Mapping[str, Any]) -> list[Table]:
    """Every attention layer found: convention if it is Sinkhorn, reason if it is not compiled."""
    sites = inspection["sites"]
    columns: dict[str, Callable[[Any], str]] = {
        "site": _text_of("name"),
        "status": _text_of("status"),
        "heads|": _number_of("heads"),
        "dim|": _number_of("head_dim"),
        "convention": lambda site: convention_text(site.get("convention")),
        "replay error|": _number_of("replay_error"),
        "reason": _text_of("reason"),
    }
    title = f"{inspection.get('model')} (capture: {inspection.get('capture')})"
    replayed = [site for site in sites if site.get("replay")]
    tried = sorted({name for site in replayed for name in site["replay"]})
    errors = {f"{name}|": partial(_replay_error, name) for name in tried}
    return [
        *(listed(title, sites, columns) or [Table(title, tuple(columns), ())]),
        *listed("Replayed on", replayed, {"site": _text_of("name"), **errors}),
    ]


def _replay_error(name: str, site: Mapping[str, Any]) -> str:
    return number(site["replay"].get(name))


def amortised_text(site: Mapping[str, Any]) -> str:
    """How a site's dual is predicted, "target, 1 c-transform, coarse:32 gaussian", or what it was
    distilled into, "32 pivots, 1 summary token, convolution of 3"; empty where neither."""
    for key in SIZES:
        if site.get(key):
            return ", ".join([f"{site[key]} {key.replace('_', '-')}", *_beside(site)])
    if not site.get("features"):
        return ""
    count = number(site.get("c_transforms"))
    c_transforms = f"{count} c-transform{'' if count == '1' else 's'}"
    told = [str(site.get("side")), c_transforms, *_choices(site), " ".join(site["features"])]
    return ", ".join(told)


def _beside(site: Mapping[str, Any]) -> list[str]:
    """What a hybrid operator has besides."""
    count, width = site.get("summary_tokens"), site.get("depthwise")
    return [
        *([f"{count} summary token{'' if count == 1 else 's'}"] if count else []),
        *([f"convolution of {width}"] if width else []),
    ]


def _choices(fitted: Mapping[str, Any]) -> list[str]:
    """What a fit has that most have not, in a few words each."""
    return [
        *(["rows rescaled"] if fitted.get("rescaled") else []),
        *(["from the last dual"] if fitted.get("aim") == "last" else []),
        *(["active points"] if fitted.get("points") == "active" else []),
    ]


def fit_text(site: Mapping[str, Any]) -> str:
    """"kl per_head", and whether it converged where that can be doubted; how close a distilled one is."""
    if not site.get("fit"):
        return ""
    if site.get("fit_rel_l2") is not None:
        return f"{site['fit']}, output l2 {number(site['fit_rel_l2'])}"
    doubt = " NOT CONVERGED" if site.get("fit_converged") is False else ""
    kept = f" on {site['kl_examples']} examples" if site.get("kl_examples") else ""
    return f"{site['fit']} {site.get('coefficients')}{kept}{doubt}"


def calibration_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The fit of every site, where any was."""
    fits = listed(
        f"Calibration of {summary.get('model')}, {summary.get('order')}",
        summary["sites"],
        {
            "site": _text_of("name"),
            "predicted": amortised_text,
            "fit": fit_text,
            "examples|": _number_of("examples"),
            "tokens|": _number_of("tokens"),
            "R2 in-sample|": _number_of("r2"),
            "cond|": _number_of("condition_number"),
            "s|": _number_of("fit_seconds"),
        },
    )
    return [*fits, *warnings_table(summary["warnings"])]


def compile_tables(manifest: Mapping[str, Any]) -> list[Table]:
    """What every site became; with an entry `onnx_file` also what model.onnx is."""
    return [
        *_choice_table("Compiled", manifest["sites"]),
        *_pairs("Holds for", {"sizes": manifest["sizes"]} if manifest.get("sizes") else {}),
        *refused_table(manifest.get("refused", ())),
        *warnings_table(manifest.get("warnings", ())),
        *(onnx_tables(manifest["onnx_file"]) if "onnx_file" in manifest else []),
    ]


def _choice_table(title: str, sites: Sequence[Mapping[str, Any]]) -> list[Table]:
    return listed(
        title,
        sites,
        {
            "site": _text_of("name"),
            "operator": _text_of("operator"),
            "predicted": amortised_text,
            "convention": lambda site: convention_text(site.get("convention")),
            "reason": _text_of("reason"),
        },
    )


def refresh_tables(entry: Mapping[str, Any]) -> list[Table]:
    """How a compiled model was trained after the replacement, and what that changed."""
    apart = ("before", "after", "earlier", "soft_to_hard")
    settings = {key: value for key, value in entry.items() if key not in apart}
    if entry.get("best_epoch") == 0:
        settings["best_epoch"] = "0: no epoch lowered the loss, the weights are unchanged"
    if entry.get("earlier"):
        settings["earlier refreshes"] = len(entry["earlier"])
    rows = tuple((REFRESH_LABELS.get(key, key), _cell(value)) for key, value in settings.items())
    before, after = entry.get("before", {}), entry.get("after", {})
    changes = tuple(
        (MODEL_LABELS.get(key, key), *(metric_text(key, side.get(key)) for side in (before, after)))
        for key in before
    )
    audit = entry.get("soft_to_hard", {})
    sorts = (("soft", "soft"), ("exact, before", "before"), ("exact, annealed", "after"))
    shares = _metrics_of(
        ("accuracy", "prediction_change"), lambda row, key: audit.get(row[1], {}).get(key)
    )
    return [
        Table("Refresh: trained after the replacement", ("", ""), rows),
        Table("Refresh: on the selection split", ("", "before|", "after|"), changes),
        *listed(
            "Refresh: from soft to hard, selection split", sorts if audit else (),
            {"sorts": lambda row: row[0], **shares},
        ),
    ]  # fmt: skip


def bench_tables(bench: Mapping[str, Any]) -> list[Table]:
    """Latencies and ratios, whole model and per site."""
    tables = [_model_table("Whole model", bench["model"])]
    if "onnx" in bench:
        tables.append(_model_table("Whole model, ONNX Runtime", bench["onnx"]))
    tables += _latency_table(bench["sites"])
    kernels = (
        {"site": site.get("name"), **kernel}
        for site in bench["sites"]
        for kernel in site.get("kernels", ())
    )
    columns = {key: _text_of(key) for key in ("site", "operator", "shape", "kernel")}
    return [*tables, *listed("Kernels", kernels, {**columns, "because": _text_of("reason")})]


def onnx_tables(record: Mapping[str, Any]) -> list[Table]:
    """What was written, and how it compared with the compiled program."""
    shapes = record.get("shapes", ())
    rows = (
        ("opset", str(record.get("opset"))),
        ("size (MB)", number(record.get("bytes", 0) / 1e6)),
        ("float16", number(record.get("float16"))),
        ("functions", ", ".join(record.get("functions", ()))),
        ("largest difference", number(record.get("largest"))),
        ("allowed", number(record.get("tolerance"))),
        ("shapes run", str(len(shapes))),
        *((name, _span(shapes, name)) for name in (shapes[0] if shapes else ())),
    )
    return [Table("ONNX, run with ONNX Runtime against the compiled model", ("", ""), rows)]


def _span(shapes: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(map(str, sorted({shape[name] for shape in shapes if name in shape})))


def study_tables(result: Mapping[str, Any]) -> list[Table]:
    """Baselines, then every row by attention error."""
    shown = ("examples", "map_examples", "batch")
    baseline = {"sites": len(result["sites"]), **result["baseline"]}
    baseline.update({name: result.get(name) for name in shown})
    rows = sorted(result["rows"], key=lambda row: float(row["attention_rel_l2"]))
    columns: dict[str, Callable[[Any], str]] = {
        "": lambda row: "*" if row.get("pareto") else "",
        "features": _text_of("features"),
        "side": lambda row: str(row.get("side") or "-"),
        "c_transforms|": lambda row: ", ".join([number(row.get("c_transforms")), *_choices(row)]),
        "fit": lambda row: str(row.get("fit") or "-"),
        "shared": lambda row: str(row.get("coefficients") or "-"),
        "ridge|": lambda row: number(row.get("ridge"))
        + (" direct" if row.get("ridge_mode") == "direct" else ""),
        "examples|": _number_of("examples"),
        **_metrics_of(metric.key for metric in METRICS if metric.study == "table"),
        "site ms|": _number_of("site_ms"),
        "predict ms|": _number_of("predict_ms"),
    }
    return [_model_table("Baseline", baseline), *listed("Rows", rows, columns)]


def comparison_table(rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """The demo's closing table: usual loop, torch.compile, lossless, amortised."""
    return listed(
        "Usual loop, better loop, no loop",
        rows,
        {
            "": _text_of("name"),
            "compile s|": _number_of("compile_seconds"),
            "latency ms|": _number_of("latency_ms"),
            "speedup|": lambda row: "-" if row.get("speedup") is None else f"{number(row['speedup'])}x",
            **_metrics_of(("attention_rel_l2", "prediction_agreement", "accuracy")),
        },
    )


def _model_table(title: str, model: Mapping[str, Any]) -> Table:
    known = [key for key in MODEL_LABELS if key in model]
    keys = known + [key for key in model if key not in MODEL_LABELS and key not in APART]
    confidence = model.get("confidence")
    rows = []
    for key in keys:
        value = model[key]
        text = metric_text(key, value) if is_share(key) else _cell(value)
        cells = (MODEL_LABELS.get(key, key), f"{text}x" if key.startswith("speedup") else text)
        rows.append((*cells, interval_text(key, confidence)) if confidence else cells)
    level = model.get("confidence_level", 0.95)
    heading = f"{_percent(level)} interval|"
    return Table(title, ("", "|", heading) if confidence else ("", ""), tuple(rows))


def interval_text(key: str, confidence: Mapping[str, Sequence[float | None]]) -> str:
    """"97.92% to 99.80%", or "-"."""
    return " to ".join(metric_text(key, end) for end in confidence.get(key, ())) or "-"


def _fidelity_table(sites: Sequence[SiteReport]) -> list[Table]:
    keys = [m.key for m in METRICS if m.column and any(m.key in site.metrics for site in sites)]
    metrics = {_heading(key): partial(_site_metric, key) for key in keys}
    columns: dict[str, Callable[[SiteReport], str]] = {
        "site": lambda site: site.name, "operator": lambda site: site.operator, **metrics,
    }  # fmt: skip
    return listed("Fidelity to the teacher, per site", sites, columns)


def _site_metric(key: str, site: SiteReport) -> str:
    return number(site.metrics.get(key))


def _latency_table(sites: Sequence[Mapping[str, Any]]) -> list[Table]:
    timed = [metric.key for metric in METRICS if metric.column and metric.scope == "both"]
    keys = [key for key in timed if any(site.get(key) is not None for site in sites)]
    columns: dict[str, Callable[[Any], str]] = {
        "site": _text_of("name"),
        "operator": lambda site: str(site.get("operator") or "-"),
        **{_heading(key): _number_of(key) for key in keys},
    }
    return listed("Latency, per site", sites if keys else (), columns)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return number(value)
