"""Renderings of the report: Markdown, JSON, JUnit and terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asapc.formats.atomic import replace_file
from asapc.report.junit import junit_text
from asapc.report.schema import report_schema
from asapc.report.text import json_text, markdown

__all__ = ["json_text", "junit_text", "markdown", "report_schema", "write_report"]


def write_report(folder: str | Path, report: Mapping[str, Any]) -> list[Path]:
    """Write report.json, report.md and junit.xml into an artefact folder, each replaced whole or not
    at all.

    Raises InputError if the folder cannot be written.
    """
    contents = {
        "report.json": json_text(report) + "\n",
        "report.md": markdown(report),
        "junit.xml": junit_text(report),
    }
    written = []
    for name, text in contents.items():
        target = Path(folder) / name
        replace_file(target, text)
        written.append(target)
    return written
