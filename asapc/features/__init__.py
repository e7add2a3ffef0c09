"""What a dual is predicted from, one family per file except for the short ones; FAMILIES lists them.

A recipe names features as `family`, `family:count` or `family:count:kind`. A feature has at most one
parameter, a tensor made once from calibration activations (slices, pivots). It maps a site's clouds to
columns X, and a dual is predicted as centre(X omega).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features import coarse, gaussian, points, sliced
from asapc.features.clouds import Budget, Clouds

MAX_COUNT = 4096
Size = int | None  # None: not known


@dataclass(frozen=True)
class Family:
    """columns(clouds, parameter, budget) -> X [B, H, N, F], finite wherever x carries mass.

    width(dim, tokens, count): the number of columns F of N tokens x of D dimensions.
    shape(heads, dim, count): of the parameter.
    counted: the recipe gives a number (slices, pivots); kinds: ways to choose them, the first is the
    default. parameter(sample, count, kind, seed) makes the tensor, None for families without one.
    derived(clouds, count) makes it from every call's own clouds instead.
    """

    columns: Callable[[Clouds, Tensor | None, Budget], Tensor]
    parameter: Callable[[Clouds, int, str, int], Tensor] | None = None
    width: Callable[[Size, Size, int], Size] = lambda dim, tokens, count: 1
    shape: Callable[[Size, Size, int], tuple[Size, ...]] = lambda heads, dim, count: (count, dim)
    counted: bool = False
    kinds: tuple[str, ...] = ()
    derived: Callable[[Clouds, int], Tensor] | None = None


FAMILIES: dict[str, Family] = {
    "sliced": Family(
        sliced.columns, sliced.parameter, counted=True, kinds=sliced.KINDS,
        width=lambda dim, tokens, count: count,
    ),
    "gaussian": Family(gaussian.columns, width=lambda dim, tokens, count: 3),
    "coarse": Family(
        coarse.columns, coarse.parameter, counted=True,
        shape=lambda heads, dim, count: (heads, count, dim),
    ),
    "farthest": Family(coarse.columns, counted=True, derived=coarse.farthest_points),
    "raw": Family(points.raw, width=lambda dim, tokens, count: dim),
    "lse": Family(points.lse),
    "token_bias": Family(points.token_bias, width=lambda dim, tokens, count: tokens),
    "norm": Family(points.norm),
    "active": Family(points.active),
}  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """One entry of a recipe's `features`, parsed."""

    family: str
    count: int = 0
    kind: str = ""

    @classmethod
    def parse(cls, text: str, where: str = "features") -> Feature:
        """"coarse:32" and the like.  Raises InputError naming what is allowed."""
        name, *rest = text.split(":")
        family = FAMILIES.get(name)
        if family is None:
            raise InputError(
                f"{where}: unknown feature family {name!r}", help=f"allowed: {', '.join(FAMILIES)}"
            )
        if not family.counted:
            if rest:
                raise InputError(f"{where}: {name} takes no number", got=repr(text))
            return cls(name)
        kinds = f", then optionally one of {', '.join(family.kinds)}" if family.kinds else ""
        rule = f"{where}: {name} is written {name}:<1 to {MAX_COUNT}>{kinds}"
        if not rest or not rest[0].isdecimal() or len(rest[0]) > 9 or not 1 <= int(rest[0]) <= MAX_COUNT:
            raise InputError(rule, got=repr(text))
        kind = rest[1] if len(rest) > 1 else (family.kinds[0] if family.kinds else "")
        if len(rest) > 2 or (len(rest) > 1 and kind not in family.kinds):
            raise InputError(rule, got=repr(text))
        return cls(name, int(rest[0]), kind)

    def __str__(self) -> str:
        """What parse reads."""
        parts = [self.family, str(self.count) if self.count else "", self.kind]
        return ":".join(part for part in parts if part)

    @property
    def has_parameter(self) -> bool:
        return FAMILIES[self.family].parameter is not None

    def parameter(self, sample: Clouds, seed: int) -> Tensor | None:
        make = FAMILIES[self.family].parameter
        return None if make is None else make(sample, self.count, self.kind, seed)

    def parameter_shape(self, heads: Size, dim: Size) -> tuple[Size, ...]:
        """Of what `parameter` makes."""
        return FAMILIES[self.family].shape(heads, dim, self.count)

    @property
    def by_head(self) -> bool:
        """Whether every head has a parameter of its own, along the first axis."""
        return self.has_parameter and self.parameter_shape(-1, None)[0] == -1

    def width(self, dim: Size, tokens: Size) -> Size:
        """Number of columns F; None if it depends on a size that is None."""
        return FAMILIES[self.family].width(dim, tokens, self.count)

    def columns(self, clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
        """By the fitted parameter, unless it is derived from the clouds."""
        family = FAMILIES[self.family]
        own = parameter if family.derived is None else family.derived(clouds, self.count)
        return family.columns(clouds, own, budget)


CLUSTERED = ("coarse", "farthest")  # families that run the loop on clusters around pivots


def total_width(features: Sequence[Feature], dim: Size, tokens: Size) -> Size:
    """Number of columns of all features, None if unknown."""
    widths = [feature.width(dim, tokens) for feature in features]
    return None if None in widths else sum(width or 0 for width in widths)


def feature_list(
    features: str, parameters: Sequence[Tensor]
) -> tuple[list[Feature], list[Tensor | None]]:
    """The parsed recipe entries, and a parameter or None for each.  features: separated by spaces."""
    parsed = [Feature.parse(text) for text in features.split()]
    remaining = iter(parameters)
    return parsed, [next(remaining) if feature.has_parameter else None for feature in parsed]


def feature_columns(
    features: Sequence[Feature], parameters: Sequence[Tensor | None], clouds: Clouds, budget: Budget
) -> Tensor:
    """X [B, H, N, F]: every feature's columns side by side, centred over the points with mass."""
    columns = [
        feature.columns(clouds, parameter, budget)
        for feature, parameter in zip(features, parameters, strict=True)
    ]
    return clouds.centre(torch.cat(columns, -1))


def predict_dual(
    features: Sequence[Feature], parameters: Sequence[Tensor | None], coefficients: Tensor,
    clouds: Clouds, budget: Budget,
) -> Tensor:  # fmt: skip
    """The predicted dual in score coordinates, centre(X omega) - |x|^2 / 2: [B, H, N].

    coefficients omega: [1, F] for all heads or [H, F].  Source: ASAP, Eq. 13 and Appendix D.1.
    """
    columns = feature_columns(features, parameters, clouds, budget)
    weights = coefficients.to(columns.dtype)[:, :, None]  # [1|H, F, 1]
    return (columns @ weights)[..., 0] - clouds.cost_offset()
