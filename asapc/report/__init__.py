"""The report: what is measured on an artefact, how it is judged, and its renderings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asapc.formats.atomic import replace_file
from asapc.report.document import Report
from asapc.report.schema import report_schema
from asapc.report.text import json_text, junit_text, markdown
from asapc.terminal.hints import install_line, missing_module

__all__ = ["Report", "json_text", "junit_text", "markdown", "report_schema", "write_report"]

PAGE = "report.html"
PAGE_NEEDS = ("jinja2", "markupsafe", "matplotlib")  # the extra `report`


def write_report(
    folder: str | Path, report: Report, note: Callable[[str], None] | None = None
) -> list[Path]:
    """Write report.json, report.md, junit.xml and report.html into an artefact folder, each replaced
    whole or not at all.

    Without the extra `report` there is no page: `note` is told, and an earlier page, which would show
    other measurements, is removed. Raises InputError if the folder cannot be written.
    """
    contents = {
        "report.json": json_text(report) + "\n",
        "report.md": markdown(report),
        "junit.xml": junit_text(report),
    }
    try:
        contents |= _page(report)
    except ModuleNotFoundError as error:
        missing = missing_module(error, *PAGE_NEEDS)
        if note is not None:
            note(f"no {PAGE}: {missing} is not installed; {install_line('report')} adds the page")
    written = []
    for name, text in contents.items():
        target = Path(folder) / name
        replace_file(target, text)
        written.append(target)
    if PAGE not in contents:
        (Path(folder) / PAGE).unlink(missing_ok=True)
    return written


def _page(report: Report) -> dict[str, str]:
    """The page, by its file's name.  Raises ModuleNotFoundError without the extra."""
    from asapc.report.html import html

    return {PAGE: html(report)}
