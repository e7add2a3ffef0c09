"""Sizes of an exported program: a grammar of what torch writes, with bounds on how large it may become.

torch writes a dynamic size as SymPy prints it, and SymPy evaluates that text when it is read:

    size   := NAME "(" [size {"," size}] ")" | "Symbol('s0', positive=True, integer=True)"
            | "Integer(-3)" | "Rational(1, 2)" | "Float('0.5', precision=53)" | "s0" | "3"

A short text can ask for endless work: a power of a power, a hundred million digits, a remainder of two
powers of sums. So Python parses the text first, with a bound on what SymPy makes of every part: the bits
of its numbers, the degree and terms of the polynomial that it would expand to.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
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
_PLAIN = re.compile(r"[\w(),.'=+ -]*", re.ASCII)  # of which Python makes names, numbers, calls and sums
_LEAF = re.compile(
    rf"(?P<symbol>Symbol\('(?:{SYMBOL.pattern})'(?:, ?(?:positive|integer|nonnegative)=True){{0,3}}\)"
    rf"|{SYMBOL.pattern})"
    r"|(?:Integer\()?(?P<integer>-?\d{1,30})\)?"
    r"|Rational\((?P<numerator>-?\d{1,30}), ?(?P<denominator>\d{1,30})\)"
    r"|(?P<float>Float\('-?\d{1,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,3})?', ?(?:precision|prec)=53\))"
    r"|true|false|True|False",
    re.ASCII,
)
_POWERS = {"Pow", "PowByNatural", "FloatPow"}
_DIVISIONS = {"Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv"}
_CHOICES = {"Max", "Min", "And", "Or"}
_FUNCTIONS = {
    "BitwiseFn_bitwise_and": 2, "BitwiseFn_bitwise_or": 2, "BitwiseFn_bitwise_xor": 2,
    "CeilToInt": 1, "FloorToInt": 1, "TruncToInt": 1, "TruncToFloat": 1, "RoundToInt": 1, "ToFloat": 1,
    "Identity": 1, "Not": 1, "ceiling": 1, "floor": 1, "Where": 3,
}  # fmt: skip
_COMPARISONS = {"Eq", "Ne", "Le", "Lt", "Ge", "Gt", "Equality", "Unequality", "LessThan",
                "StrictLessThan", "GreaterThan", "StrictGreaterThan"}  # fmt: skip
_COSTLY = re.compile(rf"\b(?:{'|'.join([*_DIVISIONS, *_COMPARISONS])})\(")


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
    """Whether the text is a single, small size."""
    if len(text) > MAX_LENGTH or not _PLAIN.fullmatch(text):
        return False
    if text.count("(") + text.count("-") > MAX_PARTS or len(_COSTLY.findall(text)) > MAX_DIVISIONS:
        return False
    text = text.strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # "1s0" is worth one to Python
            _read(text, ast.parse(text, mode="eval").body, 0)
    except (_Unfit, SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _read(text: str, node: ast.expr, depth: int) -> _Part:
    leaf = _LEAF.fullmatch(text, node.col_offset, node.end_col_offset or 0)
    if leaf is not None:
        part = _leaf(leaf)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        part = _part(node.func.id, [_read(text, argument, depth + 1) for argument in node.args])
    else:
        raise _Unfit
    if depth > MAX_DEPTH or part.bits > MAX_BITS or part.degree > MAX_DEGREE or part.terms > MAX_TERMS:
        raise _Unfit
    return part


def _leaf(match: re.Match[str]) -> _Part:
    if match["symbol"]:
        return _Part(degree=1)
    if match["integer"]:
        value = int(match["integer"])
        return _Part(bits=max(1, value.bit_length()), value=value)
    if match["numerator"]:
        if not int(match["denominator"]):
            raise _Unfit
        return _Part(bits=max(int(match[name]).bit_length() for name in ("numerator", "denominator")))
    return _Part(bits=53 if match["float"] else 1)


def _part(name: str, arguments: list[_Part]) -> _Part:
    """The bounds on a call of that name with these arguments."""
    count = len(arguments)
    bits, degree = (max((getattr(x, key) for x in arguments), default=1) for key in ("bits", "degree"))
    terms = [part.terms for part in arguments]
    if name == "Add" and count > 1:
        return _Part(bits + count.bit_length(), degree, sum(terms))
    if name == "Mul" and count > 1:
        return _Part(sum(part.bits for part in arguments), sum(part.degree for part in arguments),
                     math.prod(terms))  # fmt: skip
    if name in _POWERS and count == 2:
        return _power(*arguments)
    if name in _DIVISIONS and count == 2 and math.prod(terms) <= MAX_DIVIDED:
        return _Part(bits, 1)
    if (name in _CHOICES and 1 <= count <= MAX_COMPARED) or count == _FUNCTIONS.get(name):
        return _Part(bits, 1)
    if name in _COMPARISONS and count == 2 and sum(terms) <= MAX_DIVIDED:
        return _Part()
    raise _Unfit


def _power(base: _Part, exponent: _Part) -> _Part:
    """A power by a small whole number, or of a single term by any number (a square root)."""
    power = exponent.value
    if power is None and not exponent.degree and exponent.terms == 1 == base.terms:
        return _Part(max(base.bits, exponent.bits), 1)
    if power is None or not -MAX_POWER <= power <= MAX_POWER:
        raise _Unfit
    times = max(1, abs(power))
    return _Part(base.bits * times, max(base.degree * times, int(power < 0)), base.terms**times)
