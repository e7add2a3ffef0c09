"""Parameters and gradients: what a site takes from a weight is read from it, or a change is no secret."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from analyses import analysed, batch
from attention_zoo import module
from torch import Tensor, nn
from torch.nn import functional as F

import asapc
from asapc.artifact import read_artifact, read_manifest
from asapc.errors import InputError
from asapc.ir import Program
from asapc.passes import gradients
from asapc.passes.capture import capture
from asapc.passes.gradients import held_by, no_gradient
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.site import Site
from asapc.program.compiled import OwnCodeWarning
from asapc.training.parameters import choose_parameters

TOKENS, DIM, HEADS = 6, 8, 2


def plan_of(scores: Tensor, steps: int = 3) -> Tensor:
    for _ in range(steps):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


class WithBackward(torch.autograd.Function):
    """A map with the gradient of its last half-step alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        plan = plan_of(scores)
        ctx.save_for_backward(plan)
        return plan

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (plan,) = ctx.saved_tensors
        return plan * (grads[0] - (grads[0] * plan).sum(-1, keepdim=True))


class Nearly(torch.autograd.Function):
    """The map itself, and not quite its gradient."""

    @staticmethod
    def forward(ctx: Any, plan: Tensor) -> Tensor:
        return plan.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 0.997 * grads[0]


class Attention(nn.Module):
    """kind: how a parameter, or a gradient, enters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.log_tau = nn.Parameter(torch.tensor(-0.3))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, HEADS)[:, None, None])
        self.plain = torch.tensor(1.1)  # no weight: the state of the module
        biases = torch.linspace(-1, 1, HEADS * TOKENS * TOKENS)
        self.bias = nn.Parameter(biases.view(HEADS, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        result = self.attention(q @ k.transpose(-1, -2) / 2, q, k) @ v
        return self.out(result.transpose(1, 2).flatten(2))

    def attention(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        tau = self.log_tau.exp()
        if self.kind == "einsum":
            scores = torch.einsum("bhnd,bhmd->bhnm", q, k)
            return plan_of(scores * F.softplus(self.gain))
        if self.kind == "inside":
            g = torch.zeros_like(scores[..., :1, :])
            for _ in range(3):
                f = -tau * ((scores + g) / tau).logsumexp(-1, keepdim=True)
                g = -tau * ((scores + f) / tau).logsumexp(-2, keepdim=True)
            return ((scores + f + g) / tau).exp()
        if self.kind == "without duals":
            with torch.no_grad():
                g = torch.zeros_like(scores[..., :1, :])
                for _ in range(3):
                    f = -(scores + g).logsumexp(-1, keepdim=True)
                    g = -(scores + f).logsumexp(-2, keepdim=True)
            return (scores + f + g).exp()
        if self.kind == "start detached":  # which half-steps forget, unless scores are sharper
            kernel = (scores / 4).exp()
            a = kernel.sum(-1, keepdim=True).reciprocal().detach()
            for _ in range(4):
                b = 1 / (kernel * a).sum(-2, keepdim=True)
                a = 1 / (kernel * b).sum(-1, keepdim=True)
            return a * kernel * b
        kinds: dict[str, Callable[[], Tensor]] = {
            "temperature": lambda: plan_of(scores / tau),
            "gain": lambda: plan_of(scores * self.gain),
            "beside": lambda: plan_of(scores * self.plain * tau),
            "bias": lambda: plan_of((scores + self.bias) / tau),
            "both": lambda: plan_of((scores * self.gain - self.bias) / tau),
            "plan": lambda: plan_of(scores) * tau,
            "detached": lambda: plan_of(scores).detach(),
            "backward": lambda: WithBackward.apply(scores),
            "nearly": lambda: Nearly.apply(plan_of(scores)),
            "no parameter": lambda: plan_of(scores),
        }
        return kinds[self.kind]()


def net(*kinds: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Attention, kinds)).eval()


def tokens(count: int = 3) -> Tensor:
    return torch.randn(count, TOKENS, DIM, generator=torch.Generator().manual_seed(1))


def lossless(model: nn.Module) -> tuple[Program, Program, list[Any]]:
    """The program that sites were found in, with operators, and what was found."""
    (captured,) = capture(model, (tokens(),), {}).programs
    program, found = matched_program(captured)
    return program, lift(program, [site for site in found if isinstance(site, Site)]), found


LIVE = {"temperature": {"log_tau"}, "beside": {"log_tau"}, "gain": {"gain"}, "einsum": {"gain"},
        "bias": {"log_tau", "bias"}, "both": {"log_tau", "gain", "bias"}}  # fmt: skip


def test_what_multiplies_scores_is_read_from_its_parameter():
    model = net(*LIVE)
    program, lifted, found = lossless(model)
    assert [site.convention.to_json()["half_steps"] for site in found] == [6] * len(LIVE)
    assert held_by(program, lifted, found) == {site.name: {} for site in found}
    read = {name for name, _ in lifted.graph.named_parameters()}
    assert {f"{layer}.{name}" for layer, kind in enumerate(LIVE) for name in LIVE[kind]} <= read
    assert no_gradient(model, [lifted], batch(tokens()), ()) is None
    ours, theirs = second(lifted.graph, tokens()), second(model, tokens())
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)  # of the graph as well, which holds the same
        torch.testing.assert_close(lifted.graph(tokens()), model(tokens()))


def second(model: nn.Module, x: Tensor) -> Tensor:
    """Of a penalty on the gradient, with respect to a weight."""
    given = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
    (found,) = torch.autograd.grad(slope.square().sum(), model.get_parameter("0.qkv.weight"))
    return found


OTHERS = ["without duals", "detached", "start detached", "backward", "nearly", "no parameter"]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_gradients_are_found(kind):
    model = net(kind)
    _, lifted, _ = lossless(model)
    before = copy.deepcopy(model.state_dict())
    reason = no_gradient(model, [lifted], batch(tokens()), ())
    assert (reason is None) == (kind == "no parameter")
    assert reason is None or "its own gradient differs" in reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_of_zero_hide_no_gradient():
    model = net("without duals")
    torch.nn.init.zeros_(model.get_parameter("0.out.weight"))
    _, lifted, _ = lossless(model)
    assert no_gradient(model, [lifted], batch(tokens()), ()) is not None
    assert not bool(model.get_parameter("0.out.weight").any())


class OfItsDtype(Attention):
    """Whose constant is another in float64."""

    def attention(self, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        plan = scores.softmax(-1)
        for step in range(5):
            total = plan.sum(-1 if step % 2 else -2, keepdim=True)
            plan = plan / (total + 1e3 * torch.finfo(scores.dtype).eps)
        return plan


def test_gradients_in_float64_say_nothing_of_code_that_asks_for_dtypes():
    torch.manual_seed(0)
    (site,) = analysed(OfItsDtype(""), tokens()).sites
    assert site.convention.stabiliser.constant == pytest.approx(1.2e-4, rel=0.01)
    assert not site.no_gradient


class LeftPadded(Attention):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden[:, None, None], -1e9)
        return self.out((self.attention(scores, q, k) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["no parameter", "without duals"])
def test_gradients_are_compared_on_shorter_examples(kind, monkeypatch):
    """Of which the first tokens alone are padding."""
    torch.manual_seed(0)
    model, x = LeftPadded(kind).eval(), torch.randn(3, 40, DIM)
    hidden = (torch.arange(40) < 24).expand(3, 40)
    (captured,) = capture(model, (x, hidden), {}).programs
    program, found = matched_program(captured)
    lifted = lift(program, [site for site in found if isinstance(site, Site)])
    lengths: set[int] = set()
    model.qkv.register_forward_pre_hook(lambda _, args: lengths.add(args[0].shape[1]))
    monkeypatch.setattr(gradients, "ENOUGH_BYTES", 1 << 12)
    monkeypatch.setattr(gradients, "MOST_BYTES", 1 << 13)
    reason = no_gradient(model, [lifted], batch(x, hidden), ())
    assert lengths == {max(lengths)} and max(lengths) < 10
    assert (reason is None) == (kind == "no parameter")
    assert reason is None or "its own gradient differs" in reason


class OneByOne(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(OneByOne, self).forward(one[None])[0] for one in x])


@pytest.mark.parametrize("kind", ["no parameter", "detached"])
def test_a_loop_over_examples(kind):
    """Its program holds for their number: gradients of fewer cannot be compared."""
    torch.manual_seed(0)
    model, x = OneByOne(kind).eval(), tokens(4)
    (captured,) = capture(model, (x,), {}).programs
    program, found = matched_program(captured)
    lifted = lift(program, [site for site in found if isinstance(site, Site)])
    reason = no_gradient(model, [lifted], batch(x), ())
    assert len(found) == 4 and (reason is None) == (kind == "no parameter")


def test_a_weight_of_two_layers():
    """Of which a program knows one name; a shared layer is left with its own weights."""
    model = net("inside", "inside")
    first, second = model
    second.log_tau, second.out = first.log_tau, first.out
    before = dict(model.named_parameters(remove_duplicate=False))
    program, lifted, found = lossless(model)
    held = {name for its in held_by(program, lifted, found).values() for name in its}
    assert no_gradient(model, [lifted], batch(tokens()), held) is None
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(after[name] is x for name, x in before.items())


# Compiled models


RECIPE = {"operator": "lossless", "batch_size": 16, "max_examples": 16, "selection_examples": 8}


KIND = {"held": "inside", "other": "without duals"}


@pytest.fixture(scope="module")
def outs(tmp_path_factory):
    """held: a site with a constant; other: one with another gradient."""
    folder = tmp_path_factory.mktemp("parameters")
    for name, kind in KIND.items():
        with warnings.catch_warnings(action="ignore"):
            asapc.compile(net(kind), {"input": tokens(40)}, recipe=RECIPE, out=folder / name, examples=8)
    return {name: folder / name for name in KIND}


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    given = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(given).square().sum(), given)
    return found


def change(model: nn.Module, way: str) -> None:
    layer: Any = model.get_submodule("0")
    if way == "load":
        state = {name: 1.3 * x for name, x in model.state_dict().items() if name.endswith("log_tau")}
        model.load_state_dict(state, strict=False)
    elif way == "step":
        layer.log_tau.grad = torch.ones(())
        torch.optim.SGD([layer.log_tau], lr=0.2).step()
    else:
        layer.log_tau = nn.Parameter(torch.tensor(0.4))


def test_another_value_of_a_constant_is_no_secret(outs):
    original, alone = net("inside"), asapc.load(outs["held"])
    live = asapc.load(outs["held"], model=copy.deepcopy(original))
    x = tokens()
    with torch.no_grad(), warnings.catch_warnings(action="error", category=OwnCodeWarning):
        for model in (live, alone):
            torch.testing.assert_close(model(x), original(x))
    for way in ("load", "step", "replaced"):
        changed, own, other = (copy.deepcopy(model) for model in (original, live, alone))
        for model in (changed, own, other):
            change(model, way)
        with torch.no_grad():
            with pytest.warns(OwnCodeWarning, match=r"0\.log_tau no longer has the value"):
                assert torch.equal(own(x), changed(x))
            assert torch.equal(own(x), changed(x))
            with pytest.raises(InputError, match=r"0\.log_tau no longer has the value"):
                other(x)
            for model in (own, other):  # and back
                model.load_state_dict(original.state_dict(), strict=False)
                torch.testing.assert_close(model(x), original(x))


def of_slopes(self: Any, x: Tensor) -> Tensor:
    """Two tensors that are no weights."""
    plan = plan_of(x @ (x * torch.tensor([0.5, 1.0, 2.0, 1.0])).mT, 2)
    return plan @ self.v(x) * self.gain


def test_tensors_of_the_code_are_in_no_state_dict(tmp_path):
    original, other = (
        module(of_slopes, v=nn.Linear(4, 4), gain=torch.tensor([1.0, 2.0, 1.0, 0.5])).eval() for _ in "12"
    )
    x = torch.randn(24, 6, 4)
    live, _ = asapc.compile(original, {"x": x}, recipe=RECIPE, out=tmp_path / "out", examples=8)
    for model in (live, asapc.load(tmp_path / "out")):
        assert model.state_dict().keys() == original.state_dict().keys()
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model.double()(x.double()), other.double()(x.double()))
        other.float()


def test_a_constant_that_no_state_dict_has(tmp_path):
    original = module(lambda self, x: plan_of(x @ x.mT / self.tau, 2) @ x).eval()
    original.register_buffer("tau", torch.tensor(2.0), persistent=False)
    x = torch.randn(24, 6, 4)
    asapc.compile(original, {"x": x}, recipe=RECIPE, out=tmp_path / "out", examples=8)
    alone = asapc.load(tmp_path / "out")
    torch.testing.assert_close(alone(x), original(x))
    assert not alone.state_dict()
    alone.get_buffer("tau").fill_(1.0)
    with pytest.raises(InputError, match="tau no longer has the value"):
        alone(x)


@pytest.mark.parametrize(
    "out, says", [("held", "log_tau requires a gradient"), ("other", "inference only: its own gradient")]
)
def test_gradients_that_are_not_there_are_the_originals_or_an_error(outs, out, says):
    original, alone = net(KIND[out]), asapc.load(outs[out])
    live = asapc.load(outs[out], model=copy.deepcopy(original))
    x = tokens()
    with pytest.warns(OwnCodeWarning, match=says):
        assert torch.equal(gradient(live, x), gradient(original, x))
    torch.testing.assert_close(alone(x), original(x))  # without a backward pass nothing is wrong
    with pytest.raises(InputError, match=says):
        gradient(alone, x)
    with torch.no_grad():  # and inference is compiled
        assert not torch.equal(live(x), original(x))
        torch.testing.assert_close(live(x), original(x))


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),))[1],
    "vmap": lambda model, x: torch.vmap(model)(x[:, None]),
    "grad": lambda model, x: torch.func.grad(lambda given: model(given).square().sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_the_originals_or_an_error(outs, transform):
    original, call = net("inside"), TRANSFORMS[transform]
    live = asapc.load(outs["held"], model=copy.deepcopy(original))
    with pytest.warns(OwnCodeWarning, match=r"torch\.func"):
        assert torch.equal(call(live, tokens()), call(original, tokens()))
    with pytest.raises(InputError, match=r"torch\.func"):
        call(asapc.load(outs["held"]), tokens())


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_that_torch_compiles_are_the_originals_or_an_error(outs, transform):
    torch._dynamo.reset()
    original, call = net("inside"), TRANSFORMS[transform]
    live, alone = asapc.load(outs["held"], model=copy.deepcopy(original)), asapc.load(outs["held"])
    for model in (live, alone):
        compiled = torch.compile(lambda x, model=model: call(model, x), backend="eager")
        if model is live and transform != "grad":
            with pytest.warns(OwnCodeWarning, match=r"torch\.func"):
                torch.testing.assert_close(compiled(tokens()), call(original, tokens()))
        else:
            with pytest.raises(InputError, match=r"torch\.func"):
                compiled(tokens())
    with torch.no_grad():  # and without one, the compiled code
        found = torch.compile(live, backend="eager")(tokens())
        torch.testing.assert_close(found, original(tokens()))


LEARNT: dict[str, Callable[..., Tensor]] = {
    "pivots": lambda z, q, k, v: plan_of(q @ z.mT) @ (plan_of(z @ k.mT) @ v),
    "keys": lambda z, q, k, v: plan_of(q @ z.mT) @ (z + v.mean(2, keepdim=True)),
    "keys and values": lambda z, q, k, v: plan_of(q @ z.mT) @ z,
}


@pytest.mark.parametrize("kind", LEARNT)
def test_learnt_points_are_every_examples_and_what_a_site_holds_of_them_is_not_trained(kind):
    def forward(self: Any, x: Tensor) -> Tensor:
        points = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return LEARNT[kind](self.z, *points).transpose(1, 2).flatten(2)

    z = nn.Parameter(torch.randn(HEADS, 4, DIM // HEADS))
    model = module(forward, qkv=nn.Linear(DIM, 3 * DIM), z=z)
    program, lifted, found = lossless(model)
    torch.testing.assert_close(lifted.graph(tokens(5)), model(tokens(5)), rtol=1e-5, atol=1e-5)
    held = {name for name, constants in held_by(program, lifted, found).items() if constants}
    free, left = ({n for _, n in choose_parameters([lifted], 0, ["*"], sites)} for sites in ((), held))
    own = {"asapc_site_0_pivots", "asapc_site_0_pivot_mass"}
    assert len(found) == 1 and free - left == (own if kind == "pivots" else set())


def test_a_manifest_says_what_is_held(outs):
    sites = {name: read_manifest(out)["sites"][0] for name, out in outs.items()}
    assert [sites[name]["constants"] for name in KIND] == [{"0.log_tau": "parameter"}, {}]
    assert [sites[name]["no_gradient"] is None for name in KIND] == [True, False]
    assert "0.log_tau" in dict(asapc.load(outs["held"]).named_parameters())
    assert read_artifact(outs["held"], ()).site_names == ["0"]
