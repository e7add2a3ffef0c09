"""What is shown of a result, independent of where: titled tables of already formatted cells.

`asapc.report.text` turns them into Markdown, `asapc.report.console` into terminal tables, and the page's
template into HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from asapc.metrics import METRIC, METRICS, is_share
from asapc.operators.catalogue import SIZES
from asapc.report.document import Check, GateReport, LengthBin, Report, SiteReport, Trail

Row = tuple[str, ...]

# What a word says of a result: in a cell of its own it is coloured so, on a terminal and on the page.
TONES = {
    "ACCEPT": "good", "passed": "good", "matched": "good", "holds": "good", "inside the budget": "good",
    "chosen": "good", "REGRESSION": "bad", "FAILED": "bad", "violated": "bad", "ANOMALOUS": "odd",
    "vacuous": "odd", "refused": "odd",
}  # fmt: skip


class Cell(str):
    """A cell with a second, smaller line, and a tone ("good", "bad", "odd") other than that of its word;
    both are for the page alone."""

    note: str
    tone: str

    def __new__(cls, text: str, note: str = "", tone: str | None = None) -> Self:
        cell = super().__new__(cls, text)
        cell.note, cell.tone = note, TONES.get(text, "") if tone is None else tone
        return cell


@dataclass(frozen=True)
class Table:
    """columns: headings; a heading that ends in "|" marks a right-aligned (numeric) column.

    For the page: marked, the row to stand out; note, a line below; stacked, whether rows become cards on
    a narrow screen, where others scroll.
    """

    title: str
    columns: Row
    rows: tuple[Row, ...]
    marked: int | None = None
    note: str = ""
    stacked: bool = False

    def headings(self) -> list[tuple[str, bool]]:
        """(heading, right-aligned) per column."""
        return [(name.removesuffix("|"), name.endswith("|")) for name in self.columns]

    def cells(self) -> list[list[Cell]]:
        return [[x if isinstance(x, Cell) else Cell(x) for x in row] for row in self.rows]


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
    low, high = c.get("band") or (None, None)
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
    """Gate, warnings, model, sites, what was decided, untouched layers and environment."""
    sites = report.sites
    tables = gate_table(report.gate)
    tables += warnings_table([warning.to_json() for warning in report.warnings])
    tables.append(_model_table("Model", report.model.to_json()))
    if sites:
        tables.append(_fidelity_table(sites))
        tables += certificates_table(sites)
        tables += length_tables(report)
        tables += _latency_table([site.to_json() for site in sites])
        tables.append(_choice_table("Why", [site.to_json() for site in sites]))
    tables += selection_tables(report.selection or Trail())
    tables += audit_tables(report)
    tables += refused_table(report.refused)
    tables += refreshed_tables(report)
    tables += exported_tables(report)
    rows = [(f"examples, {name}", _cell(value)) for name, value in report.splits.items()]
    rows += [(str(key), _cell(value)) for key, value in report.environment.items()]
    rows += [("note", report.chosen_elsewhere)] if report.chosen_elsewhere else []
    if rows:
        tables.append(Table("Environment", ("", ""), tuple(rows)))
    return tables


def audit_tables(report: Report) -> list[Table]:
    return soft_to_hard_tables(report.soft_to_hard.to_json()) if report.soft_to_hard else []


def refreshed_tables(report: Report) -> list[Table]:
    return refresh_tables(report.refresh.to_json()) if report.refresh else []


def exported_tables(report: Report) -> list[Table]:
    return onnx_tables(report.onnx.to_json()) if report.onnx else []


def certificates_table(sites: Sequence[SiteReport]) -> list[Table]:
    """Proven bounds beside what was measured; none in a report without."""
    rows = tuple(
        (
            site.name,
            certificate.name,
            number(certificate.bound),
            number(certificate.measured),
            "vacuous" if certificate.vacuous else number(certificate.holds),
            number(certificate.cases),
            certificate.source or "",
        )
        for site in sites
        for certificate in site.certificates
    )
    columns = ("site", "certificate", "bound|", "measured|", "holds", "cases|", "source")
    return [Table("Certificates", columns, rows)] if rows else []


def length_tables(report: Report) -> list[Table]:
    """Errors by the length of an example: the model's predictions, and attention per site."""
    tables = []
    keys = ("prediction_agreement", "logit_kl")
    rows = tuple(_length_row(length_bin, *keys) for length_bin in report.by_length)
    if rows:
        columns = ("active keys", "examples|", *_headings(keys))
        tables.append(Table("By length of the example", columns, rows))
    rows = tuple(
        (site.name, *_length_row(length_bin, "attention_rel_l2"))
        for site in report.sites
        for length_bin in site.by_length
    )
    if rows:
        columns = ("site", "active keys", "examples|", *_headings(["attention_rel_l2"]))
        tables.append(Table("By length of the example, per site", columns, rows))
    return tables


def _length_row(length_bin: LengthBin, *keys: str) -> Row:
    values = (metric_text(key, length_bin.metrics.get(key)) for key in keys)
    return (f"{length_bin.low} to {length_bin.high}", number(length_bin.examples), *values)


def _headings(keys: Iterable[str]) -> Row:
    return tuple(f"{METRIC[key].column or METRIC[key].label}|" for key in keys)


def selection_tables(selection: Trail) -> list[Table]:
    """What was tried and why it lost, and the rounds of the whole model; none without a selection."""
    tried = tuple(
        (
            site.name,
            candidate.label,
            number(candidate.attention_rel_l2),
            number(candidate.output_rel_l2),
            _cell(candidate.latency_ms),
            _cell(candidate.teacher_ms),
            number(candidate.memory_mib),
            candidate.verdict,
        )
        for site in selection.sites
        for candidate in site.candidates
    )
    memory = selection.objective == "memory"
    rounds = tuple(
        (
            str(place),
            _cell(entry.budget),
            _cell(entry.measured),
            number(entry.predicted_mib if memory else entry.predicted_ms),
            entry.verdict,
        )
        for place, entry in enumerate(selection.rounds, 1)
    )
    tables = []
    if tried:
        budget = _cell(selection.budget) or "none"
        title = f"Selection by {selection.objective}, budget: {budget}"
        errors = _headings(("attention_rel_l2", "output_rel_l2"))
        columns = ("site", "candidate", *errors, "ms|", "teacher ms|", "MiB|", "verdict")
        tables.append(Table(title, columns, tried))
    if rounds:
        predicted = f"predicted {'MiB' if memory else 'ms'}|"
        of_rounds = ("round", "budget", "measured", predicted, "verdict")
        tables.append(Table("Selection: the whole model", of_rounds, rounds))
    return tables


def soft_to_hard_tables(audit: Mapping[str, Any]) -> list[Table]:
    """What making sorts exact does to the whole model; none for a model without soft sorts."""
    shares = ("accuracy", "prediction_change")
    rows = tuple(
        (
            str(variant.get("name")),
            *(metric_text(key, variant.get(key)) for key in shares),
            *(number(variant.get(key)) for key in ("row_err", "col_err", "entropy")),
            number(variant.get("examples_per_second")),
        )
        for variant in audit.get("variants", ())
    )
    balance = _headings(("row_err", "col_err"))
    columns = ("sorts", *_headings(shares), *balance, "entropy|", "examples/s|")
    return [Table("Soft to hard: the model by how it sorts", columns, rows)] if rows else []


def gate_table(gate: GateReport) -> list[Table]:
    """One table of checks, failures first; none if no gate was set.

    A baseline compares every metric of every site: it takes one row, and one for each that is worse.
    """
    rows = [
        (check.metric, check.scope, number(check.value), limit_text(check), check.verdict)
        for check in sorted(gate.checks, key=lambda check: check.passed)
        if check.kind != "baseline" or not check.passed
    ]
    if gate.baseline is not None:
        compared = f"{number(gate.baseline.compared)} compared"
        allowed = f"{_percent(gate.baseline.max_regression)} worse, at most"
        rows.append(("baseline", gate.baseline.path, compared, allowed, gate.baseline.verdict))
    columns = ("metric", "scope", "value|", "limit", "class")
    return [Table("Gate", columns, tuple(rows))] if rows else []


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
    rows = tuple(
        (str(item.get("name")), str(item.get("status")), str(item.get("reason") or ""))
        for item in refused
    )
    return [Table("Left as they were", ("name", "status", "reason"), rows)] if rows else []


def warnings_table(warnings: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Fits that rest on too few examples or regression rows, see asapc.calibration.enough."""
    rows = tuple(
        (
            _cell(warning.get("sites", ())[:1]),
            number(max(0, len(warning.get("sites", ())) - 1)),
            f"{number(warning.get('given'))} {warning.get('of')}",
            number(warning.get("needed")),
        )
        for warning in warnings
    )
    columns = ("site", "sites more|", "fitted on|", "needed|")
    return [Table("Warning: fits that rest on too little data", columns, rows)] if rows else []


def inspect_tables(inspection: Mapping[str, Any]) -> list[Table]:
    """Every attention layer found: convention if it is Sinkhorn, reason if it is not compiled."""
    title = f"{inspection.get('model')} (capture: {inspection.get('capture')})"
    rows = tuple(
        (
            str(site.get("name")),
            str(site.get("status")),
            number(site.get("heads")),
            number(site.get("head_dim")),
            convention_text(site.get("convention")),
            number(site.get("replay_error")),
            str(site.get("reason") or ""),
        )
        for site in inspection["sites"]
    )
    columns = ("site", "status", "heads|", "dim|", "convention", "replay error|", "reason")
    tried = sorted({name for site in inspection["sites"] for name in site.get("replay") or ()})
    worst = tuple(
        (str(site.get("name")), *(number((site.get("replay") or {}).get(name)) for name in tried))
        for site in inspection["sites"] if site.get("replay")
    )  # fmt: skip
    replayed = [Table("Replayed on", ("site", *(f"{name}|" for name in tried)), worst)] if worst else []
    return [Table(title, columns, rows), *replayed]


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
    rows = tuple(
        (
            str(site.get("name")),
            amortised_text(site),
            fit_text(site),
            number(site.get("examples")),
            number(site.get("tokens")),
            number(site.get("r2")),
            number(site.get("condition_number")),
            number(site.get("fit_seconds")),
        )
        for site in summary["sites"]
    )
    columns = ("site", "predicted", "fit", "examples|", "tokens|", "R2 in-sample|", "cond|", "s|")
    title = f"Calibration of {summary.get('model')}, {summary.get('order')}"
    fits = [Table(title, columns, rows)] if rows else []
    return [*fits, *warnings_table(summary["warnings"])]


def compile_tables(manifest: Mapping[str, Any]) -> list[Table]:
    """What every site became; with an entry `onnx_file` also what model.onnx is."""
    return [
        _choice_table("Compiled", manifest["sites"]),
        *sizes_table(manifest.get("sizes", "")),
        *refused_table(manifest.get("refused", ())),
        *warnings_table(manifest.get("warnings", ())),
        *(onnx_tables(manifest["onnx_file"]) if "onnx_file" in manifest else []),
    ]


def sizes_table(sizes: str) -> list[Table]:
    """The sizes that a program holds for."""
    return [Table("Holds for", ("", ""), (("sizes", sizes),))] if sizes else []


def _choice_table(title: str, sites: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (
            str(site.get("name")),
            str(site.get("operator")),
            amortised_text(site),
            convention_text(site.get("convention")),
            str(site.get("reason") or ""),
        )
        for site in sites
    )
    return Table(title, ("site", "operator", "predicted", "convention", "reason"), rows)


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
    audit, shares = entry.get("soft_to_hard", {}), ("accuracy", "prediction_change")
    sorts = tuple(
        (name, *(metric_text(share, audit.get(key, {}).get(share)) for share in shares))
        for name, key in (("soft", "soft"), ("exact, before", "before"), ("exact, annealed", "after"))
    )
    columns = ("sorts", *_headings(shares))
    return [
        Table("Refresh: trained after the replacement", ("", ""), rows),
        Table("Refresh: on the selection split", ("", "before|", "after|"), changes),
        *([Table("Refresh: from soft to hard, selection split", columns, sorts)] if audit else []),
    ]


def bench_tables(bench: Mapping[str, Any]) -> list[Table]:
    """Latencies and ratios, whole model and per site."""
    tables = [_model_table("Whole model", bench["model"])]
    if "onnx" in bench:
        tables.append(_model_table("Whole model, ONNX Runtime", bench["onnx"]))
    tables += _latency_table(bench["sites"])
    rows = tuple(
        (str(site.get("name")), *(str(kernel[key]) for key in ("operator", "shape", "kernel", "reason")))
        for site in bench["sites"]
        for kernel in site.get("kernels", ())
    )
    if rows:
        tables.append(Table("Kernels", ("site", "operator", "shape", "kernel", "because"), rows))
    return tables


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
    metrics = [metric.key for metric in METRICS if metric.study == "table"]
    columns = (
        "", "features", "side", "c_transforms|", "fit", "shared", "ridge|", "examples|",
        *_headings(metrics), "site ms|", "predict ms|",
    )  # fmt: skip
    keys = (*metrics, "site_ms", "predict_ms")
    cells = tuple(
        (
            "*" if row.get("pareto") else "",
            str(row.get("features")),
            str(row.get("side") or "-"),
            ", ".join([number(row.get("c_transforms")), *_choices(row)]),
            str(row.get("fit") or "-"),
            str(row.get("coefficients") or "-"),
            number(row.get("ridge")) + (" direct" if row.get("ridge_mode") == "direct" else ""),
            number(row.get("examples")),
            *(metric_text(key, row.get(key)) for key in keys),
        )
        for row in rows
    )
    return [_model_table("Baseline", baseline), Table("Rows", columns, cells)]


def comparison_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The demo's closing table: usual loop, torch.compile, lossless, amortised."""
    keys = ("attention_rel_l2", "prediction_agreement", "accuracy")
    return Table(
        "Usual loop, better loop, no loop",
        ("", "compile s|", "latency ms|", "speedup|", *_headings(keys)),
        tuple(
            (
                str(row.get("name")),
                number(row.get("compile_seconds")),
                number(row.get("latency_ms")),
                "-" if row.get("speedup") is None else f"{number(row['speedup'])}x",
                *(metric_text(key, row.get(key)) for key in keys),
            )
            for row in rows
        ),
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


def _fidelity_table(sites: Sequence[SiteReport]) -> Table:
    keys = [
        metric.key for metric in METRICS if metric.column and any(metric.key in s.metrics for s in sites)
    ]
    return Table(
        "Fidelity to the teacher, per site",
        ("site", "operator", *_headings(keys)),
        tuple(
            (site.name, site.operator, *(number(site.metrics.get(key)) for key in keys))
            for site in sites
        ),
    )


def _latency_table(sites: Sequence[Mapping[str, Any]]) -> list[Table]:
    timed = [metric.key for metric in METRICS if metric.column and metric.scope == "both"]
    keys = [key for key in timed if any(site.get(key) is not None for site in sites)]
    if not keys:
        return []
    rows = tuple(
        (
            str(site.get("name")),
            str(site.get("operator") or "-"),
            *(number(site.get(key)) for key in keys),
        )
        for site in sites
    )
    return [Table("Latency, per site", ("site", "operator", *_headings(keys)), rows)]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return number(value)
