"""Bytecode: what functions load and store by name.

before: code objects, of any Python from 3.11 on
after:  Names, and sets of names

Nothing runs. A name that cannot be told counts as any.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import re
from collections.abc import Collection, Sequence
from types import CodeType

import torch

from asapc.program.state import DEVICES, INTEGERS, PRECISION, SAME, Names

_ANY_NAME = {
    "asdict", "astuple", "vars", "__dict__", "attrgetter", "methodcaller", "__getattribute__",
    "getattr_static", "getmembers",
}  # fmt: skip
_LOOKUPS = ("__getattribute__", "__getattr__", "__setattr__", "__delattr__")
_SILENT = {"CACHE", "KW_NAMES", "NOP", "RESUME", "EXTENDED_ARG", "NOT_TAKEN"}
OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_INTEGERS = {"uint8", "int8", "int16", "short", "int32", "int", "int64", "long"}
_FLOATS = {"half", "float16", "bfloat16", "float", "float32", "double", "float64"}
_OF_DIGITS = {"eps", "tiny", "smallest_normal", "resolution"}  # of torch.finfo, beside the limits
_OF_DTYPES = {PRECISION, INTEGERS}
_OF_TORCH = {*dir(torch), *dir(torch.Tensor), *dir(torch.nn.functional)} - {
    "can_cast", "promote_types", "equal", "typename",
}  # fmt: skip
_IN_FORMAT = re.compile(r"\.([^\W\d]\w*)")
_HANDED_ON = ("BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_STRING", "FORMAT_", "CONVERT_")


def loaded_names(codes: Collection[CodeType]) -> Names:
    """What these functions load.  Their constants count where they ask for attributes by name."""
    attributes: set[str] = set()
    loaded: set[str] = set()
    environ, imported, maybe, modes = set[str](), set[str](), set[str](), False
    for code in codes:
        instructions = instructions_of(code)
        texts = {x for x in code.co_consts if isinstance(x, str)}
        of_code: set[str] = set()
        for before, step in itertools.pairwise((*instructions[:1], *instructions)):
            if step.opname in OF_ATTRIBUTES and before.opname != "COPY":
                of_code.add(str(step.argval))
                names = before.argval if isinstance(before.argval, tuple) else (before.argval,)
                modes |= step.argval == "training" and names[-1] not in code.co_varnames[:1]
            elif step.opname in OF_GLOBALS:
                loaded.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                imported.add(str(step.argval))
            elif step.opname == "MATCH_CLASS":
                by_place = bool(step.arg)  # of which the class has the names
                of_code |= {"vars"} if by_place else {*before.argval}
        asked = _asked_by_name(instructions)
        if code.co_name in _LOOKUPS:  # asks by names that other code has loaded, of what it keeps them in
            of_code |= {text for text in texts if text.isidentifier()}
            of_code -= _ANY_NAME
        elif asked is None:
            of_code.add("vars")  # names that are made while it runs
        else:
            of_code |= asked
        if code.co_name not in _LOOKUPS:
            maybe |= of_code if "AttributeError" in loaded else asked or set()
        if {"environ", "getenv"} & (of_code | loaded):
            environ |= texts
        if {"modules", "import_module", "__import__"} & (of_code | loaded):
            imported |= texts
        if {"globals", "__globals__"} & (of_code | loaded):
            loaded |= texts
        if "modules" in of_code and "__name__" in loaded:  # sys.modules[__name__].TAU
            loaded |= of_code
        if {"format", "format_map"} & of_code:  # "{0.tau}"
            of_code |= {name for text in texts for name in _IN_FORMAT.findall(text)}
        attributes |= of_code
    every = frozenset(attributes)
    return Names(
        None if _ANY_NAME & (every | loaded) else every, frozenset(loaded), frozenset(codes),
        frozenset(environ), frozenset(imported), modes, every, frozenset(maybe),
    )  # fmt: skip


def compared_by_identity(codes: Collection[CodeType], name: str) -> bool:
    """Whether code that uses this name compares anything with `is`, None apart."""
    return any(
        step.opname == "IS_OP" and not (before.opname == "LOAD_CONST" and before.argval is None)
        for code in codes if name in code.co_names
        for before, step in itertools.pairwise(instructions_of(code))
    )  # fmt: skip


def set_globals(codes: Collection[CodeType]) -> set[str]:
    """The globals that these functions set."""
    steps = (step for code in codes for step in instructions_of(code))
    return {str(step.argval) for step in steps if step.opname == "STORE_GLOBAL"}


def stored_names(codes: Collection[CodeType]) -> tuple[set[str], set[str]]:
    """The attributes that these functions set; and those that they only count, as self.calls += 1."""
    stored, counted = set[str](), set[str]()
    for code in codes:
        if "setattr" in code.co_names:
            stored |= {text for text in code.co_consts if isinstance(text, str)}
        for before, step in itertools.pairwise(instructions_of(code)):
            if step.opname == "STORE_ATTR":
                stored.add(str(step.argval))
            elif step.opname == "LOAD_ATTR" and before.opname == "COPY":
                counted.add(str(step.argval))
    return stored, counted


def sets_items(codes: Collection[CodeType]) -> bool:
    """Whether these functions set items of anything."""
    return any(step.opname == "STORE_SUBSCR" for code in codes for step in instructions_of(code))


def questions_of(code: CodeType) -> set[str]:
    """What a function asks of its inputs besides their numbers: of dtypes, which it may pass on, and
    whether two of them are the same object.

    Its values are followed by the names that they were loaded under, from line to line; a dtype that is
    not followed counts as asked. Of a device, a comparison with what is none of another tensor does.
    """
    instructions = instructions_of(code)
    loaded = {str(x.argval) for x in instructions if x.opname.startswith("LOAD_")}
    digits = loaded & {"element_size", "itemsize"} or ("finfo" in loaded and loaded & _OF_DIGITS)
    asked = ({PRECISION} if digits else set()) | ({SAME} if "id" in loaded else set())
    asked |= _OF_DTYPES if "dtype" in code.co_consts else set()
    stack: list[frozenset[str]] = []
    carriers = dict[str, frozenset[str]]()  # locals that hold a dtype or a device
    for step in instructions:
        if step.opname == "PRECALL":
            continue
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        count = _taken(step, effect)
        results = 1 if step.opname.startswith("CALL") else effect + count
        stack[:0] = [frozenset()] * (count - len(stack))  # of lines that were not followed
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        label = frozenset[str]().union(*taken)
        asked |= _question_of(step, taken, label, code.co_name)
        held, names = _held(label), step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith("STORE_FAST"):
            carriers.update((str(name), carriers.get(str(name), frozenset()) | held) for name in names)
        if step.opname.startswith("LOAD_"):
            label = frozenset(map(str, names)).union(*(carriers.get(str(name), ()) for name in names))
            label |= held & {"device"}  # of which an attribute is a part
            single = isinstance(step.argval, bool | type(None) | type(...))
            label = frozenset() if step.opname == "LOAD_CONST" and not single else label
        elif step.opname.startswith("CALL"):
            of_text = held & {"device"} if _callee(taken) == {"str"} else frozenset[str]()
            label = _callee(taken) if _is_dtype(_callee(taken)) else of_text
        elif not step.opname.startswith(_HANDED_ON):
            label = frozenset()
        stack += [label] * results
    return asked


def _question_of(
    step: dis.Instruction, taken: Sequence[frozenset[str]], label: frozenset[str], function: str
) -> set[str]:
    """label: the names of all that the instruction takes."""
    name = step.opname
    if name in ("COMPARE_OP", "IS_OP", "CONTAINS_OP", "BINARY_SUBSCR") or step.argrepr == "[]":
        if label & {"None", "True", "False", "Ellipsis"}:
            return set()
        if sum("device" in _held(one) for one in taken) == 1:
            return {DEVICES}
    if name in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
        kinds = {kind for kind, names in ((PRECISION, _FLOATS), (INTEGERS, _INTEGERS)) if label & names}
        if _is_dtype(label):
            return kinds or (set() if "bool" in label else _OF_DTYPES)
        if label & (_FLOATS | _INTEGERS) - {"float", "int"}:
            return kinds
        return {SAME} if name == "IS_OP" else set()
    if not _is_dtype(label) or name.startswith(("POP_", *_HANDED_ON)) or "JUMP" in name:
        return set()
    if name.startswith("CALL"):
        (callee,) = _callee(taken) or [""]
        error = getattr(builtins, callee, None)
        passed = callee in _OF_TORCH or (isinstance(error, type) and issubclass(error, Exception))
        return set() if passed or "dtype" in callee else _OF_DTYPES
    place = function if name.startswith("RETURN") else str(step.argval)
    kept = "dtype" in place or place in ("is_floating_point", "is_complex")
    return set() if kept or name.startswith("STORE_FAST") else _OF_DTYPES


def _taken(step: dis.Instruction, effect: int) -> int:
    """How many values an instruction takes from the stack."""
    name = step.opname
    if name in ("CALL", "CALL_KW"):
        return int(step.arg or 0) + 2 + (name == "CALL_KW")
    if name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
        return 3 if "SUPER" in name else 1
    if name.startswith("LOAD_") or effect > 0:
        return 0
    gives = not name.startswith(("STORE_", "POP_", "RETURN_", "DELETE_", "END_")) and "JUMP" not in name
    return gives - effect


def _callee(taken: Sequence[frozenset[str]]) -> frozenset[str]:
    """The name of the function that is called, beside which stands nothing or its object."""
    return next((label for label in taken[:2] if len(label) == 1), frozenset())


def _is_dtype(label: Collection[str]) -> bool:
    return any("dtype" in name for name in label)


def _held(label: Collection[str]) -> frozenset[str]:
    """What of these a value with such a label may hold: a dtype, a device."""
    return frozenset(kind for kind in ("dtype", "device") if any(kind in name for name in label))


def instructions_of(code: CodeType) -> list[dis.Instruction]:
    """What a function does, without what only helps Python to do it."""
    return [step for step in dis.get_instructions(code) if step.opname not in _SILENT]


def _asked_by_name(instructions: Sequence[dis.Instruction]) -> set[str] | None:
    """The names that getattr and hasattr are called with; None where one is made while the code runs."""
    names: set[str] = set()
    for place, start in enumerate(instructions):
        if start.opname in OF_GLOBALS and start.argval in ("getattr", "hasattr"):
            arguments = arguments_of(instructions[place + 1 :]) or []
            name = arguments[1] if len(arguments) > 1 else ()
            if len(name) != 1 or name[0].opname != "LOAD_CONST" or not isinstance(name[0].argval, str):
                return None
            names.add(name[0].argval)
    return names


def arguments_of(instructions: Sequence[dis.Instruction]) -> list[Sequence[dis.Instruction]] | None:
    """What makes each argument of the call of the function that was loaded just before; None where it is
    not called there, or with what depends on something."""
    depths = [0]
    instructions = instructions[instructions[0].opname == "PUSH_NULL" :]
    for step in instructions:
        if step.opname in ("PRECALL", "CALL", "CALL_KW"):
            count = int(step.arg or 0)
            if depths[-1] == count + (step.opname == "CALL_KW"):
                break
        depths.append(depths[-1] + dis.stack_effect(step.opcode, step.arg, jump=False))
        if depths[-1] < 0 or "JUMP" in step.opname or step.opname == "CALL_FUNCTION_EX":
            return None
    else:
        return None
    # Two locals that one instruction loads are both of the later one.
    ends = [max((n for n, current in enumerate(depths) if current == depth), default=0)
            for depth in range(count + 1)]  # fmt: skip
    return [instructions[start:end] for start, end in itertools.pairwise(ends)]
