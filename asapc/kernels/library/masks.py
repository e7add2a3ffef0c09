"""asapc::kept_keys: an additive mask as a boolean one."""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.kernels.library.registration import operator
from asapc.operators import masks


@operator
def kept_keys(mask: Tensor, hides: float) -> Tensor:
    return masks.kept_keys(mask, hides)


@kept_keys.register_fake
def _(mask: Tensor, _hides: float) -> Tensor:
    return torch.empty_like(mask, dtype=torch.bool)
