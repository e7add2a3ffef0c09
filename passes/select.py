"""Select: per site, the fastest candidate inside the fidelity budget, else the lossless operator.

A rule for one candidate: ASAP with the calibrated coefficients is taken where its attention error on
the selection split is inside the budget and it measured faster than the lossless operator on the
site's own activations. A recipe that names an operator gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.fidelity import AttentionFidelity
from asapc.formats.calibration import SiteCalibration
from asapc.ir import Convention, SiteTensors
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.rewrite import Amortised
from asapc.recipe import Recipe
from asapc.timing import interleaved_medians

# A closure costs about a half-step: with so few of them the lossless loop is already as cheap.
FEW_HALF_STEPS = 5
WORTHWHILE = 0.9  # ASAP must take at most this share of the lossless time to be picked


@dataclass(frozen=True)
class Choice:
    """operator "sinkhorn" or "asap", why, and what was measured on the selection split."""

    operator: str
    reason: str
    amortised: Amortised | None = None
    attention_rel_l2: float | None = None
    lossless_ms: float | None = None
    asap_ms: float | None = None


def needs_fit(recipe: Recipe, convention: Convention) -> bool:
    """Whether calibration has anything to fit: asap is named, or auto and the loop is long."""
    if recipe.operator == "auto":
        return convention.half_steps > FEW_HALF_STEPS
    return recipe.operator == "asap"


def choose(
    recipe: Recipe,
    convention: Convention,
    calibration: SiteCalibration | None,
    batches: Sequence[SiteTensors],
) -> Choice:
    """The operator of one site, from its activations on the selection split."""
    if recipe.operator == "sinkhorn":
        return Choice("sinkhorn", "the recipe asks for it")
    if recipe.operator == "auto" and convention.half_steps <= FEW_HALF_STEPS:
        return Choice("sinkhorn", f"{convention.half_steps} half-steps cost as much as the closures")
    if calibration is None:
        return Choice("sinkhorn", f"no dual can be predicted: {why_no_fit(recipe, convention)}")
    amortised = Amortised(calibration.closures, calibration.theta, calibration.coefficients)
    fidelity = AttentionFidelity()
    for tensors in batches:
        fidelity.update(
            _lossless(convention, tensors), _asap(convention, amortised, tensors), tensors.keep
        )
    error = fidelity.metrics()["attention_rel_l2"]
    if recipe.operator == "asap":
        return Choice("asap", "the recipe asks for it", amortised, error)
    budget = recipe.budget["attention_rel_l2"]
    if not error <= budget:
        return Choice(
            "sinkhorn", f"asap exceeds the budget: attention_rel_l2 {error:.3g} > {budget:g}",
            attention_rel_l2=error,
        )  # fmt: skip
    values = batches[0].k
    times = interleaved_medians(
        {
            "lossless": lambda: _apply_lossless(convention, batches[0], values),
            "asap": lambda: _apply_asap(convention, amortised, batches[0], values),
        },
        repeats=7,
    )
    lossless, asap = times["lossless"]["median_ms"], times["asap"]["median_ms"]
    if asap > WORTHWHILE * lossless:
        return Choice(
            "sinkhorn",
            f"asap takes {asap:.3g} ms here, the lossless loop {lossless:.3g} ms",
            None, error, lossless, asap,
        )
    return Choice(
        "asap", f"inside the budget, {lossless / asap:.2f} x the lossless speed", amortised,
        error, lossless, asap,
    )


def why_no_fit(recipe: Recipe, convention: Convention) -> str:
    """Why legal_closures gives none: the parity of the ending, or too few half-steps."""
    return (
        f"a {convention.last_side}-ending loop of {convention.half_steps} half-steps has no source "
        f"dual {recipe.closures} or fewer closures before its end"
    )


def _settings(convention: Convention) -> tuple[float, int, bool, list[float]]:
    return (
        convention.score_multiplier,
        convention.half_steps,
        convention.first_side == "row",
        factor_terms(convention.output_factor),
    )


def _lossless(convention: Convention, t: SiteTensors) -> Tensor:
    result: Tensor = torch.ops.asapc.sinkhorn_attention(
        t.q, t.k, t.keep, t.bias, *_settings(convention)
    )
    return result


def _apply_lossless(convention: Convention, t: SiteTensors, v: Tensor) -> Tensor:
    result: Tensor = torch.ops.asapc.sinkhorn(t.q, t.k, v, t.keep, t.bias, *_settings(convention))
    return result


def _dual(convention: Convention, amortised: Amortised, t: SiteTensors) -> Tensor:
    dual: Tensor = torch.ops.asapc.sliced_dual(
        t.q, t.k, t.keep, amortised.theta, amortised.coefficients, convention.score_multiplier
    )
    return dual


def _asap(convention: Convention, amortised: Amortised, t: SiteTensors) -> Tensor:
    factor = factor_terms(convention.output_factor)
    result: Tensor = torch.ops.asapc.asap_attention(
        t.q, t.k, t.keep, t.bias, _dual(convention, amortised, t),
        convention.score_multiplier, amortised.closures, factor,
    )  # fmt: skip
    return result


def _apply_asap(
    convention: Convention, amortised: Amortised, t: SiteTensors, v: Tensor
) -> Tensor:
    factor = factor_terms(convention.output_factor)
    result: Tensor = torch.ops.asapc.asap(
        t.q, t.k, v, t.keep, t.bias, _dual(convention, amortised, t),
        convention.score_multiplier, amortised.closures, factor,
    )  # fmt: skip
    return result
