"""What a site sees, at random, and batches straight into its collector, as a calibration feeds it."""

from __future__ import annotations

import torch

from asapc.calibration.stream import Collector, Pending, take_in
from asapc.ir import SiteTensors
from asapc.operators.masks import hidden_queries


def site_tensors(
    seed: int = 0, batch: int = 3, heads: int = 2, n: int = 9, m: int = 9, dim: int = 4,
    masked: bool = False, bias: bool = False, values: bool = False, hidden: bool = False,
) -> SiteTensors:  # fmt: skip
    """masked: some keys are padding, of no example all of them.  hidden: so are some queries, others."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, n, dim, generator=generator)
    k = torch.randn(batch, heads, m, dim, generator=generator)
    keep = None
    if masked:
        keep = torch.rand(batch, m, generator=generator) < 0.7
        keep[:, 0] = True
    extra = torch.randn(1, heads, n, m, generator=generator) if bias else None
    if hidden:
        shown = torch.rand(batch, n, generator=generator) < 0.7
        shown[:, 0] = True
        extra = hidden_queries(shown)
    v = torch.randn(batch, heads, m, dim, generator=generator) if values else None
    return SiteTensors(q, k, keep, extra, None, v)


def take(collector: Collector, *batches: SiteTensors) -> None:
    for tensors in batches:
        take_in([Pending(0, collector.name, 0, collector)], [tensors])
