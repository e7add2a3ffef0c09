from pathlib import Path

import pytest
import yaml

from asapc.errors import EXIT_BAD_INPUT, InputError
from asapc.recipe import Recipe, load_recipe, parse_features

SHIPPED = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_recipes_are_shipped() -> None:
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_no_file_and_an_empty_file_are_the_default(tmp_path: Path) -> None:
    assert load_recipe(None) == Recipe()
    assert load_recipe(write(tmp_path, "# nothing\n")) == Recipe()


def test_yaml_round_trip_keeps_every_value(tmp_path: Path) -> None:
    recipe = Recipe(
        operator="asap",
        closures=1,
        features=("sliced:7",),
        ridge=1e-9,
        coefficients="per_head",
        seed=3,
        budget={"attention_rel_l2": 1e-4},
        drop_attention_maps=True,
        sites={"a.*": {"operator": "sinkhorn"}, "b": {"ridge": 0.5, "features": ("sliced:2",)}},
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
            "seed": 5,
            "closures": 1,
            "sites": {
                "layers.*": {"operator": "asap", "ridge": 0.5},
                "layers.0.*": {"operator": "sinkhorn"},
            },
        }
    )
    first, second = recipe.for_site("layers.0.attn"), recipe.for_site("layers.1.attn")
    assert (first.operator, first.ridge, first.seed, first.closures) == ("sinkhorn", 0.5, 5, 1)
    assert (second.operator, second.sites) == ("asap", {})
    assert recipe.for_site("head").operator == "auto"


def test_a_pattern_must_match_a_site() -> None:
    recipe = Recipe.from_dict({"sites": {"layers.*": {"closures": 1}, "layer.0": {"closures": 1}}})
    with pytest.raises(InputError, match=r"'layer\.0' under sites must match.*layers\.0"):
        recipe.check_patterns(["layers.0"])
    with pytest.raises(InputError, match="without sites"):
        recipe.check_patterns([])
    Recipe().check_patterns([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("closure: 3", r"unknown key 'closure'(.|\n)*did you mean 'closures'"),
        ("operator: lot", "operator must be auto or sinkhorn or asap, got 'lot'"),
        ("operator: [asap]", "operator must be"),
        ("closures: 4", "closures must be an integer from 1 to 3, got 4"),
        ("closures: 0", "closures must be"),
        ("closures: true", "closures must be .* got True"),
        ("closures: 2.0", "closures must be"),
        ('closures: "2"', "closures must be"),
        ("features: sliced:32", "features must be a list"),
        ("features: []", "features must be a list"),
        ("features: [sliced]", "features: each entry must be sliced:L .* got 'sliced'"),
        ("features: [sliced:0]", "features: each entry must be sliced:L"),
        ("features: [sliced:-3]", "features: each entry must be sliced:L"),
        ("features: [gaussian]", "features: each entry must be sliced:L"),
        ("features: [3]", "features must be a list"),
        ("features: [sliced:8, sliced:16]", "takes one family"),
        ("side: target", "side must be source, got 'target'"),
        ("ridge: -1", "ridge must be a finite number >= 0, got -1"),
        ("ridge: .nan", "ridge must be a finite number"),
        ("ridge: .inf", "ridge must be a finite number"),
        ("ridge: small", "ridge must be a finite number .* got 'small'"),
        ("ridge:", "ridge must be a finite number .* got None"),
        ("coefficients: shared", "coefficients must be pooled or per_head"),
        ("seed: -1", "seed must be an integer"),
        ("budget: 0.05", "budget must be a mapping"),
        ("budget: {}", "budget must be a mapping"),
        ("budget: {plan_l1: 0.05}", "budget: unknown metric 'plan_l1'"),
        ("budget: {attention_rel_l2: 0}", "budget: attention_rel_l2 must be a finite number > 0"),
        ("drop_attention_maps: 1", "drop_attention_maps must be true or false"),
        ("batch_size: 0", "batch_size must be an integer >= 1"),
        ("max_examples: 1.5", "max_examples must be an integer >= 1"),
        ("sites: [a]", "sites must be a mapping"),
        ("sites: {a: sinkhorn}", "sites: a: overrides must be a mapping"),
        ("sites: {a: {}}", "sites: a: overrides must be a mapping"),
        ("sites: {a: {seed: 1}}", "sites: a: unknown key 'seed'"),
        ("sites: {a: {closures: 9}}", "sites: a: closures must be an integer from 1 to 3"),
        ("sites: {1: {closures: 1}}", "sites: a pattern must be text, got 1"),
        ("closures: 1\nclosures: 3", "'closures' appears twice"),
        ("sites: {a: {closures: 1}, a: {ridge: 1}}", "'a' appears twice"),
        ("- closures", "the file must be a mapping"),
        ("closures: [", "not valid YAML"),
        ("1: 2", "keys must be text"),
        ("seed: !!python/object/apply:os.system [echo]", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(path)
    assert str(path) in caught.value.rule
    assert caught.value.exit_code == EXIT_BAD_INPUT


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe(binary)


def test_parse_features() -> None:
    assert parse_features("sliced:32") == ("sliced", 32)
