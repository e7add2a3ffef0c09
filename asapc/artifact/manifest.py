"""manifest.json: what it must hold, whoever wrote it, and how it moves with its folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Len
from pydantic import (
    AfterValidator,
    AllowInfNan,
    ConfigDict,
    StringConstraints,
    ValidationError,
    create_model,
)

from asapc.errors import InputError
from asapc.formats import places
from asapc.formats.json_text import read_json
from asapc.formats.records import read
from asapc.inputs.paths import check_artifact
from asapc.inputs.settings import list_of
from asapc.operators.catalogue import convention_from_json
from asapc.program.call import Call, Child, Tree
from asapc.program.compiled import Inside
from asapc.program.state import is_question
from asapc.terminal.printed import reason, short

FORMAT_VERSION = 7
MANIFEST, SELECTION = "manifest.json", "selection.json"
TENSORS, RECIPE = "model.safetensors", "recipe.yaml"
Stage = Literal["graph", "lossless", "teacher"]
STAGES: tuple[Stage, ...] = ("graph", "lossless", "teacher")
DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}  # fmt: skip


def damaged(rule: str, got: object = None) -> InputError:
    """The error for a folder that asapc would not write like this."""
    return InputError(rule, got=got, help="copy the whole folder again, or compile again")


@contextlib.contextmanager
def consistent(place: Path) -> Iterator[None]:
    """Turn whatever torch or Python raises about parts that disagree into one message."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise damaged(f"{place}: must hold programs that can be run", reason(error)) from error


def _made(make: Callable[[Any], Any]) -> Any:
    """The type of values that `make` accepts without a KeyError, a TypeError or the like."""

    def check(value: Any) -> Any:
        try:
            make(value)
        except (InputError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(reason(error)) from None
        return value

    return Annotated[Any, AfterValidator(check)]


def _keys(**types: Any) -> Any:
    """The type of a mapping with these keys, and any others."""
    return create_model("_Keys", __config__=ConfigDict(strict=True), **types)


def _question(text: str) -> str:
    if not is_question(text):
        raise ValueError("no question that a model's code asks of torch")
    return text


_Question = Annotated[str, AfterValidator(_question)]
_Digest = Annotated[str, StringConstraints(pattern=places.DIGEST)]
_Texts, _Number = list[str], float | None
_Names = list[Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$")]]
_Program = Annotated[str, StringConstraints(pattern=r"\.pt2$")]
_Call = _made(partial(Call.from_json, where="call"))
_Site = _keys(
    name=str, operator=str, reason=str, convention=_made(convention_from_json), replay_error=_Number,
    replay=dict[str, float], side=str | None, c_transforms=int | None, rescaled=bool | None,
    coefficients=str | None, features=_Texts | None, fit=str | None, fit_converged=bool | None,
    r2=_Number, condition_number=_Number, constants=dict[str, Literal["parameter", "buffer"]],
    no_gradient=str | None, aim=(str | None, None), points=(str | None, None),
    heads=(int | None, None), head_dim=(int | None, None),
    selection_attention_rel_l2=(_Number, None),
)  # fmt: skip
_Module = _keys(
    name=str, sites=_Texts, tensors=dict[str, str], own_forward=bool,
    inside=list_of(_made(partial(Inside.from_json, where="inside"))),
)  # fmt: skip
_Live = _keys(
    file=_Program, dtype=Literal[tuple(DTYPES)], call=_Call, modules=list_of(_Module),
    children=list_of(_made(partial(Child.from_json, where="child"))),
)  # fmt: skip
_Part = _keys(
    name=str, plain=_Texts, calls=_keys(**dict.fromkeys(STAGES, _Texts)),
    **dict.fromkeys(STAGES, _Program),
    output=(_made(partial(read, Tree, where="output")), None),
)  # fmt: skip
_MANIFEST = _keys(
    capture=Literal["whole", "module"], call=_keys(args=_Names, kwargs=_Names), forward=_Call | None,
    teacher=_keys(source=str, fingerprint=str), data=str, calibration_order=str,
    files=dict[str, _Digest],
    programs=list_of(_Part, 1), sites=list_of(_Site, 1),
    refused=list_of(_keys(name=str, status=str, reason=str)),
    live=_keys(programs=list_of(_Live), left=dict[str, str]),
    sizes=(str, ""), questions=(list_of(_Question), []),
    not_applied=(_Texts, []), frozen=(_Texts, []), refresh=(dict[str, Any], {}),
    parameters=(list_of(Annotated[_Texts, Len(2, 2)]), []), not_persistent=(_Texts, []),
    onnx=(_keys(inputs=_Texts, outputs=_Texts), None),
    warnings=(list_of(_keys(sites=_Texts, text=str)), []),
)  # fmt: skip

_SELECTION = _keys(
    sha256=_Digest, fit_seconds=Annotated[float, Ge(0), AllowInfNan(False)],
    sites=(list_of(dict[str, Any]), []), rounds=(list_of(dict[str, Any]), []),
)  # fmt: skip


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read manifest.json and check what the rest relies on."""
    path = folder / MANIFEST
    check_artifact(folder)
    manifest = readable(path)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path}: format_version must be {FORMAT_VERSION}",
            got=version,
            help="compile again with this version of asapc",
        )
    _check_types(path, manifest, _MANIFEST)
    _check_rules(path, manifest)
    return dict(manifest)


def readable(path: Path) -> Any:
    """Read a JSON file of an artefact."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise damaged(f"{path}: must be readable JSON", error) from error


def _check_types(path: Path, document: Any, keys: Any) -> None:
    """Raises InputError if a key that the rest relies on is missing or has another type."""
    try:
        keys.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        *around, key = map(str, first["loc"] or ("the document",))
        rule = f"{key} {first['msg'].replace('Input should', 'must')}".replace(" Value error, ", ": ")
        if first["type"] == "missing":
            rule = f"must have {key!r}"
        raise damaged(f"{path}: {': '.join([*around, rule])}", short(first["input"])) from None


def _check_rules(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises InputError if parts of the manifest do not fit together."""
    programs, live, sites = manifest["programs"], manifest["live"]["programs"], manifest["sites"]
    files = files_of(manifest)
    for file in files:
        inside(path.parent, file)
    names = [site["name"] for site in sites]
    called_for = [site["name"] for site in sites if site["operator"] != "teacher"]
    rules = {
        "a model captured whole has a forward": bool(manifest["forward"])
        == (manifest["capture"] == "whole"),
        "every file has one digest": sorted(manifest["files"]) == files,
        "every site has a name of its own": len({*names}) == len(names),
        "a live module has sites of the model": all(
            {*module["sites"]} <= {*names} for entry in live for module in entry["modules"]
        ),
    }
    for stage, wanted in (("lossless", names), ("graph", called_for), ("teacher", [])):
        called = [site for entry in programs for site in entry["calls"][stage]]
        rule = f"the {stage} programs call an operator for each of its sites, once"
        rules[rule] = sorted(called) == sorted(wanted)
    for rule, holds in rules.items():
        if not holds:
            raise damaged(f"{path}: {rule}")


def files_of(manifest: Mapping[str, Any]) -> list[str]:
    """The files of an artefact, except manifest.json and selection.json, which vouches for both."""
    programs = [entry[stage] for entry in manifest["programs"] for stage in STAGES]
    live = [entry["file"] for entry in manifest["live"]["programs"]]
    return sorted([TENSORS, RECIPE, *programs, *live])


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises InputError if a file is not the one that was written with this manifest."""
    for file, digest in manifest["files"].items():
        now = places.digest_of(folder / file)
        if now != digest:
            got = "no such file" if now is None else f"one of SHA-256 {now[:16]}, not {digest[:16]}"
            raise _mixed_up(folder / file, got)


def read_selection(folder: Path) -> dict[str, Any]:
    """Read selection.json, without its seal, and check what the rest relies on."""
    path = folder / SELECTION
    selection = readable(path)
    _check_types(path, selection, _SELECTION)
    if selection.pop("sha256") != seal_of(folder, selection):
        raise _mixed_up(path, f"another {SELECTION}, or another {MANIFEST}")
    return dict(selection)


def seal_of(folder: Path, selection: Mapping[str, Any]) -> str:
    """sha256 of manifest.json and the selection, which holds times: manifest.json has none."""
    facts = [places.digest_of(folder / MANIFEST), selection]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _mixed_up(path: Path, got: str) -> InputError:
    return damaged(f"{path}: must be the file that was written with the others in its folder", got)


def inside(folder: Path, relative: Any) -> Path:
    """A path of the manifest, which must not leave the folder."""
    try:
        path = Path(os.path.realpath(folder / str(relative)))
        is_inside = path.is_relative_to(os.path.realpath(folder))
    except ValueError:  # a zero byte, half of a surrogate pair
        is_inside = False
    if not is_inside:
        raise InputError(f"{folder}: the manifest must name files inside the folder", got=repr(relative))
    return path


def places_moved(manifest: Mapping[str, Any], folder: Path, other: str | Path) -> dict[str, Any]:
    """The manifest of a copy of `folder` in `other`, see formats.places."""

    def moved(entry: Mapping[str, Any]) -> dict[str, Any]:
        data = {"data": places.moved(str(entry["data"]), folder, other)} if "data" in entry else {}
        earlier = {"earlier": [moved(x) for x in entry["earlier"]]} if "earlier" in entry else {}
        return {**entry, **data, **earlier}

    refresh = {"refresh": moved(manifest["refresh"])} if "refresh" in manifest else {}
    teacher = dict(manifest["teacher"])
    if "onnx" in manifest:
        teacher["source"] = places.moved(teacher["source"], folder, other)
    return {**moved(manifest), **refresh, "teacher": teacher}
