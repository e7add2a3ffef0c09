"""Gates: limits a report must keep, `{"attention_rel_l2": {"max": 0.05}}`, and the check of them.

Per-site metrics take the worst site.  A value that is missing, NaN or infinite fails its gate: what
was not measured was not shown to be good.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asapc.errors import InputError
from asapc.yaml_file import read_yaml_mapping

# These describe a predicted dual, so a site whose loop was kept exactly has none.
FIT_METRICS = ("row_bound", "dual_stability", "r2", "condition_number")


@dataclass(frozen=True)
class Gate:
    """One limit: value <= limit for "max", value >= limit for "min"."""

    metric: str
    bound: Literal["min", "max"]
    limit: float


def known_metrics() -> tuple[str, ...]:
    """Every name a gate may use."""
    from asapc.fidelity import METRICS

    return tuple(sorted(METRICS))


def load_gates(path: str | Path) -> list[Gate]:
    """The gates in a YAML or JSON file.  Raises InputError: unknown name, no limit, empty file."""
    return parse_gates(read_yaml_mapping(path, "gates"), where=f"gates {path}")


def parse_gates(data: Mapping[str, Any], *, where: str = "gates") -> list[Gate]:
    """Checks `{"metric": {"min"|"max": number}}`.  Raises InputError."""
    names = known_metrics()
    if not data:
        raise InputError(
            f"{where}: at least one limit must be set",
            help="write for example  attention_rel_l2: {max: 0.05}",
        )
    gates: list[Gate] = []
    for metric, limits in data.items():
        if metric not in names:
            close = difflib.get_close_matches(str(metric), names, n=1)
            raise InputError(
                f"{where}: unknown metric {metric!r}",
                help=(f"did you mean {close[0]!r}? " if close else "")
                + f"known: {', '.join(names)}",
            )
        if not isinstance(limits, Mapping) or not limits or not set(limits) <= {"min", "max"}:
            raise InputError(
                f"{where}: {metric} must be limited by min and/or max, as in {{max: 0.05}}",
                got=repr(limits),
            )
        for bound in ("min", "max"):
            if bound in limits:
                gates.append(Gate(metric, bound, _limit(limits[bound], f"{where}: {metric}")))
    return gates


def check(report: Mapping[str, Any], gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """One entry per gate: metric, scope ("model" or the worst site), value, min or max, passed."""
    checks = []
    for gate in gates:
        scope, value = _worst(report, gate)
        passed = value is not None and (
            value <= gate.limit if gate.bound == "max" else value >= gate.limit
        )
        checks.append(
            {
                "metric": gate.metric,
                "scope": scope,
                "value": value,
                gate.bound: gate.limit,
                "passed": passed,
            }
        )
    return checks


def gate_result(report: Mapping[str, Any], gates: Sequence[Gate]) -> dict[str, Any]:
    """The `gate` entry of a report: {"passed", "checks"}."""
    checks = check(report, gates)
    return {"passed": all(entry["passed"] for entry in checks), "checks": checks}


def _worst(report: Mapping[str, Any], gate: Gate) -> tuple[str, float | None]:
    from asapc.fidelity import METRICS

    if METRICS[gate.metric].scope != "site":
        return "model", _finite(report.get("model", {}).get(gate.metric))
    worst: tuple[str, float | None] = ("sites", None)
    for site in report.get("sites", ()):
        metrics = site.get("metrics", {})
        fitted = site.get("operator") != "sinkhorn"
        if gate.metric in FIT_METRICS and gate.metric not in metrics and not fitted:
            continue
        value = _finite(metrics.get(gate.metric))
        if value is None:
            return str(site.get("name")), None
        beyond = worst[1] is None or (value > worst[1] if gate.bound == "max" else value < worst[1])
        if beyond:
            worst = (str(site.get("name")), value)
    return worst


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _limit(value: Any, where: str) -> float:
    rule = f"{where}: a limit must be a finite number"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(rule, got=repr(value))
    try:
        limit = float(value)  # YAML 1.1 reads 1e-3 as text
    except ValueError:
        raise InputError(rule, got=repr(value)) from None
    if not math.isfinite(limit):
        raise InputError(rule, got=repr(value))
    return limit
