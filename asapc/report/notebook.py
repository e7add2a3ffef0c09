"""What a notebook shows of a report or a compiled model: the decision, three figures, the layers.

Plain HTML with a few inline styles, in the notebook's own colours and fonts: no script, no style sheet,
nothing from a network, and every name escaped. It needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from asapc.errors import InputError
from asapc.formats.json_text import read_json
from asapc.report.advice import DEFAULT_LIMITS, LOSSLESS_PYTHON, advise, decide, figures, worst_first
from asapc.report.baseline import MAX_BYTES
from asapc.report.document import Report
from asapc.report.shown import cleaned, ends_text, short, times_text
from asapc.report.tables import metric_text, number

ROWS = 12  # layers that are listed
HINTS = 3
FAINT = "opacity: .7; font-size: .92em"
LEFT = "text-align: left; padding: .15em 1.2em .15em 0"
RIGHT = "text-align: right; padding: .15em 1.2em .15em 0"


def report_html(report: Report, title: str | None = None) -> str:
    """A fragment.  title: what is shown, the model's source unless told."""
    decision = decide(report)
    gate = report.gate
    told = [DEFAULT_LIMITS] if decision.judgement.default else []
    if gate.verdict is not None:
        told.insert(0, f"{gate.verdict}: {len(gate.failures)} of {len(gate.checks)} checks failed")
    basis = "; ".join(told)
    hints = [advice.sentence for advice in advise(report)[:HINTS]]
    how = [] if decision.lossless is None else [f"<code>{_text(LOSSLESS_PYTHON)}</code>"]
    parts = [
        f'<div style="{FAINT}">{_text(title or report.model.source or "a model")}</div>',
        f'<div style="font-size: 1.4em; font-weight: 700">{_text(decision.sentence)}</div>',
        f"<div>{_text(decision.because)} <span style=\"{FAINT}\">({_text(basis)})</span></div>",
        *(f"<div>{line}</div>" for line in how),
        _figures(report),
        _layers(report),
        _list(hints),
    ]
    return _framed(parts)


def model_html(title: str, lines: Sequence[str], folder: str) -> str:
    """A compiled model: its report where `folder` has one that can be read, else a line for each layer.

    title: what it was compiled from.
    """
    heading = f"compiled model of {title}"
    report = _saved(folder)
    if report is not None:
        return report_html(report, heading)
    rest = len(lines) - ROWS
    parts = [
        f'<div style="font-weight: 700">{_text(heading)}</div>',
        _list([*lines[:ROWS], *([f"and {rest} more"] if rest > 0 else [])]),
        f'<div style="{FAINT}">No report yet: <code>asapc report</code> measures it.</div>',
    ]
    return _framed(parts)


def _saved(folder: str) -> Report | None:
    """The report beside an artefact; anybody may have written it, and a notebook goes on without."""
    path = Path(folder) / "report.json"
    try:
        return Report.from_json(read_json(path, MAX_BYTES, strict=True), str(path))
    except (OSError, ValueError, InputError):
        return None


def _figures(report: Report) -> str:
    seen = figures(report)
    cells = []
    if seen.speedup is not None:
        lossless = seen.speedup_lossless
        note = "" if lossless is None else f"{times_text(lossless)} lossless"
        cells.append(("speed-up", times_text(seen.speedup), note))
    if seen.agreement is not None:
        ends = ends_text(report.model, "prediction_agreement")
        shown = metric_text("prediction_agreement", seen.agreement)
        cells.append(("predictions kept", shown, ends))
    if seen.worst_error is not None and seen.worst_site is not None:
        where = short(seen.worst_site, 40)
        cells.append(("attention error, worst layer", number(seen.worst_error), where))
    if not cells:
        return ""
    row = "".join(
        f'<td style="{LEFT}; vertical-align: top"><div style="{FAINT}">{_text(label)}'
        f'</div><div style="font-size: 1.3em; font-weight: 600">{_text(value)}</div>'
        f'<div style="{FAINT}">{_text(note)}</div></td>'
        for label, value, note in cells
    )
    return f'<table style="margin: .6em 0"><tbody><tr>{row}</tr></tbody></table>'


def _layers(report: Report) -> str:
    sites = worst_first(report.sites)
    if not sites:
        return ""
    heads = "".join(
        f'<th scope="col" style="{side}">{_text(name)}</th>'
        for name, side in (
            ("layer", LEFT), ("operator", LEFT), ("attention error", RIGHT), ("output error", RIGHT),
        )
    )  # fmt: skip
    rows = "".join(
        f'<tr><th scope="row" style="{LEFT}; font-weight: 500">{_text(site.name)}</th>'
        f'<td style="{LEFT}">{_text(site.operator)}</td>'
        f'<td style="{RIGHT}">{_text(number(site.metric("attention_rel_l2")))}</td>'
        f'<td style="{RIGHT}">{_text(number(site.metric("output_rel_l2")))}</td></tr>'
        for site in sites[:ROWS]
    )
    rest = len(sites) - ROWS
    more = f'<div style="{FAINT}">and {rest} more with smaller errors</div>' if rest > 0 else ""
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _framed(parts: Sequence[str]) -> str:
    inside = "\n".join(part for part in parts if part)
    return f'<div style="max-width: 60em; overflow-wrap: anywhere">\n{inside}\n</div>'


def _text(text: str) -> str:
    return escape(cleaned(text))
