"""Typed settings from a user's file: each value is checked by a type, and errors say where it stands.

    CTransforms = Annotated[int, Strict(), Interval(ge=0, le=50)]
    parse({"c_transforms": 51}, {"c_transforms": CTransforms}, Place("recipe r.yaml"))
    -> recipe r.yaml, line 4: c_transforms must be an integer from 0 to 50, got 51

The types are the only description: pydantic checks values by them, messages put them into words, and the
published JSON Schema, which editors use for completion, is made from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Len
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    create_model,
)

from asapc.errors import InputError
from asapc.formats.yaml_file import Located

Compound = Callable[[Any, "Place"], Any]


# YAML 1.1 reads 1e-3 as text. This stands last and runs first: the schema is made of what is before it.
FROM_TEXT = BeforeValidator(lambda value: float(value) if isinstance(value, str) else value)
Finite = Annotated[float, Strict(), AllowInfNan(False), FROM_TEXT]
NonNegative = Annotated[float, Strict(), AllowInfNan(False), Ge(0), FROM_TEXT]
Positive = Annotated[float, Strict(), AllowInfNan(False), Gt(0), FROM_TEXT]
Share = Annotated[float, Strict(), AllowInfNan(False), Interval(ge=0, le=1), FROM_TEXT]
Switch = Annotated[bool, Strict()]


def integer(low: int, high: int) -> Any:
    """The type of a whole number within bounds."""
    return Annotated[int, Strict(), Interval(ge=low, le=high)]


def list_of(kind: Any, low: int = 0, high: int | None = None) -> Any:
    """The type of a list with a given number of values."""
    return Annotated[list[kind], Len(low, high)]


@dataclass(frozen=True)
class Place:
    """Where a value stands: "recipe r.yaml, line 4: sites: a: c_transforms"."""

    file: str
    keys: tuple[str, ...] = ()
    line: int | None = None

    def at(self, key: str, inside: object = None, label: str | None = None) -> Place:
        """Of a key in the mapping `inside`, which knows its lines if it was read from a file."""
        return Place(self.file, (*self.keys, label or key), self.line_of(key, inside).line)

    def line_of(self, key: object, inside: object) -> Place:
        """This place, at the line of that key."""
        line = inside.lines.get(key) if isinstance(inside, Located) else None
        return Place(self.file, self.keys, self.line if line is None else line)

    def __str__(self) -> str:
        file = self.file if self.line is None else f"{self.file}, line {self.line}"
        return ": ".join((file, *self.keys))


def parse(
    data: Mapping[Any, Any],
    types: Mapping[str, Any],
    place: Place,
    compound: Mapping[str, Compound] | None = None,
    *,
    what: str = "key",
    source: Mapping[Any, Any] | None = None,
) -> dict[str, Any]:
    """The values of a mapping, each as its type has it.  compound: keys with a parser of their own;
    what: of a key, for messages; source: where the keys stand in the file, `data` unless given.

    Raises InputError for an unknown key, one that names code, or a wrong value, with its line if `source`
    was read from a file.
    """
    source = data if source is None else source
    parsed = {}
    for key, value in data.items():
        if key not in types:
            if key == "metric":
                raise InputError(
                    f"{place.line_of(key, source)}: a file never names code that runs", got="metric",
                    help="name your own metric with --metric FILE.py:FUNCTION, in Python with metric=",
                )  # fmt: skip
            close = difflib.get_close_matches(str(key), types, n=1)
            raise InputError(
                f"{place.line_of(key, source)}: unknown {what} {key!r}",
                help=(f"did you mean {close[0]!r}? " if close else "") + f"allowed: {', '.join(types)}",
            )
        where = place.at(key, source)
        parser = (compound or {}).get(key)
        parsed[key] = checked(value, types[key], where) if parser is None else parser(value, where)
    return parsed


def checked(value: Any, kind: Any, place: Place) -> Any:
    """The value, converted to a type.  Raises InputError with the type in words."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError:
        raise InputError(f"{place} must be {worded(kind)}", got=repr(value)) from None


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def worded(kind: Any) -> str:
    """A type in words: "an integer from 0 to 50", "ls or kl"."""
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if kind is str:
        return "text"
    base = kind.__origin__
    bounds: dict[str, Any] = {}
    for limit in kind.__metadata__:
        if isinstance(limit, Ge | Gt | Le | Interval):
            limits = {name: getattr(limit, name, None) for name in ("ge", "gt", "le")}
            bounds |= {name: x for name, x in limits.items() if x is not None}
    if base is bool:
        return "true or false"
    if get_origin(base) is list:
        length = next(limit for limit in kind.__metadata__ if isinstance(limit, Len))
        return f"a list of {length.min_length} values"
    noun = "an integer" if base is int else "a finite number"
    if "ge" in bounds and "le" in bounds:
        return f"{noun.replace('finite ', '')} from {bounds['ge']} to {bounds['le']}"
    signs = {"ge": ">=", "gt": ">", "le": "<="}
    return " ".join([noun, *(f"{signs[name]} {limit}" for name, limit in bounds.items())])


def model(name: str, types: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> Any:
    """A type for the schema: a mapping of these keys and no others, none of them needed."""
    fields = {
        key: (kind, Field(default=None, description=(texts or {}).get(key)))
        for key, kind in types.items()
    }
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)  # type: ignore[call-overload]


def json_schema(kind: Any, title: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema 2020-12 of a model, with the defaults of its keys."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **kind.model_json_schema()}
    schema["title"] = title
    for definition in [schema, *schema.get("$defs", {}).values()]:
        for key, value in definition.get("properties", {}).items():
            value.pop("title", None)
            value.pop("default", None)
            if definition is schema and key in defaults:
                value["default"] = defaults[key]
    return schema
