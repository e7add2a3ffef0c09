"""A report as Markdown and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from asapc.report.tables import Table, report_tables


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report, tables only; ends in a newline."""
    blocks = ["# asapc fidelity report"]
    gate = report.get("gate") or {}
    if gate.get("checks"):
        blocks.append(f"**Gate: {'passed' if gate.get('passed') else 'FAILED'}**")
    blocks += [markdown_table(table) for table in report_tables(report)]
    blocks.append(
        "Fidelity is measured against the teacher, on examples neither fitted nor selected on. "
        "Attention l2 is `|A' - A| / |A|` per batch and head (mean, and worst over them); row and "
        "column errors are mean deviations from the marginals; R2 and cond belong to the fit of "
        "the dual."
    )
    return "\n\n".join(blocks) + "\n"


def markdown_table(table: Table) -> str:
    """A heading and a pipe table; cells are escaped."""
    headings = table.headings()
    lines = [
        "| " + " | ".join(_escape(name) for name, _ in headings) + " |",
        "|" + "|".join("---:" if right else "---" for _, right in headings) + "|",
    ]
    lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in table.rows]
    return f"## {table.title}\n\n" + "\n".join(lines)


def json_text(data: Any) -> str:
    """Strict JSON, indented; NaN and infinities become null, which no gate accepts."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _escape(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
