"""Options of a benchmark, and its results as files, whole or not at all: a run that is cut off leaves
what it had."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def parser_of(doc: str, **numbers: Any) -> argparse.ArgumentParser:
    """Options for numbers by name, with defaults, lists for several; and -o, a folder for the results."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in numbers.items():
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, default=default, nargs="+" if several else None)
    parser.add_argument("-o", "--out", type=Path, help="folder for the results")
    return parser


def write_results(folder: Path | None, name: str, document: Any, text: str) -> None:
    """As name.md and name.json of the folder, where there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.md", text + "\n")
        write_whole(folder / f"{name}.json", json.dumps(document, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
