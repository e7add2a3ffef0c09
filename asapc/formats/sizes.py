"""Sizes of an exported program: a grammar of what torch writes, and how large they may become.

torch writes a dynamic size as SymPy prints it, and SymPy evaluates that text when it is read:

    size   := NAME "(" [size {"," size}] ")" | "Symbol('s0', positive=True, integer=True)"
            | "Integer(-3)" | "Rational(1, 2)" | "Float('0.5', precision=53)" | "s0" | "3"

A short text can ask for endless work: a power of a power, a hundred million digits, a remainder of two
powers of sums. So a text is read once, from left to right, and with every part goes a bound on what SymPy
makes of it: bits of its numbers, degree and terms of the polynomial that it would expand to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LENGTH = 4096
MAX_PARTS = 200  # of one size; a chain of 20 convolutions has about 100
MAX_DEPTH = 64
MAX_BITS = 256
MAX_DEGREE = 16
MAX_TERMS = 64
MAX_DIVIDED = 32  # terms of what is divided times terms of the divisor: SymPy looks for common factors
MAX_DIVISIONS = 48
MAX_COMPARED = 8  # arguments of Max, Min, And, Or: SymPy compares each with each
MAX_POWER = 8

SYMBOL = re.compile(r"[suz]\d{1,6}|zuf\d{1,6}")
_INTEGER = r"-?\d{1,30}"
_TOKEN = re.compile(
    r"\s*(?:"
    rf"(?P<symbol>Symbol\('(?:{SYMBOL.pattern})'(?:, ?(?:positive|integer|nonnegative)=True){{0,3}}\))"
    rf"|Integer\((?P<integer>{_INTEGER})\)"
    rf"|Rational\((?P<numerator>{_INTEGER}), ?(?P<denominator>\d{{1,30}})\)"
    r"|(?P<float>Float\('-?\d{1,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,3})?', ?(?:precision|prec)=53\))"
    r"|(?P<truth>true|false|True|False)(?![\w(])"
    rf"|(?P<plain>{SYMBOL.pattern})(?![\w(])"
    rf"|(?P<number>{_INTEGER})(?![\w.(])"
    r"|(?P<open>[A-Za-z]\w{0,30})\("
    r"|(?P<comma>,)"
    r"|(?P<close>\))"
    r")"
)
_SUMS = {"Add"}
_PRODUCTS = {"Mul"}
_POWERS = {"Pow": 2, "PowByNatural": 2, "FloatPow": 2}
_DIVISIONS = {"Mod": 2, "PythonMod": 2, "FloorDiv": 2, "CleanDiv": 2, "CeilDiv": 2, "IntTrueDiv": 2,
              "FloatTrueDiv": 2}  # fmt: skip
_CHOICES = {"Max", "Min", "And", "Or"}
_FUNCTIONS = {
    "BitwiseFn_bitwise_and": 2, "BitwiseFn_bitwise_or": 2, "BitwiseFn_bitwise_xor": 2,
    "CeilToInt": 1, "FloorToInt": 1, "TruncToInt": 1, "TruncToFloat": 1, "RoundToInt": 1, "ToFloat": 1,
    "Identity": 1, "Not": 1, "ceiling": 1, "floor": 1, "Where": 3,
}  # fmt: skip
_COMPARISONS = {"Eq", "Ne", "Le", "Lt", "Ge", "Gt", "Equality", "Unequality", "LessThan",
                "StrictLessThan", "GreaterThan", "StrictGreaterThan"}  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """bits: of its numbers.  degree, terms: of the polynomial in symbols and functions that it is.

    value: the number, where it is a literal.
    """

    bits: int = 1
    degree: int = 0
    terms: int = 1
    value: int | None = None


class _Unfit(Exception):
    pass


def is_size_expression(text: str) -> bool:
    """Whether the text is one size, and a small one.  Linear in the length of the text."""
    if len(text) > MAX_LENGTH:
        return False
    try:
        _read(text)
    except _Unfit:
        return False
    return True


def _read(text: str) -> None:
    open_calls: list[tuple[str, list[_Part]]] = [("", [])]
    place = parts = divisions = 0
    ended = False  # after a part, which a comma or a closing bracket follows
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _Unfit
        place = match.end()
        kind = match.lastgroup
        if kind == "comma":
            if not ended or len(open_calls) == 1:
                raise _Unfit
            ended = False
            continue
        if kind == "close":
            name, arguments = open_calls.pop()
            if not open_calls or not ended:
                raise _Unfit
            divisions += name in _DIVISIONS or name in _COMPARISONS
            part = _part(name, arguments)
        elif ended:
            raise _Unfit
        elif kind == "open":
            open_calls.append((match["open"], []))
            if len(open_calls) > MAX_DEPTH:
                raise _Unfit
            continue
        else:
            part = _leaf(match)
        parts += 1
        if parts > MAX_PARTS or divisions > MAX_DIVISIONS:
            raise _Unfit
        if part.bits > MAX_BITS or part.degree > MAX_DEGREE or part.terms > MAX_TERMS:
            raise _Unfit
        open_calls[-1][1].append(part)
        ended = True
    if len(open_calls) != 1 or len(open_calls[0][1]) != 1:
        raise _Unfit


def _leaf(match: re.Match[str]) -> _Part:
    if match["symbol"] or match["plain"]:
        return _Part(degree=1)
    if match["integer"] or match["number"]:
        value = int(match["integer"] or match["number"])
        return _Part(bits=max(1, value.bit_length()), value=value)
    if match["numerator"]:
        if not int(match["denominator"]):
            raise _Unfit
        return _Part(bits=max(int(match[name]).bit_length() for name in ("numerator", "denominator")))
    return _Part(bits=53 if match["float"] else 1)


def _part(name: str, arguments: Sequence[_Part]) -> _Part:
    """What a call of that name makes of its arguments."""
    count = len(arguments)
    bits = max((part.bits for part in arguments), default=1)
    if name in _SUMS and count > 1:
        terms = sum(part.terms for part in arguments)
        return _Part(bits + count.bit_length(), max(part.degree for part in arguments), terms)
    if name in _PRODUCTS and count > 1:
        terms = 1
        for part in arguments:
            terms *= part.terms
            if terms > MAX_TERMS:
                raise _Unfit
        return _Part(sum(part.bits for part in arguments), sum(part.degree for part in arguments), terms)
    if count == _POWERS.get(name):
        return _power(*arguments)
    if count == _DIVISIONS.get(name):
        if arguments[0].terms * arguments[1].terms > MAX_DIVIDED:
            raise _Unfit
        return _Part(bits, 1)
    if (name in _CHOICES and 1 <= count <= MAX_COMPARED) or count == _FUNCTIONS.get(name):
        return _Part(bits, 1)
    if name in _COMPARISONS and count == 2:
        if arguments[0].terms + arguments[1].terms > MAX_DIVIDED:
            raise _Unfit
        return _Part()
    raise _Unfit


def _power(base: _Part, exponent: _Part) -> _Part:
    """By a small whole number; by another number where it is all that there is (a square root)."""
    power = exponent.value
    if power is None:
        if exponent.degree or exponent.terms > 1 or base.terms > 1:
            raise _Unfit
        return _Part(max(base.bits, exponent.bits), 1)
    if not -MAX_POWER <= power <= MAX_POWER:
        raise _Unfit
    times = max(1, abs(power))
    return _Part(base.bits * times, max(base.degree * times, int(power < 0)), base.terms**times)
