"""Class scores of a classifier, whatever it returns: logits, probabilities, or one binary column."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).tiny  # a probability, before its logarithm is taken
ROUNDING = 1e-4  # of a sum of probabilities


def log_probabilities(scores: Tensor, probabilities: bool) -> Tensor:
    """[B, classes] log-probabilities in float64; a single column becomes the two classes it decides."""
    wide = scores.double()
    if wide.shape[1] == 1:
        if not probabilities:
            return torch.nn.functional.logsigmoid(torch.cat([-wide, wide], dim=1))
        wide = torch.cat([1 - wide, wide], dim=1)
    return wide.clamp(min=SMALLEST).log() if probabilities else torch.log_softmax(wide, dim=-1)


def are_probabilities(scores: Tensor) -> bool:
    """Whether every row is a distribution, or a single column within [0, 1]."""
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        return False
    return scores.shape[1] == 1 or bool(((scores.double().sum(-1) - 1).abs() < ROUNDING).all())
