"""Files that a written folder names, such as its data, found again from any working folder.

A relative path is recorded relative to the folder that names it, so that the two can move together and
the same commands write the same bytes in another checkout. An absolute path stays absolute: then the
folder can move alone. pkg.module:callable is imported and stays as it is.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from asapc.errors import InputError

SUFFIXES = (".npz", ".safetensors", ".onnx")
DIGEST = "^[0-9a-f]{64}$"


def recorded(spec: str, folder: str | Path) -> str:
    """What `folder`, which may not exist yet, records for a spec of the working folder."""
    path, rest = _parts(spec)
    if not path or os.path.isabs(path):
        return spec
    here = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return _from(folder, here) + rest


def found(record: str, folder: str | Path) -> str:
    """The spec that `folder` has recorded, from the working folder."""
    path, rest = _parts(record)
    if not path or os.path.isabs(path):
        return record
    there = _there(path, folder)
    from_here = os.path.relpath(there)
    return (there if from_here.startswith(os.pardir) else from_here) + rest


def moved(record: str, folder: str | Path, other: str | Path) -> str:
    """What `other` records for a record of `folder`."""
    path, rest = _parts(record)
    if not path or os.path.isabs(path):
        return record
    return _from(other, _there(path, folder)) + rest


def same(first: str, second: str) -> bool:
    """Whether two specs are the same, or name one file, or one callable of one file, by two paths."""
    (path, rest), (other, other_rest) = _parts(first), _parts(second)
    if first == second or rest != other_rest or not (path and other):
        return first == second
    return os.path.isfile(path) and os.path.isfile(other) and os.path.samefile(path, other)


def _there(path: str, folder: str | Path) -> str:
    return os.path.normpath(os.path.join(os.path.realpath(folder), path))


def _from(folder: str | Path, path: str) -> str:
    try:
        return Path(os.path.relpath(path, os.path.realpath(folder))).as_posix()
    except ValueError:  # on another drive
        return path


def _parts(spec: str) -> tuple[str, str]:
    """The path in a spec, "" where it has none, and what comes after."""
    if Path(spec).suffix in SUFFIXES:
        return spec, ""
    location, colon, name = spec.rpartition(":")
    return (location, colon + name) if location.endswith(".py") else ("", spec)


def digest_of(path: Path) -> str | None:
    """sha256 of a file's bytes, None without one.  Raises InputError."""
    if not path.is_file():
        return None
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: must be readable", got=error.strerror) from error
