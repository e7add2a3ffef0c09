"""Errors a user can act on: each carries the rule, what arrived and the fix, and an exit code.

Exit codes (command line): 0 done; 1 gate failed; 2 usage or bad input; 3 no site compiled;
4 replay or verification failed; 70 internal error.
"""

from __future__ import annotations

from asapc.terminal.printed import escaped, one_line

EXIT_OK = 0
EXIT_GATE_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NO_SITE = 3
EXIT_VERIFICATION = 4
EXIT_INTERNAL = 70

MAX_GOT = 600  # characters of what arrived: a message, not a copy of the file


class AsapcError(Exception):
    """A failure that the user can fix; printed as one message, without a traceback.

    rule: what must hold, in one clause, naming the place ("w.safetensors: not a safetensors file").
    got:  what asapc got instead, if that adds anything.
    help: the fix.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, rule: str, *, got: object = None, help: str | None = None) -> None:
        self.rule = rule
        self.got = got
        self.help = help
        super().__init__(str(self))

    def __str__(self) -> str:
        text = one_line(self.rule)
        if self.got is not None:
            got = one_line(str(self.got))
            text += f", got {got if len(got) <= MAX_GOT else got[:MAX_GOT] + ' ...'}"
        return text if self.help is None else f"{text}\n  help: {escaped(self.help)}"


class InputError(AsapcError):
    """The model, data, recipe, gates or a command-line argument is unusable as given."""

    exit_code = EXIT_BAD_INPUT


class BranchError(InputError):
    """A program was captured on one side of a branch, and the data takes the other.

    asked: the condition, with its place in the code.  answer: its value at capture.
    """

    def __init__(self, asked: str, answer: bool) -> None:
        self.asked = asked
        super().__init__(
            f"the program was captured where {asked} is {str(answer).lower()}",
            got=f"data for which it is {str(not answer).lower()}",
            help="load it with asapc.load(OUT, model=live), which then runs the model's own code; or "
            "compile on data that covers both branches",
        )


class SizeError(InputError):
    """A program holds for other sizes than those of its inputs."""


class NoSiteError(AsapcError):
    """No attention site could be compiled; nothing was emitted."""

    exit_code = EXIT_NO_SITE


def nothing_found() -> NoSiteError:
    """Of a model in which there is nothing to be matched or refused."""
    return NoSiteError(
        "the model must contain attention, or a loop that normalises rows and columns in turn",
        got="neither: no product of a map with values, and no sums over rows and columns of a matrix",
        help="compile a model that has one; asapc does not see a loop that reads values into Python",
    )


class VerificationError(AsapcError):
    """A rewritten program does not reproduce its teacher; nothing was emitted."""

    exit_code = EXIT_VERIFICATION


class FewExamplesWarning(UserWarning):
    """A fit rests on too few examples or regression rows (commands print this on stderr)."""


def check_text(name: str, what: str) -> None:
    """InputError for a name that no file of text can record: one whose bytes are not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{what} must be UTF-8", got=ascii(name), help="rename the file or folder, or run inside it"
        ) from None
