"""The command line that a message names, such as the next one to run: a shell runs it as it is printed.

Paths are as this run was given them, so it is to be run in the same folder.
"""

from __future__ import annotations

import shlex
from pathlib import Path


def command_line(command: str, *arguments: str | Path, **options: str | Path | None) -> str:
    """asapc COMMAND ARGUMENTS --option VALUE ..., quoted.

    options: in this order; a name of one letter is -o, others are --name; None is left out.
    """
    words = ["asapc", command]
    for argument in map(str, arguments):
        words.append(f"./{argument}" if argument.startswith("-") else argument)
    for name, value in options.items():
        if value is not None:
            words += [f"-{name}" if len(name) == 1 else f"--{name}", str(value)]
    return shlex.join(words)
