"""The terminal sessions in README.md and docs/: run again, and compared or written anew.

    python docs/outputs.py                      # runs them, says which pages are stale: then exit code 1
    python docs/outputs.py --write              # puts what was printed into the pages
    python docs/outputs.py --write README.md    # of one page

A session is a ```console block after a line `<!-- run -->`: lines that begin with `$ ` are commands, run
one after the other in a copy of docs/tutorial; everything else is what they printed, on either stream,
except lines of progress and the note that the cores are busy.  Numbers, widths of columns and blank
lines are left out of the comparison, as times are never the same twice: what is compared is the wording.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/tutorial.md")
PROGRESS = re.compile(r"other programs .*|[a-z][a-z ,]*( \.\.\.|: (\d+\.\d s|\d+(/\d+)?(, .*)?))")
SESSION = re.compile(r"(?<=<!-- run -->\n)```console\n(.*?)```", re.DOTALL)


def commands(session: str) -> list[str]:
    return [line[2:] for line in session.splitlines() if line.startswith("$ ")]


def printed(command: str, folder: Path) -> str:
    """What a command prints on both streams, without progress.  Raises SystemExit where it fails."""
    environment = {
        **os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    lines = (line.rstrip() for line in done.stdout.splitlines())
    return "\n".join(line for line in lines if not PROGRESS.fullmatch(line)).strip("\n")


def ran(session: str, folder: Path) -> str:
    """The session as it is now."""
    parts = []
    for command in commands(session):
        print(f"$ {command}", file=sys.stderr, flush=True)
        output = printed(command, folder)
        parts.append(f"$ {command}\n{output}\n" if output else f"$ {command}\n")
    return "\n".join(parts)


def wording(session: str) -> list[str]:
    """Lines without numbers, rules of tables and widths."""
    lines = (re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "0", line) for line in session.splitlines())
    words = (" ".join(re.sub(r"[\u2500-\u257f]+|-{3,}", " ", line).split()) for line in lines)
    return [line for line in words if line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="README.md, docs/tutorial.md")
    parser.add_argument("--write", action="store_true", help="put what is printed into the pages")
    options = parser.parse_args()
    stale = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tutorial"
        shutil.copytree(ROOT / "docs" / "tutorial", folder)
        for page in options.pages:
            path = ROOT / page
            text = path.read_text(encoding="utf-8")
            new = SESSION.sub(lambda match: f"```console\n{ran(match[1], folder)}```", text)
            if options.write:
                path.write_text(new, encoding="utf-8")
            elif wording(text) != wording(new):
                stale = True
                print(f"{page} is stale:")
                print(*difflib.unified_diff(wording(text), wording(new), lineterm="", n=0), sep="\n")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
