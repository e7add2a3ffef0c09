"""Renderings of the report: Markdown, JSON and terminal tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asapc.errors import InputError
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
        temporary = target.with_name(f".{name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        except OSError as error:
            raise InputError(
                f"{target}: cannot be written", got=error.strerror or str(error)
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        written.append(target)
    return written
