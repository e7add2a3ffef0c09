import math

import pytest
import torch

from asapc.report.pictures import CELLS, PictureCollector, pooled


def maps(batch: int, heads: int, queries: int, keys: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, queries, keys, generator=generator).softmax(-1)


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (64, 65), (65, 200), (300, 64)])
def test_pooling_keeps_row_sums_and_makes_no_stripes(queries: int, keys: int) -> None:
    attention = torch.full((queries, keys), 1 / keys, dtype=torch.float64)
    small = pooled(attention)
    assert small.shape == (min(queries, CELLS), min(keys, CELLS))
    # Uniform attention stays uniform, whatever does not divide.
    torch.testing.assert_close(small, torch.full_like(small, 1 / small.shape[1]))
    random = maps(1, 1, queries, keys)[0, 0].double()
    torch.testing.assert_close(pooled(random).sum(-1), torch.ones(small.shape[0]).double())


def test_three_examples_each_with_its_worst_head() -> None:
    teacher = maps(2, 3, 6, 6)
    compiled = teacher.clone()
    compiled[0, 2] += 0.1
    compiled[1, 0] += 0.1
    compiled[1, 1, 0, 0] = math.nan  # broken is worse than wrong
    collector = PictureCollector("layers.0")
    collector.update(teacher, compiled)
    collector.update(teacher, teacher)
    collector.update(teacher, teacher)
    result = collector.result()
    assert result.name == "layers.0"
    assert [(p.example, p.head) for p in result.pairs] == [(0, 2), (1, 1), (2, 0)]
    assert result.pairs[1].error == math.inf
    assert result.pairs[2].error == 0.0
    expected = 0.1 * 6 / torch.linalg.matrix_norm(teacher[0, 2].double())
    assert result.pairs[0].error == pytest.approx(float(expected), rel=1e-5)


def test_masked_tokens_are_not_in_the_picture() -> None:
    teacher = maps(2, 1, 4, 8)
    teacher[1, :, :, 3] = math.nan  # NaN where nothing may be read
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[0] = False  # no active key at all: passed over
    keep[1, 3] = False
    query_keep = torch.tensor([[True] * 4, [True, True, False, True]])
    collector = PictureCollector("x")
    collector.update(teacher, teacher, keep, query_keep)
    (pair,) = collector.result().pairs
    assert (pair.example, pair.active, pair.teacher.shape) == (1, 7, (3, 7))
    inside = teacher[1, 0][query_keep[1]][:, keep[1]]
    torch.testing.assert_close(pair.teacher, inside)
    torch.testing.assert_close(pair.row_sums[0], inside.sum(-1))
    # n active queries share m active keys: a balanced column has mass n / m.
    torch.testing.assert_close(pair.column_sums[1], inside.sum(0) * 7 / 3)


def test_maps_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        PictureCollector("x").update(maps(1, 1, 4, 4), maps(1, 1, 4, 5))
