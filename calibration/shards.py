"""Parts of a long computation, each saved as soon as it is done, so that a killed run can resume.

shards.json          format_version, fingerprint: what the parts were computed from; null: they say it
NAME-X.safetensors   one part: its tensors; in the header its key, its facts (JSON) and a checksum

A part is either whole or absent: one that is torn or altered is removed. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asapc.errors import InputError
from asapc.formats.atomic import clean_leftovers, flush, lock_folder, new_file, replace_file
from asapc.formats.json_text import parse_json, read_json
from asapc.inputs.weights import fingerprint as tensor_digest
from asapc.processes import Part
from asapc.terminal.printed import reason

FORMAT_VERSION = 1
_INDEX = "shards.json"


class Shards:
    """The parts in one folder, which one run at a time may have open.

    fingerprint: a digest of each thing the parts depend on, by its name ("model", "data", ...).
    """

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, str]) -> None:
        self.folder = Path(folder).absolute()
        self.fingerprint = dict(fingerprint)
        self._lock: int | None = None

    @classmethod
    def beside(cls, out: str | Path, fingerprint: Mapping[str, str]) -> Shards:
        """Those of a run that will write `out`: in the folder .NAME.shards next to it."""
        final = Path(os.path.realpath(out))
        return cls(final.parent / f".{final.name}.shards", fingerprint)

    def open(self) -> Shards:
        """Make the folder, or continue with what an earlier run left in it; returns self.

        Raises InputError if that run computed something else (naming what differs), if another run has
        the folder open, or if the folder cannot be written or holds other things.
        """
        self._refuse_link()
        try:
            clean_leftovers(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            flush(self.folder.parent)
            self._lock = lock_folder(self.folder)
        except OSError as error:
            rule = f"{self.folder}: must be a folder that can be written"
            raise InputError(rule, got=reason(error)) from error
        if self._lock is None:
            raise InputError(
                f"{self.folder}: one run at a time may write there",
                got="another one that has not ended",
                help="wait for it, or choose another output folder",
            )
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Let another run open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Shards:
        return self if self._lock is not None else self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, key: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Save one part; it is on disk when this returns. facts: what JSON can hold.

        Raises InputError if it cannot be written.
        """
        # clones: the file takes no views of one storage
        copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
               for name, t in tensors.items()}  # fmt: skip
        text = json.dumps(facts, sort_keys=True)
        header = {"key": key, "facts": text, "sha256": _digest(key, text, copies)}
        with new_file(self._path(key)) as partial:
            save_file(copies, partial, header)

    def get(self, key: str) -> Part | None:
        """The tensors and facts of one part; None where there is none, or a damaged one."""
        part = self._read(self._path(key))
        return None if part is None else part[1]

    def drop(self, key: str) -> None:
        """Forget one part."""
        self._path(key).unlink(missing_ok=True)

    def release(self, name: str) -> None:
        """Let the next run differ in this; it must find out itself which parts it can use."""
        self._write_index({**self.fingerprint, name: None})

    def keys(self) -> list[str]:
        """The sorted keys of all whole parts. Reads and checks every part."""
        paths = sorted(self.folder.glob("*.safetensors"))
        return sorted(part[0] for part in map(self._read, paths) if part is not None)

    def discard(self) -> None:
        """Remove the folder and every part, whatever they were computed from."""
        self.close()
        self._refuse_link()
        if not self.folder.is_dir():
            return
        self._require_own()
        # under a leftover's name first: no run would clean up some of the parts without their index
        gone = self.folder.parent / f".{self.folder.name}.{os.urandom(4).hex()}.partial"
        try:
            os.rename(self.folder, gone)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be removed", got=reason(error)) from error
        shutil.rmtree(gone, ignore_errors=True)

    def _check(self) -> None:
        """Write the index, or compare with the one that is there."""
        index = self.folder / _INDEX
        self._require_own()
        if not index.exists():
            self._write_index(self.fingerprint)
            return
        try:
            document = read_json(index)
            version, then = document["format_version"], document["fingerprint"]
            now = self.fingerprint
            released = {name for name in then if then[name] is None}
            unlike = sorted(n for n in {*then, *now} - released if then.get(n) != now.get(n))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"{index}: must say what the parts were computed from",
                got=f"{type(error).__name__}: {error}",
                help=f"delete the folder {self.folder} to start again",
            ) from error
        if version != FORMAT_VERSION:
            unlike = ["version of this format", *unlike]
        if (unlike and not self.keys()) or (released and not unlike):
            self._write_index(self.fingerprint)  # nothing worth keeping, or free to go on
        elif unlike:
            raise InputError(
                f"{self.folder}: an interrupted run can resume only with its original inputs",
                got="another " + ", ".join(unlike),
                help=f"repeat the interrupted command, or start over: --restart, or delete {self.folder}",
            )

    def _write_index(self, fingerprint: Mapping[str, str | None]) -> None:
        document = {"format_version": FORMAT_VERSION, "fingerprint": fingerprint}
        replace_file(self.folder / _INDEX, json.dumps(document, indent=2) + "\n")

    def _refuse_link(self) -> None:
        """Raises InputError for a link: the folder it leads to would be filled and removed."""
        if self.folder.is_symlink():
            raise InputError(
                f"{self.folder}: must be a folder, or not exist", got="a link", help="remove the link"
            )

    def _require_own(self) -> None:
        """Raises InputError if the folder holds other things than parts."""
        names = {entry.name for entry in self.folder.iterdir()}
        if _INDEX not in names and any(not name.startswith(f".{_INDEX}.") for name in names):
            raise InputError(
                f"{self.folder}: must be a folder of parts that asapc wrote, or empty",
                got=f"one holding {sorted(names)[0]!r} and no {_INDEX}",
            )

    def _path(self, key: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", key)[:60]
        unique = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:16]
        return self.folder / f"{readable}-{unique}.safetensors"

    def _read(self, path: Path) -> tuple[str, Part] | None:
        """Its key, tensors and facts. A file that does not hold what was put is removed: None."""
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            key, text = header["key"], header["facts"]
            if header["sha256"] != _digest(key, text, tensors) or self._path(key) != path:
                raise ValueError("another checksum, or another part's file")
            facts = parse_json(text)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{path}: cannot be read", got=reason(error)) from error
        except (SafetensorError, KeyError, ValueError, RuntimeError):
            path.unlink(missing_ok=True)
            return None
        return key, (tensors, facts)


def code_digest() -> str:
    """A digest of asapc's source and torch's version: other code may compute other parts."""
    digest = hashlib.sha256(torch.__version__.encode())
    for package in ("asapc", "asapc.calibration", "asapc.passes"):
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(key: str, facts: str, tensors: Mapping[str, Tensor]) -> str:
    content = json.dumps([key, facts, tensor_digest(tensors)])
    return hashlib.sha256(content.encode()).hexdigest()
