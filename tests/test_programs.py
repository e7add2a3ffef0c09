"""Whole modules as users write them, compiled and held against their originals: see programs.py."""

from __future__ import annotations

import programs
import pytest
from torch import Tensor, nn

# Two dozen that are accepted, refused, patched and captured by modules, in a second or two each.
SEEDS = (
    2, 3, 11, 14, 24, 25, 30, 33, 50, 216, 224, 262, 621, 34579, 52263,
    # a logarithm of 0, requires_grad of weights, what is_compiling answers, a counter in a buffer
    20039, 20554, 21502, 21289,
    # sliced plans of points as large as what hides others, a gradient beside finfo.min
    20296, 21656,
)  # fmt: skip
OTHERS = (  # which none of those has
    {"family": "lot"}, {"damping": "parameter", "form": "potentials"},
    {"late": "longest", "twist": "counter"}, {"late": "context_variable", "parent": "two"},
)  # fmt: skip
SPECS = [
    *({**programs.drawn(seed), "late": "none"} for seed in SEEDS),
    *(programs.settled(programs.plain() | own) for own in OTHERS),
]
IDS = [*map(str, SEEDS), *(" ".join(map(str, own.values())) for own in OTHERS)]


def wrong(verdict: programs.Verdict) -> dict[str, str]:
    return {
        name: text for name, text in verdict.cases.items() if text.startswith(("SILENT", "raw error"))
    }


@pytest.mark.parametrize("number", range(len(SPECS)), ids=IDS)
def test_a_program_never_differs_silently(number: int) -> None:
    seed = SEEDS[number] if number < len(SEEDS) else 0
    verdict = programs.judge(SPECS[number], seed)
    assert verdict.outcome in programs.SAFE and not wrong(verdict), (
        f"{programs.differing(SPECS[number])}: {wrong(verdict) or verdict.text}"
    )


def test_they_hold_every_ingredient_but_some_twists() -> None:
    for name, values in programs.INGREDIENTS.items():
        if name not in ("twist", "second", "late"):
            assert set(map(str, values)) <= {str(spec[name]) for spec in SPECS}, name


COMPILED = {  # each was refused, or fixed to the lengths of its data
    "a mask [B, 1, M] beside memory of its own length": {"mask": "active_b1m", "cross": True},
    "positions cached in an attribute": {"bias": "cached"},
    "sliced plans that hide tokens by -1e9": {
        "family": "esp", "mask": "padded_bm", "way": "where", "value": "-1e9",
    },
    "the parent sets a tensor of a shared object on its way": {"twist": "ctx_keep", "parent": "two"},
}  # fmt: skip


MASSES = {"form": "potentials", "first": "columns", "marginals": "active", "mask": "active_bm"}


@pytest.mark.parametrize("shown", [False, True], ids=["no padding", "padding in the data"])
def test_masses_by_the_number_of_active_keys(shown: bool) -> None:
    """Refused or the same: as marginals of a loop that ends on columns they were another plan."""
    spec = programs.settled(programs.plain() | MASSES | {"padding_shown": shown})
    verdict = programs.judge(spec, 0)
    assert verdict.outcome in programs.SAFE, verdict.text


@pytest.mark.parametrize("spec", COMPILED.values(), ids=COMPILED)
def test_a_program_is_compiled(spec: dict[str, object]) -> None:
    verdict = programs.judge(programs.settled(programs.plain() | spec), 0)
    assert verdict.sites and "teacher" not in verdict.sites, verdict.text
    assert not wrong(verdict)
    assert "artefact: mild" not in verdict.cases and "artefact: padded" not in verdict.cases


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
