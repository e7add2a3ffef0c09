"""The calibration folder: calibration.json (what and how) and calibration.safetensors (numbers).

calibration.json         format_version, teacher, recipe, capture, data, order, warnings (see
                         calibration.enough), and the facts of every fit, one for each candidate of
                         each site
calibration.safetensors  seen_hashes int64 and, for the c-th fit of a site and each predicted side,
                         <site>.<c>.<side>.coefficients [1|H, F], <site>.<c>.<side>.parameter.<i>,
                         <site>.<c>.intercept [H] where both duals are predicted;
                         <site>.<c>.<operator>.<name>, the tensors among a distilled site's arguments
timings.json             seconds of every fit: the only file that two runs do not write alike
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from asapc.calibration.checked import check_fit, parameters_of, tensor_of
from asapc.calibration.students import student_of
from asapc.errors import InputError
from asapc.features import Feature
from asapc.features.predictor import Amortised, DualPredictor, TransformPlan, transform_plan
from asapc.formats.atomic import read_whole, replace_folder
from asapc.formats.json_text import read_json
from asapc.formats.records import APART, Record
from asapc.inputs.recipe import Recipe
from asapc.inputs.weights import read_safetensors
from asapc.ir import Convention, Distilled
from asapc.operators.catalogue import OPERATORS
from asapc.processes import Part
from asapc.terminal.printed import short

FORMAT_VERSION = 6
_JSON, _TENSORS, _TIMINGS = "calibration.json", "calibration.safetensors", "timings.json"
_HASHES = "seen_hashes"


@dataclass(frozen=True)
class FitQuality(Record):
    """How one dual's fit went, one entry per row of its coefficients.

    r2: in-sample, of the regression rows it was fitted on, see calibration.enough.
    condition_number: of the normal equations, None where it is infinite.  iterations, gradient_norm (mean
    over regression rows) and converged: of the KL fit, empty for "ls".
    kl_examples: how many examples the KL fit has kept; the others enter only its starting point.
    """

    fit: Literal["ls", "kl"]
    r2: tuple[float, ...]
    condition_number: tuple[float | None, ...]
    iterations: tuple[int, ...] = ()
    gradient_norm: tuple[float, ...] = ()
    converged: tuple[bool, ...] = ()
    kl_examples: int | None = None

    def __post_init__(self) -> None:
        if not self.r2 or (self.fit == "kl") > bool(self.gradient_norm):
            raise ValueError("r2 and, of a KL fit, gradient_norm must have a number for each row")


@dataclass(frozen=True)
class SiteCalibration(Record):
    """What was fitted at one site.

    quality: one per predictor of `amortised`.  examples, tokens: examples and regression rows used.
    settings: the fit's, see Recipe.fit_settings.
    """

    convention: Convention
    amortised: Amortised = field(metadata=APART)
    quality: tuple[FitQuality, ...] = field(metadata=APART)  # which JSON has with the predictors
    examples: int
    tokens: int
    fit_seconds: float = field(metadata=APART)
    sharing: Literal["per_head", "pooled", "shared"] = field(
        default="per_head", metadata={"key": "coefficients"}
    )
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(str(feature) for feature in self.amortised.predictors[0].features)

    @property
    def replacement(self) -> Amortised:
        return self.amortised

    @property
    def plan(self) -> TransformPlan | None:
        return self.amortised.plan


@dataclass(frozen=True)
class SiteDistillation(Record):
    """The operator that was distilled at one site.

    errors: relative l2 of each head's output on the held-out examples, root of the mean square.
    steps: after which each head's parameters were kept.  examples, tokens: fitted on; held_out:
    examples the fit stopped by.
    """

    convention: Convention
    distilled: Distilled = field(metadata=APART)
    errors: tuple[float, ...]
    steps: tuple[int, ...]
    examples: int
    held_out: int
    tokens: int
    fit_seconds: float = field(metadata=APART)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.errors:
            raise ValueError("errors must have a number for each head")

    @property
    def count(self) -> int:
        """Pivots or slices of a head, half-steps of a loop."""
        size = self.distilled.settings[OPERATORS[self.distilled.operator].size]
        return int(size.shape[1]) if isinstance(size, Tensor) else int(size)

    @property
    def replacement(self) -> Distilled:
        return self.distilled

    @property
    def plan(self) -> TransformPlan | None:
        return None


AnySiteCalibration = SiteCalibration | SiteDistillation


@dataclass(frozen=True)
class Calibration(Record):
    """Every fit of one teacher's sites, in the order of the recipe's candidates.

    teacher: its fingerprint; recipe: as a mapping; capture: "whole" or "module";
    data: where the examples came from, see formats.places; order: "parallel" fits every site behind the
    teacher's own layers, "sequential" behind the already amortised ones; seen_hashes: 64-bit content
    hashes of the examples used; warnings: what calibration.enough has to say, as JSON types; replayed:
    what replay found, likewise, which compile takes over (passes.replay.Replayed).
    """

    teacher: str
    recipe: Mapping[str, Any]
    capture: str
    sites: Mapping[str, Sequence[AnySiteCalibration]] = field(metadata=APART)
    data: str
    order: Literal["parallel", "sequential"] = "parallel"
    seen_hashes: tuple[int, ...] = field(default=(), metadata=APART)
    warnings: tuple[Mapping[str, Any], ...] = ()
    replayed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fit_seconds(self) -> float:
        return sum(fit.fit_seconds for fits in self.sites.values() for fit in fits)

    def fit_of(
        self, site: str, settings: Mapping[str, Any], plan: TransformPlan | None
    ) -> AnySiteCalibration | None:
        """The fit of one candidate: its settings and, where a dual is predicted, its plan."""
        for fit in self.sites.get(site, ()):
            if dict(fit.settings) == dict(settings) and fit.plan == plan:
                return fit
        return None


def save_calibration(folder: str | Path, calibration: Calibration) -> None:
    """Write the folder whole or not at all. Raises InputError if it cannot be written."""
    hashes = np.array(calibration.seen_hashes, np.uint64)
    tensors = {_HASHES: torch.from_numpy(hashes.view(np.int64))}
    sites = {}
    for name, fits in calibration.sites.items():
        for index, fit in enumerate(fits):
            tensors.update(fit_tensors(f"{name}.{index}", fit))
        sites[name] = [fit_document(fit) for fit in fits]
    seconds = {name: [fit.fit_seconds for fit in fits] for name, fits in calibration.sites.items()}
    document = {"format_version": FORMAT_VERSION, **calibration.to_json(), "sites": sites}
    with replace_folder(folder) as partial:
        save_file(tensors, partial / _TENSORS)
        text = json.dumps(document, indent=2, allow_nan=False)
        (partial / _JSON).write_text(text + "\n", encoding="utf-8")
        (partial / _TIMINGS).write_text(json.dumps({"fit_seconds": seconds}) + "\n", encoding="utf-8")
        for written in partial.iterdir():  # safetensors writes for its owner alone
            written.chmod(0o644)


def load_calibration(folder: str | Path) -> Calibration:
    """Read a folder that save_calibration wrote.

    Raises InputError if it is missing, truncated, from another version or inconsistent.
    """
    return read_whole(folder, lambda: _load(Path(folder)))


def _load(place: Path) -> Calibration:
    document = _read_json(place / _JSON)
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(
            f"{place / _JSON}: format_version must be {FORMAT_VERSION}",
            got=version,
            help="run `asapc calibrate` again with this version of asapc",
        )
    if not (place / _TENSORS).is_file():
        raise _broken(place, f"{_TENSORS} is missing")
    try:
        tensors = read_safetensors(place / _TENSORS)
    except InputError as error:
        raise _broken(place, f"{_TENSORS}: {error.got}") from error
    timings = _read_json(place / _TIMINGS)
    try:
        seconds = timings["fit_seconds"]
        sites = {
            name: _fits(name, fits, tensors, seconds.get(name, ()))
            for name, fits in document["sites"].items()
        }
        hashes = _hashes(tensors).numpy().view(np.uint64).tolist()
        return Calibration.from_json(document, _JSON, sites=sites, seen_hashes=tuple(hashes))
    except InputError as error:
        raise InputError(
            f"{place}: damaged calibration folder: {error.rule}",
            got=error.got,
            help="run `asapc calibrate` again",
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise _broken(place, f"{type(error).__name__}: {error}") from error


def _hashes(tensors: Mapping[str, Tensor]) -> Tensor:
    stored = tensors.get(_HASHES)
    count = stored.numel() if stored is not None and stored.dim() == 1 else None
    return tensor_of(tensors, _HASHES, (count,), torch.int64)


def _fits(
    name: str, fits: Any, tensors: Mapping[str, Tensor], seconds: Any
) -> tuple[AnySiteCalibration, ...]:
    if not isinstance(fits, list) or not fits:
        raise ValueError(f"{name}: expected a list of fits")
    return tuple(
        fit_from(f"{name}.{index}", {**data, "seconds": float(taken)}, tensors)
        for index, (data, taken) in enumerate(zip(fits, seconds, strict=True))
    )


def fit_tensors(name: str, site: AnySiteCalibration) -> dict[str, Tensor]:
    """The tensors of a fit under names that start with `name`."""
    if isinstance(site, SiteDistillation):
        stem, settings = f"{name}.{site.distilled.operator}", site.distilled.settings.items()
        return {f"{stem}.{key}": x.contiguous() for key, x in settings if isinstance(x, Tensor)}
    tensors = {}
    for predictor in site.amortised.predictors:
        stem = f"{name}.{predictor.side}"
        tensors[f"{stem}.coefficients"] = predictor.coefficients.contiguous()
        for index, parameter in enumerate(predictor.parameters):
            if parameter is not None:
                tensors[f"{stem}.parameter.{index}"] = parameter.contiguous()
    if site.amortised.intercept is not None:
        tensors[f"{name}.intercept"] = site.amortised.intercept.contiguous()
    return tensors


def fit_part(name: str, site: AnySiteCalibration) -> Part:
    """A whole fit: its tensors, and its document with how long it took."""
    return fit_tensors(name, site), {**fit_document(site), "seconds": site.fit_seconds}


def fit_document(site: AnySiteCalibration) -> dict[str, Any]:
    """The rest of a fit in JSON types, except how long it took."""
    facts = {**site.to_json(), "settings": dict(sorted(site.settings.items()))}
    if isinstance(site, SiteDistillation):
        arguments = sorted(site.distilled.settings.items())
        return {
            **facts, "operator": site.distilled.operator, "share": site.distilled.share,
            "arguments": {key: "tensor" if isinstance(x, Tensor) else x for key, x in arguments},
        }  # fmt: skip
    predictors = zip(site.amortised.predictors, site.quality, strict=True)
    return {
        **facts, "plan": asdict(site.amortised.plan), "features": list(site.features),
        "duals": [
            {"side": x.side, "points": x.points, "budget": asdict(x.budget), **quality.to_json()}
            for x, quality in predictors
        ],
    }  # fmt: skip


def fit_from(name: str, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> AnySiteCalibration:
    """Inverse of fit_part.

    Only numbers are read from the file. What is computed with them follows from the convention, the plan
    and the recipe's settings, which the file must agree with.  Raises KeyError, TypeError, ValueError or
    InputError where it does not.
    """
    seconds = float(data["seconds"])
    if not math.isfinite(seconds):
        raise ValueError(f"{name}: the seconds of a fit must be finite")
    convention = Convention.from_json(data["convention"], f"{name}: convention")
    settings = Recipe.from_dict(data["settings"], where=f"{name}: settings").fit_settings()
    fit: AnySiteCalibration
    if settings["operator"] == "asap":
        amortised = _amortised(name, convention, settings, data["plan"], tensors)
        quality = tuple(FitQuality.from_json(dual, f"{name}: duals") for dual in data["duals"])
        fit = SiteCalibration.from_json(
            data, name, amortised=amortised, quality=quality, fit_seconds=seconds
        )
    else:
        distilled = student_of(name, convention, settings, tensors)
        fit = SiteDistillation.from_json(data, name, distilled=distilled, fit_seconds=seconds)
    for key, value in fit_document(fit).items():
        if _canonical(data.get(key)) != _canonical(value):
            raise InputError(
                f"{name}: {key} must be what the fit's convention, plan and settings make it",
                got=short(data.get(key)),
            )
    return fit


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _amortised(
    name: str,
    convention: Convention,
    settings: Mapping[str, Any],
    plan_data: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Amortised:
    plan = transform_plan(convention, *(plan_data[key] for key in ("c_transforms", "side", "aim")))
    if plan is None:
        raise ValueError(f"{name}: the plan does not fit the convention")
    features = tuple(map(Feature.parse, settings["features"]))
    predictors = tuple(
        DualPredictor(
            side, features, parameters_of(tensors, f"{name}.{side}", features),
            tensor_of(tensors, f"{name}.{side}.coefficients", (None, None)),
            plan.budget(convention, side), settings["points"],
        )
        for side in plan.sides()
    )  # fmt: skip
    intercept = tensor_of(tensors, f"{name}.intercept", (None,)) if plan.side == "both" else None
    amortised = Amortised(plan, predictors, intercept)
    check_fit(name, amortised)
    return amortised


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
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


def fit_facts(fitted: AnySiteCalibration | None) -> dict[str, Any]:
    """What the manifest and the report say about a fit; every value is None if nothing was fitted."""
    names = ("side", "c_transforms", "rescaled", "aim", "points", "features", "fit", "coefficients", "r2",
             "condition_number", "fit_converged", "kl_examples", "examples", "pivots", "slices",
             "fit_rel_l2")  # fmt: skip
    nothing: dict[str, Any] = dict.fromkeys(names)
    if fitted is None:
        return nothing
    if isinstance(fitted, SiteDistillation):
        distilled = fitted.distilled
        settings = distilled.settings
        facts = {name: settings[name] for name in ("coupling", "ties") if name in settings}
        if settings.get("summary_tokens"):
            facts["summary_tokens"] = settings["summary_tokens"]
        if settings.get("depthwise") is not None:
            facts["depthwise"] = settings["depthwise"].shape[2]
        return nothing | facts | {
            "fit": "distilled",
            OPERATORS[distilled.operator].size: fitted.count,
            "fit_rel_l2": max(fitted.errors),
            "examples": fitted.examples,
        }
    conditions = [c for quality in fitted.quality for c in quality.condition_number if c is not None]
    converged = [c for quality in fitted.quality for c in quality.converged]
    plan = fitted.amortised.plan
    return nothing | {
        "side": plan.side,
        "c_transforms": plan.c_transforms,
        "rescaled": plan.rescaled,
        "aim": plan.aim,
        "points": fitted.amortised.predictors[0].points,
        "features": list(fitted.features),
        "fit": fitted.quality[0].fit,
        "coefficients": fitted.sharing,
        "r2": min(r2 for quality in fitted.quality for r2 in quality.r2),
        "condition_number": max(conditions, default=None),
        "fit_converged": all(converged) if converged else None,
        "kl_examples": fitted.quality[0].kl_examples,
        "examples": fitted.examples,
    }
