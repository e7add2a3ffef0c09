"""What a notebook shows of a report or a compiled model: the decision, the figures behind it, the layers.

Plain HTML with a few inline styles, in the notebook's own colours and fonts: no script, no style sheet,
nothing from a network, and every name escaped. It needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asapc.errors import InputError
from asapc.report.advice import LOSSLESS_PYTHON, advise, decide
from asapc.report.baseline import read_report
from asapc.report.brief import key_figures
from asapc.report.document import Report
from asapc.report.html import rendered
from asapc.report.tables import layers_table

ROWS = 12  # layers that are listed
HINTS = 3


def report_html(report: Report, title: str | None = None) -> str:
    """A fragment.  title: what is shown, the model's source unless told."""
    decision = decide(report)
    return _fragment(
        title or report.model.source or "a model",
        decision=decision,
        basis=f"{report.gate.verdict or 'no gate'}: {decision.judgement.basis}",
        code=LOSSLESS_PYTHON if decision.lossless is not None else "",
        figures=key_figures(report),
        layers=layers_table(report),
        lines=advise(report)[:HINTS],
    )


def model_html(title: str, lines: Sequence[str], folder: str) -> str:
    """A compiled model: its report where `folder` has one that can be read, else a line for each layer.

    title: what it was compiled from.
    """
    heading = f"compiled model of {title}"
    try:  # anybody may have written it, and a notebook goes on without
        report = read_report(Path(folder) / "report.json")
    except (OSError, ValueError, InputError):
        rest = len(lines) - ROWS
        return _fragment(heading, lines=[*lines[:ROWS], *([f"and {rest} more"] if rest > 0 else [])])
    return report_html(report, heading)


def _fragment(title: str, **parts: Any) -> str:
    """Without a decision it is a model's that was not measured."""
    empty = {"decision": None, "basis": "", "code": "", "figures": (), "layers": ()}
    return rendered("notebook.html.j2", **{"title": title, "rows": ROWS, **empty, **parts})
