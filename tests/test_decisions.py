"""What a layer decides by its scores, and what it rounds: whole layers as users write them, compiled only
where they are the same from the smallest scores to the largest."""

from __future__ import annotations

from collections.abc import Callable

import attention_zoo as zoo
import pytest
import torch
from analyses import analysed, ran
from torch import Tensor

from asapc.measure.differences import largest_difference

SCALES = (1e-3, 1.0, 1e3)  # at larger ones single precision is 1e-4 from itself


def log_loop(s: Tensor, half_steps: int = 3) -> Tensor:
    for step in range(half_steps):
        s = s - torch.logsumexp(s, -1 - step % 2, keepdim=True)
    return s.exp()


def divided(p: Tensor, constant: float = 0.0) -> Tensor:
    for axis in (-2, -1, -2, -1):
        p = p / (p.sum(axis, keepdim=True) + constant)
    return p


class Layer(zoo._Projected):
    def __init__(self, attention: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__(dim=8)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(self.attention(q @ k.transpose(-1, -2)) @ v)


def largest(s: Tensor) -> Tensor:
    return s.abs().amax((-1, -2), keepdim=True)


def cut_off(p: Tensor, below: float) -> Tensor:
    return torch.where(p < below, torch.zeros_like(p), p)


def rescued(p: Tensor) -> Tensor:
    for axis in (-2, -1, -2, -1):
        p = torch.nan_to_num(p / p.sum(axis, keepdim=True))
    return p


def uniform(s: Tensor) -> Tensor:
    return torch.where(largest(s) < 0.2, torch.zeros_like(s), s)


class Short(Layer):
    """Multiplies its map with the values in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        p = self.attention(q @ k.transpose(-1, -2))
        return self.merge((p.bfloat16() @ v.bfloat16()).float())


class OfComplex(Layer):
    """Queries and keys of complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.complex(y, y.flip(-1)) for y in self.split(x))
        return self.merge(log_loop((q @ k.mH).real) @ v.real)


class OfComplexValues(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge((log_loop(q @ k.mT).to(torch.complex64) @ torch.complex(v, v.flip(-1))).real)


SIDE, SEEN = "does not replay on scores on the other side of `", "does not replay on scores"
COMPLEX = "gives it complex numbers, which no operator has"
# A layer, or the attention of one, and what is said of it.
REFUSED: dict[str, tuple[Layer | Callable[[Tensor], Tensor], str]] = {
    # what is decided by scores
    "heads of small scores are uniform": (lambda s: log_loop(uniform(s)), SIDE),
    "a window between two decades": (lambda s: log_loop(torch.where(
        (largest(s) > 0.045) & (largest(s) < 0.055), torch.zeros_like(s), s
    )), SIDE),
    "a smooth step": (lambda s: log_loop(s + s * torch.sigmoid(1e6 * (largest(s) - 3e3))), SIDE),
    "what never happens here": (lambda s: log_loop(torch.where(
        s.amax(-1, keepdim=True) > 5 * s.std(-1, keepdim=True) + s.mean(-1, keepdim=True), s * 0.0, s
    )), SIDE),
    # rows whose sum is 0 become 0, where the operator has them whole
    "behind the loop": (lambda s: torch.nan_to_num(divided(s.softmax(-2))), SEEN),
    "at every division": (lambda s: rescued(s.softmax(-2)), SEEN),
    "small entries left out, of which a thousand sum up": (
        lambda s: cut_off(log_loop(s, 10), 1e-5), SEEN
    ),
    # what is rounded
    "to a half and back": (lambda s: log_loop(s.half().float()), "rounds to float16"),
    "the plan": (lambda s: divided(s.softmax(-1)).bfloat16().float(), "rounds to bfloat16"),
    "in the midst of the loop": (
        lambda s: log_loop(log_loop(s).log().half().float(), 2), "rounds to float16"
    ),
    "to small numbers": (lambda s: log_loop(torch.round(s * 1e7) / 1e7), "rounds scores"),
    "to whole numbers": (lambda s: log_loop(s + (s * 1e-6).int().float()), "rounds scores"),
    "a product in a half": (Short(log_loop), "rounds to bfloat16"),
    "complex scores": (OfComplex(log_loop), COMPLEX),
    "complex values": (OfComplexValues(log_loop), COMPLEX),
}  # fmt: skip


def test_what_is_decided_by_scores_or_rounded_is_refused() -> None:
    torch.manual_seed(1)
    layers = zoo.Beside(own if isinstance(own, Layer) else Layer(own) for own, _ in REFUSED.values())
    analysis = analysed(layers, torch.randn(2, 6, 8))
    assert not analysis.sites
    reasons = {left.name: left.reason for left in analysis.left_alone}
    for place, (name, (_, rule)) in enumerate(REFUSED.items()):
        assert rule in reasons[f"layers.{place}"], (name, reasons[f"layers.{place}"])


class InAHalf(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        s = (q @ k.mT).bfloat16()
        for axis in (-1, -2) * 2:
            s = s - s.logsumexp(axis, keepdim=True)
        return self.merge(s.exp().float() @ v)


def test_of_a_loop_in_a_half_the_line_where_that_begins_is_told() -> None:
    (left,) = analysed(InAHalf(log_loop).eval(), torch.randn(2, 6, 8)).left_alone
    assert left.reason.startswith("`s = (q @ k.mT).bfloat16()`")


def test_scores_that_are_bounded_far_above_are_given() -> None:
    torch.manual_seed(1)
    model = Layer(lambda s: log_loop(s.clamp(-1e4, 1e4))).eval()
    analysis = analysed(model, torch.randn(2, 6, 8))
    (site,) = analysis.sites
    assert site.convention.to_json()["operator"] == "plan"
    x = 1e3 * torch.randn(3, 9, 8)
    ours = ran(analysis, x)
    torch.testing.assert_close(ours, model(x), rtol=1e-3, atol=1e-3 * float(model(x).abs().max()))


class Rescued(Layer):
    """Of a column of -inf, which is NaN after a half-step, and its rows after the next, code makes 0."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.split(x)
        hidden = torch.where(keep[:, None, None], 0.0, -torch.inf)
        return self.merge(torch.nan_to_num(self.attention(q @ k.transpose(-1, -2) + hidden)) @ v)


def test_nan_of_padding_that_the_data_does_not_show() -> None:
    torch.manual_seed(1)
    keep = torch.ones(2, 6, dtype=torch.bool)
    analysis = analysed(Rescued(lambda s: log_loop(s, 5)), torch.randn(2, 6, 8), keep)
    assert not analysis.sites and "sees NaN" in analysis.left_alone[0].reason


def test_a_layer_like_one_that_was_refused_is_refused() -> None:
    """What is tried on one of two layers alike holds for the other, but not where it failed."""
    layers = [Layer(lambda s: log_loop(uniform(s))) for _ in "12"]
    torch.manual_seed(1)
    layers[1].load_state_dict({n: torch.randn_like(t) for n, t in layers[1].state_dict().items()})
    analysis = analysed(torch.nn.Sequential(*layers), torch.randn(2, 6, 8))
    assert not analysis.sites and len(analysis.left_alone) == 2


GUARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "only numbers": lambda s: log_loop(torch.nan_to_num(s)),
    "the least number": lambda s: log_loop(s.clamp(min=torch.finfo(s.dtype).min)),
    "nothing above 0": lambda s: divided((s - s.amax(-1, keepdim=True)).clamp(max=0.0).exp(), 1e-8),
    "in float64": lambda s: divided(s.double().softmax(-1), torch.finfo(torch.float64).eps).float(),
    "between 0 and 1": lambda s: divided(s.softmax(-1)).clamp(0.0, 1.0),
}


def test_guards_that_change_nothing_are_compiled() -> None:
    model = zoo.Beside(map(Layer, GUARDS.values()))
    torch.manual_seed(1)
    x = torch.randn(2, 6, 8)
    analysis = analysed(model, x)
    assert len(analysis.sites) == len(GUARDS), analysis.left_alone
    for scale in SCALES:
        given = x * scale**0.5
        with torch.no_grad():
            found = zip(GUARDS, model(given), analysis.lifted[0].graph(given), strict=True)
        for name, theirs, ours in found:
            if bool(theirs.isfinite().all()):
                assert largest_difference(theirs, ours) < 1e-5, name


class Sorted(zoo.SlicedSoft):
    """Padded tokens get a low number and are sorted last."""

    low, hard = -1e4, False

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        q, k, v = self.split(x)
        hidden, sides = padded[:, None, None, :], []
        for points in (q, k):
            values = points.transpose(-1, -2).masked_fill(hidden, self.low)
            if self.hard:
                order = values.argsort(dim=-1, descending=True, stable=True)
                shown = (~hidden[..., None, :]).to(x.dtype)
                sides.append((order[..., None] == torch.arange(x.shape[1])).to(x.dtype) * shown)
                continue
            ordered = values.sort(dim=-1, descending=True).values
            logits = -((ordered[..., :, None] - values[..., None, :]) ** 2) / 0.1
            logits = logits.masked_fill(hidden[..., None, :], self.low)
            sides.append(torch.softmax(logits, -1) * (ordered > self.low / 2)[..., None])
        plans = sides[0].transpose(-1, -2) @ sides[1]
        weights = self.weights(plans, q, k)
        return self.merge((weights[..., None, None] * plans).sum(2) @ v)


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(("low", "hard"), [(-1e4, False), (-1e9, False), (LEAST, True)])
def test_sorts_in_which_tokens_fall_below_padding(low: float, hard: bool) -> None:
    torch.manual_seed(0)
    model = Sorted().eval()
    model.low, model.hard = low, hard
    x, padded = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[7], [7], [7]])
    analysis = analysed(model, x, padded)
    if low == -1e4:
        assert not analysis.sites
        assert "points as large as 100000 are taken" in analysis.left_alone[0].reason
        return
    assert analysis.sites, analysis.left_alone
    for counts in ([0, 1, 7], [3, 0, 0]):
        padded = torch.arange(7) >= torch.tensor(counts)[:, None]
        for scale in (1e-3, 1.0, 1e3, 1e7 if low > LEAST else 1e9):
            with torch.no_grad():
                ours, theirs = analysis.lifted[0].graph(x * scale, padded), model(x * scale, padded)
            assert largest_difference(theirs, ours) < 1e-5


class Weighed(zoo.Glued):
    """Padding by masses: what hides a token is a number, or none."""

    low, least = -1e30, 0

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        sigma, count = torch.softmax(self.masses, -1), keep.sum(-1).clamp(min=self.least).to(x.dtype)
        uniform = (-count.log())[:, None, None].expand(-1, self.heads, x.shape[1])
        uniform = uniform.masked_fill(~keep[:, None, :], self.low)
        first = self.plan(0.5 * (q @ self.pivots.mT), uniform, sigma.log())
        second = self.plan(0.5 * (k @ self.pivots.mT), uniform, sigma.log())
        return self.merge(count[:, None, None, None] * (first @ (second.mT @ v / sigma[..., None])))


@pytest.mark.parametrize(
    ("low", "least", "half_steps"), [(-1e30, 1, 4), (-1e30, 1, 3), (-torch.inf, 0, 4)]
)
def test_glued_plans_without_tokens(low: float, least: int, half_steps: int) -> None:
    torch.manual_seed(0)
    model = Weighed().eval()
    model.low, model.least, model.half_steps = low, least, half_steps
    x, keep = torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    analysis = analysed(model, x, keep)
    if low > -torch.inf and half_steps == 4:
        assert "does not replay on no key active" in analysis.left_alone[0].reason
        return
    assert analysis.sites, analysis.left_alone
    keep = torch.arange(7) < torch.tensor([[0], [1], [5]])
    with torch.no_grad():
        ours, theirs = analysis.lifted[0].graph(x, keep), model(x, keep)
    defined = theirs.isfinite().all(-1).all(-1)  # nothing is promised elsewhere
    assert bool(defined[1:].all()) and largest_difference(theirs[defined], ours[defined]) < 1e-5
