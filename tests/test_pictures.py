"""The pictures of a report: which maps are kept, and that what is drawn is what was measured."""

import base64
import math
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure

from asapc.report.figures import Bar, Point, data_uri, draw_bars, draw_candidates, draw_maps, style
from asapc.report.pictures import CELLS, MapPair, SitePictures, pooled


def maps(batch: int, heads: int, queries: int, keys: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, queries, keys, generator=generator).softmax(-1)


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (64, 65), (65, 200), (300, 64)])
def test_pooling_makes_no_stripes(queries: int, keys: int) -> None:
    """Uniform attention stays uniform, whatever does not divide, and its rows have the same mass."""
    small = pooled(torch.full((queries, keys), 1 / keys, dtype=torch.float64))
    assert small.shape == (min(queries, CELLS), min(keys, CELLS))
    torch.testing.assert_close(small, torch.full_like(small, 1 / small.shape[1]))


def test_three_examples_each_with_its_worst_head() -> None:
    teacher = maps(2, 3, 6, 6)
    compiled = teacher.clone()
    compiled[0, 2] += 0.1
    compiled[1, 0] += 0.1
    compiled[1, 1, 0, 0] = math.nan  # broken is worse than wrong
    collector = SitePictures("layers.0")
    collector.update(teacher, compiled)
    collector.update(teacher, teacher)
    collector.update(teacher, teacher)
    assert [(p.example, p.head) for p in collector.pairs] == [(0, 2), (1, 1), (2, 0)]
    assert collector.pairs[1].error == math.inf
    assert collector.pairs[2].error == 0.0
    expected = 0.1 * 6 / torch.linalg.matrix_norm(teacher[0, 2].double())
    assert collector.pairs[0].error == pytest.approx(float(expected), rel=1e-5)


def test_masked_tokens_are_not_in_the_picture() -> None:
    teacher = maps(2, 1, 4, 8)
    teacher[1, :, :, 3] = math.nan  # NaN where nothing may be read
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[0] = False  # no active key at all: passed over
    keep[1, 3] = False
    query_keep = torch.tensor([[True] * 4, [True, True, False, True]])
    collector = SitePictures("x")
    collector.update(teacher, teacher, keep, query_keep)
    (pair,) = collector.pairs
    assert (pair.example, pair.active) == (1, 7)
    inside = teacher[1, 0][query_keep[1]][:, keep[1]]
    torch.testing.assert_close(torch.tensor(pair.teacher), inside)


def svg(figure: Figure) -> str:
    """What a picture of the page is; it is well-formed."""
    text = base64.b64decode(data_uri(figure).partition(",")[2]).decode()
    ElementTree.fromstring(text)
    return text


def test_a_map_is_the_numbers_it_shows() -> None:
    teacher = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.0, math.nan]])
    drawn = draw_maps(MapPair(0, 0, 3, teacher.tolist(), teacher.flip(0).tolist()))
    exact, compiled, difference = (axes.images[0] for axes in drawn.axes[:3])
    for image, end in ((exact, (0.0, 1.0)), (compiled, (0.0, 1.0)), (difference, (-1.0, 1.0))):
        assert image.get_clim() == pytest.approx(end)
    colors = exact.to_rgba(exact.get_array(), bytes=True)[..., :3].reshape(-1, 3).tolist()
    white, dark, wrong = [255, 255, 255], [10, 28, 66], [255, 0, 200]
    assert colors[0] == colors[4] == white and colors[2] == colors[3] == dark and colors[5] == wrong
    assert svg(draw_maps(MapPair(0, 0, 3, [[0.0, math.nan]], [[0.0, 0.0]])))


@pytest.mark.parametrize("values", [
    [0.0], [1e-9, 1e300], [None, math.inf, 1.0], [-3e-9], [0.3] * 48,
], ids=["zero", "tiny and huge", "not finite", "negative", "many"])  # fmt: skip
def test_bars_of_any_size(values: list[Any]) -> None:
    with style():
        drawn = draw_bars([Bar("<&$x$", value) for value in values], "error", line=("mean", 0.1))
        picture = svg(drawn)
    lengths = [bar.get_width() for bar in drawn.axes[0].patches]
    assert lengths == [max(v, 0) if v is not None and math.isfinite(v) else 0 for v in values]
    assert picture.count("\u221e") == sum(v is None or math.isinf(v) for v in values)
    assert "nan" not in picture and "$x$" in picture


@pytest.mark.parametrize("points", [
    [(0.0, 1.0), (0.0, 1.0)], [(1e-4, 1e-6), (1e6, 1e11)], [(0.02, 3.0), (0.02, 3.0)],
], ids=["exact", "far", "equal"])  # fmt: skip
@pytest.mark.parametrize("limit", [None, 0.0, 0.05, 1e6])
def test_candidates_anywhere(points: list[tuple[float, float]], limit: float | None) -> None:
    candidates = [Point("candidate" if error else "lossless", error, time, i == 0)
                  for i, (error, time) in enumerate(points)]  # fmt: skip
    with style():
        drawn = draw_candidates(candidates, "ms", limit)
        assert svg(drawn)
    (low, high), (bottom, top) = drawn.axes[0].get_xlim(), drawn.axes[0].get_ylim()
    assert all(low < time < high and bottom < error < top for error, time in points)
