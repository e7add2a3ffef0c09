"""The published JSON schema of report.json (JSON Schema 2020-12), from the types of the report."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from asapc.formats.records import Record, json_fields
from asapc.report.document import COUNT, REPORT_FORMAT, Report

PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"}, bool: {"type": "boolean"}, float: {"type": "number"}, int: COUNT,
}  # fmt: skip
LIMIT = {"if": {"properties": {"kind": {"const": "limit"}}},
         "then": {"oneOf": [{"required": ["min"]}, {"required": ["max"]}]}}  # fmt: skip


def report_schema() -> dict[str, Any]:
    """A new copy of the schema."""
    kinds: dict[str, Any] = {}
    body = _record(Report, kinds)
    kinds["check"] |= LIMIT
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:asapc:report:{REPORT_FORMAT}",
        "title": "asapc report",
        **body,
        "description": "What `asapc report OUT` writes into OUT/report.json. A measurement that is null "
        "was NaN, infinite or could not be taken. Further keys may be added within a format version.",
        "$defs": kinds,
    }


def _record(cls: type[Record], kinds: dict[str, Any]) -> dict[str, Any]:
    """What `to_json` always writes is required."""
    hints, properties = get_type_hints(cls, include_extras=True), dict[str, Any]()
    always = [*cls.always]
    for key, each in json_fields(cls).items():
        if "rest" in each.metadata:
            properties |= each.metadata["rest"]
            continue
        properties[key] = _type(hints[each.name], kinds)
        if "optional" not in each.metadata:
            always.append(key)
    return {"description": inspect.getdoc(cls), "type": "object", "properties": properties,
            "required": always}  # fmt: skip


def _type(hint: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        schema = _type(arguments[0], kinds)
        for more in arguments[1:]:
            schema |= {"description": more} if isinstance(more, str) else more
        return schema
    if NoneType in arguments:
        schema = _type(arguments[0], kinds)
        if "type" not in schema:
            return {"anyOf": [schema, {"type": "null"}]}
        return schema | {"type": [schema["type"], "null"]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type(arguments[1], kinds)}
    if origin is tuple and arguments[-1] is ...:
        return {"type": "array", "items": _type(arguments[0], kinds)}
    if origin is tuple:
        items = [_type(argument, kinds) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    if isinstance(hint, type) and issubclass(hint, Record):
        name = hint.__name__.removesuffix("Report").lower()
        kinds.setdefault(name, kinds.get(name) or _record(hint, kinds))
        return {"$ref": f"#/$defs/{name}"}
    return dict(PLAIN.get(hint, {}))
