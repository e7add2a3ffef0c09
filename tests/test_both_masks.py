"""Attention on an active support: one mask hides padded queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_banded import analysed, random
from torch import Tensor, nn

import asapc
import asapc.kernels.library
from asapc.inputs.data import Batch
from asapc.ir import Convention
from asapc.operators.masks import hidden_queries
from asapc.operators.stabilised import stabilised_sinkhorn
from asapc.program.runner import Runner
from asapc.report.tables import convention_text

HALF_STEPS = 5


def pairs(keep: Tensor) -> Tensor:
    return keep[:, None, :, None] & keep[:, None, None, :]


def kernel_loop(s: Tensor, keep: Tensor) -> Tensor:
    """Scalings of a kernel that is 0 outside the support."""
    kernel = torch.exp(s) * pairs(keep)
    a, b = torch.ones_like(s[..., :1]), torch.ones_like(s[..., :1, :])
    queries, keys = keep[:, None, :, None], keep[:, None, None]
    for step in range(HALF_STEPS):
        if step % 2 == 0:
            a = queries / (kernel * b).sum(-1, keepdim=True).masked_fill(~queries, 1.0)
        else:
            b = keys / (kernel * a).sum(-2, keepdim=True).masked_fill(~keys, 1.0)
    return a * kernel * b


def subtracted(s: Tensor, keep: Tensor) -> Tensor:
    s = s.masked_fill(~pairs(keep), -math.inf)
    for step in range(HALF_STEPS):
        s = s - s.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True).nan_to_num(neginf=0.0)
    return s.exp()


def no_mass(s: Tensor, keep: Tensor) -> Tensor:
    """Marginals of 1/n on the active tokens, and of next to nothing; a mask of numbers, as in BERT."""
    hide = (1.0 - keep.to(s.dtype)) * -1e9
    log_mass = (hide - keep.sum(-1, keepdim=True).log())[:, None]
    s = s + hide[:, None, None]
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for step in range(HALF_STEPS):
        if step % 2 == 0:
            f = log_mass - torch.logsumexp(s + g[..., None, :], -1)
        else:
            g = log_mass - torch.logsumexp(s + f[..., None], -2)
    return torch.exp(s + f[..., None] + g[..., None, :]) * keep.sum(-1)[:, None, None, None]


def shares(s: Tensor, keep: Tensor) -> Tensor:
    """Marginals of 1/n for all, potentials of 0 for what is hidden; not times n."""
    log_mass = -keep.sum(-1, keepdim=True).float().log()[:, None]
    s = s.masked_fill(~pairs(keep), -1e9)
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for step in range(HALF_STEPS):
        if step % 2 == 0:
            f = (log_mass - torch.logsumexp(s + g[..., None, :], -1)).masked_fill(~keep[:, None], 0.0)
        else:
            g = (log_mass - torch.logsumexp(s + f[..., None], -2)).masked_fill(~keep[:, None], 0.0)
    return torch.exp(s + f[..., None] + g[..., None, :])


class Padded(nn.Module):
    def __init__(self, attention: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (x(hidden).unflatten(2, (2, 8)).transpose(1, 2) for x in (self.q, self.k, self.v))
        a = self.attention(3 * q @ k.transpose(-1, -2) / 8**0.5, attention_mask.bool())
        return self.out((a @ v).transpose(1, 2).flatten(2))


class Dustbin(Padded):
    """Behind the tokens a learnt one for each side, and fillers (block-wise paper, Proposition 3)."""

    def __init__(self, attention: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(attention)
        self.dustbin = nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        batch, tokens = attention_mask.shape
        rows = [hidden, self.dustbin.expand(batch, 1, -1), hidden.new_zeros(batch, 3, 16)]
        active = [attention_mask, attention_mask.new_ones(batch, 1), attention_mask.new_zeros(batch, 3)]
        return super().forward(torch.cat(rows, 1), torch.cat(active, 1))[:, :tokens]


def padding(*lengths: int, tokens: int) -> Tensor:
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize(
    ("kind", "attention", "padded"),
    [(Padded, kernel_loop, False), (Padded, subtracted, False), (Padded, no_mass, False),
     (Padded, no_mass, True), (Padded, shares, False), (Padded, shares, True), (Dustbin, no_mass, True)],
)  # fmt: skip
def test_one_mask_of_queries_and_keys(kind: Any, attention: Any, padded: bool) -> None:
    """However an example is padded: none hidden, some, all but one; all, where the original is finite."""
    net = kind(attention).eval()
    mask = padding(12, 9, 4 if padded else 12, tokens=12) if padded else torch.ones(3, 12).long()
    analysis = analysed(net, random(3, 12, 16), mask)
    (site,) = analysis.sites
    assert isinstance(site.convention, Convention) and site.convention.mask == "both"
    assert (site.convention.half_steps, site.convention.last_side) == (HALF_STEPS, "row")
    assert "queries and keys masked" in convention_text(site.convention.to_json())
    for tokens in (12, 21):
        x = random(4, tokens, 16, seed=tokens)
        for lengths in ((tokens,) * 4, (tokens, 7, 2, 1), (tokens, 5, 1, 0)):
            given = (x, padding(*lengths, tokens=tokens))
            with torch.no_grad():
                theirs, ours = net(*given), Runner(None, analysis.lifted)(Batch(given, {}, None, [0] * 4))
            finite = theirs.isfinite()
            assert bool(finite[:3].all())
            assert float((ours - theirs)[finite].abs().max()) <= 2e-5


@pytest.mark.parametrize("start", ["softmax", "row"])
@pytest.mark.parametrize("form", ["plan", "scaling"])
def test_divisions_with_a_constant_beside_an_example_without_a_token(form: str, start: str) -> None:
    """Rows without a score in one example, then an example of which every score counts."""
    keep = padding(12, 5, 1, 0, tokens=12).bool()
    q, k, v = (random(4, 2, 12, 8, seed=seed) for seed in range(3))
    settings = (0.4, 9, True, form, "add", 1e-6, start, False, False, [1.0, 1.0, 0.0, 0.0])
    given = (q, k, v, keep, hidden_queries(keep), *settings)
    ours, theirs = torch.ops.asapc.stabilised_sinkhorn(*given), stabilised_sinkhorn(*given)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def dilute(s: Tensor, keep: Tensor) -> Tensor:
    """Hidden queries get nothing in the end, and take part in the columns' sums all the same."""
    s = s.masked_fill(~keep[:, None, None], -1e9)
    for step in range(HALF_STEPS):
        s = s - s.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    return s.exp() * keep[:, None, :, None]


class Apart(Padded):
    """Scores with a bias that the data makes; more: of it, where tokens are hidden."""

    def __init__(self, attention: Callable[[Tensor, Tensor], Tensor], more: bool = False) -> None:
        super().__init__(attention)
        self.more = more

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (x(hidden).unflatten(2, (2, 8)).transpose(1, 2) for x in (self.q, self.k, self.v))
        apart = (hidden[:, :, None, :2] - hidden[:, None, :, :2]).square().sum(-1)[:, None]
        keep = attention_mask.bool()
        share = keep.float().mean(-1)[:, None, None, None] if self.more else 1.0
        s = (3 * q @ k.transpose(-1, -2) / 8**0.5 * share - apart) / share
        return self.out((self.attention(s, keep) @ v).transpose(1, 2).flatten(2))


def test_scores_have_a_bias() -> None:
    net = Apart(kernel_loop).eval()
    analysis = analysed(net, random(3, 12, 16), padding(12, 9, 4, tokens=12))
    (site,) = analysis.sites
    assert isinstance(site.convention, Convention)
    assert site.convention.mask == "both" and site.convention.bias
    leaf, mask = nn.Parameter(random(3, 15, 16, seed=9)), padding(15, 8, 1, tokens=15)
    ours = Runner(None, analysis.lifted, gradients=True)(Batch((leaf, mask), {}, None, [0] * 3))
    theirs = net(leaf, mask)
    assert float((ours - theirs).detach().abs().max()) <= 2e-5
    (wanted,), (found,) = (torch.autograd.grad(x, leaf, random(3, 15, 16)) for x in (theirs, ours))
    assert float((found - wanted).norm()) <= 1e-4 * float(wanted.norm())


def by_all_examples(s: Tensor, keep: Tensor) -> Tensor:
    return subtracted(s, keep) * (keep.sum() / keep.numel())


@pytest.mark.parametrize("net", [
    Padded(dilute), Padded(by_all_examples), Apart(kernel_loop, more=True),
], ids=["hidden at the end alone", "by all examples", "a bias that the mask scales"])  # fmt: skip
def test_no_such_sites(net: Padded) -> None:
    """Data without padding does not show it."""
    for mask in (torch.ones(3, 12).long(), padding(12, 9, 4, tokens=12)):
        analysis = analysed(net.eval(), random(3, 12, 16), mask)
        assert all(site.convention.mask != "both" for site in analysis.sites)
        assert all(left.reason for left in analysis.left_alone)


def test_compiled_trained_and_never_amortised(tmp_path: Path) -> None:
    net = Apart(kernel_loop).eval()
    mask = padding(*range(1, 17), 16, 16, 16, 16, tokens=16)
    data = [{"hidden": random(20, 16, 16, seed=seed), "attention_mask": mask} for seed in range(4)]
    recipe = {"batch_size": 16, "max_examples": 32, "selection_examples": 16, "operator": "asap"}
    _, report = asapc.compile(net, data, recipe=recipe, out=tmp_path / "out", examples=16)
    (site,) = report.facts["sites"]
    assert site["operator"] in ("sinkhorn", "stabilised_sinkhorn")
    assert "padded queries are hidden" in site["reason"]
    metrics = site["metrics"]
    assert metrics["attention_rel_l2"] < 1e-5 and metrics["row_err_teacher"] < 1e-5  # it ends on rows
    assert metrics["row_err"] == pytest.approx(metrics["row_err_teacher"], abs=1e-5)
    loaded, mask = asapc.load(tmp_path / "out"), padding(20, 11, 1, tokens=20)
    leaf, grad = nn.Parameter(random(3, 20, 16, seed=9)), random(3, 20, 16, seed=4)
    (theirs,), (ours,) = (torch.autograd.grad(m(leaf, mask), leaf, grad) for m in (net, loaded))
    assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())
