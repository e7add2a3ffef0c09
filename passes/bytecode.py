"""Bytecode: what functions load and store by name.

before: code objects, of any Python from 3.11 on
after:  Names, and sets of names

Nothing runs. A name that cannot be told counts as any.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Collection, Sequence
from types import CodeType

from asapc.program.state import Names

_ANY_NAME = {
    "asdict", "astuple", "vars", "__dict__", "attrgetter", "methodcaller", "__getattribute__",
    "getattr_static", "getmembers",
}  # fmt: skip
_LOOKUPS = ("__getattribute__", "__getattr__", "__setattr__", "__delattr__")
_SILENT = {"CACHE", "KW_NAMES", "NOP", "RESUME", "EXTENDED_ARG", "NOT_TAKEN"}
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_FLOATS = {"half", "float16", "bfloat16", "float", "float32", "double", "float64"}
_OF_DIGITS = {"eps", "tiny", "smallest_normal", "resolution"}  # of torch.finfo, beside the limits


def loaded_names(codes: Collection[CodeType]) -> Names:
    """What these functions load.  Their constants count where they ask for attributes by name."""
    attributes: set[str] = set()
    loaded: set[str] = set()
    environ, imported, maybe, modes = set[str](), set[str](), set[str](), False
    for code in codes:
        instructions = _instructions(code)
        texts = {x for x in code.co_consts if isinstance(x, str)}
        own: set[str] = set()
        for before, step in itertools.pairwise((*instructions[:1], *instructions)):
            if step.opname in _OF_ATTRIBUTES and before.opname != "COPY":
                own.add(str(step.argval))
                names = before.argval if isinstance(before.argval, tuple) else (before.argval,)
                modes |= step.argval == "training" and names[-1] not in code.co_varnames[:1]
            elif step.opname in _OF_GLOBALS:
                loaded.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                imported.add(str(step.argval))
            elif step.opname == "MATCH_CLASS":
                own |= {*before.argval} if not step.arg else {"vars"}  # by place: the class has the names
        asked = _asked_by_name(instructions)
        if code.co_name in _LOOKUPS:  # asks by names that other code has loaded, of what it keeps them in
            own |= {text for text in texts if text.isidentifier()}
            own -= _ANY_NAME
        elif asked is None:
            own.add("vars")  # names that are made while it runs
        else:
            own |= asked
        if code.co_name not in _LOOKUPS:
            maybe |= own if "AttributeError" in loaded else asked or set()
        if {"environ", "getenv"} & (own | loaded):
            environ |= texts
        if {"modules", "import_module", "__import__"} & (own | loaded):
            imported |= texts
        if {"globals", "__globals__"} & (own | loaded):
            loaded |= texts
        attributes |= own
    said = frozenset(attributes)
    return Names(
        None if _ANY_NAME & (said | loaded) else said, frozenset(loaded), frozenset(codes),
        frozenset(environ), frozenset(imported), modes, said, frozenset(maybe),
    )  # fmt: skip


def stored_names(codes: Collection[CodeType]) -> tuple[set[str], set[str]]:
    """The attributes that these functions set; and those that they only count, as self.calls += 1."""
    stored, counted = set[str](), set[str]()
    for code in codes:
        for before, step in itertools.pairwise(_instructions(code)):
            if step.opname == "STORE_ATTR":
                stored.add(str(step.argval))
            elif step.opname == "LOAD_ATTR" and before.opname == "COPY":
                counted.add(str(step.argval))
    return stored, counted


def asks_for_precision(code: CodeType) -> bool:
    """Whether a function compares a dtype with one of torch's floating-point types, as code does that
    clamps in half precision alone, or computes with what rounding is in it."""
    instructions = _instructions(code)
    loaded = {str(x.argval) for x in instructions if x.opname.startswith("LOAD_")}
    if loaded & {"element_size", "itemsize"} or ("finfo" in loaded and loaded & _OF_DIGITS):
        return True
    for place, step in enumerate(instructions):
        if step.opname in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
            before = {str(x.argval) for x in instructions[max(0, place - 8) : place]}
            if "dtype" in before and before & _FLOATS:
                return True
    return False


def _instructions(code: CodeType) -> list[dis.Instruction]:
    """What a function does, without what only helps Python to do it."""
    return [step for step in dis.get_instructions(code) if step.opname not in _SILENT]


def _asked_by_name(instructions: Sequence[dis.Instruction]) -> set[str] | None:
    """The names that getattr and hasattr are called with; None where one is made while the code runs."""
    names: set[str] = set()
    for place, start in enumerate(instructions):
        if start.opname in _OF_GLOBALS and start.argval in ("getattr", "hasattr"):
            name = _second_argument(instructions[place + 1 :])
            if name is None:
                return None
            names.add(name)
    return names


def _second_argument(instructions: Sequence[dis.Instruction]) -> str | None:
    """Of the call of the function that was loaded just before: a text that stands there, or None."""
    depths = [0]
    instructions = instructions[instructions[0].opname == "PUSH_NULL" :]
    for step in instructions:
        if step.opname in ("PRECALL", "CALL") and depths[-1] == step.arg:
            break
        depths.append(depths[-1] + dis.stack_effect(step.opcode, step.arg, jump=False))
        if depths[-1] < 0 or "JUMP" in step.opname:  # an argument that depends on something
            return None
    if not {1, 2} <= {*depths}:
        return None
    first, second = (max(n for n, depth in enumerate(depths) if depth == end) for end in (1, 2))
    span = instructions[first:second]
    if len(span) != 1 or span[0].opname != "LOAD_CONST" or not isinstance(span[0].argval, str):
        return None
    return span[0].argval
