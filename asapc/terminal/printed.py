"""What may reach a terminal: the one place that decides it.

Names of nodes, operators, sites and files come from others. A control character in one of them can set
the terminal's title or clear its screen; a bidirectional one shows a text in another order than it has.
"""

from __future__ import annotations

import re
import reprlib

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for tab and the end of a line
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of text
    "\u2028\u2029\ufeff\ud800-\udfff]"  # ends of lines, an invisible space, halves of pairs
)

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80


def escaped(text: str) -> str:
    r"""The text with such characters as \u001b, which is also how JSON has them."""
    return _UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """The same for part of a line: it cannot begin a new one."""
    return escaped(text.replace("\n", " "))


def reason(error: BaseException, most: int = 300) -> str:
    """An error's message as part of a line, of at most so many characters; its type if it has none."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = one_line(" ".join(text.split())) or type(error).__name__
    return clipped(line, most)


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of what an error says that is not blank; its type if it is mute."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:most] if lines else type(error).__name__


def short(value: object) -> str:
    """A value for a message, however long or deep it is."""
    return clipped(_BRIEF.repr(value), 100)


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
