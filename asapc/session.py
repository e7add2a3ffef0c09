"""One command's run: where results and messages go, and how a failure ends it.

Results are the only thing on stdout.  Whatever else is printed meanwhile, a user's model included,
goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import psutil

from asapc.errors import EXIT_BAD_INPUT, EXIT_INTERNAL, EXIT_OK, AsapcError, InputError
from asapc.processes import rank_and_size
from asapc.terminal.hints import command_line
from asapc.terminal.printed import escaped, reason
from asapc.terminal.progress import Progress, make_progress

if TYPE_CHECKING:
    from asapc.report.tables import Table

T = TypeVar("T")
EXIT_INTERRUPTED = 130
LATER = 5.0  # seconds
BUSY = 25.0  # percent of all cores that other processes keep busy
FILE_TROUBLE = {
    errno.ENOSPC: "free some space, or write to another folder",
    errno.EDQUOT: "free some space, or write to another folder",
    errno.EROFS: "write to another folder",
    errno.EACCES: "check the permissions, or write to another folder",
    errno.EPERM: "check the permissions, or write to another folder",
    errno.ENAMETOOLONG: "check the path: no disk holds one so long",
    errno.ELOOP: "check the path: its links lead in a circle",
}


@dataclass(frozen=True)
class Session:
    """json: machine output; quiet: no progress, no notes, no result but JSON; debug: tracebacks;
    verbose: every table of a result.

    speaks: for all processes that torchrun started with this one, where there are several.
    """

    json: bool
    quiet: bool
    debug: bool
    progress: Progress
    results: TextIO
    speaks: bool = True
    verbose: bool = False

    def show(
        self, result: T, brief: Callable[[T], Sequence[Table | str]], tables: Callable[[T], list[Table]]
    ) -> None:
        """Print a command's result: as JSON, in brief, or in all of its tables."""
        if not self.speaks or (self.quiet and not self.json):
            return
        if self.json:
            from asapc.report.text import json_text

            encoding = getattr(self.results, "encoding", None) or "utf-8"
            text = json_text(result, ascii=not encoding.lower().startswith("utf"))
            print(escaped(text), file=self.results)
        else:
            from asapc.report.console import print_result

            print_result(tables(result) if self.verbose else brief(result), self.results)
        self.results.flush()

    def present(self, result: Any, kind: str) -> None:
        """Show a result as report.brief and report.tables lay out this kind."""
        from asapc.report import brief, tables

        self.show(result, getattr(brief, f"{kind}_brief"), getattr(tables, f"{kind}_tables"))

    def note(self, text: str) -> None:
        """One line on stderr, unless quiet."""
        self.progress.note(text)

    def next(self, command: str, *arguments: str, **options: str | bool | None) -> None:
        """Suggest the next command, on a line of its own that can be pasted into a shell."""
        self.note(f"next: {command_line(command, *arguments, **options)}")


def run(
    body: Callable[[Session], int | None],
    *,
    json: bool,
    quiet: bool,
    debug: bool,
    verbose: bool = False,
    processes: bool = False,
    timed: bool = False,
) -> int:
    """Run a command's body and return the exit code; a failure is one message on stderr.

    processes: several, started by torchrun, may run it together.
    timed: it times models.
    """
    if debug:
        logging.getLogger("asapc").setLevel(logging.DEBUG)  # what torch logs of a trace is shown
    rank, size = rank_and_size()
    quiet = quiet or rank > 0
    try:
        if size > 1 and not processes:
            raise InputError(
                "this command runs in one process", got=f"{size}, started by torchrun",
                help="start it without torchrun; calibrate, report, study and refresh share their work",
            )  # fmt: skip
        with _stdout_for_results() as results, _warnings(quiet=quiet, debug=debug):
            session = Session(json, quiet, debug, make_progress(quiet=quiet), results, rank == 0, verbose)
            if "torch" not in sys.modules:
                _choose_waiting(session, timed and size == 1)  # torchrun's others would look busy
            return body(session) or EXIT_OK
    except KeyboardInterrupt:
        return _fail("asapc: interrupted; earlier output is untouched", EXIT_INTERRUPTED, debug)
    except AsapcError as error:
        return _fail(f"asapc: {error}", error.exit_code, debug)
    except BrokenPipeError:
        # The reader of our output left (`| head`).  Python would complain again when it flushes.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        return _fail(*_other(error), debug)


def _choose_waiting(session: Session, timed: bool) -> None:
    """Let threads sleep while they wait for each other: a spinning one keeps its core from the thread it
    waits for.  Beside two busy processes, calibration took 578 seconds with spinning threads, and 30 so.

    On free cores spinning is faster, and users' own programs spin, so models are timed that way there.
    OpenMP reads the variable when torch is imported.
    """
    busy = psutil.cpu_percent(0.1) if timed else 0.0
    if not timed or busy > BUSY:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if busy > BUSY:
        session.note(f"other programs keep {busy:.0f} % of the cores busy, so times will be rough")


def _other(error: Exception) -> tuple[str, int]:
    """The message and exit code of an error that is not asapc's own."""
    if isinstance(error, OSError) and error.errno in FILE_TROUBLE:
        place = f"{error.filename}: " if error.filename else ""
        what = (error.strerror or str(error)).lower()
        return f"asapc: {place}{what}\n  help: {FILE_TROUBLE[error.errno]}", EXIT_BAD_INPUT
    return (
        f"asapc: internal error: {type(error).__name__}: {reason(error)}\n"
        "  help: run the same command with --debug for the traceback, and report it"
    ), EXIT_INTERNAL


def _fail(message: str, code: int, debug: bool) -> int:
    rank, size = rank_and_size()
    if rank > 0:
        if code == EXIT_INTERRUPTED:
            return code
        # The first process fails with what is wrong for all, and torchrun ends the others meanwhile.
        time.sleep(LATER)
        message = message.replace("asapc: ", f"asapc: rank {rank} of {size}: ", 1)
    if debug:
        complain(traceback.format_exc())
    complain(message)
    return code


def complain(message: str) -> None:
    """A message on stderr."""
    print(escaped(message), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stdout_for_results() -> Iterator[TextIO]:
    results = sys.stdout
    if isinstance(results, io.TextIOWrapper):  # a name that its encoding lacks is no reason to fail
        results.reconfigure(errors="backslashreplace")
    with contextlib.redirect_stdout(sys.stderr):
        yield results


@contextlib.contextmanager
def _warnings(*, quiet: bool, debug: bool) -> Iterator[None]:
    before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.formatwarning = lambda *args, **kwargs: escaped(before(*args, **kwargs))
        if quiet:
            warnings.simplefilter("ignore")
        elif not debug:
            # Advice to the authors of libraries, not to the user of this command.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            warnings.formatwarning = before
