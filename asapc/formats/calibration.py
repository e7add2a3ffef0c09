"""The calibration folder: calibration.json (what and how) and calibration.safetensors (numbers).

calibration.json         format_version, teacher, recipe, capture, data, per-site facts
calibration.safetensors  <site>.theta [L, D], <site>.coefficients [1|H, L], seen_hashes int64
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asapc.errors import InputError
from asapc.formats.atomic import replace_folder
from asapc.ir import Convention

FORMAT_VERSION = 1
_JSON, _TENSORS, _HASHES = "calibration.json", "calibration.safetensors", "seen_hashes"


@dataclass(frozen=True)
class SiteCalibration:
    """What was fitted at one site.

    theta: [L, D] directions; coefficients: [1|H, L] float32; closures: half-steps that follow.
    r2, condition_number: one per row of coefficients; condition_number may be inf.
    examples, tokens: examples and regression rows (of each row of coefficients) that were used.
    """

    convention: Convention
    closures: int
    features: tuple[str, ...]
    theta: Tensor
    coefficients: Tensor
    r2: tuple[float, ...]
    condition_number: tuple[float, ...]
    examples: int
    tokens: int
    fit_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Every fitted site of one teacher.

    teacher: its fingerprint; recipe: as a mapping; capture: "whole" or "module";
    data: where the examples came from; seen_hashes: 64-bit content hashes of the examples used.
    """

    teacher: str
    recipe: Mapping[str, Any]
    capture: str
    sites: Mapping[str, SiteCalibration]
    data: str
    seen_hashes: tuple[int, ...] = field(default=())

    @property
    def fit_seconds(self) -> float:
        return sum(site.fit_seconds for site in self.sites.values())


def save_calibration(folder: str | Path, calibration: Calibration) -> None:
    """Write the folder whole or not at all. Raises InputError if it cannot be written."""
    tensors = {_HASHES: torch.tensor([_signed(h) for h in calibration.seen_hashes]).long()}
    sites = {}
    for name, site in calibration.sites.items():
        tensors[f"{name}.theta"] = site.theta.contiguous()
        tensors[f"{name}.coefficients"] = site.coefficients.contiguous()
        sites[name] = {
            "convention": site.convention.to_dict(),
            "closures": site.closures,
            "features": list(site.features),
            "r2": list(site.r2),
            "condition_number": [c if math.isfinite(c) else None for c in site.condition_number],
            "examples": site.examples,
            "tokens": site.tokens,
            "fit_seconds": site.fit_seconds,
        }
    document = {
        "format_version": FORMAT_VERSION,
        "teacher": calibration.teacher,
        "capture": calibration.capture,
        "data": calibration.data,
        "recipe": dict(calibration.recipe),
        "sites": sites,
    }
    with replace_folder(folder) as partial:
        save_file(tensors, partial / _TENSORS)
        text = json.dumps(document, indent=2, allow_nan=False)
        (partial / _JSON).write_text(text + "\n", encoding="utf-8")


def load_calibration(folder: str | Path) -> Calibration:
    """Read a folder that save_calibration wrote.

    Raises InputError if it is missing, truncated, from another version or inconsistent.
    """
    place = Path(folder)
    document = _read_json(place / _JSON)
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(
            f"{place / _JSON}: format_version must be {FORMAT_VERSION}",
            got=version,
            help="run `asapc calibrate` again with this version of asapc",
        )
    try:
        tensors = load_file(place / _TENSORS)
    except FileNotFoundError:
        raise _broken(place, f"{_TENSORS} is missing") from None
    except (OSError, SafetensorError) as error:
        raise _broken(place, f"{_TENSORS}: {error}") from error
    try:
        return Calibration(
            teacher=document["teacher"],
            recipe=document["recipe"],
            capture=document["capture"],
            sites={name: _site(name, s, tensors) for name, s in document["sites"].items()},
            data=document["data"],
            seen_hashes=tuple(h & (2**64 - 1) for h in tensors[_HASHES].tolist()),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(place, f"{type(error).__name__}: {error}") from error


def _site(name: str, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SiteCalibration:
    theta, coefficients = tensors[f"{name}.theta"], tensors[f"{name}.coefficients"]
    if theta.dim() != 2 or coefficients.dim() != 2 or coefficients.shape[1] != theta.shape[0]:
        raise ValueError(f"{name}: theta {[*theta.shape]}, coefficients {[*coefficients.shape]}")
    if not bool(theta.isfinite().all() and coefficients.isfinite().all()):
        raise ValueError(f"{name}: theta and coefficients must be finite")
    return SiteCalibration(
        convention=Convention.from_dict(data["convention"]),
        closures=int(data["closures"]),
        features=tuple(data["features"]),
        theta=theta,
        coefficients=coefficients,
        r2=tuple(float(x) for x in data["r2"]),
        condition_number=tuple(math.inf if x is None else x for x in data["condition_number"]),
        examples=int(data["examples"]),
        tokens=int(data["tokens"]),
        fit_seconds=float(data["fit_seconds"]),
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path.parent}: not a calibration folder",
            got=f"no {path.name}",
            help="make one with `asapc calibrate MODEL --data DATA -o CALIB`",
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read", got=error.strerror) from error
    except ValueError as error:
        raise _broken(path.parent, f"{path.name}: {error}") from error


def _broken(folder: Path, reason: str) -> InputError:
    return InputError(
        f"{folder}: damaged calibration folder", got=reason, help="run `asapc calibrate` again"
    )


def _signed(value: int) -> int:
    """A 64-bit hash as the int64 with the same bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
