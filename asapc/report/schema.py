"""The published JSON schema of report.json (JSON Schema 2020-12), shipped as report.schema.json."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from asapc.formats.json_text import parse_json


@cache
def _text() -> str:
    return (files("asapc") / "report" / "report.schema.json").read_text(encoding="utf-8")


def report_schema() -> dict[str, Any]:
    """A new copy of the schema."""
    document: dict[str, Any] = parse_json(_text())
    return document
