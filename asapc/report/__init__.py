"""Renderings of the report: Markdown, JSON and terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asapc.formats.atomic import replace_file
from asapc.report.text import json_text, markdown

__all__ = ["json_text", "markdown", "write_report"]


def write_report(folder: str | Path, report: Mapping[str, Any]) -> list[Path]:
    """Write report.json and report.md into an artefact folder, each replaced whole or not at all.

    Raises InputError if the folder cannot be written.
    """
    contents = {"report.json": json_text(report) + "\n", "report.md": markdown(report)}
    written = []
    for name, text in contents.items():
        target = Path(folder) / name
        replace_file(target, text)
        written.append(target)
    return written
