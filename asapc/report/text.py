"""A report as Markdown, JSON and JUnit XML."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any
from xml.etree import ElementTree

from asapc.formats.json_text import plain
from asapc.report.document import Report
from asapc.report.tables import Table, headline, limit_text, report_tables
from asapc.terminal.printed import clipped

# A comment on a pull request takes 65536 characters; a workflow may add a line of its own.
MAX_CHARACTERS = 65_000
# Wider tables are folded: they would scroll sideways in a comment.
MAX_WIDTH = 110
MAX_CELL = 300
MAX_MESSAGES = 10
# Text without what XML 1.0 cannot hold, not even escaped.
_writable = partial(
    re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]").sub, "\ufffd"
)
ROW_LIMITS: tuple[int | None, ...] = (None, 500, 200, 100, 50, 20, 10, 5, 2)


def markdown(report: Report) -> str:
    """The whole report, sized for a comment on a pull request; ends in a newline.

    The verdict comes first, then what failed, then tables, the wide ones folded. If it were too long,
    tables lose their last rows and say so.
    """
    tables, note = report_tables(report), "Further tables are in report.json."
    shorter = [(tables, most, "") for most in ROW_LIMITS]
    shorter += [(tables[:left], ROW_LIMITS[-1], note) for left in reversed(range(len(tables)))]
    texts = (_document(report, *parts) for parts in shorter)
    return next(text for text in texts if len(text) <= MAX_CHARACTERS)


def _document(report: Report, tables: list[Table], most: int | None, note: str) -> str:
    failed = report.gate.failures
    lines = [
        f"- **{check.verdict}** {_escape(clipped(check.message, MAX_CELL))}"
        for check in failed[:MAX_MESSAGES]
    ]
    if len(failed) > MAX_MESSAGES:
        lines.append(f"- and {len(failed) - MAX_MESSAGES} more")
    blocks = [f"# asapc: {_escape(headline(report))}", "\n".join(lines)]
    blocks += [_folded(table, most) for table in tables]
    blocks += [
        note,
        "Fidelity is measured against the teacher, on examples unseen in fitting and selection. "
        "Attention l2 is `|A' - A| / |A|` per batch and head (mean, and worst over them); row and "
        "column errors are mean deviations from the marginals; R2 (in-sample) and cond belong to "
        "the fit of the dual.",
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _folded(table: Table, most: int | None) -> str:
    rows = tuple(tuple(clipped(cell, MAX_CELL) for cell in row) for row in table.rows[:most])
    heading, _, body = markdown_table(replace(table, rows=rows)).partition("\n\n")
    if len(rows) < len(table.rows):
        left_out = len(table.rows) - len(rows)
        body += f"\n\n{left_out} of {len(table.rows)} rows are left out; all are in report.json."
    if max(map(len, body.splitlines())) <= MAX_WIDTH:
        return f"{heading}\n\n{body}"
    # Without the blank line GitHub would show the pipes.
    title = escape(heading.removeprefix("## "), quote=False)
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def markdown_table(table: Table) -> str:
    """A heading and a pipe table; cells are escaped."""
    headings = table.headings()
    lines = [
        "| " + " | ".join(_escape(name) for name, _ in headings) + " |",
        "|" + "|".join("---:" if right else "---" for _, right in headings) + "|",
    ]
    lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in table.rows]
    return f"## {table.title}\n\n" + "\n".join(lines)


def json_text(data: Any, ascii: bool = False) -> str:
    """Strict JSON, indented; NaN and infinities become null, which no gate accepts, and half a surrogate
    pair U+FFFD, since no reader accepts it.  ascii: other characters are escaped."""
    return json.dumps(plain(data), indent=2, ensure_ascii=ascii, allow_nan=False)


def _escape(cell: str) -> str:
    """No cell ends its column, its row or the table: names come from a model, or from a baseline."""
    escaped = cell.replace("\\", "\\\\").replace("|", "\\|").replace("&", "&amp;").replace("<", "&lt;")
    return " ".join(escaped.splitlines())


def junit_text(report: Report) -> str:
    """The gate's checks as JUnit XML, which continuous integration servers show as tests.

    One test case per check: its class is asapc.<model or site>, a REGRESSION is a failure, an ANOMALOUS
    check an error (the test itself went wrong).  Without a gate it holds no test case.
    """
    checks = report.gate.checks
    counts = {
        "tests": str(len(checks)),
        "failures": str(sum(check.verdict == "REGRESSION" for check in checks)),
        "errors": str(sum(check.verdict == "ANOMALOUS" for check in checks)),
    }
    root = ElementTree.Element("testsuites", {"name": "asapc", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "asapc gate", **counts, "skipped": "0"})
    for check in checks:
        attributes = {
            "classname": _writable(f"asapc.{check.scope}"),
            "name": _writable(f"{check.metric}: {limit_text(check)}"),
            "time": "0",  # servers ask for it; the measuring was one step for all
        }
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if not check.passed:
            tag = "failure" if check.verdict == "REGRESSION" else "error"
            message = _writable(check.message)
            problem = ElementTree.SubElement(case, tag, {"type": check.verdict, "message": message})
            problem.text = message
    ElementTree.SubElement(suite, "system-out").text = _writable(headline(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"
