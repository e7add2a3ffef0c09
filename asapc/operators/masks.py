"""Key masks that are added to scores: 0 keeps a key, a very low number hides it.

Published code has -1e9, -10000, -inf or the least number of a dtype; a softmax of exp(-1e4 + s) is 0 in
every precision. Anything between is a bias of the scores, which no mask can stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.errors import InputError

MASKED_BELOW = -1e4  # an additive score up to here removes its key
HIDDEN_SCORE = -1e9  # what most code adds
RULE = "an additive key mask holds 0, or scores so low that they hide a key, as where it was compiled"
HELP = "compile with data whose masks hold such numbers: they are then added to the scores as a bias"


def kept_keys(mask: Tensor, hides: float) -> Tensor:
    """True on the keys that an additive mask keeps, in its shape.  hides: scores up to here hide a key.

    Raises InputError on a number between 0 and `hides`, or above 0; on a GPU, where nothing waits for a
    number, it is a device-side assertion.
    """
    kept = mask > hides
    hard = (~kept | (mask == 0)).all()
    if mask.device.type != "cpu":
        torch._assert_async(hard, RULE)
    elif not bool(hard):
        soft = mask[kept & (mask != 0)]
        raise InputError(RULE, got=f"{len(soft)} others, such as {float(soft[0]):g}", help=HELP)
    return kept
