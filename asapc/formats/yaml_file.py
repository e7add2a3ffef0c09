"""Reads a user's YAML file: safe types only, no repeated keys, errors that name the line."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from asapc.errors import InputError
from asapc.formats.json_text import read_file
from asapc.terminal.printed import one_line, reason

MAX_BYTES = 1 << 17  # PyYAML takes a second for this much
MAX_VALUES = 20_000
MAX_DEPTH = 50


class Located(dict[Any, Any]):
    """A mapping that knows the line of each of its keys in the file, counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key instead of keeping the last one, and merged keys."""

    def construct_located(self, node: yaml.MappingNode) -> Iterator[Located]:
        data = Located()
        yield data  # an alias inside may mean this very mapping
        data.update(self.construct_mapping(node))
        data.lines = {self.construct_object(key): key.start_mark.line + 1 for key, _ in node.value}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # of which it would see a key that is no text
                raise yaml.constructor.ConstructorError(
                    None, None, "merge keys (<<) are not read: write the keys out", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_located)


def read_yaml_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """The mapping at the top of a YAML (or JSON) file; an empty file is an empty mapping.

    what: "recipe" or "gates", for messages.  Raises InputError.
    """
    try:
        content = read_file(path, MAX_BYTES + 1)
        text = content.decode()
    except FileNotFoundError:
        raise InputError(f"{what} {path}: no such file", help="check the path") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{what} {path}: cannot be read", got=reason(error)) from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{what} {path}: at most {MAX_BYTES} bytes are read", got="more")
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
        _check_size(data)
    except Exception as error:  # PyYAML's constructors raise various types, for `!!int x` and the like
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        why = one_line(problem or "") or reason(error)
        raise InputError(f"{what} {path}: {where}not valid YAML: {why}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(
            f"{what} {path}: the file must be a mapping of keys to values",
            got=type(data).__name__,
        )
    for key in data:
        if not isinstance(key, str):
            raise InputError(f"{what} {path}: keys must be text", got=repr(key))
    return data


def _check_size(data: Any) -> None:
    """Raises ValueError if aliases make a small file large, or a value could not be written again."""
    level = [data]
    count = 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, int) and value.bit_length() > 64:
                raise ValueError("a number of more than 64 bits")
            elif isinstance(value, dict):
                deeper += [*value, *value.values()]
            elif isinstance(value, list | tuple | set):
                deeper += value
            if count + len(deeper) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES} values, aliases counted where they stand")
        count += len(deeper)
        level = deeper
        if not level:
            return
    raise ValueError("values are nested too deep")
