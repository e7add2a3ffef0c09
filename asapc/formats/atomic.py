"""Folders that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from asapc.errors import InputError

# A folder is only ever replaced if it carries one of these, or nothing at all.
MARKERS = ("calibration.json", "manifest.json", "study.json")
_CANNOT_WRITE = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EIO}
_HELP = "choose an output folder on a writable disk with free space"


@contextmanager
def replace_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success it takes target's place, whole.

    On an exception, KeyboardInterrupt included, the new folder is removed and what was at `target`
    stays untouched. Raises InputError if the disk is read-only or full, or if `target` is a file or
    a folder with content that asapc did not write.
    """
    final = _resolved(target)
    check_replaceable(final)
    suffix = secrets.token_hex(4)
    partial = final.parent / f".{final.name}.{suffix}.partial"
    previous = final.parent / f".{final.name}.{suffix}.previous"
    try:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        except OSError as error:
            raise _unwritable(final, error) from error
        try:
            yield partial
            _swap(partial, final, previous)
        except Exception as error:
            if _is_write_failure(error, partial):
                raise _unwritable(final, error) from error
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)


def check_replaceable(target: str | Path) -> None:
    """Raises InputError if replace_folder would refuse `target`: to be asked before long work."""
    final = _resolved(target)
    try:
        if not final.exists():
            return
        if not final.is_dir():
            raise InputError(
                f"{final}: the output must be a folder", got="a file", help="choose another name"
            )
        names = {entry.name for entry in final.iterdir()}
    except OSError as error:
        raise _unwritable(final, error) from error
    if names and not names.intersection(MARKERS):
        raise InputError(
            f"{final}: asapc replaces only folders that it wrote",
            got=f"a folder holding {sorted(names)[0]!r}",
            help="choose a new or empty output folder",
        )


def _resolved(target: str | Path) -> Path:
    final = Path(target).absolute()
    return final.resolve() if final.is_symlink() else final


def _swap(partial: Path, final: Path, previous: Path) -> None:
    """Put partial at final; whatever interrupts, final is the old folder or the new one."""
    if not final.exists():
        os.rename(partial, final)
        return
    try:
        os.rename(final, previous)
        os.rename(partial, final)
    except BaseException:
        if previous.exists() and not final.exists():
            os.rename(previous, final)
        raise


def _is_write_failure(error: Exception, partial: Path) -> bool:
    """Whether the disk is at fault; each library words that in its own exception."""
    if isinstance(error, OSError):
        place = error.filename if isinstance(error.filename, str) else ""
        return error.errno in _CANNOT_WRITE or place.startswith(str(partial))
    if isinstance(error, SafetensorError):
        return "os error" in str(error).lower()
    return isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error)


def _unwritable(final: Path, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(f"{final}: cannot write the output folder", got=reason, help=_HELP)
