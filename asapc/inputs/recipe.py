"""A recipe: what may be tried at each site and how close it must be.  Typed data, read from YAML.

    budget: {attention_rel_l2: 0.02}
    candidates:  # lists of values multiply
      - {side: [target, source], c_transforms: [1, 3], features: [["coarse:32"], ["coarse:32", gaussian]]}
    sites:
      "transformer.layers.0.*": {operator: sinkhorn}

The fields of `Recipe` are the keys. `asapc calibrate` and `asapc compile` read the same file. An unknown
key, a wrong type and a pattern that matches no site are errors: an option ignored silently is worse than
one refused.
`recipe.schema.json` is its JSON Schema, for completion in editors: `recipe_schema` makes it of TYPES.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from annotated_types import Ge, Interval
from pydantic import AllowInfNan, Strict

from asapc.errors import InputError
from asapc.features import MAX_COUNT, Feature
from asapc.features.clouds import Points
from asapc.features.predictor import Aim, RecipeSide
from asapc.formats.json_text import plain
from asapc.formats.yaml_file import read_yaml_mapping
from asapc.inputs.settings import (
    FROM_TEXT,
    Compound,
    NonNegative,
    Place,
    Positive,
    Share,
    Switch,
    checked,
    integer,
    json_schema,
    list_of,
    model,
    parse,
)
from asapc.metrics import BUDGET_BOUNDS
from asapc.operators.catalogue import HYBRIDS, KINDS, OPERATORS, REPLACEMENTS

_ASKED_FOR = dict.fromkeys(itertools.chain(*REPLACEMENTS.values()))  # each once, in order
OPERATOR_NAMES = ("auto", "lossless", KINDS[0], *_ASKED_FOR)
Fit = Literal["ls", "kl"]
RidgeMode = Literal["risk", "direct"]
Coefficients = Literal["per_head", "pooled", "shared"]
Objective = Literal["latency", "memory"]
From = Literal["sinkhorn", "softmax"]
Depthwise = Literal[0, 3, 5, 7, 9, 11, 13, 15]

MAX_C_TRANSFORMS = 50
MAX_HALF_STEPS = 1024
MAX_CANDIDATES = 256
MAX_SHAPES = 64
MAX_SHAPE = 2**20  # tokens, and examples: beyond it a timing could not end
MAX_RIDGE = 1e30  # times any number of rows it is finite
DEFAULT_BUDGET = {"attention_rel_l2": 0.05, "prediction_agreement": 0.99}
HYBRID_KEYS = ("summary_tokens", "depthwise")  # that make a distilled operator a hybrid one
FIT_KEYS: Mapping[str, tuple[str, ...]] = {
    "asap": ("features", "points", "fit", "coefficients", "ridge", "ridge_mode", "seed", "max_examples"),
    **{name: (OPERATORS[name].size, *HYBRID_KEYS, "seed", "max_examples") for name in HYBRIDS},
}

Count = Annotated[int, Strict(), Interval(ge=1, le=MAX_COUNT)]
Size = Annotated[int, Strict(), Ge(1)]
_Tokens = integer(1, MAX_SHAPE)
_Shape: Any = tuple[integer(0, MAX_SHAPE), _Tokens]  # type: ignore[misc]
BUDGET_TYPES: Mapping[str, Any] = {
    key: Share if bound == "min" else Positive if key == "attention_rel_l2" else NonNegative
    for key, bound in BUDGET_BOUNDS.items()
}


def beside(settings: Mapping[str, Any]) -> dict[str, int]:
    """The settings that make a distilled operator a hybrid one, by key; empty for a plain one.

    settings: of a recipe, or of a fit, see Recipe.fit_settings.
    """
    return {key: settings[key] for key in HYBRID_KEYS if settings.get(key)}


@dataclass(frozen=True)
class Recipe:
    """What asapc may try, and how close the result must be; `Recipe()` holds the defaults.

    from:                "softmax" also compiles softmax layers, as loops of one half-step on rows.
    operator:            "auto" measures and chooses within the budget; any other value is forced.
                         "lossless" is the site's exact operator, "sinkhorn" that of a Sinkhorn site.
    side:                which dual is predicted: "source" the queries', "target" the keys'.
    c_transforms:        most half-steps after the predicted dual (fewer if the parity requires it).
    aim:                 "aligned" predicts the dual from which the teacher's last half-steps start;
                         "last" predicts its last dual.
    points:              "active" excludes padded queries from features and regression.
    features:            entries `family`, `family:count` or `family:count:kind`.
    fit:                 "ls": least squares on the dual; "kl": Kullback-Leibler divergence of the plan.
    ridge, ridge_mode:   lambda of either fit, >= 0, by default per regression row.
    coefficients:        one vector per head, per site, or for all sites.
    pivots, slices:      number per head if a site is distilled into lot or esp_hard.
    half_steps:          length of the loop if a site is distilled into fitted_sinkhorn.
    summary_tokens:      leading tokens of softmax layers whose rows stay softmax over all keys, while
                         the distilled operator handles the others among themselves.
    depthwise:           width of a convolution on the values of each channel, fitted to the residual
                         of a distilled operator in a softmax layer; 0 for none.
    candidates:          what `operator: auto` tries besides the lossless operator; each overrides keys
                         above. Empty: the keys above as they are.
    seed:                seed of directions and sampling.
    budget:              limits that the selection keeps, see BUDGET_BOUNDS: attention_rel_l2 of the worst
                         site, the rest of the whole model; under `sites`, with only that site replaced.
    objective:           what the selection minimises within the budget.
    shapes:              (batch, tokens) to time at; batch 0 is batch_size. Empty: as in the data.
    drop_attention_maps: skip attention maps that the teacher returns.
    batch_size, max_examples, selection_examples: how data is streamed.
    sites:               glob pattern on site names -> overrides; later patterns win.
    """

    from_: From = "sinkhorn"
    operator: str = "auto"
    side: RecipeSide = "target"
    c_transforms: Annotated[int, Strict(), Interval(ge=0, le=MAX_C_TRANSFORMS)] = 1
    aim: Aim = "aligned"
    points: Points = "all"
    features: tuple[str, ...] = ("coarse:32",)
    fit: Fit = "ls"
    ridge: Annotated[float, Strict(), AllowInfNan(False), Interval(ge=0, le=MAX_RIDGE), FROM_TEXT] = 1e-5
    ridge_mode: RidgeMode = "risk"
    coefficients: Coefficients = "per_head"
    pivots: Count = 32
    slices: Count = 32
    half_steps: Annotated[int, Strict(), Interval(ge=1, le=MAX_HALF_STEPS)] = 3
    summary_tokens: Annotated[int, Strict(), Interval(ge=0, le=MAX_COUNT)] = 0
    depthwise: Depthwise = 0
    candidates: tuple[Mapping[str, Any], ...] = ()
    seed: Annotated[int, Strict(), Interval(ge=0, le=2**63 - 1)] = 0
    budget: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_BUDGET))
    objective: Objective = "latency"
    shapes: tuple[tuple[int, int], ...] = ()
    drop_attention_maps: Switch = False
    batch_size: Size = 32
    max_examples: Size = 512
    selection_examples: Size = 256
    sites: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def for_site(self, name: str) -> Recipe:
        """This recipe with the overrides of every pattern that matches `name`, in file order."""
        resolved = replace(self, sites={})
        for overrides in self._overrides(name):
            resolved = replace(resolved, **overrides)
        if not resolved.candidates:
            resolved.check_side(f"recipe: {name}")
        return resolved

    def _overrides(self, name: str) -> list[Mapping[str, Any]]:
        return [overrides for pattern, overrides in self.sites.items() if fnmatchcase(name, pattern)]

    def alternatives(self) -> list[Recipe]:
        """Of a site's own recipe: one with a named operator for each candidate, itself if one is named.

        Raises InputError where `side: both` and `c_transforms: 0` do not stand together in one of them.
        """
        if self.operator != "auto":
            return [self]
        tried = self.candidates or ({},)
        named = [replace(self, **{"operator": "asap", "candidates": (), **block}) for block in tried]
        for recipe in named:
            recipe.check_side("recipe: candidates")
        return list({recipe.label(): recipe for recipe in named}.values())

    def label(self) -> str:
        """A short, unique name of a candidate: "asap key 1 coarse:32"."""
        if self.operator in OPERATORS and (size := OPERATORS[self.operator].size):
            words = [self.operator, str(getattr(self, size))]
            words += [f"{key} {value}" for key, value in self.beside().items()]
            return " ".join(words)
        if self.operator != "asap":
            return self.operator
        words = [self.operator, self.side, str(self.c_transforms), *self.features]
        texts = {"aim": "aim {}", "points": "{} points", "fit": "{}", "coefficients": "{}"}
        for key, text in texts.items():
            if getattr(self, key) != getattr(Recipe, key):
                words.append(text.format(getattr(self, key)))
        if (self.ridge, self.ridge_mode) != (Recipe.ridge, Recipe.ridge_mode):
            words.append(f"ridge {self.ridge!r} {self.ridge_mode}")
        return " ".join(words)

    def beside(self) -> dict[str, int]:
        """As the function of that name."""
        return beside(vars(self))

    def fit_settings(self) -> dict[str, Any]:
        """Everything a candidate's fit depends on except the convention and the plan, in plain types."""
        return {key: plain(getattr(self, key)) for key in ("operator", *FIT_KEYS.get(self.operator, ()))}

    def site_budget(self, name: str) -> Mapping[str, float]:
        """Limits with only this site replaced: its own, else the attention error of the whole budget."""
        budgets = [overrides["budget"] for overrides in self._overrides(name) if "budget" in overrides]
        if budgets:
            return dict(budgets[-1])
        return {key: limit for key, limit in self.budget.items() if key == "attention_rel_l2"}

    def check_side(self, where: str) -> None:
        """InputError unless `side: both` and `c_transforms: 0` stand together, once overrides apply."""
        if (self.side == "both") != (self.c_transforms == 0):
            raise InputError(
                f"{where}: `side: both` goes with `c_transforms: 0`, which predicts both duals",
                got=f"side: {self.side}, c_transforms: {self.c_transforms}",
                help="name both keys, or neither",
            )

    def _check_used(self, place: Place) -> None:
        """InputError for a key of hybrid operators if none of them may be tried anywhere."""
        keys_here = {key: getattr(self, key) for key in ("operator", *HYBRID_KEYS)}
        outer = [keys_here, *self.sites.values()]
        blocks = [*outer, *self.candidates, *(x for o in outer for x in o.get("candidates", ()))]
        if any(block.get("operator") in HYBRIDS for block in blocks):
            return
        for key in HYBRID_KEYS:
            if any(block.get(key) for block in blocks):
                raise InputError(
                    f"{place}: {key} is for {', '.join(HYBRIDS)}, which softmax layers may become",
                    got=f"operator: {self.operator}",
                    help="name one of them, as `operator` or among `candidates`",
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
        return {item.name.rstrip("_"): plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        *,
        where: str | Place = "recipe",
        source: Mapping[str, Any] | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> Recipe:
        """Checks every key and value.

        source: where the keys stand in their file, `data` unless given.  types: of the keys that may be
        set, all of a recipe's unless given.

        Raises InputError naming the key and what is allowed.
        """
        place = Place(where) if isinstance(where, str) else where
        values = parse(data, types or TYPES, place, _COMPOUND, source=source)
        recipe = cls(**{"from_" if key == "from" else key: value for key, value in values.items()})
        recipe._check_used(place)
        return recipe

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None)


# The types of the keys in a file: those of the fields or, where _COMPOUND has a parser, of the schema.
_KEYS: dict[str, Any] = {
    key.rstrip("_"): kind for key, kind in get_type_hints(Recipe, include_extras=True).items()
} | {"operator": Literal.__getitem__(OPERATOR_NAMES), "features": list_of(str, 1)}
CANDIDATE_TYPES: Mapping[str, Any] = {
    key: _KEYS[key] for key in itertools.takewhile("candidates".__ne__, _KEYS) if key != "from"
}
_Block = model("Candidates", {key: kind | list_of(kind, 1) for key, kind in CANDIDATE_TYPES.items()})
SITE_TYPES = {**CANDIDATE_TYPES, "candidates": list_of(_Block), "budget": model("Budget", BUDGET_TYPES)}
TYPES: Mapping[str, Any] = {
    **_KEYS, **SITE_TYPES, "shapes": list_of(_Tokens | _Shape, 0, MAX_SHAPES),
    "sites": dict[str, model("Site", SITE_TYPES)],  # type: ignore[misc]
}  # fmt: skip


def load_recipe(path: str | Path | None) -> Recipe:
    """The recipe in a YAML file, or the default one for None.  Raises InputError."""
    if path is None:
        return Recipe()
    return Recipe.from_dict(read_yaml_mapping(path, "recipe"), where=f"recipe {path}")


def _features(value: Any, place: Place) -> tuple[str, ...]:
    listed = isinstance(value, list | tuple) and value
    if not listed or not all(isinstance(entry, str) for entry in value):
        raise InputError(f'{place} must be a list such as ["coarse:32", gaussian]', got=repr(value))
    parsed = [str(Feature.parse(entry, str(place))) for entry in value]
    if len(set(parsed)) != len(parsed):
        raise InputError(f"{place}: each entry may appear only once", got=repr(list(value)))
    return tuple(parsed)


def _budget(value: Any, place: Place) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise InputError(f"{place} must be a mapping such as {{attention_rel_l2: 0.05}}", got=repr(value))
    return parse(value, BUDGET_TYPES, place, what="metric")


def _candidates(value: Any, place: Place) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise InputError(
            f"{place} must be a list such as [{{side: target, c_transforms: [1, 3]}}]", got=repr(value)
        )
    candidates: list[dict[str, Any]] = []
    for number, block in enumerate(value, 1):
        block_place = place.at("", label=f"entry {number}")
        if not isinstance(block, Mapping) or not block:
            rule = f"{block_place} must be a mapping such as {{c_transforms: 1}}"
            raise InputError(rule, got=repr(block))
        for combination in combinations(block, str(block_place)):
            candidates.append(parse(combination, CANDIDATE_TYPES, block_place, _COMPOUND, source=block))
            if candidates[-1].get("operator") == "auto":
                named = block_place.line_of("operator", block)
                raise InputError(f"{named}: operator must be a named one", got="auto")
            if len(candidates) > MAX_CANDIDATES:
                raise InputError(f"{place}: at most {MAX_CANDIDATES} candidates", got="more")
    return tuple(candidates)


def combinations(block: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Every combination of the values in a block: lists of values multiply, except that `features` is a
    list itself.  Raises InputError for an empty list."""
    choices = []
    for key, value in block.items():
        if not isinstance(value, list | tuple):
            choices.append([(key, value)])
            continue
        if not value:
            raise InputError(f"{where}: {key} must have a value", got="[]")
        several = key != "features" or all(isinstance(v, list | tuple) for v in value)
        choices.append([(key, one) for one in (value if several else [value])])
    for combination in itertools.product(*choices):
        yield dict(combination)


def _shapes(value: Any, place: Place) -> tuple[tuple[int, int], ...]:
    try:
        checked(value, TYPES["shapes"], place)
    except InputError:
        raise InputError(
            f"{place} must be a list of token counts or [batch, tokens], such as [256, [8, 2048]]",
            got=repr(value),
        ) from None
    return tuple((0, entry) if isinstance(entry, int) else tuple(entry) for entry in value)


def _sites(value: Any, place: Place) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise InputError(f"{place} must be a mapping of site patterns to overrides", got=repr(value))
    parsed = {}
    for pattern, overrides in value.items():
        if not isinstance(pattern, str) or not pattern:
            raise InputError(
                f"{place.line_of(pattern, value)}: a pattern must be text", got=repr(pattern)
            )
        where = place.at(pattern, value)
        if not isinstance(overrides, Mapping) or not overrides:
            raise InputError(
                f"{where}: overrides must be a mapping such as {{operator: sinkhorn}}",
                got=repr(overrides),
            )
        parsed[pattern] = parse(overrides, SITE_TYPES, where, _COMPOUND)
    return parsed


# Keys whose values need more than a type: other spellings, a candidate for each combination.
_COMPOUND: Mapping[str, Compound] = {
    "features": _features,
    "candidates": _candidates,
    "budget": _budget,
    "shapes": _shapes,
    "sites": _sites,
}


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file, which recipe.schema.json holds."""
    described = re.findall(r"^    ([a-z_, ]+?): +(\S.*(?:\n {8,}\S.*)*)", Recipe.__doc__ or "", re.M)
    texts = {key: " ".join(text.split()) for keys, text in described for key in keys.split(", ")}
    kind = model("Recipe", TYPES, texts)
    return json_schema(kind, "asapc recipe", Recipe().to_dict())


if __name__ == "__main__":  # python -m asapc.inputs.recipe > asapc/recipe.schema.json
    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
