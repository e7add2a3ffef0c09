"""Values and names as the page and a notebook show them: plain text, cleaned, never longer than fits."""

from __future__ import annotations

import math
import unicodedata

from asapc.metrics import METRIC
from asapc.report.document import Measured, TriedSite, finite
from asapc.report.tables import metric_text, number

LONGEST = 240  # characters of a value that are shown


def cleaned(text: str) -> str:
    """No control or bidirectional character to disguise it, no endless name."""
    shown = "".join("\ufffd" if _disguises(c) else c for c in text[: 4 * LONGEST + 1])
    return short(shown, 4 * LONGEST) if " " in shown else short(shown, LONGEST)


def _disguises(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn")


def short(text: str, longest: int = 80) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def times_text(ratio: float) -> str:
    return f"{number(float(ratio))}×"


def ends_text(holder: Measured, metric: str) -> str:
    """"0.1 to 0.2", or nothing where there is no interval."""
    return " to ".join(metric_text(metric, end) for end in holder.interval(metric) or ())


def limit_text(metric: str, limit: float) -> str:
    """A limit as somebody would write it, of a share in per cent."""
    share = metric in METRIC and METRIC[metric].share
    return f"{100.0 * limit:.6g}%" if share else f"{limit:.6g}"


def change_text(metric: str, change: float) -> str:
    """A signed difference: points of a share, else in the metric's own unit."""
    if metric in METRIC and METRIC[metric].share:
        points = f"{change * 100:+.2f}".replace("-", "−")
        return "±0" if points[1:] == "0.00" else f"{points} points"
    return f"+{number(change)}" if change > 0 else number(change).replace("-", "−") if change else "±0"


def positive(value: float | None) -> float | None:
    result = finite(value)
    return result if result is not None and result > 0 else None


def largest_shape(tried: TriedSite) -> str:
    """Of those that candidates were timed at, "32x512"; empty where there is none."""
    keys = {key for candidate in tried.candidates for key in candidate.latency_ms}
    return max(keys, key=lambda key: (math.prod(sizes_of(key) or [0]), key), default="")


def shape_text(shape: str) -> str:
    """"32x512" as "32 × 512"; nothing else comes through, it is drawn in a plot."""
    return " × ".join(map(str, sizes_of(shape))) or "one shape"


def sizes_of(shape: str) -> list[int]:
    """Of "32x512"; none of anything else."""
    parts = shape.split("x")
    fine = all(part.isascii() and part.isdigit() and len(part) < 12 for part in parts)
    return [int(part) for part in parts] if fine else []
