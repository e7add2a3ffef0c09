"""Parameters: what enters a plan and does not depend on data, as pivots and masses of each head.

Code repeats parameters for every example before it multiplies by them, so that their first axis is
examples and heads in one: such a tensor is made at the sizes of an experiment and folded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.operators.lot import by_example
from asapc.passes.cut import constants_entering
from asapc.passes.lot.half import Half
from asapc.passes.lot.probe import Masses


def candidates(half: Half, sizes: Sequence[dict[Any, int]]) -> tuple[list[Tensor], list[Masses]]:
    """Pivots [H, R, D] and masses of them that could be a plan's; of scores, the unit vectors."""
    batch, heads, _, dim = half.shape(sizes[0])
    pivots = [torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)] if half.scores else []
    masses: list[Masses] = []
    for value in constants_entering(half.graph, half.between, sizes[0]):
        flat = value.reshape([n for n in value.shape if n != 1] or [1])
        if not half.scores:
            for turned in (flat, flat.transpose(-1, -2)) if flat.dim() > 1 else ():
                folded = None if turned.shape[-1] != dim else per_head(turned, 2, batch, heads)
                if folded is not None and not folded[1]:
                    pivots.append(folded[0].contiguous())
        for measure in (flat, flat.exp()):
            if bool((measure >= 0).all()) and bool(measure.isfinite().all()) and bool(measure.any()):
                folded = per_head(measure, 1, batch, heads)
                if folded is not None:
                    table, by_row = folded
                    masses.append(Masses(table / table.sum(-1, keepdim=True), by_row))
    counts = {z.shape[1] for z in pivots}
    masses += [Masses(torch.full((heads, r), 1.0 / r, dtype=torch.float64)) for r in sorted(counts)]
    distinct: list[Masses] = []
    for mass in masses:
        if mass.table.shape[1] in counts and not any(mass.is_like(other) for other in distinct):
            distinct.append(mass)
    return pivots, distinct


def per_head(
    value: Tensor, trailing: int, batch: int, heads: int, tolerance: float = 0.0
) -> tuple[Tensor, bool] | None:
    """A tensor whose leading axes are heads, examples, both or none as [H, ..], and whether its rows are
    interleaved (operators.lot); None where it is neither.

    trailing: how many last axes are one head's.  tolerance: relative, up to which rows are alike.
    """

    def alike(x: Tensor, y: Tensor) -> bool:
        return bool(((x - y).abs() <= tolerance * y.abs()).all())

    lead = max(value.dim() - trailing, 0)
    if value.dim() < trailing:
        return None
    rows = value.reshape(-1, *value.shape[lead:])
    if len(rows) == 1:
        return rows.expand(heads, *rows.shape[1:]), False
    if len(rows) == heads:
        return rows, False
    if len(rows) == batch and alike(rows, rows[:1]):
        return rows[:1].expand(heads, *rows.shape[1:]), False
    if len(rows) != batch * heads:
        return None
    folded = rows.unflatten(0, (batch, heads))
    if alike(folded, folded[:1].expand_as(folded)):
        return folded[0], False
    table = rows[::batch]
    return (table, True) if alike(by_example(table, batch), folded) else None
