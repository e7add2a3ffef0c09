"""The command lines that messages name, such as the next one to run: a shell runs them as printed.

Paths are as this run was given them, so it is to be run in the same folder.
"""

from __future__ import annotations

import shlex
from dataclasses import field
from pathlib import Path
from typing import Any


def command_line(command: str, *arguments: str | Path, **options: str | Path | bool | None) -> str:
    """asapc COMMAND ARGUMENTS --option VALUE ..., quoted.

    options: in this order; a name of one letter is -o, others are --name; True is a flag, None and False
    are left out.
    """
    words = ["asapc", command]
    for argument in map(str, arguments):
        words.append(f"./{argument}" if argument.startswith("-") else argument)
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return shlex.join(words)


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass that commands take as an option, see asapc.options.  more: of the option."""
    return field(default=default, metadata={"help": help, **more})


def install_line(extra: str) -> str:
    """How to install an extra.  asapc is on no package index, so the line is for a clone of it."""
    return f"pip install '.[{extra}]' in a clone of asapc"


def missing_module(error: ModuleNotFoundError, *expected: str) -> str:
    """The package that is not installed.  Raises the error again if it is none of those expected."""
    package = (error.name or "").partition(".")[0]
    if package not in expected:
        raise error
    return package
