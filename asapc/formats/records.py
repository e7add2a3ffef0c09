"""Frozen dataclasses read from JSON that others may have written, and written back.

The annotations of a dataclass are its format: a value without these types is an InputError that names
the place.  An absent or null part takes its default.  A `rest` keeps the keys that no field has.  A part
that may be one of several records is the first whose keys are there.  A ValueError of `__post_init__`
becomes an InputError, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from asapc.errors import InputError
from asapc.terminal.printed import short

KINDS: Mapping[Any, str] = {
    str: "text", bool: "true or false", int: "an integer of 64 bits", float: "a finite number",
    tuple: "a list", Mapping: "a mapping",
}  # fmt: skip


def rest(numbers: Mapping[str, Any] = {}) -> Any:
    """A field for the keys that no other field has; those in `numbers` are numbers with these schemas."""
    return field(default_factory=dict, metadata={"rest": numbers})


OPTIONAL: Mapping[str, Any] = {"optional": True}


def optional() -> Any:
    """A field that is left out of the JSON where it is None."""
    return field(default=None, metadata=OPTIONAL)


APART: Mapping[str, Any] = {"apart": True}  # of a field that is no part of the JSON


@dataclass(frozen=True)
class Record:
    """A dataclass with a JSON form.  A field that `__init__` does not take is written but not read.

    always: keys of its `rest` that every written record has.
    """

    always: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a word that an annotation does not allow."""
        for name, hint in _hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(hint)))}")

    @classmethod
    def from_json(cls, document: Any, where: str, **apart: Any) -> Self:
        """apart: fields that are no part of the JSON.  Raises InputError naming the place."""
        if not isinstance(document, Mapping):
            raise InputError(f"{where} must be a mapping", got=short(document))
        hints, values = _hints(cls), dict[str, Any](apart)
        by_key = json_fields(cls)
        for key, each in by_key.items():
            value, place = document.get(key), f"{where}: {key}"
            if "rest" in each.metadata:
                more = {key: item for key, item in document.items() if key not in by_key}
                for name in more.keys() & each.metadata["rest"].keys():
                    more[name] = read(float | None, more[name], f"{where}: {name}")
                values[each.name] = more
            elif each.init and (value is not None or required(each)):
                values[each.name] = read(hints[each.name], value, place)
        try:
            return cls(**values)
        except ValueError as error:  # a rule that the annotations do not express
            raise InputError(f"{where}: {error}", got=short(document)) from None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {}
        for key, each in json_fields(type(self)).items():
            value = getattr(self, each.name)
            if "rest" in each.metadata:
                document.update(_plain(value))
            elif value is not None or "optional" not in each.metadata:
                document[key] = _plain(value)
        return document


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def json_fields(cls: type[Record]) -> dict[str, Field[Any]]:
    """The fields by their keys, in order; `key` in the metadata is one that is no name in Python."""
    return {
        each.metadata.get("key", each.name): each for each in fields(cls) if "apart" not in each.metadata
    }


def required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read(hint: Any, value: Any, where: str) -> Any:
    """The value with the type of the annotation.  Raises InputError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or (value is None and NoneType in arguments):
        return value
    if origin in (Union, UnionType):
        return read(_one_of(arguments, value), value, where)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_json(value, where)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise InputError(f"{where} must be one of {', '.join(arguments)}", got=short(value))
    if origin is tuple and arguments[-1] is not ...:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise InputError(f"{where} must be a list of {len(arguments)}", got=short(value))
        pairs = zip(arguments, value, strict=True)
        return tuple(read(argument, item, where) for argument, item in pairs)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {key: read(arguments[1], x, f"{where}: {_name(key)}") for key, x in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        beyond = isinstance(value, int) and abs(value) > sys.float_info.max
        return math.inf * (1 if value > 0 else -1) if beyond else value
    if hint in (str, bool) and type(value) is hint:
        return value
    if hint is int and type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise InputError(f"{where} must be {KINDS[origin or hint]}", got=short(value))


def _one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    """The first of the kinds that the value is; the first of all if it is none."""
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    for kind in kinds[1:] and kinds:
        if isinstance(kind, type) and issubclass(kind, Record):
            keys = {key for key, each in json_fields(kind).items() if each.init and required(each)}
            if isinstance(value, Mapping) and keys <= value.keys():
                return kind
        elif type(value) is kind or (isinstance(value, list) and get_origin(kind) is tuple):
            return kind
    return kinds[0]


def _name(key: Any) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) < 60 else short(key)
