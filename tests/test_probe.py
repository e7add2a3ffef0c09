"""Identification from behaviour: published implementations and every convention we claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.ir import Convention, OutputFactor, Side, Stabiliser
from asapc.operators import sinkhorn as meaning
from asapc.passes.experiment import NoFit
from asapc.passes.sinkhorn.probe import Guesses, Sample, attention_of, identify

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "sinkhorn.json").read_text())
TENSORS = load_file(GOLDEN / "sinkhorn.safetensors")
PLAN = [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_published_implementations_are_recognised_and_reproduced(case: dict[str, object]) -> None:
    name, half_steps, epsilon = str(case["name"]), int(case["half_steps"]), float(case["epsilon"])  # type: ignore[call-overload, arg-type]
    scores, plan = TENSORS[f"{name}.scores"].double(), TENSORS[f"{name}.plan"].double()
    keep = TENSORS.get(f"{name}.keep")
    if keep is None:
        scores, plan = scores[:, None], plan[:, None]
    else:
        scores = scores.masked_fill(~keep[:, None, None, :], 0.0)
    found = identify([Sample(scores, plan, keep)], Convention, tolerance=2e-5)
    convention = found.convention
    assert convention.half_steps == half_steps and convention.first_side == "row"
    assert convention.score_multiplier == pytest.approx(1 / epsilon, rel=1e-6)
    assert convention.mask == ("none" if keep is None else "key")
    assert convention.output_factor == OutputFactor()

    zero = torch.zeros(*scores.shape[:2], scores.shape[2], 1, dtype=torch.float64)
    arguments = (keep, scores / epsilon, 1.0, half_steps, True, PLAN)
    reference = meaning.sinkhorn_attention(zero, zero, *arguments)
    assert float((reference - plan).abs().max()) < 2e-6
    kernel = torch.ops.asapc.sinkhorn_attention(zero, zero, *arguments)
    assert float((kernel - reference).abs().max()) < 1e-9


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "columns first"])
@pytest.mark.parametrize("half_steps", [1, 2, 3, 20, 21, 50])
def test_every_budget_and_order_is_told_apart(half_steps: int, rows_first: bool) -> None:
    generator = torch.Generator().manual_seed(half_steps)
    samples = []
    for spread in (1.0, 3.0, 6.0):
        s = spread * torch.randn(2, 2, 11, 14, generator=generator, dtype=torch.float64)
        q = torch.zeros(2, 2, 11, 1, dtype=torch.float64)
        k = torch.zeros(2, 2, 14, 1, dtype=torch.float64)
        factor = [1.0, 0.0, 1.0, 0.0]
        a = meaning.sinkhorn_attention(q, k, None, s, 1.0, half_steps, rows_first, factor)
        samples.append(Sample(s / 0.4, a))
    found = identify(samples, Convention)
    assert found.convention.half_steps == half_steps
    assert found.convention.first_side == ("row" if rows_first else "column")
    assert found.convention.score_multiplier == pytest.approx(0.4)
    assert found.convention.output_factor == OutputFactor(keys=1)
    assert found.error < 1e-12


def observed(convention: Convention, spreads: tuple[float, ...]) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for spread in spreads:
        s = spread * torch.randn(2, 2, 11, 14, generator=generator, dtype=torch.float64)
        found.append(Sample(s, attention_of(convention, s, None), mild=spread <= 6))
    return found


SHARP = (1.0, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0)


@pytest.mark.parametrize(("half_steps", "first"), [(66, "row"), (200, "column"), (1024, "row")])
def test_long_loops_are_told_apart_at_sharp_scores(half_steps: int, first: Side) -> None:
    law = Convention(half_steps, first, 1.0)
    found = identify(observed(law, SHARP), Convention)
    assert found.rival is None
    assert (found.convention.half_steps, found.convention.first_side) == (half_steps, first)


def test_what_only_mild_scores_have_seen_has_a_rival() -> None:
    """T = 80 was once taken for 33: at these spreads both have converged."""
    found = identify(observed(Convention(80, "row", 1.0), (0.5, 1.0)), Convention)
    assert found.rival is not None


@pytest.mark.parametrize(("form", "kind", "constant"), [
    ("plan", "add", 1e-6), ("plan", "clamp", 1e-9), ("scaling", "add", 1e-30), ("scaling", "clamp", 1e-6),
])  # fmt: skip
def test_a_stabilising_constant_is_part_of_the_convention(form: Any, kind: Any, constant: float) -> None:
    start = "softmax" if form == "plan" else "matrix"
    own = Stabiliser(form, kind, constant, start)
    law = Convention(7, "row", 1.0, OutputFactor(queries=1), stabiliser=own)
    found = identify(observed(law, SHARP), Convention, guesses=Guesses([1e-5, constant]))
    assert found.error < 1e-9
    assert found.convention.half_steps == 7 and found.convention.stabiliser == law.stabiliser
    with pytest.raises(NoFit, match="something else at sharp ones"):
        identify(observed(law, SHARP), Convention)


def test_what_is_not_a_scaling_is_refused() -> None:
    s = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    squared = (s + 5).square()
    with pytest.raises(NoFit, match="row and column scaling"):
        identify([Sample(s, squared / squared.sum(-1, keepdim=True))], Convention)
    with pytest.raises(NoFit, match="neither rows nor columns"):
        identify([Sample(s, s.exp())], Convention)


def test_a_perturbed_loop_is_refused_with_its_error() -> None:
    """Damped updates end on exact rows but are no convention of ours."""
    s = 3 * torch.randn(1, 1, 8, 8, dtype=torch.float64)
    log_a = s.clone()
    for _ in range(3):
        log_a = log_a - 0.7 * log_a.logsumexp(-2, keepdim=True)
        log_a = log_a - log_a.logsumexp(-1, keepdim=True)
    with pytest.raises(NoFit) as refused:
        identify([Sample(s, log_a.exp())], Convention)
    assert refused.value.error is not None and refused.value.error > 1e-6
