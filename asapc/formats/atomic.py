"""Folders and files that appear complete or not at all, whatever interrupts: kill -9 and power loss too.

Content is written under a temporary name beside the target, flushed to the disk, and only then
takes the target's place:

    replace_file     os.replace
    replace_folder   renameat2(RENAME_EXCHANGE): old and new change names in one step, then the old one
                     is deleted.  Where a system or disk cannot exchange, two renames: target ->
                     .NAME.X.previous, .NAME.X.partial -> target.

Between the two renames there is no target. put_back, which writers and readers call first, then gives
the old folder its name again; a writer that meets it there moves it away once more.

A run holds a lock on what it is writing, which ends with the process.  The next run for the same
target removes what bears a name of this kind and is not locked.  The lock is flock's, on the file or
folder itself. A lock file, as the library filelock makes one, would stay behind in a result or beside it,
would not follow a folder to its new name, and where a disk has no flock would outlive a killed process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from asapc.errors import InputError

Result = TypeVar("Result")

# A folder is only ever replaced if it carries one of these, or nothing at all.
MARKERS = ("calibration.json", "manifest.json", "study.json")
_CANNOT_WRITE = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EIO}
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM}
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}
_ATTEMPTS = 20  # of a swap or a read that other runs keep disturbing
_HELP = "choose an output folder on a writable disk with free space"


@contextmanager
def replace_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success it takes target's place, whole and on disk.

    On an exception, KeyboardInterrupt included, the new folder is removed and what was at `target`
    stays untouched. Raises InputError if the disk is read-only or full, or if `target` is a file or
    a folder with content that asapc did not write.
    """
    final = _resolved(target)
    check_replaceable(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _clean(final)
        partial, lock = _new_partial(final)
    except OSError as error:
        raise _unwritable(final, error) from error
    try:
        try:
            yield partial
            for place, _, files in os.walk(partial, topdown=False):
                for name in (*files, ""):
                    flush(Path(place, name))
            flush(final.parent)
        except Exception as error:
            if _is_write_failure(error, partial):
                raise _unwritable(final, error) from error
            raise
        check_replaceable(final)  # the work was long: somebody may have put something there
        try:
            _swap(partial, final)
            flush(final.parent)
        except OSError as error:
            raise _unwritable(final, error) from error
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)  # what failed, or the old folder
        with contextlib.suppress(OSError):  # what stays is removed by the next run
            _clean(final)


def replace_file(path: str | Path, content: bytes | str) -> None:
    """Write one file: the old one or the new one, on disk when this returns. A link is replaced, not
    followed. Raises InputError if it cannot be written."""
    # half of a surrogate pair, which JSON may hold, becomes its escape
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with new_file(path) as partial:
        partial.write_bytes(data)


def make_parent(path: str | Path) -> None:
    """The folder that a file is to be written in. Raises InputError where it cannot be made."""
    try:
        _absolute(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(Path(path), error) from error


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield an empty file beside `path` to be filled by its name; on success it takes path's place.

    Raises InputError where it cannot be written, or where something stands that is no file.
    """
    final = _absolute(path)
    _check_is_file(final)
    partial, lock = None, -1
    try:
        _clean(final)
        partial, lock = _new_partial(final, lambda path: path.touch(exist_ok=False))
        yield partial
        flush(partial)
        os.replace(partial, final)
        flush(final.parent)
    except Exception as error:
        if isinstance(error, OSError) or _is_write_failure(error, partial or final):
            raise _unwritable(path, error, "cannot be written") from error
        raise
    finally:
        if partial is not None:
            os.close(lock)
            partial.unlink(missing_ok=True)


def _check_is_file(final: Path) -> None:
    """Raises InputError where a rename would remove what is no file, or a link to it."""
    try:
        there = os.stat(final)
    except OSError:  # nothing, or a link to nothing, or no place to write: os.replace says so
        there = None
    place = Path(os.path.realpath(final.parent))
    systems = place == Path("/dev") or any(map(place.is_relative_to, ("/proc", "/sys")))
    if systems or (there is not None and not stat.S_ISREG(there.st_mode)):
        raise InputError(
            f"{final}: must be a file, or not exist", got="something else",
            help="choose another name; to print a result, omit the option or use --json",
        )  # fmt: skip


def read_whole(folder: str | Path, read: Callable[[], Result]) -> Result:
    """read(), again where `folder` was replaced meanwhile: never the old and the new one mixed."""
    put_back(folder)
    for _ in range(_ATTEMPTS):
        before = _identity(folder)
        try:
            result = read()
        except InputError:
            if before == _identity(folder):
                raise
        else:
            if before == _identity(folder):
                return result
    raise InputError(
        f"{folder}: must not change while it is read",
        got="a folder that another run keeps replacing",
        help="wait for that run to end",
    )


def check_replaceable(target: str | Path, inputs: Sequence[str | Path] = ()) -> None:
    """Raises InputError if replace_folder would refuse `target`: to be asked before long work.

    inputs: files and folders that are read; none may be the target or lie inside it.
    """
    final = _resolved(target)
    for source in inputs:
        for path in (str(source), str(source).rpartition(":")[0]):  # file.py:function too
            read = path and os.path.lexists(path)
            if read and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(final)):
                raise InputError(
                    f"{target}: the output folder must not contain an input",
                    got=f"{path}, which would be deleted",
                    help="choose another output folder",
                )
    try:
        if not final.exists():
            return
        if not final.is_dir():
            raise InputError(
                f"{final}: the output must be a folder", got="a file", help="choose another name"
            )
        names = {entry.name for entry in final.iterdir()}
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise _unwritable(final, error) from error
    if names and not names.intersection(MARKERS):
        raise InputError(
            f"{final}: asapc replaces only folders that it wrote",
            got=f"a folder holding {sorted(names)[0]!r}",
            help="choose a new or empty output folder",
        )


def put_back(target: str | Path) -> None:
    """Where a killed run left no target but its old folder beside it, give that its name again."""
    final = _resolved(target)
    if os.path.lexists(final):
        return
    for previous in _leftovers(final, "previous"):
        try:
            os.rename(previous, final)
        except OSError as error:
            if error.errno not in _TAKEN:  # taken: the run lives and has just put its own there
                raise _unwritable(final, error) from error
        return


def clean_leftovers(target: str | Path) -> None:
    """Remove what killed runs left beside `target`. What a live run writes stays."""
    _clean(_resolved(target))


def _clean(final: Path) -> None:
    put_back(final)
    for path in [*_leftovers(final, "partial"), *_leftovers(final, "previous")]:
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # its own run, or another one, was faster
            continue
        try:
            kept = path.suffix == ".previous" and not final.exists()  # the only one there is
            if kept or not _try_lock(lock):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)


def flush(path: Path) -> None:
    """fsync of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network disks know no such call
            raise
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int | None:
    """A descriptor that keeps others from locking `folder` until it is closed; None if one does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if _try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _resolved(target: str | Path) -> Path:
    final = _absolute(target)
    try:
        return final.resolve() if final.is_symlink() else final
    except (OSError, RuntimeError) as error:  # links in a circle
        raise _unwritable(final, error) from error


def _absolute(target: str | Path) -> Path:
    try:
        possible = b"\0" not in os.fsencode(target)
    except UnicodeEncodeError:  # half of a surrogate pair
        possible = False
    if not possible:
        raise InputError("an output must have a name that a disk can hold", got=ascii(str(target)))
    return Path(target).absolute()


def _beside(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{secrets.token_hex(4)}.{kind}"


def _leftovers(final: Path, kind: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}\.{kind}")
    try:
        names = os.listdir(final.parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [final.parent / name for name in sorted(names) if pattern.fullmatch(name)]


def _new_partial(final: Path, create: Callable[[Path], None] = Path.mkdir) -> tuple[Path, int]:
    """Something empty beside final, and its lock."""
    for _ in range(_ATTEMPTS):
        partial = _beside(final, "partial")
        create(partial)
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another run took it for a leftover before it was locked
        if _try_lock(lock) and partial.exists():
            return partial, lock
        os.close(lock)
    raise OSError(errno.EBUSY, "other runs keep writing there")


def _try_lock(descriptor: int) -> bool:
    """False where another process holds the lock. A disk without locks locks nothing out."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ENOLCK)
    return True


def _identity(folder: str | Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _swap(partial: Path, final: Path) -> None:
    """Put partial at final. What was there ends beside it, under a name that is cleaned up."""
    for _ in range(_ATTEMPTS):
        try:
            if not os.path.lexists(final):
                os.rename(partial, final)
            elif not _exchange(partial, final):
                _swap_in_two(partial, final)
            return
        except OSError as error:  # another run, or a reader, has put something there or taken it
            if error.errno not in _TAKEN or not partial.exists():
                raise
    raise OSError(errno.EBUSY, "other runs keep writing there", str(partial))


def _swap_in_two(partial: Path, final: Path) -> None:
    previous = _beside(final, "previous")
    lock = lock_folder(final)  # none may clean it up before the new one is in place
    try:
        os.rename(final, previous)
        os.rename(partial, final)
    except BaseException:
        if previous.exists() and not final.exists():
            os.rename(previous, final)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where this system or disk cannot."""
    if not sys.platform.startswith("linux"):
        return False
    at_working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    if renameat2(at_working_folder, paths[0], at_working_folder, paths[1], exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first))


def _is_write_failure(error: Exception, partial: Path) -> bool:
    """Whether the disk is at fault; every library has another exception for that."""
    if isinstance(error, OSError):
        place = error.filename if isinstance(error.filename, str) else ""
        return error.errno in _CANNOT_WRITE or place.startswith(str(partial))
    if isinstance(error, SafetensorError):
        return "os error" in str(error).lower()
    return isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error)


def _unwritable(
    path: str | Path, error: Exception, what: str = "cannot write the output folder"
) -> InputError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(f"{path}: {what}", got=reason, help=_HELP)
