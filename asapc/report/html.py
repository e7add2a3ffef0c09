"""A report as HTML: one self-contained page, or a fragment in a notebook.

Both begin with what to do (asapc.report.advice) and the figures behind it (asapc.report.brief), then list
the layers, the worst one first; the page goes on with the tables that the terminal and Markdown have, too
(asapc.report.tables). There is no script and nothing from a network. Every part of a report is optional
here. Values are formatted here; the templates clean and escape them.

jinja2 comes with torch; matplotlib, which the page's pictures need, is in the extra `report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from asapc.errors import InputError
from asapc.metrics import METRICS
from asapc.report.advice import LOSSLESS_PYTHON, LOSSLESS_RECIPE, advise, decide
from asapc.report.baseline import read_report
from asapc.report.brief import key_figures
from asapc.report.document import Report
from asapc.report.tables import TONES, gate_table, layers_table, listed, report_sections
from asapc.terminal.printed import clipped, escaped

ADVICE = 5
HINTS = 3  # of the advice, in a notebook
LISTED = 12  # layers in a notebook
ROWS = 15  # of a table: longer ones are folded
PICTURED = 12  # layers with pictures, so that a page of any depth stays small enough to open
LONGEST = 500  # characters of a value that are shown
# Not in the words of a verdict, which only a gate file gives.
DEFAULT_WORDS = {"ACCEPT": "kept", "REGRESSION": "not kept", "ANOMALOUS": "cannot be judged"}
LOSSLESS = f"""\
{LOSSLESS_PYTHON}      # in Python, from the same artefact; or
echo "{LOSSLESS_RECIPE}" > lossless.yaml
asapc compile MODEL --calibration CALIB --recipe lossless.yaml -o OUT"""


def rendered(template: str, **parts: Any) -> str:
    """A template of ours: whatever is shown in it is cleaned and escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_cleaned, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        loader=jinja2.PackageLoader("asapc.report", "template"),
    )  # fmt: skip
    environment.globals |= {"tones": TONES, "most": ROWS}
    return environment.get_template(template).render(**parts)


def _cleaned(value: Any) -> Any:
    """Text as it may be shown; what is markup is ours."""
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return clipped(escaped(value), LONGEST) if plain else value


def html(report: Report) -> str:
    """The page, the same bytes for the same report.  Raises ModuleNotFoundError without matplotlib."""
    from asapc.report.figures import style

    with style():
        return rendered("report.html.j2", **page(report))


def page(report: Report) -> dict[str, Any]:
    """What the template lays out, part by part in order; a part that is empty is left out there."""
    from asapc.report.figures import layer_pictures, model_pictures

    decision = decide(report)
    judged, verdict = decision.judgement, report.gate.verdict
    sections = {"Layers": layers_table(report)}
    if judged.defaults:
        sections["Default limits"] = gate_table(judged.gate, "Default limits", DEFAULT_WORDS)
    for heading, tables in report_sections(report).items():
        sections[heading] = sections.get(heading, []) + tables
    measured = {key for site in report.sites for key in site.metrics}
    sections["What the figures mean"] = listed(
        "Metrics of a layer", [metric for metric in METRICS if metric.key in measured],
        {"metric": lambda metric: metric.key, "meaning": lambda metric: metric.doc},
    )  # fmt: skip
    tone = "good" if decision.action in ("ship", "lossless") else "odd"
    if verdict is not None and (verdict != "ACCEPT" or judged.defaults is None):
        tone = TONES[verdict]
    return {
        "source": report.model.source or "a model",
        "decision": decision,
        "verdict": verdict,
        "tone": tone,
        "warnings": [w for w in (*(w.text for w in report.warnings), report.chosen_elsewhere) if w],
        "figures": key_figures(report),
        "how": LOSSLESS,
        "advice": advise(report)[:ADVICE],
        "pictures": model_pictures(report),
        "layers": [(site.name, layer_pictures(report, site)) for site in report.worst_first[:PICTURED]],
        "sections": {heading: tables for heading, tables in sections.items() if tables},
    }  # fmt: skip


def report_html(report: Report, title: str = "") -> str:
    """What a notebook shows of a report, in its own colours and fonts, without matplotlib.

    title: the model's source unless given.
    """
    decision = decide(report)
    return rendered(
        "notebook.html.j2", title=title or report.model.source or "a model", decision=decision,
        basis=f"{report.gate.verdict or 'no gate'}: {decision.judgement.basis}",
        code=LOSSLESS_PYTHON if decision.lossless is not None else "", figures=key_figures(report),
        layers=layers_table(report), rows=LISTED, lines=advise(report)[:HINTS],
    )  # fmt: skip


def model_html(title: str, lines: Sequence[str], folder: str) -> str:
    """A compiled model: its report where `folder` has one that can be read, else a line for each layer.

    title: what it was compiled from.
    """
    heading = f"compiled model of {title}"
    try:  # anybody may have written it, and a notebook goes on without
        report = read_report(Path(folder) / "report.json")
    except (OSError, ValueError, InputError):
        more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        return rendered("notebook.html.j2", title=heading, decision=None, lines=[*lines[:LISTED], *more])
    return report_html(report, heading)
