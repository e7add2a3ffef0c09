"""What a dual is predicted from, one family per file."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asapc.errors import InputError
from asapc.features.sliced import slices


def directions(features: Sequence[str], dim: int, seed: int) -> Tensor:
    """The slices theta [L, D] that a recipe's features ask for: ("sliced:32",) -> [32, D].

    Raises InputError on a family other than `sliced:<number of slices>`.
    """
    rule = "features must be one entry `sliced:<number of slices>`"
    if len(features) != 1:
        raise InputError(rule, got=list(features), help="write features: [sliced:32]")
    family, _, number = features[0].partition(":")
    if family != "sliced" or not number.isdecimal() or int(number) == 0:
        raise InputError(rule, got=repr(features[0]), help="write features: [sliced:32]")
    return slices(int(number), dim, seed)
