"""Token bias: one learnt value per position, for models whose sequences have one length.

Columns: the identity, F = N, [B, H, N, N]; no cost but the product by omega.
Source: ASAP, Appendix E.4 (the token bias of the MNIST layers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features.clouds import Budget, Clouds


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """One-hot positions: [B, H, N, N].  Raises InputError where the lengths vary."""
    if clouds.x_keep is not None or clouds.x_real is not None:
        raise InputError(
            "token_bias: needs sequences of one length",
            got="a padding mask",
            help="leave token_bias out of the candidate's features",
        )
    batch, heads, num_x, _ = clouds.x.shape
    identity = torch.eye(num_x, dtype=clouds.x.dtype, device=clouds.x.device)
    return identity.expand(batch, heads, num_x, num_x)
