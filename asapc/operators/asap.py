"""ASAP: predicted duals, then a fixed small number of c-transforms (ASAP paper, Eqs. 16-18).

    source dual, columns last, 1 c-transform:   g0 = T_K(f^)
    source dual, columns last, 3 c_transforms:  g0 = T_K(f^), f+ = T_Q(g0), g+ = T_K(f+)
    source dual, rows last,    2 c_transforms:  g0 = T_K(f^), f+ = T_Q(g0)
    target dual, rows last,    1 c-transform:   f+ = T_Q(g^)             softmax attention with a key bias
    target dual, columns last, 2 c_transforms:  f+ = T_Q(g^), g+ = T_K(f+)
    both duals,  no c-transform:                exp(S + f^ + g^)         an ablation: no exact marginal

A predicted dual stands for the teacher's, as many half-steps before its end as there are c-transforms, so
an exact prediction reproduces the finite teacher exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from asapc.features import CLUSTERED, coarse, feature_list, predict_dual
from asapc.features.clouds import Budget, active_share, clouds_from
from asapc.ir import Side
from asapc.operators.pair import pair
from asapc.operators.sinkhorn import (
    attention_map,
    clean_values,
    initial_duals,
    open_empty,
    run_half_steps,
    score_matrix,
    widen,
)


def _asap(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, bias: Tensor | None,
    source_dual: Tensor | None, target_dual: Tensor | None, score_multiplier: float, c_transforms: int,
    output_factor: Sequence[float],
) -> Tensor:  # fmt: skip
    """A v [B, H, N, E] in v's dtype, or the dense map A [B, H, N, M] in q's, after `c_transforms`
    c-transforms from the given dual.

    source_dual: [B, H, N], target_dual: [B, H, M], predictions in score coordinates. C-transforms start
    on the side that is not given, and the gauge is free; with none of them both must be given.
    Raises ValueError on any other combination.
    """
    first_side = first_c_transform(source_dual, target_dual, c_transforms)
    source_dual = None if source_dual is None else open_dual(source_dual, keep)
    target_dual = None if target_dual is None else open_dual(target_dual, keep)
    q, keep, bias = open_empty(q, keep, bias)
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), score_multiplier)
    f, g = initial_duals(scores, keep)
    if source_dual is not None:
        f = source_dual.to(scores.dtype)
    if target_dual is not None:
        g = target_dual.to(scores.dtype)
        if keep is not None:
            g = g.masked_fill(~keep[:, None, :], -math.inf)
    f, g = run_half_steps(scores, f, g, c_transforms, first_side, keep)
    attention = attention_map(scores, f, g, output_factor, keep)
    return attention if v is None else attention @ widen(clean_values(v, keep))


asap, asap_attention = pair("asap", _asap)


def open_dual(dual: Tensor, keep: Tensor | None) -> Tensor:
    """A dual [B, H, N or M] with 0 on examples without an active key, see open_empty."""
    return dual if keep is None else dual.masked_fill(~keep.any(-1)[:, None, None], 0.0)


def first_c_transform(source_dual: Tensor | None, target_dual: Tensor | None, c_transforms: int) -> Side:
    """The side of the first c-transform.  Raises ValueError unless the duals fit the c-transforms."""
    wanted = 2 if c_transforms == 0 else 1
    given = [dual is not None for dual in (source_dual, target_dual)]
    if sum(given) != wanted:
        raise ValueError(f"{c_transforms} c-transforms start from {wanted} dual(s), got {sum(given)}")
    return "row" if target_dual is not None else "column"


def dual(
    q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, parameters: Sequence[Tensor],
    coefficients: Tensor, features: str, side: str, score_multiplier: float, half_steps: int,
    starts_on_x: bool,
) -> Tensor:  # fmt: skip
    """A predicted dual in score coordinates: [B, H, N] from the source side, [B, H, M] from the key's.

    features: recipe entries separated by spaces; parameters: those that exist, in that order;
    coefficients: [1|H, F].  See asapc.features.
    """
    clouds = clouds_from(q, k, keep, bias, score_multiplier, side)
    parsed, aligned = feature_list(features, parameters)
    return predict_dual(parsed, aligned, coefficients, clouds, Budget(half_steps, starts_on_x))


def dual_and_row_mass(
    q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, parameters: Sequence[Tensor],
    coefficients: Tensor, features: str, score_multiplier: float, half_steps: int, starts_on_x: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The keys' dual [B, H, M], and the mass of every query row in the teacher's plan [B, H, N].

    One c-transform from the keys' dual ends on rows of mass 1. A column-ending teacher leaves its rows
    out of balance, padded batches by a third and more; these masses (in attention units) put that
    back. They come from the first feature with clusters, and are active_share everywhere without one.
    """
    arguments = (features, "target", score_multiplier, half_steps, starts_on_x)
    predicted = dual(q, k, keep, bias, parameters, coefficients, *arguments)
    clouds = clouds_from(q, k, keep, bias, score_multiplier, "target")
    for feature, parameter in zip(*feature_list(features, parameters), strict=True):
        if feature.family in CLUSTERED:
            budget = Budget(half_steps, starts_on_x)
            _, mass = coarse.dual_and_mass(clouds, parameter, feature.count, budget, True)
            assert mass is not None
            return predicted, mass * active_share(clouds)
    return predicted, active_share(clouds)
