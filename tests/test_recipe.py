import json
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from asapc.errors import EXIT_BAD_INPUT, InputError
from asapc.features import FAMILIES, Feature
from asapc.inputs import recipe as recipe_module
from asapc.inputs.recipe import MAX_C_TRANSFORMS, Recipe, load_recipe, recipe_schema

SHIPPED = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_names_the_schema_for_editors(path: Path) -> None:
    recipe = load_recipe(path)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    named = path.parent / first.partition("=")[2]
    assert named.is_file() and named.resolve().name == "recipe.schema.json"


def test_no_file_and_an_empty_file_are_the_default(tmp_path: Path) -> None:
    assert SHIPPED and load_recipe(None) == load_recipe(write(tmp_path, "# nothing\n")) == Recipe()
    assert Recipe.from_dict(Recipe().to_dict()) == Recipe().for_site("any")
    assert Recipe().operator == "auto" and Recipe().parsed_features()


def test_yaml_round_trip_keeps_every_value(tmp_path: Path) -> None:
    recipe = Recipe(
        operator="asap", side="target", c_transforms=1, features=("sliced:7:axis", "norm", "coarse:4"),
        fit="kl", ridge=1e-9, ridge_mode="direct", coefficients="shared", seed=3,
        budget={"attention_rel_l2": 1e-4, "prediction_agreement": 0.98}, drop_attention_maps=True,
        sites={"a.*": {"operator": "sinkhorn"}, "b": {"ridge": 0.5, "features": ("sliced:2:random",)}},
    )
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    assert isinstance(yaml.safe_load("1e-3"), str)  # why the recipe has to convert
    recipe = load_recipe(write(tmp_path, "ridge: 1e-3\nbudget: {attention_rel_l2: 1e-2}\n"))
    assert recipe.ridge == 1e-3
    assert recipe.budget == {"attention_rel_l2": 1e-2}


def test_later_patterns_win_and_the_rest_is_inherited() -> None:
    recipe = Recipe.from_dict(
        {
            "seed": 5, "c_transforms": 1,
            "sites": {
                "layers.*": {"operator": "asap", "ridge": 0.5}, "layers.0.*": {"operator": "sinkhorn"},
            },
        }
    )
    first, second = recipe.for_site("layers.0.attn"), recipe.for_site("layers.1.attn")
    assert (first.operator, first.ridge, first.seed, first.c_transforms) == ("sinkhorn", 0.5, 5, 1)
    assert (second.operator, second.sites) == ("asap", {})
    assert recipe.for_site("head").operator == "auto"


def test_a_pattern_must_match_a_site() -> None:
    sites = {"layers.*": {"c_transforms": 1}, "layer.0": {"c_transforms": 1}}
    recipe = Recipe.from_dict({"sites": sites})
    with pytest.raises(InputError, match=r"'layer\.0' under sites must match.*layers\.0"):
        recipe.check_patterns(["layers.0"])
    with pytest.raises(InputError, match="without sites"):
        recipe.check_patterns([])
    Recipe().check_patterns([])


# Of messages: what a schema cannot say.
BEYOND_THE_SCHEMA = re.compile(
    r"features: |twice|YAML|column|a pattern must|: operator|at most 256|got nan"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c_transform: 3", r"unknown key 'c_transform'(.|\n)*did you mean 'c_transforms'"),
        ("operator: lots", "operator must be auto or lossless or sinkhorn or asap or lot or esp_hard"),
        ("c_transforms: 51", f"c_transforms must be an integer from 0 to {MAX_C_TRANSFORMS}, got 51"),
        ("features: sliced:32", "features must be a list"),
        ("features: [sliced]", "features: sliced is written sliced:<1 to 4096>, .*random.* got"),
        ("features: [sliced:0]", "features: sliced is written"),
        ("features: ['gaussian:8']", "features: gaussian takes no number"),
        ("features: [norm, norm]", "features: each entry may appear only once"),
        ("side: queries", "side must be source or target or both, got 'queries'"),
        ("ridge: -1", r"ridge must be a number from 0 to 1e\+30, got -1"),
        ("ridge: .nan", "ridge must be a number .* got nan"),
        ("ridge:", "ridge must be a number .* got None"),
        ("seed: -1", "seed must be an integer"), ("budget: 0.05", "budget must be a mapping"),
        ("pivots: 0", "pivots must be an integer from 1 to"), ("pivots: 1.5", "pivots must be an int"),
        ("slices: true", "slices must be an integer"), ("slices: '8'", "slices must be an integer"),
        ("budget: {plan_l1: 0.05}", "budget: unknown metric 'plan_l1'"),
        ("budget: {attention_rel_l2: 0}", "budget: attention_rel_l2 must be a finite number > 0"),
        ("drop_attention_maps: 1", "drop_attention_maps must be true or false"),
        ("batch_size: 0", "batch_size must be an integer >= 1"),
        ("sites: [a]", "sites must be a mapping"),
        ("sites: {a: {seed: 1}}", "sites: a: unknown key 'seed'"),
        ("sites: {a: {c_transforms: 99}}", "sites: a: c_transforms must be an integer from 0 to"),
        ("c_transforms: 1\nc_transforms: 3", "'c_transforms' appears twice"),
        ("metric: a.py:f", r"line 1: a file never names code that runs(.|\n)*--metric FILE.py:FUNCTION"),
        ("- c-transforms", "the file must be a mapping"), ("c_transforms: [", "not valid YAML"),
        ("1: 2", "keys must be text"), ("seed: !!python/object/apply:os.system [echo]", "not valid YAML"),
        ("ridge: 1.0e+308", r"ridge must be a number from 0 to 1e\+30"),  # its products are finite
        ("candidates: {c_transforms: 1}", "candidates must be a list"),
        ("candidates: [{c_transforms: []}]", r"entry 1: c_transforms must have a value, got \[\]"),
        ("candidates: [{operator: auto}]", "entry 1: operator must be a named one"),
        (f"candidates: [{{c_transforms: {list(range(1, 50))}, pivots: {list(range(1, 9))}}}]",
         "at most 256"),
        ("budget: {prediction_agreement: 1.5}", "prediction_agreement must be a number from 0 to 1,"),
        ("objective: speed", "objective must be latency or memory"),
        ("shapes: 256", "shapes must be a list"), ("shapes: [0]", r"shapes must be a list .* got \[0\]"),
        ("selection_examples: 0", "selection_examples must be an integer >= 1"),
        # and on which line it stands
        ("# one\n\nc_transforms: 51\n", "line 3: c_transforms must be"),
        ("seed: 1\nfeatures:\n  - slices:8\n", "line 2: features: unknown feature family"),
        ("sites:\n  a: {fit: ls}\n  b:\n    fit: ls\n    ridge: -1\n", "line 5: sites: b: ridge must"),
        ("seed: 1\nbudget:\n  logit_kl: 1\n  speed: 2\n", "line 4: budget: unknown metric 'speed'"),
        (
            "candidates:\n  - {side: target}\n  - side: target\n    c_transforms: [1, 99]\n",
            "line 4: candidates: entry 2: c_transforms must be an integer from 0 to",
        ),
        ("a: &x {fit: ls, seed: 1}\nsites:\n  b: *x\n", "line 1: unknown key 'a'"),
        ("seed: 1\nfit: [ls\n", "line 3, column 1: not valid YAML: expected ',' or"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(path)
    assert caught.value.rule.startswith(f"recipe {path}")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    if not BEYOND_THE_SCHEMA.search(message):
        assert not Draft202012Validator(recipe_schema()).is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("value", [True, "2 %", {}, 10**400, "nan", "1e999"], ids=str)
def test_what_is_no_number_is_refused(value: object) -> None:
    for data in ({"ridge": value}, {"budget": {"logit_kl": value}}, {"candidates": [{"ridge": value}]}):
        with pytest.raises(InputError, match=r"must be a (finite )?number"):
            Recipe.from_dict(data)


def test_every_key_has_a_type_and_a_description() -> None:
    names = {item.name.rstrip("_") for item in fields(Recipe)}  # from_: a word of Python's own
    assert set(recipe_module.TYPES) == names
    properties = recipe_schema()["properties"]
    assert names == set(properties)
    assert all(len(own["description"]) > 5 for own in properties.values())
    assert {name: own["default"] for name, own in properties.items()} == Recipe().to_dict()


def test_the_published_schema_is_current() -> None:
    published = files("asapc") / "recipe.schema.json"
    assert json.loads(published.read_text(encoding="utf-8")) == recipe_schema(), (
        "write it again: python -m asapc.inputs.recipe > asapc/recipe.schema.json"
    )


ALSO_VALID = [
    "{}", "ridge: 0.0", "shapes: [256, [8, 2048]]",
    'sites: {"a.*": {operator: lot, budget: {logit_kl: 0.1}, candidates: [{c_transforms: [1, 3]}]}}',
    'candidates: [{side: [target, source], features: [["coarse:8"], [raw, norm]]}, {features: [raw]}]',
]


@pytest.mark.parametrize("text", [*ALSO_VALID, *(path.read_text() for path in SHIPPED)])
def test_what_loads_is_valid_by_the_schema(tmp_path: Path, text: str) -> None:
    load_recipe(write(tmp_path, text))
    Draft202012Validator(recipe_schema()).validate(yaml.safe_load(text))


def test_no_c_transform_goes_with_both_duals_only() -> None:
    for side, c_transforms in (("both", 0), ("source", 1), ("target", 50), ("both", 3), ("source", 0)):
        keys = {"side": side, "c_transforms": c_transforms}
        for recipe in (Recipe.from_dict(keys), Recipe.from_dict({"sites": {"layers.*": keys}})):
            if (side == "both") == (c_transforms == 0):
                own = recipe.for_site("layers.0")
                assert (own.side, own.c_transforms) == (side, c_transforms)
                continue
            with pytest.raises(InputError, match=r"layers\.0: `side: both` goes with `c_transforms: 0`"):
                recipe.for_site("layers.0")
    completed = Recipe.from_dict({"side": "both", "sites": {"layers.0": {"c_transforms": 0}}})
    assert completed.for_site("layers.0").c_transforms == 0
    with pytest.raises(InputError, match=r"layers\.1"):
        completed.for_site("layers.1")


def test_every_family_can_stand_in_a_recipe() -> None:
    entries = [f"{name}:5" if family.counted else name for name, family in FAMILIES.items()]
    recipe = Recipe.from_dict({"features": entries})
    assert [feature.family for feature in recipe.parsed_features()] == list(FAMILIES)
    assert recipe.parsed_features()[0] == Feature("sliced", 5, "random")
    assert Recipe.from_dict({"features": list(recipe.features)}) == recipe


def test_lists_of_values_multiply_into_candidates() -> None:
    families = [["coarse:8"], ["coarse:8", "norm"]]
    tried = [{"side": ["target", "source"], "features": families}, {"c_transforms": 3}]
    recipe = Recipe.from_dict({"candidates": tried, "ridge": 0.5})
    labels = [own.label() for own in recipe.alternatives()]
    assert labels == [
        "asap target 1 coarse:8 ridge 0.5 risk", "asap target 1 coarse:8 norm ridge 0.5 risk",
        "asap source 1 coarse:8 ridge 0.5 risk", "asap source 1 coarse:8 norm ridge 0.5 risk",
        "asap target 3 coarse:32 ridge 0.5 risk",
    ]
    assert all(own.operator == "asap" and own.candidates == () for own in recipe.alternatives())
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_candidates_are_of_auto_sites_only_and_each_once() -> None:
    recipe = Recipe.from_dict(
        {
            "candidates": [{"c_transforms": [1, 1]}, {"operator": "lot", "pivots": 4}],
            "sites": {"a": {"operator": "asap"}, "b": {"candidates": [{"fit": "kl"}]}},
        }
    )
    assert [own.label() for own in recipe.alternatives()] == ["asap target 1 coarse:32", "lot 4"]
    assert [own.label() for own in recipe.for_site("a").alternatives()] == ["asap target 1 coarse:32"]
    assert [own.label() for own in recipe.for_site("b").alternatives()] == ["asap target 1 coarse:32 kl"]
    assert [own.operator for own in Recipe().alternatives()] == ["asap"]
    with pytest.raises(InputError, match="`side: both` goes with"):
        Recipe.from_dict({"candidates": [{"side": "both"}]}).alternatives()


def test_a_site_keeps_the_attention_error_of_the_model_unless_it_has_a_budget() -> None:
    recipe = Recipe.from_dict(
        {
            "budget": {"attention_rel_l2": 0.1, "prediction_agreement": 0.998},
            "sites": {"a.*": {"budget": {"logit_kl": 0.01}}, "a.1": {"c_transforms": 3}},
        }
    )
    assert recipe.site_budget("b") == {"attention_rel_l2": 0.1}
    assert recipe.site_budget("a.1") == {"logit_kl": 0.01}
