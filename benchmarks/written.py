"""Results of a benchmark as files, whole or not at all: a run that is cut off leaves what it had."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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
