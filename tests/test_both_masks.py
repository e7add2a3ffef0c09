"""Attention on an active support: one mask hides padded queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from analyses import analysed, batch, ran, random
from torch import Tensor, nn

import asapc
import asapc.kernels.library
from asapc.artifact import read_artifact
from asapc.errors import InputError
from asapc.ir import Convention
from asapc.operators.asap import asap as reference
from asapc.operators.masks import hidden_queries
from asapc.operators.stabilised import stabilised_sinkhorn
from asapc.report.tables import convention_text
from asapc.stages.analyse import analysed_once
from asapc.terminal.progress import make_progress

HALF_STEPS = 5


def pairs(queries: Tensor, keys: Tensor | None) -> Tensor:
    shown = queries[:, None, :, None]
    return shown if keys is None else shown & keys[:, None, None, :]


def kernel_loop(s: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
    """Scalings of a kernel that is 0 outside the support."""
    kernel = torch.exp(s) * pairs(queries, keys)
    a, b = torch.ones_like(s[..., :1]), torch.ones_like(s[..., :1, :])
    for step in range(HALF_STEPS):
        if step % 2 == 0:
            shown = queries[:, None, :, None]
            a = shown / (kernel * b).sum(-1, keepdim=True).masked_fill(~shown, 1.0)
        elif keys is None:
            b = 1.0 / (kernel * a).sum(-2, keepdim=True)
        else:
            shown = keys[:, None, None]
            b = shown / (kernel * a).sum(-2, keepdim=True).masked_fill(~shown, 1.0)
    return a * kernel * b


def subtracted(s: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
    s = s.masked_fill(~pairs(queries, keys), -math.inf)
    for step in range(HALF_STEPS):
        s = s - s.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True).nan_to_num(neginf=0.0)
    return s.exp()


def no_mass(
    s: Tensor, queries: Tensor, keys: Tensor | None, half_steps: int = HALF_STEPS, low: Any = -1e9
) -> Tensor:
    """Marginals of 1/n on the active tokens, and of next to nothing; a mask of numbers, as in BERT."""
    keys = s.new_ones(len(s), s.shape[-1]).bool() if keys is None else keys
    rows, columns = ((1.0 - x.to(s.dtype)) * low for x in (queries, keys))
    log_mu, log_nu = (
        (x - keep.sum(-1, keepdim=True).log())[:, None] for x, keep in ((rows, queries), (columns, keys))
    )
    s = s + columns[:, None, None]
    if keys is not queries:
        s = s + rows[:, None, :, None]
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for step in range(half_steps):
        if step % 2 == 0:
            f = log_mu - torch.logsumexp(s + g[..., None, :], -1)
        else:
            g = log_nu - torch.logsumexp(s + f[..., None], -2)
    return torch.exp(s + f[..., None] + g[..., None, :]) * queries.sum(-1)[:, None, None, None]


def columns_last(s: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
    return no_mass(s, queries, keys, HALF_STEPS + 1, torch.tensor(-1e9))  # the number is a tensor


def shares(s: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
    """Marginals of 1/n for all, potentials of 0 for what is hidden; not times n."""
    hidden = ~pairs(queries, keys)
    keys = s.new_ones(len(s), s.shape[-1]).bool() if keys is None else keys
    log_mu, log_nu = (-x.sum(-1, keepdim=True).float().log()[:, None] for x in (queries, keys))
    s = s.masked_fill(hidden, -1e9)
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for step in range(HALF_STEPS):
        if step % 2 == 0:
            f = (log_mu - torch.logsumexp(s + g[..., None, :], -1)).masked_fill(~queries[:, None], 0.0)
        else:
            g = (log_nu - torch.logsumexp(s + f[..., None], -2)).masked_fill(~keys[:, None], 0.0)
    return torch.exp(s + f[..., None] + g[..., None, :])


Loop = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Padded(nn.Module):
    def __init__(self, attention: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (x(hidden).unflatten(2, (2, 8)).transpose(1, 2) for x in (self.q, self.k, self.v))
        keep = attention_mask.bool()
        a = self.attention(3 * q @ k.transpose(-1, -2) / 8**0.5, keep, keep)
        return self.out((a @ v).transpose(1, 2).flatten(2))


class Dustbin(Padded):
    """Behind the tokens a learnt one for each side, and fillers (block-wise paper, Proposition 3)."""

    def __init__(self, attention: Loop) -> None:
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
                theirs, ours = net(*given), ran(analysis, *given)
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


def dilute(s: Tensor, keep: Tensor, _keys: Tensor | None) -> Tensor:
    """Hidden queries get nothing in the end, and take part in the columns' sums all the same."""
    s = s.masked_fill(~keep[:, None, None], -1e9)
    for step in range(HALF_STEPS):
        s = s - s.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    return s.exp() * keep[:, None, :, None]


def shown(s: Tensor, keep: Tensor, _keys: Tensor | None) -> Tensor:
    """Hidden queries take no part in the columns' sums, and have attention all the same."""
    for step in range(HALF_STEPS):
        taking_part = keep[:, None, None] if step % 2 == 0 else keep[:, None, :, None]
        s = s - s.masked_fill(~taking_part, -1e9).logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    return s.masked_fill(~keep[:, None, None], -1e9).exp()


class Apart(Padded):
    """Scores with a bias that the data makes; more: of it, where tokens are hidden."""

    def __init__(self, attention: Loop, more: bool = False) -> None:
        super().__init__(attention)
        self.more = more

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (x(hidden).unflatten(2, (2, 8)).transpose(1, 2) for x in (self.q, self.k, self.v))
        apart = (hidden[:, :, None, :2] - hidden[:, None, :, :2]).square().sum(-1)[:, None]
        keep = attention_mask.bool()
        share = keep.float().mean(-1)[:, None, None, None] if self.more else 1.0
        s = (3 * q @ k.transpose(-1, -2) / 8**0.5 * share - apart) / share
        return self.out((self.attention(s, keep, keep) @ v).transpose(1, 2).flatten(2))


def test_scores_have_a_bias() -> None:
    net = Apart(kernel_loop).eval()
    analysis = analysed(net, random(3, 12, 16), padding(12, 9, 4, tokens=12))
    (site,) = analysis.sites
    assert isinstance(site.convention, Convention)
    assert site.convention.mask == "both" and site.convention.bias
    leaf, mask = nn.Parameter(random(3, 15, 16, seed=9)), padding(15, 8, 1, tokens=15)
    ours = ran(analysis, leaf, mask, gradients=True)
    theirs = net(leaf, mask)
    assert float((ours - theirs).detach().abs().max()) <= 2e-5
    (wanted,), (found,) = (torch.autograd.grad(x, leaf, random(3, 15, 16)) for x in (theirs, ours))
    assert float((found - wanted).norm()) <= 1e-4 * float(wanted.norm())


@pytest.mark.parametrize(("net", "said"), [
    (Padded(dilute), ""), (Padded(shown), "have attention: multiply it by that mask"),
    (Padded(lambda s, keep, keys: subtracted(s, keep, keys) * (keep.sum() / keep.numel())), ""),
    (Apart(kernel_loop, more=True), ""),
], ids=["hidden at the end alone", "at the end shown", "by all examples", "a bias that the mask scales"])
def test_no_such_sites(net: Padded, said: str) -> None:
    """Data without padding does not show it."""
    for mask in (torch.ones(3, 12).long(), padding(12, 9, 4, tokens=12)):
        analysis = analysed(net.eval(), random(3, 12, 16), mask)
        assert all(site.convention.mask != "both" for site in analysis.sites)
        assert all(left.reason and said in left.reason for left in analysis.left_alone)
        assert not said or analysis.left_alone


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


# Two masks


class Cross(Padded):
    """Queries of one sequence and keys of another, each with its padding."""

    def forward(
        self, hidden: Tensor, context: Tensor, attention_mask: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        q = self.q(hidden).unflatten(2, (2, 8)).transpose(1, 2)
        k, v = (x(context).unflatten(2, (2, 8)).transpose(1, 2) for x in (self.k, self.v))
        keys = None if context_mask is None else context_mask.bool()
        a = self.attention(3 * q @ k.transpose(-1, -2) / 8**0.5, attention_mask.bool(), keys)
        return self.out((a @ v).transpose(1, 2).flatten(2))


def cross(queries: int, keys: int, seed: int = 0, batch: int = 4) -> tuple[Tensor, ...]:
    """Sequences of other lengths in every example, and their masks."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((queries, generator), (keys, generator))
    lengths = (torch.randint(1, size + 1, (batch,), generator=one) for size, one in sizes)
    masks = (padding(*x.tolist(), tokens=n) for x, n in zip(lengths, (queries, keys), strict=True))
    return random(batch, queries, 16, seed=seed), random(batch, keys, 16, seed=seed + 1), *masks


LOOPS = (kernel_loop, subtracted, no_mass, columns_last, shares)


@pytest.mark.parametrize(("attention", "keys", "alone"), [  # as many keys as queries, or more
    (own, 12 if (place + alone) % 2 else 14, alone)
    for place, own in enumerate(LOOPS) for alone in (False, True)
])  # fmt: skip
def test_a_mask_of_queries_and_another_of_keys(attention: Loop, keys: int, alone: bool) -> None:
    """Each side's mask is that side's marginal, on inputs with other masks and sizes than were seen."""
    net, given = Cross(attention).eval(), cross(12, keys)[: 3 if alone else 4]
    analysis = analysed(net, *given)
    (site,) = analysis.sites
    assert isinstance(site.convention, Convention)
    assert site.convention.mask == ("query" if alone else "both")
    assert site.convention.last_side == ("column" if attention is columns_last else "row")
    text = convention_text(site.convention.to_json())
    assert ("query mask" if alone else "queries and keys masked") in text
    for n, m in ((12, keys), (21, 7), (5, 19)):
        hidden, context = random(6, n, 16, seed=n), random(6, m, 16, seed=m + 100)
        masks = padding(n, 3, 1, 1, n, 0, tokens=n), padding(m, 1, 2, m, 0, 0, tokens=m)
        masks[0][1] = torch.arange(n) % 2  # not at the end, and not the first
        given = (hidden, context, *masks)[: len(given)]
        whole = 5 if alone else 4  # examples with a query and a key
        some = tuple(x[:whole] for x in given)
        for tried in (some, *([given] if attention is not shares else [])):
            with torch.no_grad():
                theirs = net(*tried)
                ours = ran(analysis, *tried)
            finite = theirs.isfinite()
            assert bool(finite[:whole].all()) and bool(ours.isfinite().all())
            assert float((ours - theirs)[finite].abs().max()) <= 2e-5
    nothing = tuple(x[:0] for x in given)
    with torch.no_grad():
        assert ran(analysis, *nothing).shape == (0, 5, 16)
    if attention is shares:  # hidden tokens take part again where no other is left
        with pytest.raises(InputError, match="every example has an active key and query"):
            ran(analysis, *given)


def of_all_keys(s: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
    """Queries that hide nothing in columns' sums."""
    assert keys is not None
    return subtracted(s, torch.ones_like(queries), keys) * queries[:, None, :, None]


def of_both_lengths(s: Tensor, queries: Tensor, keys: Tensor | None) -> Tensor:
    assert keys is not None
    return subtracted(s, queries, keys) * (queries.sum(-1) + keys.sum(-1))[:, None, None, None]


@pytest.mark.parametrize("attention", [of_all_keys, of_both_lengths])
def test_two_masks_that_are_no_marginals(attention: Loop) -> None:
    analysis = analysed(Cross(attention).eval(), *cross(12, 14))
    assert not analysis.sites and all(left.reason for left in analysis.left_alone)


def test_a_mask_that_is_made_of_another_before_the_layer() -> None:
    net = Cross(lambda s, queries, keys: subtracted(s, queries.roll(1, 0), keys)).eval()
    analysis = analysed(net, *cross(12, 14))
    assert len(analysis.sites) == 1
    tried = (random(3, 9, 16, seed=7), random(3, 11, 16, seed=8), padding(2, 0, 4, tokens=9),
             padding(1, 5, 0, tokens=11))  # fmt: skip
    with torch.no_grad():
        ours = ran(analysis, *tried)
        torch.testing.assert_close(ours, net(*tried), rtol=1e-4, atol=2e-5)


class Decoder(nn.Module):
    """Not written for this test's rules: an encoder-decoder's layer, whose masks are True on padding."""

    def __init__(self, dim: int = 24, heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm, self.to_q = nn.LayerNorm(dim), nn.Linear(dim, dim, bias=False)
        self.to_kv, self.proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim)

    def forward(
        self, target: Tensor, memory: Tensor, target_key_padding_mask: Tensor,
        memory_key_padding_mask: Tensor,
    ) -> Tensor:  # fmt: skip
        (b, n, _), m, h = target.shape, memory.shape[1], self.heads
        q = self.to_q(self.norm(target)).view(b, n, h, -1)
        k, v = self.to_kv(memory).view(b, m, 2, h, -1).unbind(2)
        logits = torch.einsum("bnhd,bmhd->bhnm", q * self.scale * 4, k)
        drop_q, drop_k = target_key_padding_mask[:, None, :], memory_key_padding_mask[:, None, :]
        logits = logits.masked_fill(drop_q[..., None] | drop_k[..., None, :], float("-inf"))
        r, c = logits.new_zeros(b, h, n), logits.new_zeros(b, h, m)
        for _ in range(3):
            c = -torch.logsumexp(logits + r[..., None], 2).masked_fill(drop_k, 0.0)
            r = -torch.logsumexp(logits + c[:, :, None], 3).masked_fill(drop_q, 0.0)
        plan = (logits + r[..., None] + c[:, :, None]).exp()
        return target + self.proj(torch.einsum("bhnm,bmhd->bnhd", plan, v).reshape(b, n, -1))


class Merged(Cross):
    """Heads in the batch, whose masks are repeated; columns last."""

    def forward(
        self, hidden: Tensor, context: Tensor, attention_mask: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        assert context_mask is not None
        def split(x: Tensor) -> Tensor:
            return x.unflatten(2, (2, 8)).transpose(1, 2).reshape(-1, x.shape[1], 8)

        q, k, v = split(self.q(hidden)), split(self.k(context)), split(self.v(context))
        pairs = attention_mask.bool()[:, :, None] & context_mask.bool()[:, None]
        hide = ~pairs.repeat_interleave(2, 0)
        s = torch.bmm(q, k.transpose(1, 2)).masked_fill(hide, -math.inf)
        for step in range(4):
            s = s - s.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True).nan_to_num(neginf=0.0)
        o = torch.bmm(s.exp(), v).reshape(-1, 2, hidden.shape[1], 8)
        return self.out(o.transpose(1, 2).flatten(2))


class Divided(Cross):
    """Tokens before heads, masks that are multiplied, and a constant in the divisions."""

    def forward(
        self, hidden: Tensor, context: Tensor, attention_mask: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        assert context_mask is not None
        q, k, v = (x.unflatten(2, (2, 8)) for x in (self.q(hidden), self.k(context), self.v(context)))
        keep = (attention_mask == 1)[:, None, :, None] * (context_mask == 1)[:, None, None, :]
        p = torch.exp(torch.einsum("bihd,bjhd->bhij", q, k)) * keep
        for axis in (-1, -2, -1, -2, -1):
            p = p / (p.sum(axis, keepdim=True) + 1e-8)
        return self.out(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2))


@pytest.mark.parametrize("kind", [Merged, Divided])
def test_two_masks_in_other_spellings(kind: Any) -> None:
    net = kind(kernel_loop).eval()
    analysis = analysed(net, *cross(12, 14))
    (site,) = analysis.sites
    assert isinstance(site.convention, Convention) and site.convention.mask == "both"
    given = cross(9, 17, 5, 6)
    given[2][0], given[3][1] = 0, 0
    with torch.no_grad():
        theirs, ours = net(*given), ran(analysis, *given)
    assert bool(theirs.isfinite().all())
    assert float((ours - theirs).abs().max()) <= 2e-5


NAMES = ("target", "memory", "target_key_padding_mask", "memory_key_padding_mask")


def decoded(queries: int, keys: int, seed: int, batch: int = 16) -> dict[str, Tensor]:
    """What a Decoder is given: padding of every length, and noise where there is padding."""
    _, _, *kept = cross(queries, keys, seed, batch)
    tokens = random(batch, queries, 24, seed=seed), random(batch, keys, 24, seed=seed + 1)
    return dict(zip(NAMES, (*tokens, *(keep == 0 for keep in kept)), strict=True))


CANDIDATES = {
    "gaussian raw": ("source", 4, 0.05), "coarse:4 gaussian": ("source", 2, 0.05),
    "sliced:8 norm": ("source", 4, 0.1), "farthest:4 active": ("target", 3, 0.05),
    "lse": ("target", 3, 0.1), "coarse:6": ("target", 1, 0.15),
}  # fmt: skip


ANALYSED = analysed_once()


@pytest.mark.parametrize("features", CANDIDATES)
def test_every_family_leaves_hidden_tokens_out(features: str, tmp_path: Path, monkeypatch: Any) -> None:
    """What padding holds changes nothing, and a dual of the tokens that count is as good as elsewhere."""
    monkeypatch.setattr("asapc.api.analysed_once", lambda: ANALYSED)  # of one net and its data
    net, data = Decoder().eval(), [decoded(12, 14, seed) for seed in range(6)]
    side, c_transforms, bound = CANDIDATES[features]
    recipe = {
        "batch_size": 16, "max_examples": 48, "selection_examples": 16, "operator": "asap",
        "features": features.split(), "side": side, "c_transforms": c_transforms,
    }  # fmt: skip
    _, report = asapc.compile(net, data, recipe=recipe, out=tmp_path / "out", examples=16)
    (site,) = report.facts["sites"]
    assert site["operator"] == "asap", site["reason"]
    metrics = site["metrics"]
    assert 0.0 < metrics["attention_rel_l2"] < bound
    assert metrics["row_err"] < 1e-5 and metrics["row_err_teacher"] < 1e-5  # it ends on rows
    assert site["certificates"] and all(one["holds"] for one in site["certificates"])
    loaded = asapc.load(tmp_path / "out")
    given = decoded(9, 17, 99)
    noisy = dict(given)
    for tokens, mask in zip(NAMES[:2], NAMES[2:], strict=True):
        noise = 100 * random(*given[tokens].shape, seed=7)
        noisy[tokens] = torch.where(given[mask][..., None], noise, given[tokens])
    shown = ~given["target_key_padding_mask"]
    with torch.no_grad():
        theirs, ours, others = net(**given)[shown], loaded(**given)[shown], loaded(**noisy)[shown]
    assert float((ours - theirs).norm()) < bound * float(theirs.norm())
    assert float((others - ours).abs().max()) <= 1e-4


def test_what_hides_queries_is_exported(tmp_path: Path) -> None:
    """One c-transform to rows of a loop that ends on columns: its rows get the mass that is predicted."""
    pytest.importorskip("onnxruntime")
    from asapc.inputs.onnx.session import open_session, run
    from asapc.inputs.onnx.settings import OnnxSettings
    from asapc.onnx.export import write_onnx

    net, names = Cross(columns_last).eval(), ("hidden", "context", "attention_mask", "context_mask")
    data = [dict(zip(names, cross(12, 14, seed, 16), strict=True)) for seed in range(4)]
    recipe = {
        "batch_size": 16, "max_examples": 32, "selection_examples": 16, "operator": "asap",
        "features": ["coarse:6"], "side": "target", "c_transforms": 1,
    }  # fmt: skip
    loaded, report = asapc.compile(net, data, recipe=recipe, out=tmp_path / "out", examples=16)
    (site,) = report.facts["sites"]
    assert site["operator"] == "asap" and site["metrics"]["attention_rel_l2"] < 0.1
    assert site["metrics"]["col_err_teacher"] < 1e-5
    seen = batch(*cross(12, 14, 50))
    artifact = read_artifact(tmp_path / "out", ("graph",))
    write_onnx(artifact, [seen], OnnxSettings(), make_progress(quiet=True))
    hidden, context, queries, keys = cross(9, 17, 51, 5)
    queries[0], keys[1] = 0, 0  # an example without queries, another without keys
    given = dict(zip(names, (hidden, context, queries, keys), strict=True))
    with torch.no_grad():
        ours = loaded(**given)
    (found,) = run(open_session(tmp_path / "out" / "model.onnx"), given)
    assert bool(ours.isfinite().all()) and float((found - ours).abs().max()) <= 1e-4


@pytest.mark.parametrize("c_transforms", [1, 2, 3])
@pytest.mark.parametrize("side", ["source", "target"])
def test_c_transforms_of_what_is_left_and_their_gradients(side: str, c_transforms: int) -> None:
    """Kernels against the reference in float64: queries and keys are hidden, in some examples all."""
    q, k, v = random(5, 2, 9, 8), random(5, 2, 11, 8, seed=1), random(5, 2, 11, 4, seed=2)
    keep, shown = padding(11, 4, 1, 11, 0, tokens=11).bool(), padding(9, 1, 5, 0, 2, tokens=9).bool()
    dual = random(5, 2, 9 if side == "source" else 11, seed=3)
    duals = (dual, None) if side == "source" else (None, dual)
    settings = (0.4, c_transforms, [1.0, 1.0, 0.0, 0.0])
    cotangent, results = random(5, 2, 9, 4, seed=4).double(), []
    for operator, dtype in (
        (reference, torch.float64), (reference, torch.float32), (torch.ops.asapc.asap, torch.float32),
    ):  # fmt: skip
        leaves = [nn.Parameter(x.to(dtype)) for x in (q, k, v)]
        own = [None if x is None else x.to(dtype) for x in duals]
        out = operator(*leaves, keep, hidden_queries(shown).to(dtype), *own, *settings)
        hidden = ~shown & keep.any(1, keepdim=True)  # without a key, all attend to all alike
        assert float(out.detach().transpose(1, 2)[hidden].abs().sum()) == 0.0
        results.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))])
    for exact, plain, kernel in zip(*results, strict=True):
        budget = 2 * float((plain - exact).abs().max()) + 1e-6
        assert float((kernel - exact).abs().max()) <= budget


@pytest.mark.parametrize("attention", [kernel_loop, shares])
def test_two_masks_have_the_teachers_gradient(attention: Loop) -> None:
    net = Cross(attention).eval()
    analysis = analysed(net, *cross(12, 14))
    hidden, *rest = cross(9, 17, 52)
    leaf, grad = nn.Parameter(hidden), random(4, 9, 16, seed=4)
    ours = ran(analysis, leaf, *rest, gradients=True)
    theirs, found = (torch.autograd.grad(x, leaf, grad)[0] for x in (net(leaf, *rest), ours))
    assert float((found - theirs).norm()) <= 1e-4 * float(theirs.norm())
