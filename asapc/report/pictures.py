"""What the page's pictures need: a few attention maps, teacher against compiled, small enough to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asapc.processes import Part

EXAMPLES = 3
CELLS = 64  # a side of a map, at most: finer is not seen on a page


@dataclass(frozen=True)
class MapPair:
    """One head's attention in one example, in attention units: rows sum to about 1.

    Only active queries and keys are kept.  teacher, compiled: [n, m] float32, n and m at most CELLS,
    see `pooled`.  row_sums, column_sums: (teacher, compiled), before pooling, one number per active
    query and key; columns times M / N, so that 1 is balanced on both sides.
    error: |A^ - A|_F / |A|_F before pooling.
    """

    example: int  # place among the examples that were measured
    head: int
    active: int  # keys
    teacher: Tensor
    compiled: Tensor
    row_sums: tuple[Tensor, Tensor]
    column_sums: tuple[Tensor, Tensor]
    error: float = 0.0


@dataclass(frozen=True)
class SitePictures:
    """The pictures of one site, in order of the examples."""

    name: str
    pairs: list[MapPair] = field(default_factory=list)

    def part(self) -> Part:
        """What another process makes the same of, see from_part."""
        maps = [(x.teacher, x.compiled, *x.row_sums, *x.column_sums) for x in self.pairs]
        facts = [(pair.example, pair.head, pair.active, pair.error) for pair in self.pairs]
        tensors = {f"{n}.{i}": x for n, own in enumerate(maps) for i, x in enumerate(own)}
        return tensors, [self.name, facts]

    @classmethod
    def from_part(cls, part: Part) -> SitePictures:
        tensors, (name, facts) = part
        pairs = []
        for number, (example, head, active, error) in enumerate(facts):
            t, c, rows_t, rows_c, columns_t, columns_c = (tensors[f"{number}.{i}"] for i in range(6))
            sums = (rows_t, rows_c), (columns_t, columns_c)
            pairs.append(MapPair(example, head, active, t, c, *sums, error))
        return cls(name, pairs)


class PictureCollector:
    """Keeps the first EXAMPLES examples with an active key: of each the head with the largest error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen = 0
        self._pairs: list[MapPair] = []

    def update(
        self,
        teacher_map: Tensor,
        compiled_map: Tensor,
        keep: Tensor | None = None,
        query_keep: Tensor | None = None,
    ) -> None:
        """Add maps [B, H, N, M] in attention units; keep: [B, M], query_keep: [B, N], True if active.

        The masks mean what they mean for `asapc.measure.fidelity.AttentionFidelity`.
        """
        if teacher_map.shape != compiled_map.shape:
            raise ValueError(
                f"maps must have one shape: {teacher_map.shape}, {compiled_map.shape}"
            )
        batch = len(teacher_map)
        for index in range(batch):
            if len(self._pairs) == EXAMPLES:
                break
            pair = _pair(
                self._seen + index, teacher_map[index], compiled_map[index],
                None if keep is None else keep[index],
                None if query_keep is None else query_keep[index],
            )  # fmt: skip
            if pair is not None:
                self._pairs.append(pair)
        self._seen += batch

    def result(self) -> SitePictures:
        return SitePictures(self.name, list(self._pairs))


def pooled(attention: Tensor, cells: int = CELLS) -> Tensor:
    """[N, M] to at most [cells, cells]: the mean over pooled queries, the sum over pooled keys.

    So rows still sum to what they summed to. A token between two cells is shared by area: whole
    tokens would make stripes, two tokens in one cell beside one in the next.
    """
    queries = _shares(attention.shape[0], cells, attention)
    keys = _shares(attention.shape[1], cells, attention)
    return (queries / queries.sum(-1, keepdim=True)) @ attention @ keys.T


def _shares(count: int, cells: int, like: Tensor) -> Tensor:
    """[min(count, cells), count]: the part of each token that lies in each cell; columns sum to 1."""
    if count <= cells:
        return torch.eye(count, dtype=like.dtype, device=like.device)
    width = count / cells
    token = torch.arange(count, dtype=torch.float64)
    cell = torch.arange(cells, dtype=torch.float64)[:, None] * width
    overlap = torch.minimum(token + 1, cell + width) - torch.maximum(token, cell)
    return overlap.clamp(min=0).to(like)


def _pair(
    example: int, teacher: Tensor, compiled: Tensor, keep: Tensor | None, query_keep: Tensor | None
) -> MapPair | None:
    """[H, N, M] maps of one example; None without an active query or key."""
    exact, approx = teacher.detach().double(), compiled.detach().double()
    ratio = exact.shape[-1] / max(1, exact.shape[-2])
    if keep is not None:
        exact, approx = exact[:, :, keep], approx[:, :, keep]
    if query_keep is not None:
        exact, approx = exact[:, query_keep], approx[:, query_keep]
        ratio = exact.shape[-1] / max(1, exact.shape[-2])
    if exact.numel() == 0:
        return None
    difference = torch.linalg.vector_norm(approx - exact, dim=(-2, -1))
    norm = torch.linalg.vector_norm(exact, dim=(-2, -1)).clamp(min=1e-300)
    error = torch.nan_to_num(difference / norm, nan=torch.inf)  # a broken head is the one to show
    head = int(error.argmax())
    exact, approx = exact[head], approx[head]
    return MapPair(
        example, head, exact.shape[-1],
        teacher=_small(pooled(exact)), compiled=_small(pooled(approx)),
        row_sums=(_small(exact.sum(-1)), _small(approx.sum(-1))),
        column_sums=(_small(exact.sum(-2) * ratio), _small(approx.sum(-2) * ratio)),
        error=float(error[head]),
    )  # fmt: skip


def _small(values: Tensor) -> Tensor:
    return values.float().cpu()
