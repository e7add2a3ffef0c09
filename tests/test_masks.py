"""Key masks however they are written: what the compiled layer gives is what the original gives, wherever
keys are hidden: none, some, all but one, all of some examples, or all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from analyses import analysed, ran
from torch import Tensor, nn

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.errors import InputError
from asapc.passes.capture import capture
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.masks import heads_vary
from asapc.passes.match import match
from asapc.passes.plan.site import PlanSite
from asapc.passes.regions import Refusal
from asapc.passes.sinkhorn.site import AttentionSite

LOWEST = torch.finfo(torch.float32).min
B, N, D, HEADS = 3, 8, 8, 2
Spelling = Callable[[Tensor, Tensor], Tensor]


def active(*counts: int) -> Tensor:
    return torch.arange(N) < torch.tensor(counts)[:, None]


KEEPS = {
    "full": active(N, N, N), "padded": active(N, 5, 3), "one key": active(1, 1, 1),
    "no key": active(0, 0, 0), "mixed": active(N, 0, 1),
}  # fmt: skip


class Layer(nn.Module):
    """Attention whose map is a function of its products and of a mask."""

    def __init__(self, plan: Spelling) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.plan = plan

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return (self.plan(q @ k.transpose(-1, -2) / 2, mask) @ v).transpose(1, 2).flatten(2)


def divided(plan: Tensor, steps: int = 3, constant: float = 1e-8) -> Tensor:
    for step in range(steps):
        plan = plan / (plan.sum(-2 if step % 2 else -1, keepdim=True) + constant)
    return plan


def log_divided(s: Tensor, hide: Callable[[Tensor], Tensor] = lambda s: s, steps: int = 5) -> Tensor:
    for step in range(steps):
        s = hide(s)
        s = s - s.logsumexp(-2 if step % 2 else -1, keepdim=True)
    return s.exp()


def filled(low: float) -> Spelling:
    return lambda s, keep: divided(s.masked_fill(~keep[:, None, None], low).softmax(-1), 4)


def potentials(s: Tensor, keep: Tensor) -> Tensor:
    """Potentials [B, H, N] and [B, H, M], the latter with a mask [B, 1, M]."""
    s = s.masked_fill(~keep[:, None, None], -1e9)
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for _ in range(2):
        f = -torch.logsumexp(s + g[..., None, :], -1) - math.log(N)
        g = (-torch.logsumexp(s + f[..., None], -2) - math.log(N)).masked_fill(~keep[:, None], -1e9)
    f = -torch.logsumexp(s + g[..., None, :], -1) - math.log(N)
    return torch.exp(s + f[..., None] + g[..., None, :]) * N


def shares_of_active_keys(s: Tensor, keep: Tensor) -> Tensor:
    """Marginals 1 / n of n active keys, and the map times n."""
    count = keep.sum(-1).float()[:, None, None]
    s = s.masked_fill(~keep[:, None, None], -math.inf)
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for _ in range(2):
        f = -torch.logsumexp(s + g[..., None, :], -1) - math.log(N)
        g = (-torch.logsumexp(s + f[..., None], -2) - count.log()).masked_fill(~keep[:, None], -math.inf)
    return torch.exp(s + f[..., None] + g[..., None, :]) * count[..., None]


def without_nan(s: Tensor, keep: Tensor) -> Tensor:
    """-inf throughout, and sums that are finite."""
    s = s.masked_fill(~keep[:, None, None], -math.inf)
    for step in range(3):
        s = s - s.logsumexp(-2 if step % 2 else -1, keepdim=True).clamp(min=-1e4)
    return s.exp()


def columns_first(constant: float) -> Spelling:
    """Of exp(S - the row's largest), so that what is subtracted counts; some constants take a part of
    every sum."""

    def plan(s: Tensor, keep: Tensor) -> Tensor:
        s = s.masked_fill(~keep[:, None, None], -1e9)
        kernel = (s - s.amax(-1, keepdim=True)).exp()
        for step in range(5):
            kernel = kernel / (kernel.sum(-1 if step % 2 else -2, keepdim=True) + constant)
        return kernel

    return plan


def largest_by_hand(s: Tensor, keep: Tensor) -> Tensor:
    """A logsumexp as it is written by hand, and potentials that are multiplied by the mask."""

    def sum_of(z: Tensor, dim: int) -> Tensor:
        top = z.max(dim, keepdim=True).values
        return (top + (z - top).exp().sum(dim, keepdim=True).log()).squeeze(dim)

    s = s.masked_fill(~keep[:, None, None], -1e9)
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for _ in range(2):
        f = -sum_of(s + g[..., None, :], -1)
        g = -sum_of(s + f[..., None], -2) * keep[:, None]
    return (s + f[..., None] + g[..., None, :]).exp()


def added_before_the_loop(low: float) -> Spelling:
    """A number that hides columns, whose potentials are left alone: of an example without a key, what it
    leaves of the scores is brought to rows alone."""

    def plan(s: Tensor, keep: Tensor) -> Tensor:
        s = s + torch.where(keep, 0.0, low)[:, None, None]
        f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
        for _ in range(2):
            f = -torch.logsumexp(s + g[..., None, :], -1)
            g = (-torch.logsumexp(s + f[..., None], -2)).masked_fill(~keep[:, None], 0.0)
        return torch.exp(s + (f[..., None] + g[..., None, :]))

    return plan


SPELLINGS: dict[str, Spelling] = {
    "filled with -1e4": filled(-1e4), "filled with -inf": filled(-math.inf),
    "subtracted -1e9":
        lambda s, keep: divided((s + (1.0 - keep.float())[:, None, None] * -1e9).softmax(-1), 4),
    "in the loop, the least":
        lambda s, keep: log_divided(s, lambda s: s.masked_fill(~keep[:, None, None], LOWEST)),
    "added in the loop":
        lambda s, keep: log_divided(s, lambda s: s + torch.where(keep, 0.0, -1e9)[:, None, None]),
    "added before the loop, -1e4": added_before_the_loop(-1e4),
    "added before the loop, -1e9": added_before_the_loop(-1e9), "potentials, -1e9": potentials,
    "shares of active keys": shares_of_active_keys,
    "columns first": columns_first(1e-8), "a large constant": columns_first(5e-3),
    "multiplied": lambda s, keep: divided(s.exp() * keep[:, None, None]),
    "largest by hand": largest_by_hand, "without NaN": without_nan,
}  # fmt: skip


def compiled(plan: Spelling, mask: Tensor) -> tuple[nn.Module, nn.Module, AttentionSite]:
    """The original and what it becomes, of data with this mask."""
    torch.manual_seed(0)
    model = Layer(plan).eval()
    captured = capture(model, (torch.randn(B, N, D), mask), {}).programs[0]
    program, (site,) = matched_program(captured)
    assert isinstance(site, AttentionSite | PlanSite), site
    return model, lift(program, [site]).graph, site  # type: ignore[return-value]


def assert_same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Numbers where the original has numbers, and NaN where it has NaN."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


DATA = [*((name, "padded") for name in SPELLINGS), *((name, "full") for name in [*SPELLINGS][::5])]


@pytest.mark.parametrize(("name", "data"), DATA)  # without padding, data says nothing about padding
@torch.no_grad()
def test_every_spelling_is_the_original_wherever_keys_are_hidden(name: str, data: str) -> None:
    model, lifted, site = compiled(SPELLINGS[name], KEEPS[data])
    assert site.convention.mask == "key"
    for spread in (0.1, 3.0, 30.0):
        x = torch.randn(B, N, D) * spread**0.5
        for keep in KEEPS.values():
            expected = model(x, keep)
            try:
                found = lifted(x, keep)
            except InputError as error:  # -1e9 is added to all scores, which it rounds to 64ths of them
                assert "none in example" in str(error) or ("-1e+09" in str(error) and spread == 30.0)
                assert not bool(keep.any(-1).all())
                continue
            assert_same(found, expected, 2e-3 if "-1e4" in name else 1e-4)


def test_a_layer_whose_empty_examples_are_not_known() -> None:
    """It is compiled, and such an example is an error, unless the data has one."""
    torch.manual_seed(0)
    model, x = Layer(added_before_the_loop(-1e9)).eval(), torch.randn(B, N, D)
    for data in ("full", "mixed"):
        analysis = analysed(model, x, KEEPS[data])
        if data == "mixed":
            assert "hides every key is not known" in analysis.left_alone[0].reason
            continue
        ours = ran(analysis, x, KEEPS["padded"])
        torch.testing.assert_close(ours, model(x, KEEPS["padded"]), rtol=1e-4, atol=1e-5)
        with pytest.raises(InputError, match="none in example 1 of the batch"):
            ran(analysis, x, KEEPS["mixed"])


def given(loop: Callable[[Tensor], Tensor]) -> Spelling:
    """A mask that the caller adds: [B, M], or [B, N, M]."""
    return lambda s, mask: loop(s + (mask[:, None, None] if mask.dim() == 2 else mask[:, None]))


def soft(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


ADDED = {  # loop, and the mask that calibration has
    "protected, nothing hidden": (lambda s: divided(s.softmax(-1), 4), torch.zeros(B, N)),
    "protected, of pairs": (lambda s: divided(s.softmax(-1), 4), torch.zeros(B, N, N)),
    "plain, nothing hidden": (log_divided, torch.zeros(B, N)),
    "plain, soft": (log_divided, soft((B, N))),
    "plain, of pairs": (log_divided, soft((B, N, N))),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
@torch.no_grad()
def test_a_mask_that_is_added_is_followed_or_refused_when_it_runs(name: str) -> None:
    """Whatever numbers come: never another result."""
    loop, mask = ADDED[name]
    model, lifted, _ = compiled(given(loop), mask)
    same = 0
    for low in (-1e4, -1e6, -1e9, LOWEST, -math.inf):
        for keep in KEEPS.values():
            x, added = torch.randn(B, N, D), torch.where(keep, 0.0, low)
            added = added if mask.dim() == 2 else added[:, None].expand(-1, N, -1).contiguous()
            expected = model(x, added)
            try:
                found = lifted(x, added)
            except InputError:
                continue
            same += 1
            assert_same(found, expected, 2e-2 if low == -1e6 else 2e-3)
    assert same >= (9 if "plain, " in name and mask.any() else 20)


def added_and_filled(s: Tensor, keep: Tensor) -> Tensor:
    plan = (s + (1.0 - keep.float()) * -1e9).softmax(-1)
    for step in range(4):
        plan = (plan / (plan.sum(-1 if step % 2 else -2, keepdim=True) + 1e-8)).masked_fill(~keep, 0.0)
    return plan


def numbers_of_booleans(s: Tensor, keep: Tensor) -> Tensor:
    mask = keep.long()
    return log_divided(
        s + (1 - mask)[:, None, None] * -1e9, lambda s: s.masked_fill(mask[:, None, None] == 0, -1e9)
    )


def compared_and_counted(s: Tensor, mask: Tensor) -> Tensor:
    """Potentials of keys with a mass of 1 / n each."""
    keep, counts = mask.bool(), mask.sum(-1)
    s = s.masked_fill(~keep[:, None, None], -1e9)
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    for _ in range(2):
        f = -torch.logsumexp(s + g[..., None, :], -1)
        g = -torch.logsumexp(s + f[..., None], -2) - counts[:, None, None].float().log()
        g = g.masked_fill(~keep[:, None], 0.0)
    return torch.exp(s + f[..., None] + g[..., None, :])


USED_TWICE: dict[str, tuple[Spelling, Callable[[Tensor], Tensor], float | None]] = {
    # the loop, its mask of keep [B, M], and a number that is no mask's
    "added and compared": (
        lambda s, ext: log_divided(s + ext, lambda s: s.masked_fill(ext < -1, -1e9)),
        lambda keep: torch.where(keep, 0.0, -1e9)[:, None, None], -1.5
    ),
    "added and filled": (added_and_filled, lambda keep: keep[:, None, None], None),
    "numbers of booleans": (numbers_of_booleans, lambda keep: keep, None),
    "compared and counted": (compared_and_counted, lambda keep: keep.long(), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", USED_TWICE)
@torch.no_grad()
def test_what_a_loop_uses_in_two_ways_is_one_mask(name: str) -> None:
    plan, made, other = USED_TWICE[name]
    model, lifted, site = compiled(plan, made(KEEPS["padded"]))
    assert isinstance(site, AttentionSite) and site.convention.mask == "key"
    for which in ("full", "padded", "one key"):
        x, mask = torch.randn(B, N, D), made(KEEPS[which])
        assert_same(lifted(x, mask), model(x, mask), 1e-4)
    if other is not None:
        mask[0, ..., 0] = other
        with pytest.raises(InputError, match=f"1 others, such as {other:g}"):
            lifted(x, mask)


def test_scores_to_whose_sizes_a_mask_is_spread_decide_nothing() -> None:
    def plan(s: Tensor, keep: Tensor) -> Tensor:
        s = s.clone()
        s[~keep[:, None, None].expand_as(s)] = -1e9
        plan = s.softmax(-1)
        for axis in (-2, -1) * 2:
            plan = plan / (plan.sum(axis, keepdim=True) + 1e-6) * keep[:, None, None]
        return plan

    torch.manual_seed(0)
    analysis = analysed(Layer(plan), torch.randn(B, N, D), KEEPS["full"])
    assert not analysis.left_alone and len(analysis.sites) == 1


@torch.no_grad()
def test_a_bias_looked_up_by_token_hides_tokens_that_the_data_did_not_have() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(2, 1)
    table.weight[0] = -1e9
    model, lifted, site = compiled(
        lambda s, keep: log_divided(s + table(keep.long())[:, None, None, :, 0]), KEEPS["full"]
    )
    assert isinstance(site, PlanSite)  # of the scores as the code makes them
    for keep in KEEPS.values():
        x = torch.randn(B, N, D)
        assert_same(lifted(x, keep), model(x, keep), 1e-4)


def test_a_sum_of_zero_that_is_left_alone_is_another_loop() -> None:
    """Where scores are sharp, sums are 0 in float32 and their rows are lost: no operator has that."""

    def plan(s: Tensor, keep: Tensor) -> Tensor:
        weights = (s - s.amax(-1, keepdim=True)).exp() * keep[:, None, None]
        for step in range(3):
            total = weights.sum(-2 if step % 2 else -1, keepdim=True)
            weights = torch.where(total > 0, weights / total, 0.0)
        return weights

    program = capture(Layer(plan).eval(), (torch.randn(B, N, D), KEEPS["padded"]), {}).programs[0]
    (found,) = match(program)
    assert isinstance(found, Refusal)


class Duals(nn.Module):
    """Log masses [B, 1, M] that are added to duals [B, H, M], and [B*H, 1, M] of merged heads."""

    def forward(
        self, duals: Tensor, merged: Tensor, keep: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        masses = torch.where(keep, -keep.sum(-1, keepdim=True).log(), torch.tensor(-math.inf))[:, None]
        return duals + masses, merged + other[:, None]


def test_masses_added_to_duals_are_the_same_for_all_heads() -> None:
    keep = KEEPS["padded"]
    inputs = (torch.randn(B, HEADS, N), torch.randn(B * HEADS, 1, N), keep, torch.randn(B * HEADS, N))
    program = capture(Duals(), inputs, {}).programs[0]
    duals, merged, *_ = (n for n in program.graph.graph.nodes if n.op == "placeholder")
    first, second = (
        next(x for x in user.all_input_nodes if x is not node)
        for node in (duals, merged) for user in node.users
    )  # fmt: skip
    batch = duals.meta["val"].shape[0]
    assert not heads_vary(first, HEADS, batch) and heads_vary(first, HEADS, None)
    assert heads_vary(second, HEADS, batch)
