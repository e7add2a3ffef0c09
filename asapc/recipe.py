"""A recipe: what may be tried at each site and how close it must be.  Typed data, read from YAML.

    operator: auto            # auto | lossless | sinkhorn | asap | esp_hard | lot
    side: key                 # key | source: whose dual is predicted; both: an ablation
    closures: 1               # at most; the site's convention decides the parity. 0 with side: both
    features: ["coarse:32"]   # families a dual is predicted from, see asapc.features
    fit: ls                   # ls | kl
    ridge: 1.0e-3
    ridge_mode: risk          # risk: lambda = regression rows * ridge | direct: lambda = ridge
    coefficients: per_head    # per_head | pooled over heads | shared by heads and sites
    pivots: 32                # of lot, per head
    slices: 32                # of esp_hard, per head
    budget: {attention_rel_l2: 0.05, prediction_change: 0.01}
    sites:
      "transformer.layers.0.*": {operator: sinkhorn}

`asapc calibrate` and `asapc compile` read the same file.  An unknown key, a wrong type and a
pattern that matches no site are errors: an option ignored silently is worse than one refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from asapc.errors import InputError
from asapc.features import Feature
from asapc.features.predictor import RecipeSide
from asapc.yaml_file import read_yaml_mapping

Operator = Literal["auto", "lossless", "sinkhorn", "asap", "esp_hard", "lot"]

MAX_CLOSURES = 50
DEFAULT_BUDGET = {"attention_rel_l2": 0.05, "prediction_change": 0.01}
SITE_KEYS = (
    "operator", "side", "closures", "features", "fit", "ridge", "ridge_mode", "coefficients",
    "pivots", "slices", "budget",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Every field has a default; `Recipe()` is the recipe used when none is given.

    operator:            "auto" measures and picks inside the budget; the others are forced. "lossless"
                         is the site's own operator, "sinkhorn" that of a Sinkhorn site.
    side:                which dual is predicted: "source" the queries', "key" the keys'.
    closures:            most half-steps after the predicted dual (fewer if the parity asks for it).
    features:            entries `family`, `family:count` or `family:count:kind`.
    fit:                 "ls" least squares on the dual; "kl" the plan's Kullback-Leibler divergence.
    ridge, ridge_mode:   lambda of either fit, >= 0, by default per regression row.
    coefficients:        one vector for each head, for all heads of a site, or for all sites.
    pivots, slices:      of each head, where a Sinkhorn site is distilled into lot or esp_hard.
    seed:                directions and any sampling.
    budget:              largest allowed attention_rel_l2 of the worst site, and share of predictions
                         that exact sorting instead of a soft one may change.
    drop_attention_maps: leave out attention maps the teacher returned.
    batch_size, max_examples: how calibration data is streamed.
    sites:               glob pattern on site names -> overrides, later patterns win.
    """

    operator: Operator = "auto"
    side: RecipeSide = "key"
    closures: int = 1
    features: tuple[str, ...] = ("coarse:32",)
    fit: Literal["ls", "kl"] = "ls"
    ridge: float = 1e-3
    ridge_mode: Literal["risk", "direct"] = "risk"
    coefficients: Literal["per_head", "pooled", "shared"] = "per_head"
    pivots: int = 32
    slices: int = 32
    seed: int = 0
    budget: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_BUDGET))
    drop_attention_maps: bool = False
    batch_size: int = 32
    max_examples: int = 512
    sites: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def for_site(self, name: str) -> Recipe:
        """This recipe with the overrides of every pattern that matches `name`, in file order."""
        resolved = replace(self, sites={})
        for pattern, overrides in self.sites.items():
            if fnmatchcase(name, pattern):
                resolved = replace(resolved, **overrides)
        resolved.check_side(f"recipe: {name}")
        return resolved

    def check_side(self, where: str) -> None:
        """InputError unless `side: both` and `closures: 0` stand together, once overrides apply."""
        if (self.side == "both") != (self.closures == 0):
            raise InputError(
                f"{where}: `side: both` goes with `closures: 0`, which predicts both duals",
                got=f"side: {self.side}, closures: {self.closures}",
                help="name both keys, or neither",
            )

    def parsed_features(self) -> tuple[Feature, ...]:
        return tuple(Feature.parse(text) for text in self.features)

    def check_patterns(self, site_names: Iterable[str]) -> None:
        """InputError if a pattern under `sites` matches none of the names."""
        names = list(site_names)
        for pattern in self.sites:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"recipe: the pattern {pattern!r} under sites must match a site",
                    got=f"sites {', '.join(names)}" if names else "a model without sites",
                    help="`asapc inspect MODEL` lists the names",
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain types only; `Recipe.from_dict` inverts it."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Checks every key and value.  Raises InputError naming the key and what is allowed."""
        return cls(**_parse(data, tuple(item.name for item in fields(cls)), where))

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None)


def load_recipe(path: str | Path | None) -> Recipe:
    """The recipe in a YAML file, or the default one for None.  Raises InputError."""
    if path is None:
        return Recipe()
    return Recipe.from_dict(read_yaml_mapping(path, "recipe"), where=f"recipe {path}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _parse(data: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> dict[str, Any]:
    parsed = {}
    for key, value in data.items():
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            raise InputError(
                f"{where}: unknown key {key!r}",
                help=(f"did you mean {close[0]!r}? " if close else "")
                + f"allowed: {', '.join(allowed)}",
            )
        parsed[key] = _PARSERS[key](value, f"{where}: {key}")
    return parsed


def _choice(*allowed: str) -> Any:
    def parse(value: Any, where: str) -> str:
        if value not in allowed:
            raise InputError(f"{where} must be {' or '.join(allowed)}", got=repr(value))
        return str(value)

    return parse


def _integer(low: int, high: int | None = None) -> Any:
    bounds = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"

    def parse(value: Any, where: str) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < low or (high is not None and value > high):
            raise InputError(f"{where} must be {bounds}", got=repr(value))
        return int(value)

    return parse


def _number(value: Any, where: str, *, positive: bool = False) -> float:
    rule = f"{where} must be a finite number {'> 0' if positive else '>= 0'}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(rule, got=repr(value))
    try:
        number = float(value)  # YAML 1.1 reads 1e-3 as text
    except ValueError:
        raise InputError(rule, got=repr(value)) from None
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise InputError(rule, got=repr(value))
    return number


def _ridge(value: Any, where: str) -> float:
    return _number(value, where)


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{where} must be true or false", got=repr(value))
    return value


def _features(value: Any, where: str) -> tuple[str, ...]:
    rule = f'{where} must be a list such as ["coarse:32", gaussian]'
    if not isinstance(value, list | tuple) or not value:
        raise InputError(rule, got=repr(value))
    if not all(isinstance(entry, str) for entry in value):
        raise InputError(rule, got=repr(value))
    parsed = [str(Feature.parse(entry, where)) for entry in value]
    if len(set(parsed)) != len(parsed):
        raise InputError(f"{where}: each entry must be there once", got=repr(list(value)))
    return tuple(parsed)


def _budget(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise InputError(
            f"{where} must be a mapping such as {{attention_rel_l2: 0.05}}", got=repr(value)
        )
    for key in value:
        if key not in DEFAULT_BUDGET:
            raise InputError(
                f"{where}: unknown metric {key!r}", help=f"allowed: {', '.join(DEFAULT_BUDGET)}"
            )
    given = {
        key: _number(limit, f"{where}: {key}", positive=True) for key, limit in value.items()
    }
    return DEFAULT_BUDGET | given


def _sites(value: Any, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise InputError(
            f"{where} must be a mapping of site patterns to overrides", got=repr(value)
        )
    parsed = {}
    for pattern, overrides in value.items():
        if not isinstance(pattern, str) or not pattern:
            raise InputError(f"{where}: a pattern must be text", got=repr(pattern))
        if not isinstance(overrides, Mapping) or not overrides:
            raise InputError(
                f"{where}: {pattern}: overrides must be a mapping such as {{operator: sinkhorn}}",
                got=repr(overrides),
            )
        parsed[pattern] = _parse(overrides, SITE_KEYS, f"{where}: {pattern}")
    return parsed


_PARSERS: dict[str, Any] = {
    "operator": _choice(*get_args(Operator)),
    "side": _choice("source", "key", "both"),
    "closures": _integer(0, MAX_CLOSURES),
    "features": _features,
    "fit": _choice("ls", "kl"),
    "ridge": _ridge,
    "ridge_mode": _choice("risk", "direct"),
    "coefficients": _choice("per_head", "pooled", "shared"),
    "pivots": _integer(1),
    "slices": _integer(1),
    "seed": _integer(0, 2**63 - 1),
    "budget": _budget,
    "drop_attention_maps": _boolean,
    "batch_size": _integer(1),
    "max_examples": _integer(1),
    "sites": _sites,
}
