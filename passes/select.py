"""Select: per site, the fastest candidate inside the fidelity budget, else the lossless operator.

A rule for one candidate: ASAP with the calibrated coefficients is taken where its attention error on
the selection split is inside the budget and it measured faster than the lossless operator on the
site's own activations. A recipe that names an operator gets it; lot and esp_hard, distilled into a
Sinkhorn site, are never picked otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features.predictor import Amortised, DualPredictor
from asapc.fidelity import AttentionFidelity
from asapc.formats.calibration import AnySiteCalibration, SiteDistillation
from asapc.ir import AnyConvention, Convention, Distilled, EspConvention, LotConvention, SiteTensors
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.calls import times_share
from asapc.passes.rewrite import Hardened, Replacement
from asapc.recipe import Recipe
from asapc.timing import interleaved_medians

# A closure costs about a half-step: with so few of them the lossless loop is already as cheap.
REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "sinkhorn": ("asap", "lot", "esp_hard"), "esp_soft": ("esp_hard",), "esp_hard": (), "lot": (),
}  # fmt: skip
# Operators that are fitted to a Sinkhorn site's outputs, and the recipe's key for their size.
DISTILLED = {"lot": "pivots", "esp_hard": "slices"}
FEW_HALF_STEPS = 5
WORTHWHILE = 1.1  # an approximation must be this much faster than the exact loop to be picked


@dataclass(frozen=True)
class Choice:
    """The operator a site becomes, why, and what was measured on the selection split."""

    operator: str
    reason: str
    replacement: Replacement | None = None
    attention_rel_l2: float | None = None
    lossless_ms: float | None = None
    asap_ms: float | None = None


def needs_fit(convention: AnyConvention, recipe: Recipe) -> TypeGuard[Convention]:
    """Whether calibration may have something to fit: an operator is named that needs it, or auto and
    the loop is long."""
    if not isinstance(convention, Convention):
        return False
    if recipe.operator == "auto":
        return convention.half_steps > FEW_HALF_STEPS
    return recipe.operator in ("asap", *DISTILLED)


def choose(
    recipe: Recipe,
    convention: AnyConvention,
    calibration: AnySiteCalibration | None,
    batches: Sequence[SiteTensors],
) -> Choice:
    """The operator of one site, from its activations on the selection split.

    Exact instead of soft sorting is decided for the whole model, see pipeline.compile.
    Raises InputError if the recipe names an operator that this kind of site cannot become.
    """
    own = convention.to_dict()["operator"]
    if recipe.operator not in ("auto", "lossless", own, *REPLACEMENTS[own]):
        raise InputError(
            f"recipe: a site of the kind {own} can become {' or '.join((own, *REPLACEMENTS[own]))}",
            got=f"operator: {recipe.operator}",
            help="name sites of different kinds under `sites`, each with its own operator",
        )
    if recipe.operator in ("lossless", own):
        return Choice(own, "the recipe asks for it")
    if isinstance(convention, LotConvention) or own == "esp_hard":
        return Choice(own, "the same map from a faster kernel: nothing is approximated")
    if isinstance(convention, EspConvention):
        forced = recipe.operator == "esp_hard"
        return Choice("esp_hard", "the recipe asks for it" if forced else "exact sorting", Hardened())
    if recipe.operator == "auto" and convention.half_steps <= FEW_HALF_STEPS:
        return Choice("sinkhorn", f"{convention.half_steps} half-steps cost as much as the closures")
    if calibration is None:
        return Choice("sinkhorn", f"no dual can be predicted: {why_no_fit(recipe, convention)}")
    fidelity = AttentionFidelity()
    for tensors in batches:
        fidelity.update(
            apply_lossless(convention, tensors, None),
            apply_replacement(convention, calibration.replacement, tensors, None),
            tensors.keep,
        )
    error = fidelity.metrics()["attention_rel_l2"]
    if isinstance(calibration, SiteDistillation):
        return Choice(recipe.operator, "the recipe asks for it", calibration.distilled, error)
    amortised = calibration.amortised
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
            "lossless": lambda: apply_lossless(convention, batches[0], values),
            "asap": lambda: apply_amortised(convention, amortised, batches[0], values),
        },
        repeats=7,
    )
    lossless, asap = times["lossless"]["median_ms"], times["asap"]["median_ms"]
    if lossless < WORTHWHILE * asap:
        return Choice(
            "sinkhorn",
            f"asap is {lossless / asap:.2f} x as fast as the lossless loop ({asap:.3g} and "
            f"{lossless:.3g} ms), less than the {WORTHWHILE:g} x that an approximation must gain",
            None, error, lossless, asap,
        )
    return Choice(
        "asap", f"inside the budget, {lossless / asap:.2f} x the lossless speed", amortised,
        error, lossless, asap,
    )


def why_no_fit(recipe: Recipe, convention: Convention) -> str:
    """Why closure_plan gives none: the parity of the ending, or too few half-steps."""
    return (
        f"a {convention.last_side}-ending loop of {convention.half_steps} half-steps has no "
        f"{recipe.side} dual {recipe.closures} or fewer closures before its end"
    )


def apply_lossless(convention: Convention, t: SiteTensors, v: Tensor | None) -> Tensor:
    """The finite loop on a site's tensors: A v, or the map A where v is None."""
    settings = (
        convention.score_multiplier,
        convention.half_steps,
        convention.first_side == "row",
        factor_terms(convention.output_factor),
    )
    result: Tensor
    if v is None:
        result = torch.ops.asapc.sinkhorn_attention(t.q, t.k, t.keep, t.bias, *settings)
    else:
        result = torch.ops.asapc.sinkhorn(t.q, t.k, v, t.keep, t.bias, *settings)
    return result


def predict(convention: Convention, predictor: DualPredictor, t: SiteTensors) -> Tensor:
    """One predicted dual on a site's tensors."""
    dual: Tensor = torch.ops.asapc.dual(
        t.q, t.k, t.keep, t.bias, *predictor.arguments(convention.score_multiplier)
    )  # fmt: skip
    return dual


def apply_replacement(
    convention: Convention, own: Amortised | Distilled, t: SiteTensors, v: Tensor | None
) -> Tensor:
    """What replaces a site's loop, on its tensors: A v, or the map A where v is None."""
    if isinstance(own, Distilled):
        return apply_distilled(own, t, v)
    return apply_amortised(convention, own, t, v)


def apply_distilled(own: Distilled, t: SiteTensors, v: Tensor | None) -> Tensor:
    """A distilled operator on a site's tensors: A v, or the map A where v is None.

    The same calls that rewrite puts into a graph.
    """
    operator = getattr(torch.ops.asapc, own.operator if v is not None else f"{own.operator}_attention")
    values = () if v is None else (v,)
    result: Tensor = operator(t.q, t.k, *values, t.keep, None, *own.arguments)
    return times_share(result, t.keep) if own.share else result


def apply_amortised(
    convention: Convention, own: Amortised, t: SiteTensors, v: Tensor | None
) -> Tensor:
    """Predicted duals and closures on a site's tensors: A v, or the map A where v is None.

    The same calls that rewrite.amortise puts into a graph.
    """
    duals: dict[str, Tensor | None] = {"source": None, "key": None}
    mass: Tensor | None = None
    for predictor in own.predictors:
        if own.plan.rescaled:
            duals["key"], mass = torch.ops.asapc.dual_and_row_mass(
                t.q, t.k, t.keep, t.bias, *predictor.arguments(convention.score_multiplier, mass=True)
            )
        else:
            duals[predictor.side] = predict(convention, predictor, t)
    source = duals["source"]
    if own.intercept is not None and source is not None:
        source = source + own.intercept[:, None]
    settings = (
        source, duals["key"], convention.score_multiplier, own.plan.closures,
        factor_terms(convention.output_factor),
    )  # fmt: skip
    result: Tensor
    if v is None:
        result = torch.ops.asapc.asap_attention(t.q, t.k, t.keep, t.bias, *settings)
    else:
        result = torch.ops.asapc.asap(t.q, t.k, v, t.keep, t.bias, *settings)
    return result if mass is None else (result * mass[..., None]).to(result.dtype)
