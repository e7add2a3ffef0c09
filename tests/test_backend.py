"""torch.compile(model, backend="asapc"): what becomes an operator, and that nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_zoo import Gated, LogDomainPlain, SinkhornDistance, module
from plan_nets import Scaled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import asapc
from asapc import backend as under_test
from asapc.report import explained

WITHIN = 1e-6  # of outputs and gradients, relative to the largest


class Attention(nn.Module):
    """Sinkhorn attention as people write it.  changes: in place, where that is possible."""

    def __init__(self, half_steps: int = 4, dropout: float = 0.0, changes: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.half_steps, self.changes, self.tau = half_steps, changes, 1.0

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (8**0.5 * self.tau)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None], -1e9)
        for step in range(self.half_steps):
            total = torch.logsumexp(scores, -1 - step % 2, keepdim=True)
            if self.changes:
                scores -= total
            else:
                scores = scores - total
        mixed = self.dropout(scores.exp()) @ v
        if self.changes:
            mixed *= 2
        return x + self.out(mixed.transpose(1, 2).reshape(b, n, 16))


def log_plan(scores: Tensor) -> Tensor:
    for axis in (-1, -2) * 2:
        scores = scores - torch.logsumexp(scores, axis, keepdim=True)
    return scores


def without_gradient(self: Any, x: Tensor) -> Tensor:
    scores = x @ x.transpose(-1, -2)
    with torch.no_grad():
        plan = log_plan(scores)
    return (scores * plan.exp()) @ x


def detached(self: Any, x: Tensor) -> Tensor:
    """The loop's sums are not differentiated."""
    plan = self.scores(x) @ x.transpose(-1, -2) / 4
    for axis in (-1, -2) * 2:
        plan = plan - torch.logsumexp(plan, axis, keepdim=True).detach()
    return x + self.out(plan.exp() @ x)


def sharpened(self: Any, x: Tensor, epsilon: int) -> Tensor:
    x = self.project(x)
    return log_plan(x @ x.transpose(-1, -2) / epsilon).exp() @ x


def unbalanced(self: Any, scores: Tensor) -> Tensor:
    """By learnt numbers, which no operator takes as tensors."""
    kernel = torch.exp(scores / self.epsilon)
    power = self.gamma / (self.gamma + self.epsilon)
    a = torch.ones_like(scores[..., :1])
    for _ in range(3):
        b = (1 / (kernel.mT @ a)) ** power
        a = (1 / (kernel @ b)) ** power
    return a * kernel * b.mT


def with_dustbins(self: Any, scores: Tensor) -> Tensor:
    """Which are written into a buffer."""
    b, n, m = scores.shape
    z = scores.new_zeros(b, n + 1, m + 1)
    z[:, :n, :m], z[:, n] = scores, 1
    return log_plan(z)


class Counts(nn.Module):
    """It keeps a mean of its inputs, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.attention(x - self.mean)


def under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.attention(x).float() * 2


def with_a_learnt_dustbin(self: Any, x: Tensor) -> Tensor:
    """Pooling by optimal transport, whose potentials are added in another order than they were made."""
    scores = self.score(x).transpose(1, 2)
    b, m, n = scores.shape
    scores = torch.cat([scores, self.dustbin.expand(b, 1, n)], 1)
    norm = -math.log(n + m)
    f, g = torch.zeros(b, m + 1), torch.zeros(b, n)
    for _ in range(3):
        f = norm - torch.logsumexp(scores + g[:, None], 2)
        g = norm - torch.logsumexp(scores + f[:, :, None], 1)
    return (scores + f[:, :, None] + g[:, None] - norm)[:, :-1].exp() @ x


def beside_a_cache(self: Any, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Whose length is of no concern to the attention."""
    whole = past.shape[1] // 4 * 4
    pooled = past[:, :whole].reshape(past.shape[0], whole // 4, 4, 16).mean(2)
    return self.attention(x), pooled


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    explained._SEEN.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(model: Any, inner: str = "aot_eager", **how: Any) -> Any:
    return torch.compile(model, backend="asapc", options={"inner": inner}, **how)


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    return torch.randn(batch, length, 16)


def operators(model: Any = None) -> list[str]:
    return [site.convention.operator for facts in asapc.explain(model).graphs for site in facts.sites]


def reasons(model: Any = None) -> str:
    facts = asapc.explain(model).graphs
    return "; ".join(x.reason or "" for x in (*facts, *(left for each in facts for left in each.left)))


def assert_same(ours: Tensor, theirs: Tensor, within: float = WITHIN) -> None:
    assert ours.dtype == theirs.dtype
    assert float((ours - theirs).abs().max()) <= within * max(1.0, float(theirs.abs().max()))


def assert_trains_alike(model: nn.Module, x: Tensor, within: float = WITHIN, **how: Any) -> None:
    """Outputs, gradients and state after two steps, dropout included."""
    twin, fast = copy.deepcopy(model), compiled(model, **how)
    for seed in range(2):
        outputs = []
        for call, net in ((fast, model), (twin, twin)):
            torch.manual_seed(seed)
            net.zero_grad()
            outputs.append(call(x.clone().requires_grad_()))
            outputs[-1].sin().sum().backward()
        assert_same(*outputs, within)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            largest = max(float(p.grad.abs().max()) for p in twin.parameters())
            assert float((ours.grad - theirs.grad).abs().max()) <= 10 * within * largest
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert_same(ours, theirs, within)


def test_it_needs_no_import_and_inductor_is_its_default() -> None:
    code = (
        "import torch\n"
        "@torch.compile(backend='asapc')\n"
        "def plan(s):\n"
        "    for axis in (-1, -2) * 5: s = s - s.logsumexp(axis, keepdim=True)\n"
        "    return s.exp()\n"
        "print(float(plan(torch.randn(4, 30, 30)).sum((-1, -2)).mean()))\n"
        "import asapc; print(asapc.explain())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "compiled by inductor" in done.stdout and "asapc::plan" in done.stdout
    assert float(done.stdout.split()[0]) == pytest.approx(30, rel=1e-5)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(Exception, match=r"needs a C\+\+ compiler(.|\n)*inner"):
        compiled(nn.Softmax(-1), "inductor")(torch.randn(5, 77).requires_grad_(False))


TRAINED: dict[str, tuple[Callable[[], nn.Module], dict[str, bool], list[str]]] = {
    "in evaluation mode": (lambda: Attention().eval(), {"fullgraph": True}, ["sinkhorn"]),
    "dropout": (lambda: Attention(dropout=0.3), {"dynamic": True}, ["plan"]),
    "another layer, and buffers that change": (
        lambda: nn.Sequential(Counts(), Attention(3)), {}, ["sinkhorn", "sinkhorn"]),
    "float64": (lambda: Attention().double(), {}, ["sinkhorn"]),
}  # fmt: skip


@pytest.mark.parametrize(("make", "how", "expected"), TRAINED.values(), ids=TRAINED)
def test_outputs_gradients_and_state_are_the_models(make: Any, how: Any, expected: list[str]) -> None:
    model = make()
    x = tokens().to(next(model.parameters()).dtype)
    assert_trains_alike(model, x, 1e-12 if x.dtype == torch.float64 else WITHIN, **how)
    assert operators(model) == expected


def test_what_is_changed_in_place_is_replaced() -> None:
    model, x = Attention(changes=True), tokens()
    with torch.no_grad():
        assert_same(compiled(model, "eager")(x), model(x))
    assert operators(model) == ["sinkhorn"]


def test_a_scores_buffer_is_filled_and_differentiated() -> None:
    model = nn.Sequential(module(with_dustbins))  # in which a number written is a constant's name
    scores = torch.randn(2, 6, 7, requires_grad=True)
    ours, theirs = compiled(model)(scores), model(scores)
    assert_same(ours, theirs)
    assert_same(*(torch.autograd.grad(x.sin().sum(), scores)[0] for x in (ours, theirs)))
    assert operators() == ["plan"]


def test_another_gradient_leaves_its_site_and_no_other_while_it_is_asked_for() -> None:
    model, x = nn.Sequential(Attention(), module(without_gradient)), tokens()
    assert_trains_alike(model, x)
    assert operators(model) == ["sinkhorn"] and "its own gradient differs" in reasons()
    with torch.no_grad():
        assert_same(compiled(model)(x), model(x))
    assert len(operators(model)) == 3


def test_another_gradient_shows_behind_weights_of_zero() -> None:
    model = module(detached, scores=nn.Linear(16, 16), out=nn.Linear(16, 16))
    nn.init.zeros_(model.out.weight)
    fast, x = compiled(model), tokens()
    for _ in range(2):
        weight = model.scores.weight
        assert_same(*(torch.autograd.grad(f(x).sin().sum(), weight)[0] for f in (fast, model)), 1e-5)
        nn.init.normal_(model.out.weight)
    assert not operators(model)


def test_numbers_that_operators_hold_are_guarded() -> None:
    model = module(sharpened, project=nn.Linear(16, 16))
    fast, x = compiled(model), tokens()
    for epsilon in (2, 3, 9):
        assert_same(fast(x, epsilon), model(x, epsilon))
    assert set(operators()) == {"sinkhorn"}


def test_weights_that_operators_hold_are_guarded() -> None:
    one = torch.ones(1)
    model = module(unbalanced, gamma=nn.Parameter(one), epsilon=nn.Parameter(one / 2))
    fast, scores = compiled(model), torch.randn(3, 11, 11)
    assert_trains_alike(copy.deepcopy(model), scores)
    with torch.no_grad():
        assert_same(fast(scores), model(scores))
        assert operators(model) == ["plan"]
        for gamma in (3.0, 5.0):  # which leave no trace
            model.gamma.data.fill_(gamma)
            for _ in range(2):
                assert_same(fast(scores), model(scores))
    assert operators(model) == ["plan"] and "neither a marginal" in reasons(model)  # not held again


def test_small_attention_stays_inductors_and_larger_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "SMALL_PLAN", 0)  # of scores that are given
    for model, x in ((Scaled(), torch.randn(8, 150, 6)), (Attention(), tokens())):  # plain scalings, too
        _, sites, left, _ = rewritten_for(model, x)
        assert not sites and [site.reason for site in left if site.reason.startswith("so small")]
    monkeypatch.setattr(under_test, "SMALL", 0)
    torch._dynamo.reset()
    _, sites, *_ = rewritten_for(model, x)
    assert len(sites) == 1


def rewritten_for(model: nn.Module, x: Tensor) -> Any:
    """What a graph becomes that Inductor is to compile."""
    made: list[Any] = []

    def look(graph: Any, inputs: Any) -> Any:
        made.append(under_test.rewritten(graph, inputs, fuses=True))
        return graph

    torch.compile(model, backend=look)(x)
    return made[0]


def test_what_is_kept_of_graphs_is_few_and_no_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MOST_KNOWN", 1)
    for half_steps in (2, 3):
        compiled(Attention(half_steps).eval(), "eager")(tokens())
    assert len(under_test._KNOWN) == 1
    torch._dynamo.reset()
    gc.collect()
    held = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == (3, 11, 16)]
    assert not held


def test_masks_lengths_and_batches() -> None:
    model = Attention().eval()
    fast = compiled(model)
    for batch, length in ((3, 11), (5, 17), (1, 9), (2, 2)):
        x = tokens(batch, length)
        keep = torch.rand(batch, length) > 0.3
        keep[:, 0] = True
        with torch.no_grad():
            assert_same(fast(x, keep), model(x, keep))
    assert set(operators(model)) <= {"sinkhorn", "plan"} and operators(model)


def test_another_batch_is_not_identified_again() -> None:
    fast = compiled(Attention().eval(), dynamic=False)
    with torch.no_grad():
        fast(tokens(6, 13))
        known = len(under_test._KNOWN)
        fast(tokens(9, 15))
    assert len(under_test._KNOWN) == known and len(asapc.explain().graphs) == 2


def test_a_learnt_dustbin_is_no_mask() -> None:
    model = module(with_a_learnt_dustbin, score=nn.Linear(16, 5), dustbin=nn.Parameter(torch.tensor(1.0)))
    model, x = model.double(), tokens(3, 20).double()
    with torch.no_grad():
        assert_same(compiled(model, "eager")(x), model(x))
    assert operators() == ["plan"]


def test_a_length_may_be_a_quotient() -> None:
    model = module(lambda self, x: self.attention(x.reshape(len(x) // 4, -1, 16)), attention=Attention())
    fast = compiled(model.eval(), "eager", dynamic=True)
    with torch.no_grad():
        for x in (tokens(8)[:, 0], tokens(12)[:, 0]):
            assert_same(fast(x), model(x))
    assert {*operators(model)} == {"sinkhorn"}


def test_lengths_of_other_tensors_are_free() -> None:
    model, x = module(beside_a_cache, attention=Attention()).eval(), tokens()
    fast = compiled(model, "eager")
    with torch.no_grad():
        for length in (12, 13, 17, 22, 25):
            past = tokens(3, length)
            for ours, theirs in zip(fast(x, past), model(x, past), strict=True):
                assert_same(ours, theirs)
    assert operators(model) == ["sinkhorn", "sinkhorn"]  # a length, and any length


def test_what_has_no_loop_is_looked_at_once() -> None:
    def with_a_sink(x: Tensor, sink: Tensor) -> Tensor:
        scores = torch.cat([x @ x.transpose(-1, -2), sink.expand(3, 11, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ x

    known = len(under_test._KNOWN)
    compiled(with_a_sink, "eager")(tokens(), torch.zeros(1))
    assert "sink" in reasons() and len(under_test._KNOWN) == known + 1


def test_what_changes_between_calls_takes_effect() -> None:
    model, x = Attention().eval(), tokens()
    fast = compiled(model)
    for change in ({}, {"half_steps": 5}, {"tau": 0.5}):
        for name, value in change.items():
            setattr(model, name, value)
        assert_same(fast(x), model(x))
    with torch.no_grad():
        model.qkv.weight.mul_(2)
    assert_same(fast(x), model(x))
    assert set(operators(model)) == {"sinkhorn"}


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    model = module(under_autocast, attention=Attention()) if inside else Attention()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        assert_trains_alike(model, tokens(), 2e-2)
    assert operators(model) == ["sinkhorn"]


def test_inference_mode_then_gradients() -> None:
    model, x = Attention(), tokens()
    fast = compiled(model)
    with torch.inference_mode():
        assert_same(fast(x), model(x))
    assert_same(fast(x), model(x))
    assert operators(model) == ["sinkhorn", "sinkhorn"]


def test_a_checkpoint_around_the_first_call_counts_what_the_model_saves() -> None:
    model, x = Attention(), tokens().requires_grad_()
    ours = checkpoint(compiled(model), x, use_reentrant=False)
    assert_same(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (ours, model(x))))
    assert operators(model) == ["sinkhorn"]


def test_what_is_not_recognised_runs_as_it_is() -> None:
    x = torch.randn(2, 7, 16)
    model = Gated()
    assert torch.equal(compiled(model, "eager")(x), model(x))
    assert not operators(model) and "the attention depends on" in reasons(model)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of asapc's log."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asapc").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("asapc").removeHandler(handler)


def test_a_failure_is_logged_and_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(under_test, "put_back", fail)
    model, x = Attention(), tokens()
    with logged() as messages:
        assert_same(compiled(model)(x), model(x))
    assert len(messages) == 1 and "KeyError" in messages[0] and "a bug" in reasons()


def test_a_long_first_call_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "SILENCE", 0.0)
    monkeypatch.setattr(under_test, "_KNOWN", {})
    with logged() as messages:
        compiled(Attention())(tokens())
    assert any("still identifying" in message for message in messages)


def around(self: Any, x: Tensor) -> Tensor:
    return x + self.attention(self.first(x))[0]


def test_a_loop_that_ends_early_is_one_operator_and_the_model_stays_as_it_is() -> None:
    model = module(around, first=nn.Linear(16, 16), attention=LogDomainPlain(4)).eval()
    fast, x, names = compiled(model, "eager"), tokens(), model.state_dict().keys()
    with torch.no_grad():
        for given in (x, x, tokens(5, 17), x):
            assert_same(fast(given), model(given))
        for call, count in ((fast, 1), (model, 0)):
            with torch.profiler.profile() as profile:
                call(x)
            assert sum("asapc::sinkhorn" in event.name for event in profile.events()) == count
    assert operators(model) == ["sinkhorn"] and model.state_dict().keys() == names


def test_a_loop_that_cannot_be_patched_says_why() -> None:
    def dropping(self: Any, x: Tensor) -> Tensor:
        return self.dropout(self.sink(self.first(x) @ x.transpose(-1, -2))) @ x

    model = module(
        dropping, first=nn.Linear(16, 16), sink=SinkhornDistance(0.5, 4), dropout=nn.Dropout(0.1)
    ).eval()
    x = tokens()
    with torch.no_grad():
        assert_same(compiled(model, "eager")(x), model(x))
    assert "drops entries of its maps" in str(asapc.explain(model))


def test_graphs_are_explained_by_model() -> None:
    def broken(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)

    model, plain = module(broken, first=Attention(), second=Attention(3)), nn.Linear(16, 16)
    calls = [compiled(each) for each in (model, plain)]
    for call in calls:
        call(tokens())
    assert [len(facts.sites) for facts in asapc.explain(calls[0]).graphs] == [1, 1]
    assert len(asapc.explain(plain).graphs) == 1 and len(asapc.explain().graphs) == 3
    text = str(asapc.explain(model))
    assert "graph 2, compiled by aot_eager\n  second: asapc::sinkhorn, T=3, row first" in text
    assert "ends at a graph break, `torch._dynamo.graph_break()` (test_backend.py, line" in text
    assert [bool(x.broken_at) for x in asapc.explain(model).graphs] == [True, False]
    assert "no loop of rows and columns" in str(asapc.explain(plain))
    (site,) = asapc.explain(model).to_dict()["graphs"][0]["sites"]
    assert site["convention"]["half_steps"] == 4 and site["replay_error"] < 1e-5
    assert "call it first" in str(asapc.explain(nn.Linear(3, 3)))
    bare = module(lambda self, x: log_plan(x @ x.mT))  # without weights
    compiled(bare)(tokens())
    assert len(asapc.explain(bare).graphs) == 1 and not asapc.explain(module(broken)).graphs
