"""Run a user's Python: "pkg.module:name" or "path/file.py:name", with failures as messages."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from asapc.errors import InputError


def describe(error: BaseException, path: str | None = None) -> str:
    """ "ValueError: message (file.py, line 3)"; the line is the deepest one in `path`, if any."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    if frames and path is not None:
        text += f" ({Path(path).name}, line {frames[-1].lineno})"
    return text


class _LastResort(MetaPathFinder):
    """Finds modules beside a user's code that nothing else has: a forward may import when it runs."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if path is not None else PathFinder.find_spec(name, self.places)


_last_resort = _LastResort()


@contextlib.contextmanager
def _importable(places: list[str], *, keep_modules: bool) -> Iterator[None]:
    """Imports look in `places` first and leave no bytecode; what is printed goes to stderr.

    What the code puts on sys.path is added to `places` for the next time; sys.path is restored.  Unless
    keep_modules, modules found in `places` leave sys.modules again, so that two models can each have a
    `utils.py`.
    """
    path, modules, bytecode = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.path[:0] = places
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        places[:] = dict.fromkeys(place for place in sys.path if place not in path or place in places)
        sys.path[:] = path
        sys.dont_write_bytecode = bytecode
        if _last_resort not in sys.meta_path:
            sys.meta_path.append(_last_resort)
        _last_resort.places = [*dict.fromkeys([*places, *_last_resort.places])]
        if not keep_modules:
            folders = {Path(os.path.realpath(place)) for place in places}
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None)
                if file and folders & {*Path(os.path.realpath(file)).parents}:
                    del sys.modules[name]


def _load_file(path: Path) -> ModuleType:
    """Import a file under a unique name, so that no other module is replaced."""
    name = f"asapc_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch look classes up by their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class UserCode:
    """A callable named by the user.

    file: the source file it was found in.  Raises InputError when it cannot be imported or found.
    """

    def __init__(self, spec: str, role: str) -> None:
        self.spec = spec
        self.role = role
        location, _, name = spec.rpartition(":")
        if not location or not name:
            raise InputError(
                f"{role} must be pkg.module:name or file.py:name",
                got=repr(spec),
                help="name the function after a colon, for example model.py:build",
            )
        is_file = location.endswith(".py")
        file = Path(os.path.realpath(location))
        if is_file and not file.is_file():
            raise InputError(f"{location}: no such file", help="check the path before the colon")
        self._places = [str(file.parent if is_file else Path.cwd())]
        self._keep_modules = not is_file
        self.file: str | None = str(file) if is_file else None
        module = self._import(location, file if is_file else None)
        self.file = getattr(module, "__file__", None) or self.file
        target: Any = module
        for part in name.split("."):
            target = getattr(target, part, None)
        if not callable(target):
            callables = [
                name
                for name, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "") == module.__name__
            ]
            raise InputError(
                f"{location} must define a callable {name!r}",
                got="no such name" if target is None else f"a {type(target).__name__}",
                help="it defines " + (", ".join(callables[:8]) if callables else "no function or class"),
            )
        self.target: Callable[..., Any] = target

    def _import(self, location: str, file: Path | None) -> ModuleType:
        try:
            with _importable(self._places, keep_modules=self._keep_modules):
                module = importlib.import_module(location) if file is None else _load_file(file)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{location} could not be imported",
                got=describe(error, self.file),
                help="install what it imports, or run the command where Python can import it",
            ) from error
        sys.modules[module.__name__] = module  # it lies in the folder, so it had to leave too
        return module

    def run(self, function: Callable[[], Any], action: str) -> Any:
        """function(), with the user's imports found; an exception becomes an InputError."""
        try:
            with _importable(self._places, keep_modules=self._keep_modules):
                return function()
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{self.role} {self.spec} must {action} without an error",
                got=describe(error, self.file),
                help="call it in plain Python to see the whole traceback, or add --debug",
            ) from error

    def call(self, /, **kwargs: Any) -> Any:
        """The callable's result.  Raises InputError with its exception, SystemExit included."""
        return self.run(lambda: self.target(**kwargs), "return")
