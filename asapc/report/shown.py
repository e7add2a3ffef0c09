"""Values and names as the page and a notebook show them: plain text, cleaned, never longer than fits."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from asapc.metrics import METRIC
from asapc.report.document import Measured, finite
from asapc.report.tables import MODEL_LABELS, metric_text, number

LONGEST = 240  # characters of a value that are shown


def cleaned(text: str) -> str:
    """No control or bidirectional character to disguise it, no endless name."""
    shown = "".join("\ufffd" if _disguises(c) else c for c in text[: 4 * LONGEST + 1])
    return short(shown, 4 * LONGEST) if " " in shown else short(shown, LONGEST)


def _disguises(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn")


def short(text: str, longest: int = 80) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def text_of(value: Any) -> str:
    return "" if value is None else str(value)


def plain(value: Any) -> str:
    """A limit as somebody wrote it, a value of any kind as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{text_of(k)} {plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(v) for v in value)
    return text_of(value)


def label(key: str) -> str:
    return METRIC[key].name if key in METRIC else MODEL_LABELS.get(key) or key.replace("_", " ")


def times_text(ratio: float) -> str:
    return f"{number(float(ratio))}×"


def ends_text(holder: Measured, metric: str) -> str:
    """"0.1 to 0.2", or nothing where there is no interval."""
    return " to ".join(metric_text(metric, end) for end in holder.interval(metric) or ())


def limit_text(metric: str, limit: float) -> str:
    """A limit as somebody would write it, of a share in per cent."""
    share = metric in METRIC and METRIC[metric].share
    return f"{plain(100.0 * limit)}%" if share else plain(float(limit))


def change_text(metric: str, change: float) -> str:
    """A signed difference: points of a share, else in the metric's own unit."""
    if metric in METRIC and METRIC[metric].share:
        points = f"{change * 100:+.2f}".replace("-", "−")
        return "±0" if points[1:] == "0.00" else f"{points} points"
    return f"+{number(change)}" if change > 0 else number(change).replace("-", "−") if change else "±0"


def positive(value: float | None) -> float | None:
    result = finite(value)
    return result if result is not None and result > 0 else None
