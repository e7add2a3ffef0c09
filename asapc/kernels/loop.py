"""What a kernel of the finite loop is asked to run, and how much of it gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asapc.ir import Side

ROUNDING = 8  # units in the last place of a term: what a sum of products may be off by

# Entries of K lie in [exp(-range), 1] and the scalings in exp(+-2 range), so this range keeps every
# intermediate inside the format: exp(2 * 40) < 3.4e38 and exp(2 * 340) < 1.8e308.
SAFE_ROW_RANGE = {torch.float32: 40.0, torch.float64: 340.0}


def precision(widest: float, dtype: torch.dtype) -> torch.dtype | None:
    """The format, dtype or else float64, that holds the linear domain of rows of scores that span so far;
    None where logarithms are needed."""
    return next((own for own in (dtype, torch.float64) if widest <= SAFE_ROW_RANGE[own]), None)


class Loop(NamedTuple):
    """`half_steps` c-transforms on S = score_multiplier q k' + bias, the first on `first_side`.

    output_factor: [coefficient, N power, M power, n power], see operators.sinkhorn.factor_value.
    """

    score_multiplier: float
    half_steps: int
    first_side: Side
    output_factor: Sequence[float]

    @property
    def ends_on_rows(self) -> bool:
        return (self.first_side == "row") == (self.half_steps % 2 == 1)


class Gradients(NamedTuple):
    """Of q, k, v and the start dual (None without one); depth: [B, H], half-steps they passed through."""

    q: Tensor
    k: Tensor
    v: Tensor
    dual: Tensor | None
    depth: Tensor


@dataclass(frozen=True)
class Tail:
    """The half-steps that gradients pass through, from the last one: a certified tail.

    most: at most so many.  tolerance: fewer where what they leave out of the scores' gradient is at most
    this part, in L1 and for every head, of the slopes of the plan with fixed scalings, A_ij (Z_ij - mean
    of row i under A), Z = dout v', or no more than the rounding of A_ij Z_ij; 0 leaves out nothing.

    The adjoint of a half-step does not enlarge the gradient of a dual in L1, as its plan's rows (or
    columns) sum to 1. So the t half-steps before the tail add at most t |x|_1 to the scores' gradient,
    x being the gradient of the dual that they end with: it is known, and no product is needed.
    Source: block-wise paper, Proposition 5 and Corollary 2, with this bound for the norm.
    """

    most: int
    tolerance: float = 0.0

    def allowed(self, attention: Tensor, products: Tensor) -> Tensor:
        """What may be left out of rows of A and Z [G, ..., M]: [G], for every head."""
        mass = attention.sum(-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
        terms = attention * products
        slopes = attention * (products - terms.sum(-1, keepdim=True) / mass)
        rounding = ROUNDING * torch.finfo(terms.dtype).eps
        return self.tolerance * slopes.abs().flatten(1).sum(1) + rounding * terms.abs().flatten(1).sum(1)
