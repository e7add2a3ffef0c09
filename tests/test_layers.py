"""Layers: imports lead downwards only, late ones too, and no module imports itself in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

LAYERS = [  # the lowest first
    "terminal", "errors", "memory", "processes", "device", "formats", "ir", "metrics",
    "features", "operators", "kernels", "models",
    "inputs", "program", "measure", "calibration", "passes", "artifact",
    "onnx", "training", "report",
    "stages", "pipeline", "study", "api", "broken", "backend", "session", "options", "demo", "cli",
    "__main__",
]  # fmt: skip


def modules() -> dict[str, tuple[Path, bool]]:
    """Every module of the package: its file, and whether it is a package itself."""
    found = {}
    for package in ("asapc", "asapc.passes", "asapc.calibration"):
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        for path in root.rglob("*.py"):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            found[".".join(parts[:-1] if is_package else parts)] = (path, is_package)
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[str]:
    """What a module imports, wherever in it, but for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: import through asapc."
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (whole if whole in known else str(node.module) for whole in wholes)


def with_packages(name: str) -> Iterator[str]:
    """A module, and the packages around it, which run before it does."""
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(2, len(parts) + 1))


@functools.cache
def graph() -> dict[str, set[str]]:
    found = modules()
    known = set(found)
    return {
        name: {
            needed
            for imported in imports(name, path, known) if imported in known
            for needed in with_packages(imported)
            if needed not in with_packages(name)
        }
        for name, (path, _) in found.items()
    }  # fmt: skip


def layer(name: str) -> int:
    return LAYERS.index(name.split(".")[1])


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[1] for name in modules() if name != "asapc"} == set(LAYERS)


def test_every_import_leads_downwards() -> None:
    upwards = [
        f"{name} imports {own}"
        for name, needs in graph().items() if name != "asapc"
        for own in needs
        if own != "asapc" and layer(own) > layer(name)
    ]  # fmt: skip
    assert not upwards


def test_no_module_needs_itself() -> None:
    needs = graph()
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name):], name])
        if name not in done:
            for own in sorted(needs[name]):
                visit(own, (*above, name))
            done.add(name)

    for name in sorted(needs):
        visit(name, ())
