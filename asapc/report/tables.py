"""What is shown of a result, independent of where: titled tables of already formatted cells.

`asapc.report.text` turns them into Markdown, `asapc.report.console` into terminal tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """columns: headings; a heading that ends in "|" marks a right-aligned (numeric) column."""

    title: str
    columns: Row
    rows: tuple[Row, ...]

    def headings(self) -> list[tuple[str, bool]]:
        """(heading, right-aligned) per column."""
        return [(name.removesuffix("|"), name.endswith("|")) for name in self.columns]


MODEL_LABELS = {
    "source": "model",
    "capture": "capture",
    "examples": "examples, unseen in the fit",
    "data": "data",
    "batch": "batch size",
    "output_rmse": "output RMSE",
    "output_rel_l2": "output relative l2",
    "max_abs_error": "largest output difference",
    "logit_kl": "logit KL",
    "prediction_agreement": "prediction agreement",
    "accuracy_teacher": "accuracy, teacher",
    "accuracy_compiled": "accuracy, compiled",
    "accuracy_drop": "accuracy drop",
    "latency_teacher_ms": "latency, teacher (ms)",
    "latency_lossless_ms": "latency, lossless loop (ms)",
    "latency_compiled_ms": "latency, compiled (ms)",
    "speedup_lossless": "speedup, lossless loop",
    "speedup": "speedup, compiled",
    "megabytes_teacher": "file, teacher (MB)",
    "megabytes_lossless": "file, lossless loop (MB)",
    "megabytes_compiled": "file, compiled (MB)",
    "threads": "threads",
    "provider": "provider",
    "fit_seconds": "fit (s)",
    "break_even_batches": "batches until the fit has paid",
    "lossless_max_abs_error": "largest output difference, lossless",
    "calibration_order": "calibration order",
    "map_examples": "examples, attention compared",
    "usual_loop_ms": "site: usual loop (ms)",
    "lossless_ms": "site: lossless (ms)",
    "softmax_ms": "site: softmax attention (ms)",
}
SITE_LABELS = {
    "attention_rel_l2": "attention l2",
    "attention_rel_l2_worst": "worst",
    "output_rel_l2": "output l2",
    "row_err": "row err",
    "col_err": "col err",
    "plan_kl": "plan KL",
    "r2": "R2 in-sample",
    "condition_number": "cond",
    "row_bound": "row bound",
    "contraction_bound": "contraction",
}
REFRESH_LABELS = {
    "best_epoch": "epoch kept",
    "learning_rate": "learning rate",
    "batch_size": "batch size",
    "examples": "examples trained on",
    "selection_examples": "examples selected on",
    "parameters": "trained",
}
LATENCY_LABELS = {
    "latency_teacher_ms": "teacher ms",
    "latency_lossless_ms": "lossless ms",
    "latency_compiled_ms": "compiled ms",
    "speedup_lossless": "lossless x",
    "speedup": "compiled x",
}
# Shown beside the values they belong to.
APART = ("confidence", "confidence_level")
SHARES = (
    "prediction_agreement", "accuracy_teacher", "accuracy_compiled", "accuracy_drop", "accuracy",
)  # fmt: skip


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
    parts = _CONVENTION_TEXTS[convention.get("operator", "sinkhorn")](convention)
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


_CONVENTION_TEXTS = {
    "sinkhorn": _loop_text, "esp_soft": _sliced_text, "esp_hard": _sliced_text, "lot": _glued_text,
}  # fmt: skip
_FLAGS = (("bias", "bias"), ("early stop", "early_stop"))


def headline(report: Mapping[str, Any]) -> str:
    """The result in one line: verdict, speed-up, agreement with its interval."""
    model = _mapping(report, "model")
    parts = [verdict_text(_mapping(report, "gate"))]
    if isinstance(model.get("speedup"), int | float):
        parts.append(f"{number(model['speedup'])}x as fast as the teacher")
    agreement = model.get("prediction_agreement")
    if agreement is not None:
        ends = _interval(model, "prediction_agreement")
        within = f" ({ends})" if ends != "-" else ""
        parts.append(f"{_share(agreement)} of predictions kept{within}")
    return ", ".join(parts)


def verdict_text(gate: Mapping[str, Any]) -> str:
    """"ACCEPT", "REGRESSION" or "ANOMALOUS"; "no gate set" where nothing was asked."""
    return str(gate.get("verdict") or "no gate set")


def report_tables(report: Mapping[str, Any]) -> list[Table]:
    """Gate, warnings, model, sites, what was decided, untouched layers and environment."""
    sites = _list(report, "sites")
    tables = gate_table(_mapping(report, "gate"))
    tables += warnings_table(_list(report, "warnings"))
    tables.append(_model_table("Model", _mapping(report, "model")))
    if sites:
        tables.append(_fidelity_table(sites))
        tables += certificates_table(sites)
        tables += length_tables(report)
        tables += _latency_table(sites)
        tables.append(
            Table(
                "Why",
                ("site", "operator", "predicted", "convention", "reason"),
                tuple(
                    (
                        str(site.get("name")),
                        str(site.get("operator")),
                        amortised_text(site),
                        convention_text(site.get("convention")),
                        str(site.get("reason") or ""),
                    )
                    for site in sites
                ),
            )
        )
    tables += selection_tables(_mapping(report, "selection"))
    tables += soft_to_hard_tables(_mapping(report, "soft_to_hard"))
    tables += refused_table(_list(report, "refused"))
    if _mapping(report, "refresh"):
        tables += refresh_tables(_mapping(report, "refresh"))
    if _mapping(report, "onnx"):
        tables += onnx_tables(_mapping(report, "onnx"))
    rows = [(f"examples, {name}", _cell(value)) for name, value in _mapping(report, "splits").items()]
    rows += [(str(key), _cell(value)) for key, value in _mapping(report, "environment").items()]
    if rows:
        tables.append(Table("Environment", ("", ""), tuple(rows)))
    return tables


def certificates_table(sites: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Proven bounds beside what was measured; none in a report without."""
    rows = tuple(
        (
            str(site.get("name")),
            str(own.get("name")),
            number(own.get("bound")),
            number(own.get("measured")),
            "vacuous" if own.get("vacuous") else number(own.get("holds")),
            number(own.get("cases")),
            str(own.get("source") or ""),
        )
        for site in sites
        for own in _list(site, "certificates")
        if isinstance(own, Mapping)
    )
    columns = ("site", "certificate", "bound|", "measured|", "holds", "cases|", "source")
    return [Table("Certificates", columns, rows)] if rows else []


def length_tables(report: Mapping[str, Any]) -> list[Table]:
    """Errors by the length of an example: the model's predictions, and attention per site."""
    tables = []
    bins = [own for own in _list(report, "by_length") if isinstance(own, Mapping)]
    if bins:
        rows = tuple(
            (
                _range_text(own),
                number(own.get("examples")),
                _share(own.get("prediction_agreement")),
                number(own.get("logit_kl")),
            )
            for own in bins
        )
        columns = ("active keys", "examples|", "agreement|", "logit KL|")
        tables.append(Table("By length of the example", columns, rows))
    rows = tuple(
        (
            str(site.get("name")),
            _range_text(own),
            number(own.get("examples")),
            number(own.get("attention_rel_l2")),
        )
        for site in _list(report, "sites")
        for own in _list(site, "by_length")
        if isinstance(own, Mapping)
    )
    if rows:
        columns = ("site", "active keys", "examples|", "attention l2|")
        tables.append(Table("By length of the example, per site", columns, rows))
    return tables


def selection_tables(selection: Mapping[str, Any]) -> list[Table]:
    """What was tried and why it lost, and the rounds of the whole model; none without a selection."""
    tried = tuple(
        (
            str(site.get("name")),
            str(own.get("label")),
            number(own.get("attention_rel_l2")),
            number(own.get("output_rel_l2")),
            _cell(own.get("latency_ms")),
            _cell(own.get("teacher_ms")),
            number(own.get("memory_mib")),
            str(own.get("verdict") or ""),
        )
        for site in _list(selection, "sites")
        for own in _list(site, "candidates")
        if isinstance(own, Mapping)
    )
    unit = "MiB" if selection.get("objective") == "memory" else "ms"
    rounds = tuple(
        (
            str(place),
            _cell(own.get("budget")),
            _cell(own.get("measured")),
            number(own.get(f"predicted_{unit.lower()}")),
            str(own.get("verdict") or ""),
        )
        for place, own in enumerate(_list(selection, "rounds"), 1)
        if isinstance(own, Mapping)
    )
    tables = []
    if tried:
        budget = _cell(selection.get("budget")) or "none"
        title = f"Selection by {selection.get('objective')}, budget: {budget}"
        columns = (
            "site", "candidate", "attention l2|", "output l2|", "ms|", "teacher ms|", "MiB|", "verdict",
        )  # fmt: skip
        tables.append(Table(title, columns, tried))
    if rounds:
        of_rounds = ("round", "budget", "measured", f"predicted {unit}|", "verdict")
        tables.append(Table("Selection: the whole model", of_rounds, rounds))
    return tables


def _range_text(own: Mapping[str, Any]) -> str:
    return f"{number(own.get('low'))} to {number(own.get('high'))}"


def soft_to_hard_tables(audit: Mapping[str, Any]) -> list[Table]:
    """What making sorts exact does to the whole model; none for a model without soft sorts."""
    rows = tuple(
        (
            str(variant.get("name")),
            *(_share(variant.get(key)) for key in ("accuracy", "prediction_change")),
            *(number(variant.get(key)) for key in ("row_err", "col_err", "entropy")),
            number(variant.get("examples_per_second")),
        )
        for variant in _list(audit, "variants")
    )
    columns = (
        "sorts", "accuracy|", "predictions changed|", "row err|", "col err|", "entropy|", "examples/s|",
    )  # fmt: skip
    return [Table("Soft to hard: the model by how it sorts", columns, rows)] if rows else []


def gate_table(gate: Mapping[str, Any]) -> list[Table]:
    """One table of checks, what failed first; none if no gate was set.

    A baseline is one row and what is worse than it: it compares every metric of every site.
    """
    checks = [own for own in _list(gate, "checks") if isinstance(own, Mapping)]
    checks.sort(key=lambda own: bool(own.get("passed")))
    rows = []
    for own in checks:
        if own.get("kind") == "baseline" and own.get("passed"):
            continue
        value = own.get("value")
        rows.append(
            (
                str(own.get("metric")),
                str(own.get("scope")),
                "-" if value is None else number(value),
                limit_text(own),
                str(own.get("class")),
            )
        )
    baseline = _mapping(gate, "baseline")
    if baseline:
        compared = f"{number(baseline.get('compared'))} compared"
        allowed = f"{_percent(baseline.get('max_regression'))} worse, at most"
        verdict = str(baseline.get("verdict"))
        rows.append(("baseline", str(baseline.get("path")), compared, allowed, verdict))
    columns = ("metric", "scope", "value|", "limit", "class")
    return [Table("Gate", columns, tuple(rows))] if rows else []


def limit_text(check: Mapping[str, Any]) -> str:
    """What a check held the value against: "max 0.01", "min 0.99, confident", "0.04 + 2%"."""
    for bound in ("min", "max"):
        if bound in check:
            return f"{bound} {number(check[bound])}{', confident' if check.get('confidence') else ''}"
    if "allowed" in check:
        return f"baseline {number(check.get('baseline'))}, {_percent(check['allowed'])}"
    return "plausible" if check.get("kind") == "plausibility" else "-"


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
    """Fits that rest on too few examples or regression rows, see asapc.formats.enough."""
    rows = tuple(
        (
            _cell(_list(own, "sites")[:1]),
            number(max(0, len(_list(own, "sites")) - 1)),
            f"{number(own.get('given'))} {own.get('of')}",
            number(own.get("needed")),
        )
        for own in warnings
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
        for site in _list(inspection, "sites")
    )
    columns = ("site", "status", "heads|", "dim|", "convention", "replay error|", "reason")
    tried = sorted({name for site in _list(inspection, "sites") for name in site.get("replay") or ()})
    worst = tuple(
        (str(site.get("name")), *(number((site.get("replay") or {}).get(name)) for name in tried))
        for site in _list(inspection, "sites") if site.get("replay")
    )  # fmt: skip
    replayed = [Table("Replayed on", ("site", *(f"{name}|" for name in tried)), worst)] if worst else []
    return [Table(title, columns, rows), *replayed]


def amortised_text(site: Mapping[str, Any]) -> str:
    """How a site's dual is predicted: "key, 1 closure, coarse:32 gaussian", or what it was distilled
    into: "32 pivots"; empty where neither."""
    for key in ("pivots", "slices"):
        if site.get(key):
            return f"{site[key]} {key}"
    if not site.get("features"):
        return ""
    count = number(site.get("closures"))
    closures = f"{count} closure{'' if count == '1' else 's'}"
    rescaled = ", rows rescaled" if site.get("rescaled") else ""
    return f"{site.get('side')}, {closures}{rescaled}, {' '.join(site['features'])}"


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
    """The fit of every site."""
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
        for site in _list(summary, "sites")
    )
    columns = ("site", "predicted", "fit", "examples|", "tokens|", "R2 in-sample|", "cond|", "s|")
    title = f"Calibration of {summary.get('model')}, {summary.get('order')}"
    return [Table(title, columns, rows), *warnings_table(_list(summary, "warnings"))]


def compile_tables(manifest: Mapping[str, Any]) -> list[Table]:
    """What every site became; with an entry `onnx_file` also what model.onnx is."""
    rows = tuple(
        (
            str(site.get("name")),
            str(site.get("operator")),
            amortised_text(site),
            convention_text(site.get("convention")),
            str(site.get("reason") or ""),
        )
        for site in _list(manifest, "sites")
    )
    columns = ("site", "operator", "predicted", "convention", "reason")
    onnx = _mapping(manifest, "onnx_file")
    return [
        Table("Compiled", columns, rows),
        *refused_table(_list(manifest, "refused")),
        *warnings_table(_list(manifest, "warnings")),
        *(onnx_tables(onnx) if onnx else []),
    ]


def refresh_tables(entry: Mapping[str, Any]) -> list[Table]:
    """How a compiled model was trained after the replacement, and what that changed."""
    apart = ("before", "after", "earlier", "soft_to_hard")
    settings = {key: value for key, value in entry.items() if key not in apart}
    if entry.get("best_epoch") == 0:
        settings["best_epoch"] = "0: no epoch lowered the loss, the weights are unchanged"
    if _list(entry, "earlier"):
        settings["earlier refreshes"] = len(_list(entry, "earlier"))
    rows = tuple((REFRESH_LABELS.get(key, key), _cell(value)) for key, value in settings.items())
    before, after = _mapping(entry, "before"), _mapping(entry, "after")
    changes = tuple(
        (
            MODEL_LABELS.get(key, key),
            *((_share if key in SHARES else number)(side.get(key)) for side in (before, after)),
        )
        for key in before
    )
    audit = _mapping(entry, "soft_to_hard")
    sorts = tuple(
        (name, *(_share(_mapping(audit, key).get(own)) for own in ("accuracy", "prediction_change")))
        for name, key in (("soft", "soft"), ("exact, before", "before"), ("exact, annealed", "after"))
    )
    columns = ("sorts", "accuracy|", "predictions changed|")
    return [
        Table("Refresh: trained after the replacement", ("", ""), rows),
        Table("Refresh: on the selection split", ("", "before|", "after|"), changes),
        *([Table("Refresh: from soft to hard, selection split", columns, sorts)] if audit else []),
    ]


def bench_tables(bench: Mapping[str, Any]) -> list[Table]:
    """Latencies and ratios, whole model and per site."""
    tables = [_model_table("Whole model", _mapping(bench, "model"))]
    if _mapping(bench, "onnx"):
        tables.append(_model_table("Whole model, ONNX Runtime", _mapping(bench, "onnx")))
    tables += _latency_table(_list(bench, "sites"))
    rows = tuple(
        (str(site.get("name")), *(str(kernel[key]) for key in ("operator", "shape", "kernel", "reason")))
        for site in _list(bench, "sites")
        for kernel in site.get("kernels", ())
    )
    keys = ("tile_bytes", "resident_bytes", "gain")
    tuned = tuple(
        (str(site.get("name")), *(number(site["tuned"][key]) for key in keys))
        for site in _list(bench, "sites")
        if "tuned" in site
    )
    if tuned:
        tables.append(Table("Tuned", ("site", "tile bytes|", "kept bytes|", "gain|"), tuned))
    if rows:
        tables.append(Table("Kernels", ("site", "operator", "shape", "kernel", "because"), rows))
    return tables


def onnx_tables(record: Mapping[str, Any]) -> list[Table]:
    """What was written, and how it compared with the compiled program."""
    shapes = _list(record, "shapes")
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
    baseline = {"sites": len(_list(result, "sites")), **_mapping(result, "baseline")}
    shown = ("examples", "map_examples", "batch")
    baseline.update({name: result.get(name) for name in shown})
    rows = sorted(_list(result, "rows"), key=lambda row: float(row["attention_rel_l2"]))
    columns = (
        "", "features", "side", "closures|", "fit", "shared", "ridge|", "examples|", "attention l2|",
        "worst|", "plan KL|", "output RMSE|", "agreement|", "accuracy|", "site ms|", "predict ms|",
        "fit s|",
    )  # fmt: skip
    keys = (
        "attention_rel_l2", "attention_rel_l2_worst", "plan_kl", "output_rmse",
        "prediction_agreement", "accuracy_compiled", "site_ms", "predict_ms", "fit_seconds",
    )  # fmt: skip
    cells = tuple(
        (
            "*" if row.get("pareto") else "",
            str(row.get("features")),
            str(row.get("side") or "-"),
            number(row.get("closures")) + (" rescaled" if row.get("rescaled") else ""),
            str(row.get("fit") or "-"),
            str(row.get("coefficients") or "-"),
            number(row.get("ridge")) + (" direct" if row.get("ridge_mode") == "direct" else ""),
            number(row.get("examples")),
            *(_share(row.get(k)) if k in SHARES else number(row.get(k)) for k in keys),
        )
        for row in rows
    )
    return [_model_table("Baseline", baseline), Table("Rows", columns, cells)]


def comparison_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The demo's closing table: usual loop, lossless, amortised."""
    return Table(
        "Usual loop, better loop, no loop",
        ("", "latency ms|", "speedup|", "attention l2|", "agreement|", "accuracy|"),
        tuple(
            (
                str(row.get("name")),
                number(row.get("latency_ms")),
                f"{number(row.get('speedup'))}x",
                number(row.get("attention_rel_l2")),
                _share(row.get("prediction_agreement")),
                _share(row.get("accuracy")),
            )
            for row in rows
        ),
    )


def _model_table(title: str, model: Mapping[str, Any]) -> Table:
    known = [key for key in MODEL_LABELS if key in model]
    keys = known + [key for key in model if key not in MODEL_LABELS and key not in APART]
    confident = bool(_mapping(model, "confidence"))
    rows = []
    for key in keys:
        value = model[key]
        text = _share(value) if key in SHARES else _cell(value)
        cells = (MODEL_LABELS.get(key, key), f"{text}x" if key.startswith("speedup") else text)
        rows.append((*cells, _interval(model, key)) if confident else cells)
    level = model.get("confidence_level", 0.95)
    heading = f"{_percent(level)} interval|"
    return Table(title, ("", "|", heading) if confident else ("", ""), tuple(rows))


def _interval(model: Mapping[str, Any], key: str) -> str:
    """"97.92% to 99.80%", or "-"."""
    ends = _mapping(model, "confidence").get(key)
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return "-"
    low, high = (_share(end) if key in SHARES else number(end) for end in ends)
    return f"{low} to {high}"


def _fidelity_table(sites: Sequence[Mapping[str, Any]]) -> Table:
    keys = [key for key in SITE_LABELS if any(key in _mapping(s, "metrics") for s in sites)]
    return Table(
        "Fidelity to the teacher, per site",
        ("site", "operator", *(f"{SITE_LABELS[key]}|" for key in keys)),
        tuple(
            (
                str(site.get("name")),
                str(site.get("operator")),
                *(number(_mapping(site, "metrics").get(key)) for key in keys),
            )
            for site in sites
        ),
    )


def _latency_table(sites: Sequence[Mapping[str, Any]]) -> list[Table]:
    keys = [key for key in LATENCY_LABELS if any(site.get(key) is not None for site in sites)]
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
    columns = ("site", "operator", *(f"{LATENCY_LABELS[key]}|" for key in keys))
    return [Table("Latency, per site", columns, rows)]


def _share(value: Any) -> str:
    return f"{value:.2%}" if isinstance(value, float) and math.isfinite(value) else number(value)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return number(value)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(data: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = data.get(key)
    return value if isinstance(value, list | tuple) else []
