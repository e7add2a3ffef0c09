"""Whole modules as users write them, compiled and held against their originals: see programs.py."""

from __future__ import annotations

import programs
import pytest
from program_texts import INGREDIENTS
from torch import Tensor, nn

SEEDS = (
    # accepted, refused, patched and captured by modules: with the others they hold every ingredient
    57121, 23031, 2977, 39149, 39652, 5167,
    # a logarithm of 0, requires_grad of weights, what is_compiling answers, a counter in a buffer
    20039, 20554, 21502, 21289,
    # sliced plans of points as large as what hides others, a gradient beside finfo.min
    20296, 21656,
    # masses of 1 and shares of one, where a sum is as small as the constant beside it
    900190,
    # exp(s) in float64 of scores as low as its subnormal numbers, which the log domain does not form
    1001724,
    # a mask that is a column's mass, and no key of an example that has any
    1101011,
)  # fmt: skip
COMPILED = {  # each was refused, or fixed to the lengths of its data
    "a mask [B, 1, M] beside memory of its own length": {"mask": "active_b1m", "cross": True},
    "positions cached in an attribute": {"bias": "cached"},
    "sliced plans that hide tokens by -1e9": {
        "family": "esp", "mask": "padded_bm", "way": "where", "value": "-1e9",
    },
    "the parent sets a tensor of a shared object on its way": {"twist": "ctx_keep", "parent": "two"},
}  # fmt: skip
OTHERS = {
    "two finite loops through pivots": {"family": "lot"},
    "a learnt damping": {
        "damping": "parameter", "form": "potentials", "factor": "N", "scores": "distance",
        "bias": "distance",
    },
    "state that grows": {"late": "longest", "twist": "counter"},
    "a late counter beside positions that are kept": {"bias": "cached", "twist": "late_counter"},
    # refused or the same: as marginals of a loop that ends on columns they were another plan
    "masses by the number of active keys": {
        "form": "potentials", "first": "columns", "marginals": "active", "mask": "active_bm",
        "padding_shown": True,
    },
}  # fmt: skip
WRITTEN = {name: programs.settled(programs.plain() | own) for name, own in (COMPILED | OTHERS).items()}
DRAWN = {str(seed): {**programs.drawn(seed), "late": "none"} for seed in SEEDS}
SPECS = DRAWN | WRITTEN


@pytest.mark.parametrize("name", SPECS)
def test_a_program_never_differs_silently(name: str) -> None:
    verdict = programs.judge(SPECS[name], int(name) if name in DRAWN else 0)
    wrong = [text for text in verdict.cases.values() if text.startswith(("SILENT", "raw error"))]
    differing = programs.differing(SPECS[name])
    assert verdict.outcome in programs.SAFE and not wrong, f"{differing}: {wrong or verdict.text}"
    if name in COMPILED:
        assert verdict.sites and "teacher" not in verdict.sites, verdict.text
        assert "artefact: mild" not in verdict.cases and "artefact: padded" not in verdict.cases
        assert "long" not in verdict.cases, verdict.cases["long"]


def test_they_hold_every_ingredient_but_some_twists() -> None:
    for name, values in INGREDIENTS.items():
        if name not in ("twist", "second", "late"):
            assert set(map(str, values)) <= {str(spec[name]) for spec in SPECS.values()}, name


def test_a_silent_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compiled model whose outputs are a thousandth off."""
    compiled_of = programs.compiled_of

    def off(model: nn.Module, data: dict[str, Tensor]) -> tuple[nn.Module, None, list[str]]:
        live, _, sites = compiled_of(model, data)
        live.register_forward_hook(lambda module, args, out: out * 1.001)
        return live, None, sites

    monkeypatch.setattr(programs, "compiled_of", off)
    verdict = programs.judge(programs.plain(), 0, lambda case: case.name == "mild")
    assert verdict.outcome == "SILENT" and "mild" in verdict.cases


def test_programs_are_many_and_the_same_for_the_same_seed() -> None:
    sources = [programs.source_of(programs.drawn(seed), seed) for seed in range(200)]
    assert len(set(sources)) == 200
    assert sources[7] == programs.source_of(programs.drawn(7), 7)
    for seed, source in enumerate(sources):
        compile(source, f"<program {seed}>", "exec")
