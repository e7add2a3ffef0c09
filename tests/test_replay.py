"""Replay beyond the data, sites paired by name, and ways of ending a loop that a trace does not show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from analyses import analysed, batch
from small_text import write_data, write_teacher
from steps import calibrated, run
from torch import Tensor, nn

from asapc.errors import InputError
from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.measure.differences import largest_difference
from asapc.passes import analyse as analysing
from asapc.passes.analyse import analyse
from asapc.passes.capture import capture
from asapc.passes.lift import lift
from asapc.passes.match import match
from asapc.passes.plan.site import PlanSite
from asapc.passes.regions import Refusal
from asapc.passes.replay import TOLERANCE, Replay, Replayed, replay
from asapc.passes.sinkhorn.site import AttentionSite
from asapc.passes.site import Site
from asapc.program.calls import call_of, operator_calls
from asapc.program.runner import Runner


def plan(scores: Tensor, half_steps: int) -> Tensor:
    for step in range(half_steps):
        scores = scores.log_softmax(-2 if step % 2 else -1)
    return scores.exp()


def crossed(self: Any, x: Tensor, pivots: Tensor) -> Tensor:
    """Both products of scores come first; the later plan is the first to be used."""
    q, z, k, v = self.q(x), self.z(pivots), self.k(x), self.v(x)
    first, second = q @ z.transpose(-1, -2), z @ k.transpose(-1, -2)
    gathered = plan(second, 4) @ v
    return plan(first, 3) @ gathered


def test_sites_are_paired_with_their_own_calls() -> None:
    torch.manual_seed(0)
    model = zoo.module(crossed, **{name: nn.Linear(8, 8) for name in "qzkv"}).eval()
    x, pivots = torch.randn(3, 9, 8), torch.randn(3, 5, 8)
    teacher = Teacher(model, None, "crossed", "0", False, None)
    analysis = analyse(teacher, batch(x, pivots), more=[batch(-2 * x, pivots + 1)])
    assert not analysis.left_alone and len(analysis.sites) == 2
    (lifted,) = analysis.lifted
    for site in analysis.sites:
        _, call = call_of([lifted], site.name)
        assert call.settings["half_steps"] == site.loop.half_steps  # its own loop, whichever comes first
    assert {site.loop.half_steps for site in analysis.sites} == {3, 4}
    order = [o.settings["half_steps"] for o in operator_calls(lifted.graph)]
    assert order == [4, 3] and [site.loop.half_steps for site in analysis.sites] == [3, 4]
    with torch.no_grad():
        assert largest_difference(model(x, pivots), lifted.graph(x, pivots)) < 2e-6


def replayed(model: nn.Module, *batches: Batch) -> dict[str, float]:
    program = capture(model, batches[0].args, {}).programs[0]
    sites = [own for own in match(program) if not isinstance(own, Refusal)]
    (found,) = replay(model, [program], [sites], batches).values()
    return found.errors


class Hidden(zoo._Projected):
    """A plain loop, as long as no score is beyond what data has shown."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2)
        return self.merge(plan(scores.clamp(max=self.limit), 4) @ v)

    limit = 1e30


def test_every_condition_is_tried_on_every_batch() -> None:
    torch.manual_seed(0)
    model = zoo.LogDomainMasked().eval()
    errors = replayed(model, *(batch(*zoo.inputs_for(model, seed)) for seed in (0, 5)))
    assert set(errors) == {
        "the data", "queries / 4", "as given, in float64", "queries x 4", "sharper queries",
        "rows nearly one-hot", "fewer tokens", "all but one key masked", "no key active",
        "queries / 1000", "queries x 1e5", "keys + 1e5",
    }  # fmt: skip
    assert errors.pop("the data") < 1e-5 and errors.pop("no key active") < 1e-5  # float32
    assert max(errors.values()) < 1e-9  # float64


def stacked(self: Any, x: Tensor) -> Tensor:
    """Two layers that are alike, and one whose loop is longer."""
    for place, layer in enumerate(self.layers):
        q, k, v = layer(x).chunk(3, -1)
        x = x + plan(q @ k.transpose(-1, -2), 3 if place == 2 else 2) @ v
    return x


def test_layers_that_are_alike_are_tried_far_from_the_data_once() -> None:
    torch.manual_seed(0)
    given = batch(torch.randn(3, 9, 8))
    model = zoo.module(stacked, layers=nn.ModuleList(nn.Linear(8, 24) for _ in range(3)))
    program = capture(model.eval(), given.args, {}).programs[0]
    sites = [site for site in match(program) if not isinstance(site, Refusal)]
    first, second, longer = replay(None, [program], [sites], [given]).values()
    assert set(second.errors) == {"the data", "rows nearly one-hot"}
    assert set(first.errors) == set(longer.errors) > set(second.errors)
    assert all(found.worst[1] < TOLERANCE for found in (first, second, longer))


def test_what_only_sharp_scores_show_is_seen() -> None:
    """A clamp that no probe has met, for it is put in only after the site was matched."""
    torch.manual_seed(0)
    model = Hidden().eval()
    x = 0.3 * torch.randn(3, 10, 16)
    program = capture(model, (x,), {}).programs[0]
    (site,) = match(program)
    assert isinstance(site, AttentionSite)
    for node in program.graph.graph.nodes:
        if node.target is torch.ops.aten.clamp.default:
            node.args = (node.args[0], None, 6.0)  # beyond what the data shows
    program.graph.recompile()
    found = replay(None, [program], [[site]], [batch(x)])[site.name]
    assert found.errors["the data"] < TOLERANCE < found.worst[1]
    assert any(found.errors[tried] > TOLERANCE for tried in ("queries x 4", "sharper queries"))


def largest(change: Tensor) -> Tensor:
    return change.abs().max()


def mean_square(change: Tensor) -> Tensor:
    """What one example or a few tokens still need hardly moves it."""
    return change.square().mean()


class While(nn.Module):
    """Ends where `small` says so of what `residual` makes of a change, or after `most` iterations."""

    def __init__(
        self, threshold: Any, small: Callable[[Tensor, Any], bool] = lambda r, t: r.item() < t,
        residual: Callable[[Tensor], Tensor] = largest, most: int = 3,
    ) -> None:  # fmt: skip
        super().__init__()
        self.threshold, self.small, self.residual, self.most = threshold, small, residual, most

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(-1, -2)
        f = torch.zeros_like(scores[..., 0])
        for _ in range(self.most):
            g = -torch.logsumexp(scores + f[..., None], -2)
            before, f = f, -torch.logsumexp(scores + g[..., None, :], -1)
            if self.small(self.residual(f - before), self.threshold):
                break
        return (scores + f[..., None] + g[..., None, :]).exp() @ x


def outcome_of(model: nn.Module) -> Any:
    (outcome,) = match(capture(model, (torch.randn(2, 9, 4),), {}).programs[0])
    return outcome


class StoppingGlue(zoo.Glued):
    """A glued plan whose loops end early, far from their budget."""

    half_steps = 4

    def plan(self, scores: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
        u, w = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for step in range(self.half_steps):
            before = u
            if step % 2 == 0:
                u = log_a - torch.logsumexp(scores + w.unsqueeze(-2), -1)
            else:
                w = log_b - torch.logsumexp(scores + u.unsqueeze(-1), -2)
            if step % 2 == 0 and (u - before).abs().amax().item() < 0.3:
                break
        return torch.exp(scores + u.unsqueeze(-1) + w.unsqueeze(-2))


def test_a_glued_plan_that_may_end_early_is_refused() -> None:
    torch.manual_seed(1)
    (found,) = match(capture(StoppingGlue().eval(), (torch.randn(3, 10, 16),), {}).programs[0])
    assert isinstance(found, Refusal) and "ends early where" in found.reason


class Branch(While):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2 if x.max() > 100 else x)


class Afterwards(While):
    """Looks once more when the loop is over, and goes on."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(-1, -2)
        attention = plan(scores, 5)
        residual = (attention.sum(-2) - 1).abs().max()
        return (plan(attention.log(), 4) if residual.item() < 0.01 else attention) @ x


@pytest.mark.parametrize("model", [Branch(1e-13), Afterwards(1e-13)], ids=["before", "afterwards"])
def test_a_branch_on_a_number_of_the_data_is_not_traced_one_way(model: nn.Module) -> None:
    found = capture(model, (torch.randn(2, 9, 4),), {})
    ((_, reason),) = found.skipped
    assert not found.programs and "other than to end a loop early" in reason


def root_mean_square(change: Tensor) -> Tensor:
    """At 512 examples of 300 tokens, one of which is not flat, 5e-6 changes the attention by 4e-3."""
    return change.square().mean().sqrt()


def test_a_layer_that_stays_as_it_is_still_ends_early() -> None:
    """Beside a known one. The graph of the whole model holds its full budget: it is not the model."""
    torch.manual_seed(0)
    model = zoo.module(
        lambda self, x: self.stops(self.known(x)[..., :4]), known=zoo.ExpDomain(), stops=While(1e-2)
    ).eval()
    x = torch.randn(3, 10, 16)
    found = analysed(model, x)
    assert found.capture.kind == "module" and len(found.sites) == 1
    with torch.no_grad():
        assert largest_difference(model(x), Runner(model, found.lifted)(batch(x))) < 1e-5


class Soft(zoo._Projected):
    """A mask that is added, as its caller gives it."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2) + mask[:, None, None]
        for step in range(4):
            total = scores.logsumexp(-2 if step % 2 else -1, keepdim=True)
            scores = scores - torch.where(total < -1e8, 0.0, total)
        return self.merge(scores.exp() @ v)


def test_a_soft_mask_after_hard_ones_is_an_error_and_no_other_result() -> None:
    torch.manual_seed(0)
    model, x = Soft().eval(), torch.randn(3, 10, 16)
    hard = torch.where(torch.arange(10) < torch.tensor([[10], [7], [4]]), 0.0, -1e9)
    program = capture(model, (x, hard), {}).programs[0]
    (found,) = match(program)
    assert isinstance(found, AttentionSite) and found.mask is not None
    lifted = lift(program, [found]).graph
    with torch.no_grad():
        torch.testing.assert_close(lifted(x, hard), model(x, hard), rtol=1e-4, atol=1e-5)
        hard[1, 1] = -2.0
        with pytest.raises(InputError, match=r"hide a key(.|\n)*1 others, such as -2"):
            lifted(x, hard)


class Cutoff(zoo._Projected):
    """A bias that counts up to a cutoff."""

    def forward(self, x: Tensor, distance: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2)
        return self.merge(plan(torch.maximum(scores - distance[:, None], scores - 6.0), 4) @ v)


def plan_that_replays(
    model: nn.Module, args: tuple[Tensor, ...], *others: tuple[Tensor, ...]
) -> PlanSite:
    """What is none of its family is a plan of scores that are given, the same model at every size."""
    found = site_that_replays(model, args, *others)
    assert isinstance(found, PlanSite)
    return found


def site_that_replays(model: nn.Module, args: tuple[Tensor, ...], *others: tuple[Tensor, ...]) -> Site:
    program = capture(model.eval(), args, {}).programs[0]
    (found,) = match(program)
    assert isinstance(found, Site)
    lifted = lift(program, [found]).graph
    for inputs in (args, *others):
        with torch.no_grad():
            assert largest_difference(model(*inputs), lifted(*inputs)) < 2e-6
    return found


def test_a_bias_is_added_at_every_size_or_is_part_of_the_scores() -> None:
    torch.manual_seed(0)
    args, others = ((torch.randn(3, n, 16), 9 * torch.randn(3, n, n)) for n in (10, 30))
    site = plan_that_replays(Cutoff(), args, others)
    assert site.part().inputs[0].target is torch.ops.aten.maximum.default


class Growing(zoo._Projected):
    """log(1 / N + 1e-6) is log(1 / N) for a few tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2)
        shares = torch.full((x.shape[1],), 1.0 / x.shape[1])
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(2):
            f = torch.log(shares + 1e-6) - torch.logsumexp(scores + g[..., None, :], -1)
            g = torch.log(shares + 1e-6) - torch.logsumexp(scores + f[..., None], -2)
        return self.merge((scores + f[..., None] + g[..., None, :]).exp() @ v * x.shape[1])


def test_a_constant_that_grows_with_the_tokens_is_seen() -> None:
    torch.manual_seed(0)
    site = plan_that_replays(Growing(), (torch.randn(3, 10, 16),), (torch.randn(2, 300, 16),))
    assert site.convention.target_marginal == "constant"


class ByPair(zoo._Projected):
    """Masked by pairs of tokens, which padding makes different between queries."""

    def kept(self, x: Tensor, keep: Tensor) -> Tensor:
        return (keep[:, :, None] & keep[:, None, :])[:, None]

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.transpose(-1, -2)).masked_fill(~self.kept(x, keep), -1e9).softmax(-1)
        for step in range(3):
            weights = weights / weights.sum(-1 if step % 2 else -2, keepdim=True).clamp(min=1e-9)
        return self.merge(weights @ v)


class Heads(ByPair):
    """A mask for each head, alike where nothing is hidden."""

    def kept(self, x: Tensor, keep: Tensor) -> Tensor:
        return torch.stack([keep, keep | (x[..., 0] > 0)], 1)[:, :, None]


@pytest.mark.parametrize("kind", [ByPair, Heads])
def test_a_mask_that_hides_nothing_in_the_example_is_read_from_how_it_is_made(kind: Any) -> None:
    torch.manual_seed(0)
    args = torch.randn(3, 10, 16), torch.ones(3, 10, dtype=torch.bool)
    keep = torch.rand(3, 14) < torch.tensor([[1.0], [0.5], [0.0]])
    plan_that_replays(kind(), args, (torch.randn(3, 14, 16), keep))


class Before(While):
    """Decides by its scores how long it runs, before it does."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(-1, -2)
        return plan(scores, 4 if scores.abs().max().item() < 10 else 12) @ x


ENDS, UNKNOWN = "ends early where a residual is at most 0.01", "compared with an unknown number"
STOPS = {
    "a tensor": (While(1e-2, lambda r, t: bool(r <= t)), ENDS),
    "reversed": (While(1e-2, lambda r, t: not r.item() > t), ENDS),
    "a mean, of which few need more steps": (While(1e-8, residual=mean_square, most=5), "ends early"),
    "a mean, in a larger batch": (While(5e-6, residual=root_mean_square, most=5), "ends early"),
    "nobody sees the threshold": (While(1e-13, lambda r, t: float(r) < t), UNKNOWN),
    "the threshold is a tensor, and comes first": (
        While(nn.Buffer(torch.tensor(0.3)), lambda r, t: bool(t > r), mean_square), UNKNOWN),
    # Looks whether it diverges: taken for a loop that goes on while the residual is large, it once cut a
    # loop to one iteration.
    "a guard by a number": (While(1e-13, lambda r, t: r.item() > 1e6), UNKNOWN),
    "a guard by isnan": (While(1e-13, lambda r, t: math.isnan(r.item())), UNKNOWN),
    "before": (Before(0.1), "before its loop begins"),
}  # fmt: skip


@pytest.mark.parametrize("how", STOPS)
def test_a_stop_that_changes_something_or_is_not_seen_is_refused(how: str) -> None:
    model, reason = STOPS[how]
    found = outcome_of(model)
    assert isinstance(found, Refusal) and reason in found.reason


# What calibrate has replayed, compile takes over


def test_replay_is_not_done_again_where_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is where the calibration is of other code."""
    teacher = write_teacher(tmp_path / "teacher", n_layers=1, max_iter=2)
    recipe = {"operator": "sinkhorn", "max_examples": 16}
    calibration = calibrated(tmp_path, teacher, write_data(tmp_path / "data.npz", 60), recipe)
    done: list[str] = []

    def counted(name: str, true: Any, *arguments: Any) -> Any:
        done.append(name)
        return true(*arguments)

    for name in ("replay", "_whole_replay"):
        monkeypatch.setattr(analysing, name, partial(counted, name, getattr(analysing, name)))

    def compiled() -> dict[str, Any]:
        done.clear()
        out = tmp_path / "out"
        assert run("compile", teacher, "--calibration", calibration, "-o", out, "--quiet") == 0
        sites = json.loads((out / "manifest.json").read_text())["sites"]
        return {site["name"]: site["replay"] for site in sites}

    taken_over = compiled()
    assert done == [] and all("queries x 4" in tried for tried in taken_over.values())
    path = calibration / "calibration.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "replayed": {**document["replayed"], "of": "0"}}))
    assert compiled() == taken_over and done == ["replay", "_whole_replay"]


def test_errors_without_a_number_come_back() -> None:
    found = Replayed("x", {"a": Replay({"the data": 1e-7, "queries x 4": math.inf}, 0.5)}, 1e-6)
    assert Replayed.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
