"""The published JSON schema of report.json (JSON Schema 2020-12): report.schema.json and every metric."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from asapc.formats.json_text import parse_json
from asapc.metrics import METRICS


@cache
def _text() -> str:
    return (files("asapc") / "report" / "report.schema.json").read_text(encoding="utf-8")


def report_schema() -> dict[str, Any]:
    """A new copy of the schema."""
    document: dict[str, Any] = parse_json(_text())
    kinds = document["$defs"]
    site = kinds["site"]["properties"]
    holders = {
        "model": [kinds["model"]["properties"], kinds["lengthBin"]["properties"]],
        "site": [site["metrics"]["properties"], kinds["lengthBin"]["properties"]],
        "both": [kinds["model"]["properties"], site["metrics"]["properties"], site],
    }
    for metric in METRICS:
        for properties in holders[metric.scope] if metric.gate else ():
            properties.setdefault(metric.key, metric.schema())
    return document
