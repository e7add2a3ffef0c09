"""What a program takes for granted is guarded: state, closures, globals, modes, being traced."""

from __future__ import annotations

import array
import collections
import configparser
import contextlib
import contextvars
import copy
import dataclasses
import functools
import importlib
import json
import math
import operator
import os
import random
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import log
from typing import Any
from unittest import mock

import drop_in_nets
import numpy as np
import pytest
import torch
from attention_zoo import Beside, module
from torch import Tensor, nn
from torch.compiler import is_exporting as exporting

import asapc
from asapc.errors import InputError, NoSiteError, VerificationError
from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.passes.analyse import Analysis, analyse
from asapc.passes.state import observed
from asapc.program import state
from asapc.program.compiled import OwnCodeWarning
from asapc.program.state import Reads, reachable

LOSSLESS = {"operator": "lossless", "batch_size": 8}
LIMITS = {"compiled": 1.0}


def attended(layer: Layer, x: Tensor, tau: Any = 1.0, steps: int = 2, bias: Any = 0.0) -> Tensor:
    q, k = layer.qk(x).chunk(2, -1)
    scores = 3 * q @ k.mT / tau + bias
    f, g = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1, :])
    for _ in range(steps):
        f = -torch.logsumexp(scores + g, -1, keepdim=True)
        g = -torch.logsumexp(scores + f, -2, keepdim=True)
    return torch.exp(scores + f + g) @ layer.out(x)


def products(layer: Layer, x: Tensor) -> Tensor:
    q, k = layer.qk(x).chunk(2, -1)
    return q @ k.mT


def temperature(tau: float) -> Callable[[], float]:
    return lambda: tau


@dataclasses.dataclass
class Context:
    tau: float = 1.0
    layer: int = 0


class Slots:
    __slots__ = ("tau",)

    def __init__(self) -> None:
        self.tau = 1.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(4, 8), nn.Linear(4, 4)
        self.context, self.options, self._steps, self.taus = Context(), {"n": 3}, 3, [1.0]
        self.tau, self.slots, self.plain, self.calls = temperature(1.0), Slots(), torch.ones(()), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x)


def layer(forward: Callable[..., Any], holds: Callable[[], dict[str, Any]] = dict) -> type[Layer]:
    """The layers that have this forward, and what `holds` gives each."""

    class Made(Layer):
        def __init__(self) -> None:
            super().__init__()
            for name, value in holds().items():
                setattr(self, name, value)

    Made.forward = forward  # type: ignore[method-assign]
    return Made


def of_modes(self: Layer, x: Tensor) -> Tensor:
    traced = torch.compiler.is_compiling() or exporting()
    return attended(self, x, steps=2 + torch.is_grad_enabled() + 2 * self.training + 4 * traced)


OfModes, OfLayer = layer(of_modes), layer(lambda self, x: attended(self, x, steps=SHARED.layer))
SHARED = Context()


class Stack(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            SHARED.layer = number
            x = x + layer(x)
        return x.mean(1)


def stack(*layers: Callable[[], nn.Module]) -> Stack:
    torch.manual_seed(0)
    return Stack(*(layer() for layer in layers)).eval()


KINDS = (OfModes, OfLayer, OfLayer)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The model, and its compiled form."""
    model, x = stack(*KINDS), torch.randn(48, 6, 4)
    before = _state(model)
    out = tmp_path_factory.mktemp("guards") / "out"
    generator = torch.get_rng_state()
    made = asapc.compile(
        model, {"x": x}, recipe={"operator": "lossless", "batch_size": 16}, examples=16, out=out
    )
    assert _state(model) == before and torch.equal(torch.get_rng_state(), generator)
    assert not made.report.facts.get("refused")
    return model, made.model, out


def _state(model: nn.Module) -> Any:
    plain = [{k: repr(v) for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
    return plain, {name: x.tolist() for name, x in model.state_dict().items()}


def own_code(model: nn.Module, compiled: nn.Module, x: Tensor) -> list[str]:
    """What was warned of, where both give the same."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    return [str(w.message) for w in caught if issubclass(w.category, OwnCodeWarning)]


def assert_told(warned: list[str], *texts: str | None) -> None:
    """One warning after the other that say so; None: no warning."""
    expected = [text for text in texts if text is not None]
    assert len(warned) == len(expected), warned
    assert all(text in told for text, told in zip(expected, warned, strict=True)), warned


@functools.cache
def made(kind: Callable[[], nn.Module], *size: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()).eval(), torch.randn(24, *size, 6, 4)
    return model, asapc.compile(model, {"input": x}, recipe=LOSSLESS, examples=8).model


@functools.cache
def beside(*kinds: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Layers side by side in one model, all of which are compiled."""
    torch.manual_seed(0)
    model, x = Beside(kind() for kind in kinds).eval(), torch.randn(48, 6, 4)
    compiled, report = asapc.compile(model, x, recipe=LOSSLESS, examples=8)
    operators = [site["operator"] for site in report.facts["sites"]]
    assert len(operators) == len(kinds) and {*operators} <= {"sinkhorn", "plan"}, operators
    return model, compiled


class Settings:
    """Attributes by way of __getattr__, as configurations have them."""

    def __init__(self) -> None:
        self.__dict__["_values"] = {"tau": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name == "_values" or name not in self._values:
            raise AttributeError(name)
        return self._values[name]


SETTINGS = types.ModuleType("settings_of_test")
SETTINGS.TAU, GLOBAL = 1.0, 1.0
sys.modules["settings_of_test"] = SETTINGS
EXTRA = types.ModuleType("torch_extra")  # no part of torch, in a package called almost like it
exec(compile("TAU = 1.0\ndef tau(): return TAU", "/site-packages/torch_extra/x.py", "exec"), vars(EXTRA))
CELL = {"tau": 1.0}
ELSEWHERE = types.ModuleType("elsewhere_of_test")  # a file that the model's own does not name
sys.modules["elsewhere_of_test"] = ELSEWHERE
exec(compile("""
TAU = 1.0


def scaled(x): return x * TAU


class Base:
    def forward(self, x): return self.attend(scaled(x))


class Called:
    def __call__(self, x): return x * 1.0
BY_PAIR = {(1, 2): scaled}
""", "/elsewhere/of_test.py", "exec"), vars(ELSEWHERE))


@torch.compile(backend="eager")
def below_compile() -> float:
    return LIMITS["compiled"]


class Same(nn.Module):
    def forward(self, x: float) -> float:
        return x


VARIABLE = contextvars.ContextVar("tau", default=1.0)
LOCAL = threading.local()
LOCAL.tau = 1.0
ACTS = {"a": lambda s: s * 1, "b": lambda s: s * 2}


class Level(int):
    pass


EVENT, CONFIG, NUMBERS = threading.Event(), configparser.ConfigParser(), array.array("d", [1.0])
CONFIG.read_dict({"a": {"tau": "1"}})


class OfNames(Layer):
    """Attributes of many kinds; what is not there, or has a name in a text alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", None)
        self.listed, self.share, self.weight = nn.ParameterList([torch.ones(1)]), Fraction(1), None
        self.sized = nn.Parameter(torch.ones(1))
        self.window, self.pick, self.level = slice(0, 3), operator.itemgetter(0), Level(1)

    def forward(self, x: Tensor) -> Tensor:
        tau = 2.0 if self.none is not None or hasattr(self, "later") else 1.0
        tau = tau * len(self.listed) * float(self.share) * self.sized.shape[0]
        tau = tau * len(range(9)[self.window]) / 3 * self.pick([1.0, 2.0]) * self.level
        tau = tau * (2.0 if EVENT.is_set() else 1.0) * CONFIG.getfloat("a", "tau") * NUMBERS[0]
        tau = tau * globals()["GLOBAL"] * importlib.import_module("settings_of_test").TAU
        tau = tau * (len(list(self.parameters())) / 6) * (2.0 if getattr(x, "sharp", False) else 1.0)
        tau = tau * (2.0 if torch.distributed.is_initialized() else 1.0)
        self.calls += 1  # and nothing reads it
        tau = tau * self.context.tau * self.taus[0] * self.tau() * self.slots.tau * self.plain
        return attended(self, x, tau, self._steps * self.options["n"] // 3)


class OfHidden(Layer):
    """What a walk over attributes does not come by."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.table, self.user = Settings(), np.array([1.0]), collections.UserDict(tau=1.0)
        self.many, self.long = {f"k{i}": 1.0 for i in range(80)}, [1.0] * 90
        self.kinds, self.by_kind, self.act = {1, 2}, {0.5: 1.0}, ACTS["a"]
        self.tau_0, self.weak = 1.0, weakref.ref(SHARED)
        self.kind, self.norm, self.others, self.same = "soft", nn.LayerNorm(4), [Same().eval()], Same()
        self.same.register_forward_hook(lambda module, args, out: out * CELL["tau"])

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "soft":
                tau = self.same(1.0)
            case _:
                tau = 2.0
        tau = tau * self.settings.tau * self.table[0] * self.user["tau"] * self.many["k7"] * self.long[70]
        tau = tau * (2.0 if 3 in self.kinds else 1.0) * self.by_kind[0.5]
        tau = tau * getattr(self, f"tau_{x.dim() - 3}") * VARIABLE.get() * LOCAL.tau * self.weak().tau
        tau = tau * float(os.environ.get("TAU_OF_TEST", "1")) * EXTRA.tau() * below_compile()
        tau = tau * (2.0 if self.others[0].training else 1.0) * (1 + self.norm.eps)
        return attended(self, x, float(self.act(tau)))


class OfMadeNames(Layer):
    """Names that are made while it runs, and weights of its own that nothing registers."""

    def __init__(self) -> None:
        super().__init__()
        self.get_tau, self.hidden = operator.attrgetter("context.tau"), [nn.Linear(4, 40)]

    def forward(self, x: Tensor) -> Tensor:
        tau = self.get_tau(self) * float(os.environ.get(f"TAU_OF_{self._steps}", "1"))
        return attended(self, x + self.hidden[0](x)[..., :4], tau)


def bool_one() -> bool:
    return True


CHANGES: dict[type[Layer], list[tuple[Callable[..., Any], str | None]]] = {
    OfHidden: [
        (lambda one, patch: None, None),
        (lambda one, patch: one.settings._values.update(tau=2.0), "settings._values['tau']"),
        (lambda one, patch: one.table.__setitem__(0, 2.0), "table"),
        (lambda one, patch: one.user.update(tau=2.0), "user.data['tau']"),
        (lambda one, patch: one.many.update(k7=2.0), "many"),
        (lambda one, patch: one.long.__setitem__(70, 2.0), "long"),
        (lambda one, patch: (one.kinds.discard(1), one.kinds.add(3)), "kinds"),
        (lambda one, patch: one.by_kind.update({0.5: 2.0}), "by_kind"),
        (lambda one, patch: setattr(one, "act", ACTS["b"]), "act"),
        (lambda one, patch: setattr(one, "tau_0", 2.0), "tau_0"),
        (lambda one, patch: patch.setattr(SHARED, "tau", 2.0), "weak.tau"),
        (lambda one, patch: VARIABLE.set(2.0), "VARIABLE"),
        (lambda one, patch: patch.setattr(LOCAL, "tau", 2.0), "LOCAL.tau"),
        (lambda one, patch: patch.setenv("TAU_OF_TEST", "2"), "os.environ['TAU_OF_TEST']"),
        (lambda one, patch: patch.setattr(EXTRA, "TAU", 2.0), "TAU"),
        (lambda one, patch: patch.setitem(LIMITS, "compiled", 2.0), "LIMITS['compiled']"),
        (lambda one, patch: patch.setitem(CELL, "tau", 2.0), "CELL['tau']"),
        (lambda one, patch: setattr(one, "kind", "hard"), "kind"),
        (lambda one, patch: setattr(one.norm, "eps", 1.0), "norm.eps"),
        (lambda one, patch: one.others[0].train(), "others[0].training"),
        (lambda one, patch: one.same.register_full_backward_hook(print), "hooks of gradients"),
    ],
    OfMadeNames: [
        (lambda one, patch: None, None),
        (lambda one, patch: setattr(one.context, "tau", 2.0), "context.tau was captured as 1.0"),
        (lambda one, patch: patch.setenv("TAU_OF_3", "2"), "os.environ['TAU_OF_3']"),
        (lambda one, patch: one.hidden[0].weight.data.mul_(2.0), "the weights of hidden[0]"),
    ],
    OfNames: [
        (lambda one, patch: setattr(one, "calls", 7), None),
        (lambda one, patch: setattr(one, "context", Context()), None),
        (lambda one, patch: setattr(one.context, "tau", 2.0), "context.tau was captured as 1.0"),
        (lambda one, patch: one.options.update(n=6), "options['n'] was captured as 3, but is 6"),
        (lambda one, patch: setattr(one, "_steps", 6), "_steps was captured as 3, but is 6"),
        (lambda one, patch: one.taus.__setitem__(0, 2.0), "taus[0]"),
        (lambda one, patch: one.taus.append(2.0), "taus"),
        (lambda one, patch: one.options.update(m=0), "options"),
        (lambda one, patch: setattr(one, "tau", temperature(2.0)), "tau was captured as 1.0, but is 2.0"),
        (lambda one, patch: setattr(one.slots, "tau", 2.0), "slots.tau"),
        (lambda one, patch: one.plain.mul_(2), "plain"),
        (lambda one, patch: setattr(one, "none", torch.ones(1)), "was captured as"),
        (lambda one, patch: setattr(one, "later", 1), "later was captured as attribute absent"),
        (lambda one, patch: one.listed.append(torch.ones(1)), "was captured as"),
        (lambda one, patch: setattr(one, "share", Fraction(2)), "share"),
        (lambda one, patch: setattr(one, "sized", nn.Parameter(torch.ones(2))), "sized"),
        (lambda one, patch: setattr(one, "window", slice(0, 6)), "window"),
        (lambda one, patch: setattr(one, "pick", operator.itemgetter(1)), "pick"),
        (lambda one, patch: setattr(one, "level", Level(2)), "level"),
        (lambda one, patch: patch.setattr(EVENT, "_flag", True), "EVENT"),
        (lambda one, patch: patch.setitem(CONFIG["a"], "tau", "2"), "CONFIG"),
        (lambda one, patch: patch.setitem(globals(), "NUMBERS", array.array("d", [2.0])), "NUMBERS"),
        (lambda one, patch: patch.setitem(globals(), "GLOBAL", 2.0), "GLOBAL"),
        (lambda one, patch: patch.setattr(SETTINGS, "TAU", 2.0), "TAU"),
        (lambda one, patch: one.register_parameter("another", nn.Parameter(torch.ones(1))), "structure"),
        (lambda one, patch: patch.setattr(torch.distributed, "is_initialized", bool_one), "distributed"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "text"), [(kind, *case) for kind, cases in CHANGES.items() for case in cases]
)
def test_state_off_the_beaten_track_is_guarded(kind, change, text, monkeypatch):
    """Changed after a first call, of objects that stay the same ones."""
    model, compiled = copy.deepcopy(made(kind))
    x = torch.randn(2, 5, 4)
    compiled(x)

    def changed() -> list[str]:
        for one in (model[0], compiled[0]):
            change(one, monkeypatch)
        return own_code(model, compiled, x)

    assert_told(contextvars.copy_context().run(changed), text)


class Holder:
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


def test_what_is_held_in_many_ways_is_looked_at_once():
    first = thing = Holder([1.0])
    for _ in range(5):
        thing = Holder([thing] * 5)
    with mock.patch.object(state, "_dict_of", wraps=state._dict_of) as looked:
        before = state.encoded({thing})
    assert looked.call_count < 100
    first.parts[0] = 2.0
    assert state.encoded({thing}) != before


def test_a_value_of_another_thread_is_guarded():
    model, compiled = copy.deepcopy(made(OfHidden))
    x, told = torch.randn(2, 5, 4), list[str]()
    compiled(x)

    def elsewhere() -> None:
        LOCAL.tau = 2.0
        told.extend(own_code(model, compiled, x))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert_told(told, "LOCAL.tau")


class Raising:
    @property
    def func(self) -> None:
        raise AssertionError("code of the user's")


class Held(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.act, self.other, value = nn.ReLU(), Raising(), 1.0

        def taking(number: float = 1.0) -> float:
            return number * value

        def emptying() -> None:
            nonlocal value
            del value

        self.taking, self.emptying = taking, emptying


class HeldTwice(Held):
    scale = 2.0


@pytest.mark.parametrize(("change", "what"), [
    (lambda one, patch: None, None),
    (lambda one, patch: patch.setattr(Held, "act", 3.0, raising=False), "act"),
    (lambda one, patch: patch.setattr(Held, "later", 3.0, raising=False), "later"),
    (lambda one, patch: setattr(one, "later", 3.0), "later"),
    (lambda one, patch: setattr(one, "scale", 3.0), "scale"),
    (lambda one, patch: patch.setattr(Held, "scale", 3.0), "scale"),
    (lambda one, patch: setattr(one, "__class__", HeldTwice), "scale"),
    (lambda one, patch: one.emptying(), "value"),
    (lambda one, patch: setattr(one.taking, "__defaults__", (3.0,)), "taking"),
    (lambda one, patch: setattr(one.taking, "__code__", (lambda: 3.0 + 0 * one).__code__), "taking"),
])  # fmt: skip
def test_what_is_checked_at_every_call(change, what, monkeypatch):
    """It is looked up again only where it may be another."""
    one = Held()
    paths: list[Any] = [(("attr", name),) for name in ("act", "later", "scale", "taking")]
    paths += [(("attr", "taking"), ("cell", "value")), (("attr", "taking"), ("default", 0))]
    paths += [(("attr", "other"), ("part", part)) for part in ("func", "bases")]  # as no capture writes
    values = ((steps, state.found(one, steps)) for steps in paths)
    reads = state.Reads(tuple(
        (steps, state.ABSENT if value is state.GONE else state.encoded(value)) for steps, value in values
    ))  # fmt: skip
    assert reads.difference(one) is None
    with mock.patch.object(state, "found", wraps=state.found) as looked:
        assert reads.difference(one) is None and looked.call_count == 0
        change(one, monkeypatch)
        difference = reads.difference(one)
        assert (difference and difference[0]) == what and (looked.call_count > 0) == (what is not None)


def test_a_guard_passes_again_when_all_is_as_it_was():
    one = copy.deepcopy(made(OfNames)[1])[0]
    inside = one.forward.inside[0]
    assert inside.difference(one) is None is inside.difference(one)
    one.context.tau = 2.0
    assert inside.difference(one) is not None
    one.context.tau = 1.0
    assert inside.difference(one) is None
    reads = json.loads(json.dumps(inside.reads.to_json()))
    assert Reads.from_json(reads, "reads") == inside.reads
    for wrong in ([["call", "x"]], [["item", -1]], [["attr", None]]):
        with pytest.raises(InputError):
            Reads.from_json({"values": [[wrong, 1]], "questions": []}, "reads")
    with pytest.raises(InputError, match="a question"):
        Reads.from_json({"values": [], "questions": ["anything"]}, "reads")


def test_what_a_parent_sets_for_each_layer(pair):
    model, compiled, out = pair
    x = torch.randn(3, 5, 4)
    with torch.no_grad(), warnings.catch_warnings(action="error", category=OwnCodeWarning):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    whole = asapc.load(out)  # which has no code of its own
    with torch.no_grad():
        torch.testing.assert_close(whole(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(asapc.errors.InputError, match="gradients are recorded"):
        whole(x)


def counts(self: Layer, x: Tensor) -> Tensor:
    self.calls += 1
    return attended(self, x, steps=3 if self.calls < 9 else 6)


def counts_in_a_buffer(self: Layer, x: Tensor) -> Tensor:
    self.seen += 1
    return attended(self, x, steps=3 if self.seen < 9 else 6)


def decays(self: Layer, x: Tensor) -> Tensor:
    self.context.tau *= 0.9
    return attended(self, x, self.context.tau)


def caches(self: Layer, x: Tensor) -> Tensor:
    if not isinstance(self.plain, Tensor) or len(self.taus) != x.shape[1]:
        self.taus = [0.1 * place for place in range(x.shape[1])]
    return attended(self, x + sum(self.taus))


def records(self: Layer, x: Tensor) -> Tensor:
    """Remembers what is larger than the data."""
    self.calls = max(self.calls, 40, x.shape[1])
    return attended(self, x, self.calls / 40)


class Positions(Layer):
    """Kept for the longest input so far, in which the first entry stands for the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.places, self.base, self.gain = 0, None, 2.0, nn.Parameter(torch.ones(()))

    def made(self, n: int) -> Tensor:
        return self.base * torch.arange(n)[:, None] / 9

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.places is None or n > self.longest:
            self.longest, self.places = n, self.made(n)
        return attended(self, x, bias=torch.cos(self.places[:n] - self.places[:n].mT))


class OfOneLength(Positions):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "kept") or self.kept[0].shape[0] != x.shape[1]:
            self.kept = (self.made(x.shape[1]),)
        return attended(self, x, bias=torch.cos(self.kept[0] - self.kept[0].mT))


class OfFrequencies(Positions):
    """As rotary positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([0.5, 0.1]))

    def made(self, n: int) -> Tensor:
        return (torch.arange(n)[:, None] * self.frequencies).sum(-1, keepdim=True)


class OfWeights(Positions):
    def made(self, n: int) -> Tensor:
        return super().made(n) * self.gain.detach()


class OfTheLongest(Positions):
    def made(self, n: int) -> Tensor:
        return super().made(n) * (1.0 if n < 90 else 0.5)


class OfTheFirst(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.plain.shape != x.shape[:1]:
            self.plain = x.mean((1, 2))
        return attended(self, x, 1 + self.plain[:, None, None])


@pytest.mark.parametrize("used", [False, True])
def test_what_is_kept_of_sizes_alone_is_computed_anew(used):
    model, x = stack(Positions, OfOneLength, OfFrequencies), torch.randn(60, 6, 4)
    if used:
        model(torch.randn(1, 20, 4))
    compiled = asapc.compile(model, x, recipe=LOSSLESS, examples=8).model
    for size in (6, 1, 50, 9):  # shorter after longer, as no other call was made before
        assert_told(own_code(copy.deepcopy(model), compiled, torch.randn(3, size, 4)), None)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert_told(own_code(model, compiled, torch.randn(3, 60, 4)), *["hooks of all modules"] * 3)
    hook.remove()  # what its own code kept is no other state
    assert_told(own_code(model, compiled, torch.randn(3, 60, 4)), None)
    table = torch.randn(70, 1)
    for layer in (*model.layers, *compiled.layers):
        layer.longest, layer.places, layer.kept = 70, table, (table,)
    assert_told(own_code(model, compiled, torch.randn(3, 70, 4)), "longest", "kept", "longest")


def test_what_depends_on_more_than_sizes_is_not():
    for kind in (OfTheLongest, OfTheFirst, OfWeights):
        with pytest.raises(NoSiteError, match=r"after calls with other|makes pla.* once"):
            made(kind)


def _analysed(model: nn.Module) -> Analysis:
    x = torch.randn(8, 6, 4)
    first, *more = (Batch((part,), {}, None, [0] * 4) for part in (x[:4], 3 * x[4:, :5]))
    return analyse(Teacher(model, None, "net", "", False, None), first, more=more)


FIRST_SEEN: dict[str, Tensor] = {}
FIRST_LENGTH = None


def once() -> Callable[[Tensor], Tensor]:
    known = []

    def level(x: Tensor) -> Tensor:
        known.extend([] if known else [x.abs().mean()])
        return known[0]

    return level


class Once(Layer):
    """What is made at the first call stays."""

    level: Any = None
    of_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("known", torch.zeros(()))
        self.functions = {"level": [once()]}

    def made_once(self, x: Tensor) -> Any:
        if self.level is None:
            self.level = x.abs().mean()
        return self.level

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, self.made_once(x))


def of_sizes(self: Once, x: Tensor) -> Any:
    self.level = self.level or x.shape[1] / 6
    return self.level


def of_weights(self: Once, x: Tensor) -> Any:
    self.level = self.level or float(self.qk.weight.abs().sum())
    return self.level


def of_nothing(self: Once, x: Tensor) -> Any:
    self.level = self.level or torch.tensor(self.qk.in_features / 8)
    return self.level


def in_a_class(self: Once, x: Tensor) -> Any:
    Once.of_class = self.of_class or float(x.abs().mean())
    return self.of_class


def in_a_dict(self: Once, x: Tensor) -> Any:
    return FIRST_SEEN.setdefault("level", x.abs().mean())


def in_a_global(self: Once, x: Tensor) -> Any:
    global FIRST_LENGTH
    FIRST_LENGTH = FIRST_LENGTH or len(x[0])
    return FIRST_LENGTH


def around_an_attribute(self: Once, x: Tensor) -> Any:
    """Of a function, which copies of the layer share."""
    return self.functions["level"][0](x)


def by_another_function(level: Callable[[Tensor], Tensor]) -> Any:
    return lambda self, x: level(x)


def in_a_buffer(self: Once, x: Tensor) -> Any:
    if not self.known:
        self.known.copy_(x.abs().mean())
    return self.known


def in_a_weight(self: Once, x: Tensor) -> Any:
    if not self.known:
        self.known.fill_(1.0)
        self.scale.data.copy_(x.abs().mean())
    return self.scale


def once_as(made_once: Any, base: type[Once] = Once) -> type[Once]:
    return type("Own", (base,), {"made_once": made_once})


class OrNaN(Once):
    """All of a kernel leaves the format where inputs are large, and what is 0 / 0 tells nothing apart."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x.abs().amax() > 40, torch.nan, x))


class Careless:
    """Everything of it that is not stored fails."""

    def __init__(self) -> None:
        self.itself, self.tau = self, 1.0

    @property
    def broken(self) -> float:
        raise AssertionError("a property was asked")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_looking_runs_no_code():
    model = stack(layer(lambda self, x: attended(self, x, getattr(self, "".join(("care", "less"))).tau)))
    model.layers[0].careless = Careless()
    with torch.no_grad():
        found = observed(model, [Batch((torch.randn(2, 5, 4),), {}, None, [])] * 2)
    names = found.names["layers.0"]
    assert names.attributes is None  # a name that is made while it runs
    path = (("attr", "careless"), ("attr", "tau"))
    assert reachable(model.layers[0], names)[path] == 1.0 and not found.changing


@torch.no_grad()
def test_weights_that_nothing_registers():
    """Of a layer in a list, beside the model that it is in."""
    torch.manual_seed(0)
    model = stack(layer(
        lambda self, x: attended(self, self.hidden[0](x), len(self.around[0].layers)),
        lambda: {"hidden": [nn.Linear(4, 4)], "around": []},
    ))  # fmt: skip
    model.layers[0].around.append(model)
    compiled = asapc.compile(model, torch.randn(40, 6, 4), recipe=LOSSLESS, examples=8, quiet=True).model
    for of, told in (("out", None), ("hidden", "not registered in the model")):
        for one in (model.layers[0], compiled.layers[0]):
            (one.out if of == "out" else one.hidden[0]).weight.mul_(2)
        assert_told(own_code(model, compiled, torch.randn(3, 6, 4)), told)
    model.layers[0].hidden[0] = nn.BatchNorm1d(6)  # in training mode, which model.eval() does not end
    with pytest.raises(NoSiteError, match=r"in the model\), which is not always"):
        asapc.compile(model, torch.randn(40, 6, 4), recipe=LOSSLESS, examples=8, quiet=True)


class Scripted(Stack):
    """A layer is a script, and the model cannot be captured whole."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(x).detach().numpy())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_whose_code_or_weights_are_elsewhere():
    model, x = Stack(Layer(), Layer()).eval(), torch.randn(8, 6, 4)
    for made in (torch.jit.script(nn.Linear(4, 4)).eval(), torch.jit.trace(model, x)):
        with pytest.raises(asapc.errors.InputError, match="scripted or traced"):
            asapc.compile(made, {"x": x})
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(asapc.errors.InputError, match="quantised"):
        asapc.compile(quantised, {"x": x})


class Matches(nn.Module):
    """The log plan of scores that a mask hides with -inf, all but those of no match, and the matches."""

    def __init__(self, plan: bool = True) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, scores: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        scores = scores.masked_fill(~keep[:, None], -math.inf)
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
        scores = torch.cat([scores, torch.zeros_like(scores[:, :1])], 1)
        f, g = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[:, :1])
        for _ in range(3):
            f = -torch.logsumexp(scores + g, -1, keepdim=True)
            g = -torch.logsumexp(scores + f, -2, keepdim=True)
        plan = scores + f + g
        return (plan, plan.argmax(-1)) if self.plan else (plan.argmax(-1),)


def test_logarithms_of_no_mass_are_no_difference() -> None:
    x = {"scores": torch.randn(40, 7, 6), "keep": torch.arange(6) < torch.randint(2, 7, (40, 1))}
    compiled = asapc.compile(Matches().eval(), x, recipe=LOSSLESS)
    assert [site["operator"] for site in compiled.report.facts["sites"]] == ["plan"]
    scores, keep = torch.randn(3, 9, 5), torch.arange(5) < torch.tensor([[5], [3], [1]])
    (plan, best), (own, own_best) = compiled.model(scores, keep), Matches()(scores, keep)
    assert bool(own.isneginf().any()) and torch.equal(best, own_best)
    torch.testing.assert_close(plan, own)


def test_what_returns_indices_alone_cannot_be_compared() -> None:
    x = {"scores": torch.randn(40, 7, 6), "keep": torch.ones(40, 6, dtype=torch.bool)}
    with pytest.raises(InputError, match="return floating-point numbers"):
        asapc.compile(Matches(plan=False).eval(), x, recipe=LOSSLESS)


def test_scripts_and_lazy_layers():
    model = Scripted(Layer(), Layer()).eval()
    model.layers[0].out = torch.jit.script(nn.Linear(4, 4))
    analysis = _analysed(model)
    left = [region.name for region in analysis.left_alone]
    assert "layers.1" in analysis.names and "layers.0" in left
    model.layers[0].out = nn.LazyLinear(4)
    with pytest.raises(asapc.errors.InputError, match=r"layers\.0\.out\.weight"):
        asapc.compile(model, {"x": torch.randn(8, 6, 4)})
# What stays the same, whatever a layer does


@torch.jit.script
def scripted(scores: Tensor, steps: int = 3) -> tuple[Tensor, Tensor]:
    f, g = torch.zeros_like(scores[:, :, :1]), torch.zeros_like(scores[:, :1])
    for _ in range(steps):
        f = -torch.logsumexp(scores + g, [2], True)
        g = -torch.logsumexp(scores + f, [1], True)
    return torch.exp(scores + f + g), g


def of_a_script(self: Layer, x: Tensor) -> Tensor:
    q, k = self.qk(x).chunk(2, -1)
    return scripted(3 * q @ k.mT)[0] @ self.out(x)


def with_logs_of_numpy(self: Layer, x: Tensor) -> Tensor:
    plan = (3 * products(self, x)).log_softmax(-1) - np.log(x.shape[1])
    for step in range(3):
        plan = plan - plan.logsumexp(-1 if step % 2 else -2, keepdim=True) - np.log(x.shape[1])
    return plan.exp() @ self.out(x) * np.sqrt(x.shape[1])


def of_a_list(self: Layer, x: Tensor, maps: list[Tensor]) -> Tensor:
    maps.append(attended(self, x))
    return maps[-1]


OfGivenList = layer(of_a_list)


def of_list_of_layers(self: nn.Module, x: Tensor) -> Tensor:
    maps: list[Tensor] = []
    x = x + 1 if x.sum() > 1e9 else x
    for one in self.layers:
        x = x + one(x, maps)
    return x + maps[0]


def in_parts(self: Layer, x: Tensor) -> Tensor:
    """Queries four at a time, of which the last are what is left."""
    q, k = self.qk(x).chunk(2, -1)
    parts = [3 * part @ k.mT for part in q.split(4, 1)]
    parts = [part - torch.logsumexp(part, -1, keepdim=True) for part in parts]
    parts = [(part - torch.logsumexp(part, -2, keepdim=True)).exp() for part in parts]
    return torch.cat(parts, 1) @ self.out(x)


def of_two_names() -> nn.Module:
    """A layer with two names, whose weights torch.func.functional_call does not put back."""
    q = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return layer(
        lambda self, x: by_softmax(self.q(x) @ self.k(x).mT) @ self.out(x), lambda: {"q": q, "k": q}
    )()


def in_blocks(self: Layer, x: Tensor) -> Tensor:
    """Of four tokens, the last of them padded: a length that is 4, whatever is given."""
    blocks = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(len(x), -1, 4, 4)
    return attended(self, blocks).flatten(1, 2)[:, : x.shape[1]]


def of_baddbmm(self: Layer, x: Tensor) -> Tensor:
    """Scores as old code has them, which torch.export follows and its own check of shapes does not."""
    q, k = self.qk(x).chunk(2, -1)
    scores = torch.baddbmm(torch.zeros(1, 1, 1).to(q), q, k.mT, beta=0, alpha=0.5)
    return by_softmax(scores) @ self.out(x)


def with_autocast(self: Layer, x: Tensor) -> Tensor:
    """Around one of its layers."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = self.out(x)
    return attended(self, x + out.float())


def by_softmax(scores: Tensor) -> Tensor:
    for half_step in range(6):
        scores = scores.log_softmax(-1 - half_step % 2)
    return scores.exp()


SAME: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a script": (layer(of_a_script), (11, 5)),
    "NumPy's logarithm of a length": (layer(with_logs_of_numpy), (11, 5)),
    "len, and a logarithm by itself": (layer(
        lambda self, x: attended(self, x).view(len(x), -1, 4) * log(x.shape[1])), (9,)),
    "mapped over examples": (layer(
        lambda self, x: torch.vmap(lambda one: attended(self, one))(x)), (11,)),
    "a list for layers": (lambda: module(
        of_list_of_layers, layers=nn.ModuleList([OfGivenList(), OfGivenList()])), (6,)),
    "parts of queries": (layer(in_parts), (6,)),
    "a layer of two names": (of_two_names, (6,)), "blocks": (layer(in_blocks), (5, 6, 7)),
    "autocast of a layer": (layer(with_autocast), (6,)), "baddbmm": (layer(of_baddbmm), (6, 9)),
    "a layer that is captured alone and called twice": (lambda: module(
        lambda self, x: self.layer(self.layer(torch.from_numpy(x.numpy()))), layer=Layer()), (6, 9, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "lengths"), SAME.values(), ids=SAME)
@torch.no_grad()
def test_layers_that_are_the_same_at_every_size(kind, lengths):
    model, compiled = made(kind)
    assert "sinkhorn" in repr(compiled) or "plan" in repr(compiled)
    for examples, length in zip((3, 1, 2), lengths):  # noqa: B905
        assert own_code(model, compiled, torch.randn(examples, length, 4)) == []


# What is refused


def of_remade_buffers(self: Layer, x: Tensor) -> Tensor:
    """Positions of the longest input, in a buffer that begins empty."""
    if len(self.positions) < x.shape[1]:
        self.positions = torch.arange(x.shape[1])[:, None].to(x)
    return attended(self, x + 0.1 * self.positions[: x.shape[1]])


def of_callbacks(self: Layer, x: Tensor) -> Tensor:
    self.keep(x)
    return attended(self, x)


def leaves_its_length(self: Layer, x: Tensor) -> Tensor:
    self.length = float(x.shape[1])
    return attended(self, x)


def reads_what_is_left(self: nn.Module, x: Tensor) -> Tensor:
    """From the call before, where there was one."""
    x = x * (1 + 0.01 * getattr(self.layer, "length", 7.0))
    return self.layer(self.layer(x))


def adds_to_its_input(self: Layer, x: Tensor) -> Tensor:
    x += attended(self, x)
    return x


@dataclasses.dataclass
class LastMap:
    __slots__ = ("plan",)
    plan: Any


@dataclasses.dataclass
class LastOrNone:
    plan: Any = None


def last_map() -> None:
    """Has it as an attribute."""


class Publishes(Layer):
    """Its map, for others, where nothing can be taken away."""

    kept: Any = None
    length = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.slot, self.record = where, LastMap(None), LastOrNone()

    def forward(self, x: Tensor) -> Tensor:
        plan = (3 * self.qk(x)[..., :4] @ self.qk(x)[..., 4:].mT).softmax(-1).detach()
        {
            "LAST_MAP": into_global, "slot.plan": into_slot, "record.plan": into_record,
            "Publishes.kept": into_class, "last_map.plan": into_function, "length": into_default,
        }[self.where](self, plan)  # fmt: skip
        return attended(self, x)


def into_global(layer: Publishes, plan: Tensor) -> None:
    global LAST_MAP
    LAST_MAP = plan


def into_slot(layer: Publishes, plan: Tensor) -> None:
    layer.slot.plan = plan


def into_record(layer: Publishes, plan: Tensor) -> None:
    layer.record.plan = plan


def into_class(layer: Publishes, plan: Tensor) -> None:
    Publishes.kept = plan


def into_function(layer: Publishes, plan: Tensor) -> None:
    last_map.plan = plan  # type: ignore[attr-defined]


def into_default(layer: Publishes, plan: Tensor) -> None:
    layer.length = plan.shape[1]


LEVEL, FIRST, VARIES = "makes level once", "first", "which is not always the same"
LEFT: dict[str, tuple[Callable[[], Layer], str]] = {
    "a counter": (layer(counts), f"reads calls, {VARIES}"),
    "a buffer that counts": (layer(counts_in_a_buffer), "seen, that is written"),
    "decay": (layer(decays), "reads context.tau"), "a cache": (layer(caches), "reads taus"),
    "what is larger than the data": (layer(records), rf"reads calls, {VARIES} \(40 and 520\)"),
    "chance": (layer(lambda self, x: attended(self, x, 3.0 if random.random() < 1e-12 else 1.0)), VARIES),
    "files": (layer(lambda self, x: attended(self, x, 3.0 if os.path.exists("sharp") else 1.0)), VARIES),
    "memory": (layer(lambda self, x: attended(self, x, 3.0 if x.is_shared() else 1.0)), VARIES),
    "iterators": (layer(
        lambda self, x: attended(self, x, next(self.rest)), lambda: {"rest": iter([1.0] * 99)}), VARIES),
    "callbacks": (layer(of_callbacks, lambda: {"keep": list[Tensor]().append}), VARIES),
    "a buffer that the first call makes": (
        layer(of_remade_buffers, lambda: {"positions": nn.Buffer(torch.zeros(0, 1), persistent=False)}),
        "writes into weights or buffers when it is first"),
    **{f"a map left in {place}": (
        functools.partial(Publishes, place), f"sets (the global )?{place}, which comp")
        for place in ("LAST_MAP", "slot.plan", "record.plan", "Publishes.kept", "last_map.plan", "length")
    },
    "of what is NaN": (once_as(of_sizes, OrNaN), LEVEL),
    **{kind.__name__: (once_as(kind), LEVEL if kind in (Once.made_once, of_sizes, of_weights) else FIRST)
       for kind in (Once.made_once, of_sizes, of_weights, in_a_class, in_a_dict, in_a_global, in_a_buffer,
                    in_a_weight, around_an_attribute)},
    "a function's own": (once_as(staticmethod(once())), FIRST),
    "a closure's": (once_as(by_another_function(once())), FIRST),
}  # fmt: skip


NAMES = [*LEFT]
TOGETHER = [NAMES[:5] + NAMES[11:17], NAMES[5:11], NAMES[17:]]


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_state_that_changes_is_left_to_the_code(names):
    """Beside a layer without state, and one that makes once what depends on nothing."""
    model = stack(*(LEFT[name][0] for name in names), Layer, once_as(of_nothing))
    whole = [*map(str, model.state_dict().values())]
    analysis = _analysed(copy.deepcopy(model))
    assert {*analysis.names} == {f"layers.{len(names) + i}" for i in range(2)}
    left = {own.name: own.reason for own in analysis.left_alone}
    assert len(left) == len(names)
    for number, name in enumerate(names):
        assert re.search(LEFT[name][1], left[f"layers.{number}"]), (name, left)
    assert [*map(str, model.state_dict().values())] == whole


class BesideFastPath(nn.TransformerEncoderLayer):
    """In evaluation torch takes softmax attention in place of its own."""

    def __init__(self) -> None:
        super().__init__(4, 2, 8, batch_first=True)
        self.qk, self.out = nn.Linear(4, 8), nn.Linear(4, 4)

    def _sa_block(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        return attended(self, x)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "attention that torch's fast path leaves out": (
        BesideFastPath, InputError, "its own code in evaluation mode, got torch's fast path"),
    "a residual in place": (layer(adds_to_its_input), InputError, "the model writes into its inputs"),
    "noise": (layer(
        lambda self, x: attended(self, x, bias=torch.empty(x.shape[1]).uniform_(0, 1))),
        InputError, "the model must compute the same from the same inputs"),
    "what changes between the calls of one run": (
        lambda: module(reads_what_is_left, layer=layer(leaves_its_length)()),
        VerificationError, "where other data or weights came first"),
    "other numbers at each call": (
        lambda: module(
            lambda self, x: self.layer(self.layer(torch.from_numpy(x.numpy()), 1.0), 2.0),
            layer=layer(attended)()),
        NoSiteError, "layer is called in more than one way"),
    "state that changes": (layer(counts), NoSiteError, VARIES),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "error", "rule"), REFUSED.values(), ids=REFUSED)
def test_what_no_program_can_hold_to_is_refused(kind, error, rule):
    with pytest.raises(error, match=rule):
        made(kind)


def into_a_copy(self: Layer, x: Tensor) -> Tensor:
    """Whether what is doubled is a copy of x depends on how x is stored."""
    kept = x + 0
    kept.mT.contiguous().mul_(2.0)
    return attended(self, kept)


def into_a_copy_by_place(self: Layer, x: Tensor) -> Tensor:
    kept = x + 0
    nn.functional.relu(kept.mT.contiguous(), True)
    return attended(self, kept)


def of_any_keywords(self: Layer, *args: Tensor, **named: Tensor) -> Tensor:
    return attended(self, *args, named["x"], bias=named["bias"][:, None]) + named["more"]


TWO = torch.ones(2)


def of_defaults(self: Layer, x: Tensor, *, scale: float = 1.0, bias: Tensor = TWO) -> Tensor:
    """By keyword, and one of them is a tensor."""
    return attended(self, x * scale, bias=bias.sum())


def of_nested_inputs(self: Layer, data: dict[str, Any]) -> Tensor:
    x, others = data["tokens"]
    return attended(self, x) + others["image"].mean((1, 2, 3))[:, None, None] * data["weight"]


class OfSuper(ELSEWHERE.Base, Layer):  # type: ignore[misc, name-defined]
    def attend(self, x: Tensor) -> Tensor:
        return attended(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


BY_PAIR = ELSEWHERE.BY_PAIR


def of_pairs(self: Layer, x: Tensor) -> Tensor:
    """What no steps lead to: keys that are neither texts nor numbers, what is in a set or a long list."""
    (slots,) = self.set
    return attended(self, BY_PAIR[1, 2](x), self.by_pair[1, 2].tau * slots.tau * self.long[66][0])


OfPairs = layer(of_pairs, lambda: {
    "by_pair": {(1, 2): Context()}, "set": {Slots()}, "long": [[1.0] for _ in range(70)],
})  # fmt: skip
OfGivenFunction = layer(lambda self, x: self.inner(x, lambda y: y * self.sharp), lambda: {
    "inner": layer(lambda self, x, function: attended(self, function(x)))(), "sharp": 1.0,
})  # fmt: skip


def of_given_dict(self: Layer, data: dict[str, Tensor]) -> Tensor:
    """What it writes is for its caller, and no output."""
    out = attended(self, data["x"])
    data["sum"] = 0.5 * data["sum"] + out.sum((1, 2))
    return out


def of_the_world(self: Layer, x: Tensor) -> Tensor:
    """Functions, locks, settings and imports; a gradient, and the precision of its input."""
    import drop_in_nets

    tau = 3.0 if torch.are_deterministic_algorithms_enabled() else drop_in_nets.TAU_OF_TEST
    tau = tau * (3.0 if x.dtype == torch.float64 else 1.0)
    tau = tau * (1.0 if self.out.weight.grad is None else 3.0)
    return attended(self, nn.functional.relu(x) + torch.sin(x) + LOCK.locked(), tau)


def of_devices(self: Layer, x: Tensor) -> Tensor:
    device = str(x.device)
    ones = torch.ones(x.shape[1:], device=x.device)
    ones = ones.to(x.device) if ones.device != x.device else ones
    return attended(self, ones * x * (1.0 if "cpu" in device else 2.0))


def on_any_device(self: Layer, x: Tensor, device: torch.device | None = None) -> Tensor:
    other = x.device if device is None else device
    same = self.out.weight.device == other
    return attended(self, x * torch.full((4,), float(same), device=other))


LOCK = threading.Lock()
OfTheWorld = layer(of_the_world)


def of_dtype(self: Layer, x: Tensor) -> Tensor:
    """Which it hands on."""
    weight = self.out.weight
    return attended(self, x.to(weight.dtype)).to(x.dtype) + attended(self, x.type_as(weight)).to(x)


def of_autocast(self: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return attended(self, x.float())


def plan_of(layer: Layer, x: Tensor) -> Tensor:
    q, k = layer.qk(x).chunk(2, -1)
    plan = torch.softmax(q @ k.mT, -1)
    for _ in range(3):
        plan = plan / plan.sum(-2, keepdim=True)
        plan = plan / plan.sum(-1, keepdim=True)
    return plan


class OfWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(4, 8)

    def qk(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x)], -1)

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, self.q(x).shape[-1] / 8)


class OfAbsentBias(OfWidth):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, 3.0 if self.q.bias is None else 1.0)


def of_children(self: Layer, x: Tensor) -> Tensor:
    """Through all of its layers."""
    own = 3.0 if "gate" in self._parameters else 1.0
    return attended(self, x, own * sum(one(x)[..., :1] ** 2 for one in self.children()).mean())


OfChildren = layer(of_children)


def tells_its_layers() -> Layer:
    def forward(self: Layer, x: Tensor) -> Tensor:
        self.context.tau = 1.0 if x.shape[1] < 9 else 2.0
        self.scales[0].options["n"] = x.shape[1]
        self.scales[0].by = x.shape[1] + 1
        return self.scales(attended(self, x))

    context = Context()
    scales = module(
        lambda self, x: x * self.context.tau / self.options["n"] / self.by,
        context=context, options={"n": 1}, by=1,
    )  # fmt: skip
    return layer(forward, lambda: {
        "context": context, "scales": nn.Sequential(scales, nn.Linear(4, 4))})()  # fmt: skip


@torch.no_grad()
def test_layers_that_read_what_the_code_around_them_sets():
    """By code which is compiled: the layer is no longer called."""
    model, compiled = made(tells_its_layers)
    for length in (6, 11, 6, 3):
        x = torch.randn(3, length, 4)
        with warnings.catch_warnings(action="ignore", category=OwnCodeWarning):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-50, 50)


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
@torch.no_grad()
def test_a_bias_of_weights_that_hides_later(kind):
    """Of heads, queries and keys."""
    biased = layer(lambda self, x: attended(self, x, bias=self.bias), lambda: {
        "bias": kind(torch.randn(2, 6, 6))})  # fmt: skip
    model, compiled = made(biased, 2)
    x, layers = torch.randn(3, 2, 6, 4), (model[0], compiled[0])
    for entries, low in ((2, 2.0), (3, -math.inf)):
        for one in layers:
            one.bias[1, 4, :entries] = low
        if low > 0:
            assert own_code(model, compiled, x) == []
    assert model(x).isfinite().all()
    with pytest.raises(InputError, match="a score bias holds numbers"):
        compiled(x)


@pytest.mark.parametrize(("model", "batch"), [
    (layer(of_given_dict), lambda: {"data": {"x": torch.randn(8, 6, 4), "sum": torch.zeros(8)}}),
    (OfGivenList, lambda: {"x": torch.randn(8, 6, 4), "maps": []}),
])  # fmt: skip
def test_a_model_that_writes_into_a_list_or_dict(model, batch):
    with pytest.raises(NoSiteError, match="writes into a list or dict that it is given"):
        asapc.compile(model().eval(), [batch() for _ in range(3)], recipe=LOSSLESS, examples=8)


def by_name(examples: int, tokens: int) -> dict[str, Any]:
    shape = examples, tokens
    return {"x": torch.randn(*shape, 4), "bias": torch.randn(shape), "more": torch.randn(*shape, 1)}


def nested(examples: int, tokens: int) -> dict[str, Any]:
    inside = {"image": torch.randn(examples, 3, 4, 4)}
    return {"data": {"tokens": (torch.randn(examples, tokens, 4), inside), "weight": 0.5}}


def given_one(examples: int, tokens: int) -> dict[str, Any]:
    return {"x": torch.randn(examples, tokens, 4)}


@pytest.mark.parametrize(
    ("forward", "call"),
    [(of_any_keywords, by_name), (of_nested_inputs, nested), (of_defaults, given_one)],
)
@torch.no_grad()
def test_sizes_of_keywords_and_nested_inputs_are_free(forward, call):
    model = layer(forward)().eval()
    compiled = asapc.compile(model, [call(8, 6) for _ in range(5)], recipe=LOSSLESS, quiet=True).model
    for examples, tokens in ((3, 6), (2, 11)):
        given = call(examples, tokens)
        with warnings.catch_warnings(action="error"):
            assert torch.allclose(compiled(**given), model(**given), atol=1e-5)


def test_an_input_that_is_no_tensor_is_named():
    with pytest.raises(InputError, match=r"data\['weight'\] must be a tensor"):
        asapc.compile(layer(of_nested_inputs)().eval(), [{"data": {"weight": object()}}], quiet=True)


@pytest.mark.parametrize(("kind", "asks"), [(layer(of_devices), True), (layer(on_any_device), False)])
@torch.no_grad()
def test_a_device_that_code_asks_for(kind, asks):
    """And not one that it only hands on, or compares with that of another tensor."""
    model, compiled = made(kind)
    x = torch.randn(3, 6, 4)
    assert own_code(model, compiled, x) == []
    with warnings.catch_warnings(record=True, action="always") as caught:
        compiled.to("meta")(x.to("meta"))
    warned = [str(w.message) for w in caught if issubclass(w.category, OwnCodeWarning)]
    assert len(warned) == asks and all("devices()=cpu" in text for text in warned)


@torch.no_grad()
def test_an_input_of_another_dtype_than_the_weights():
    x = torch.randn(3, 6, 4)
    model, compiled = made(layer(of_dtype))
    for kind in (torch.float64, torch.float16):
        other = copy.deepcopy(compiled)
        assert_told(own_code(model, other, x.to(kind)), "mixed_precision()=no, which is now torch")
        with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(action="error"):
            other(x)
    for one in (model, compiled):
        one.double()
    assert own_code(model, compiled, x.double()) == []
    assert_told(own_code(model, compiled, x), "mixed_precision")


def of_precision(self: Layer, x: Tensor) -> Tensor:
    """Asks for the dtype of what autocast may have made."""
    scores = products(self, x)
    return attended(self, x, bias=1.0 * scores.clamp(-0.1, 0.1) if scores.dtype in LOW else 0.0)


LOW = (torch.bfloat16, torch.float16)


def of_limits(self: Layer, x: Tensor) -> Tensor:
    """Hides the first key of every odd token by the lowest number of the dtype that scores have."""
    scores = products(self, x)
    hidden = torch.arange(x.shape[1])[:, None] % 2 > torch.arange(x.shape[1])
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    for _ in range(3):
        scores = scores.log_softmax(-2).log_softmax(-1)
    return scores.exp() @ self.out(x)


@torch.no_grad()
def test_the_lowest_number_of_a_dtype_under_autocast():
    model, compiled = made(layer(of_limits))
    x = torch.randn(3, 6, 4)
    for one in (copy.deepcopy(compiled), compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(action="error"):
            torch.testing.assert_close(one(x), model(x), rtol=2e-2, atol=2e-2)
        assert own_code(model, one, x) == []


def of_values(self: nn.Module, x: Tensor) -> Tensor:
    """Without a layer: what autocast makes of the product with the values decides."""
    return by_softmax(x @ x.mT) @ x


def of_given_mass(self: nn.Module, x: Tensor) -> Tensor:
    """Scores in the dtype of autocast, next to masses that are not."""
    scores, masses = x @ x.mT, (x[..., 0] - 1).log_softmax(-1)[..., None]
    f, g = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1, :])
    for _ in range(3):
        g = -(scores + f).logsumexp(-2, keepdim=True)
        f = masses - (scores + g).logsumexp(-1, keepdim=True)
    return (scores + f + g).exp()


@torch.no_grad()
def test_the_dtype_of_outputs_under_autocast(tmp_path):
    torch.manual_seed(0)
    model = module(lambda self, x: (of_values(self, x), of_given_mass(self, x))).eval()
    x = torch.randn(48, 6, 4)
    live = asapc.compile(model, {"x": x}, recipe=LOSSLESS, examples=8, out=tmp_path / "out").model
    for one in (live, asapc.load(tmp_path / "out"), torch.compile(live, backend="eager")):
        assert own_code(model, one, x[:3]) == []
        for dtype in (torch.bfloat16, torch.float16):  # the second is not the one at compile time
            with torch.autocast("cpu", dtype=dtype):
                for given in (x[:3], x[:5].double()):
                    expected, found = model(given), one(given)
                    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)  # and dtypes


def test_dtypes_under_autocast_that_gradients_change(tmp_path):
    """Beside torch's encoder, which takes a way of its own without them."""
    torch.manual_seed(0)
    model = layer(lambda self, x: self.encoder(x + attended(self, x)), lambda: {
        "encoder": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)})().eval()  # fmt: skip
    x = torch.randn(48, 6, 4)
    asapc.compile(model, x, recipe=LOSSLESS, examples=8, out=tmp_path / "out")
    alone, dtypes = asapc.load(tmp_path / "out", trust=True), []
    for grad in (False, True):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            dtypes += [model(x[:3]).dtype]
            assert alone(x[:3]).dtype == dtypes[-1]
    assert dtypes == [torch.bfloat16, torch.float32]


def wider(layer: Any) -> None:
    layer.q, layer.k = nn.Linear(4, 16), nn.Linear(4, 16)


def mixed(layer: Layer, x: Tensor) -> Tensor:
    return plan_of(layer, x) @ layer.out(x)


def drops_of_everything(self: Layer, x: Tensor) -> Tensor:
    """The map, and what comes of it."""
    plan = nn.functional.dropout(plan_of(self, x), 0.5, self.training)
    return nn.functional.dropout(plan @ self.out(x), 0.5, self.training)


def drops_beside_itself(self: Layer, x: Tensor) -> Tensor:
    """Whose layer gives the very tensor that it is given, which is added to what it gives."""
    y = mixed(self, x)
    return y + self.drop(y)


def drops_another_map(self: Layer, x: Tensor) -> Tensor:
    share = 0.5 if self.training else 0.0
    return mixed(self, x + nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=share))


def drops_queries(self: Layer, x: Tensor) -> Tensor:
    """By a function of torch, on the way to a product of which no factor is a map."""
    q, k = self.qk(x).chunk(2, -1)
    return by_softmax(nn.functional.dropout(q, 0.5, self.training) @ k.mT) @ self.out(x)


def drops_of_its_map_in_training_alone(self: Layer, x: Tensor) -> Tensor:
    """By a share that is 0 in evaluation mode, whose graph has no dropout."""
    share = 0.5 if self.training else 0.0
    return nn.functional.dropout(plan_of(self, x), share) @ self.out(x)


def drops_in_training_alone(self: Layer, x: Tensor) -> Tensor:
    q, k = self.qk(x).chunk(2, -1)
    q = nn.functional.dropout(q, 0.5) if self.training else q
    return by_softmax(q @ k.mT) @ self.out(x)


def normalises_scores(self: Layer, x: Tensor) -> Tensor:
    scores = products(self, x)
    return by_softmax(self.norm(scores.flatten(1)[:, None]).view_as(scores)) @ self.out(x)


def a_half() -> dict[str, Any]:
    return {"drop": nn.Dropout(0.5)}


# What is read more than once, and what the module gives.
DropsInputs = layer(lambda self, x: self.drop(mixed(self, self.drop(x))), a_half)
DropsScores = layer(lambda self, x: by_softmax(self.drop(products(self, x))) @ self.out(x), a_half)
NormalisesScores = layer(normalises_scores, lambda: {"norm": nn.BatchNorm1d(1)})
# Beside what is written in place, a graph keeps no dropout of evaluation mode.
DropsInPlace, DropsScoresInPlace, NormalisesInPlace = (
    type("InPlace", (kind,), {
        "forward": lambda self, x, kind=kind: kind.forward(self, (2 * x).tanh_())})
    for kind in (DropsInputs, DropsScores, NormalisesScores)
)  # fmt: skip
MultiHead = layer(lambda self, x: mixed(self, x + self.before(x, x, x)[0]), lambda: {
    "before": nn.MultiheadAttention(4, 2, 0.5, batch_first=True)})  # fmt: skip
IN_TRAINING = (
    DropsInputs, DropsScores, layer(drops_beside_itself, lambda: {"drop": nn.AlphaDropout(0.5)}),
    layer(drops_another_map), layer(drops_queries), MultiHead, layer(drops_of_everything),
    layer(drops_in_training_alone), layer(drops_of_its_map_in_training_alone), DropsInPlace,
    DropsScoresInPlace,
)  # fmt: skip
CALLED = (NormalisesScores, NormalisesInPlace)  # by the compiled code, which begins after it


@pytest.mark.parametrize("kinds", [IN_TRAINING, CALLED], ids=["own code", "called"])
@torch.no_grad()
def test_layers_that_are_others_in_training_mode(kinds):
    model, compiled = (copy.deepcopy(one) for one in beside(*kinds))
    x, outputs, is_called = 1 + 3 * torch.randn(5, 6, 4), [], kinds is CALLED
    assert own_code(model, compiled, x) == []
    evaluated = model(x)
    for one in (model.train(), compiled.train()):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True, action="always") as caught:
            outputs.append(one(x))
    expected = [f"layers.{i}: " for i in range(len(kinds)) if not is_called]
    assert_told([str(warning.message) for warning in caught], *expected)
    assert all("training mode" in str(warning.message) for warning in caught)
    torch.testing.assert_close(*outputs, rtol=1e-5 * is_called, atol=1e-5 * is_called)
    assert not any(torch.allclose(*pair) for pair in zip(outputs[1], evaluated, strict=True))
    torch.testing.assert_close(compiled.state_dict(), model.state_dict())
    if not is_called:  # nor is dropout of nothing
        parts = [copy.deepcopy(one).train().layers[:2] for one in beside(*kinds)]
        for one in (*parts[0], *parts[1]):
            one.drop.p = 0.0
        assert own_code(*(Beside(part) for part in parts), x) == []


def drops_maps(self: Layer, x: Tensor) -> Tensor:
    return self.outside(self.on_map(plan_of(self, x)) @ self.out(x))


def drops_maps_by_function(self: Layer, x: Tensor) -> Tensor:
    plan = nn.functional.dropout(plan_of(self, x), 0.5, self.training)
    return self.outside(plan @ self.out(x))


OfDroppedMaps, OfDroppedFeatures, OfDroppedMapsByFunction, OfDroppedMapsInPlace = (
    layer(forward, lambda kind=kind: {"on_map": kind(0.5), "outside": nn.Dropout(0.5)})
    for forward, kind in (
        (drops_maps, nn.Dropout), (drops_maps, nn.FeatureAlphaDropout),
        (drops_maps_by_function, nn.Dropout),
        (lambda self, x: self.on_map(plan_of(self, (2 * x).tanh_())) @ self.out(x), nn.Dropout),
    )
)  # fmt: skip


@pytest.mark.parametrize("kind", [
    OfDroppedMaps, OfDroppedMapsByFunction, OfDroppedMapsInPlace, OfDroppedFeatures,
])  # fmt: skip
@torch.no_grad()
def test_dropout_of_a_map_is_left_out_with_a_warning(kind):
    _, compiled = made(kind)
    x = torch.randn(2, 6, 4)
    compiled.train()
    with pytest.warns(UserWarning, match="dropout between scores and values is not applied"):
        compiled(x)
    compiled[0].outside.eval()  # type: ignore[index]
    with warnings.catch_warnings(action="error"):  # once
        assert torch.equal(compiled(x), compiled.eval()(x))


DROPOUT, STATISTICS = "dropout", "batch statistics (batch_norm)"
ITERATIONS = "power iterations (spectral_norm)"
NORMED = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


@pytest.mark.parametrize(("kinds", "left_out"), [
    ((nn.Dropout(0.5), nn.BatchNorm1d(6), NORMED), {DROPOUT, STATISTICS, ITERATIONS}),
    ((DropsScores(), NormalisesScores(), nn.utils.spectral_norm(nn.Linear(4, 4))),
     {DROPOUT, STATISTICS, ITERATIONS}),
    ((DropsInPlace(), NormalisesInPlace()), {DROPOUT, STATISTICS}), ((OfDroppedMaps(),), {DROPOUT}),
    ((DropsScoresInPlace(),), {DROPOUT}), ((nn.LayerNorm(4), nn.Dropout(0.0)), set()),
], ids=lambda x: type(x[0]).__name__ if isinstance(x, tuple) else "")  # fmt: skip
@torch.no_grad()
def test_training_mode_of_a_model_that_is_rebuilt(kinds, left_out, tmp_path):
    """Layers that are others in training mode, after one that is not."""
    torch.manual_seed(0)
    model, data = nn.Sequential(Layer(), *kinds).eval(), {"input": torch.randn(48, 6, 4)}
    asapc.compile(model, data, recipe=LOSSLESS, examples=8, out=tmp_path / "out")
    with warnings.catch_warnings(action="error"):
        loaded = asapc.load(tmp_path / "out", trust=True).eval()
    with warnings.catch_warnings(record=True, action="always") as caught:
        loaded.train()
    texts = [str(warning.message) for warning in caught]
    assert loaded.training and len(texts) == bool(left_out)
    assert all({*x.partition("in evaluation mode, without ")[2].split(", ")} == left_out for x in texts)


def test_frozen_weights_are_frozen_in_a_model_that_is_rebuilt(tmp_path):
    model = nn.Sequential(Layer(), nn.LayerNorm(4)).eval()
    model[0].qk.requires_grad_(False)
    asapc.compile(model, torch.randn(48, 6, 4), recipe=LOSSLESS, examples=8, out=tmp_path / "out")
    trained = [
        {name for name, weight in one.named_parameters() if weight.requires_grad}
        for one in (model, asapc.load(tmp_path / "out"))
    ]
    assert trained[0] == trained[1] and len(trained[0]) == 4


class Instances(dict[str, Any]):
    """Of classes, made when they are read, as transformers keeps its activations."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


KEPT, ACTIVATIONS = {"tau": 1.0}, Instances(linear=lambda: nn.Linear(4))  # type: ignore[call-arg]


class WritesInTraining(Layer):
    """Into weights, numbers and globals, in training mode or where gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.centre = 1.0, torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.qk.weight /= self.qk.weight.norm(dim=-1, keepdim=True)
                self.seen += x.mean()
            KEPT["tau"] *= 0.5
        if torch.is_grad_enabled():
            self.scale, self.centre = self.scale * 0.5, self.centre + 1
        return attended(self, x * self.scale - self.seen - self.centre, KEPT["tau"])


def test_what_is_written_in_training_alone_stays_as_it_was():
    model, compiled = made(WritesInTraining)
    torch.manual_seed(0)
    known = nn.Sequential(WritesInTraining()).state_dict()
    assert KEPT == {"tau": 1.0} and compiled[0].scale == 1.0 and not compiled[0].centre.any()
    for one in (model, compiled):
        assert all(torch.equal(one.state_dict()[name], x) for name, x in known.items())
    with torch.no_grad():
        assert own_code(model, compiled, torch.randn(2, 6, 4)) == []


class WritesBuffers(Layer):
    """Unread, read on the way, or added to what it gives."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "input":
            x.mul_(2)
        else:
            self.seen.add_(x.mean().abs() if self.where == "read" else 1)
        return attended(self, x, 1.0 + self.seen * (self.where == "read")) + self.seen * (
            self.where == "outside")  # fmt: skip


@pytest.mark.parametrize("where", ["unread", "read", "outside", "input"])
def test_an_exported_program_that_writes_into_buffers_or_inputs(where, tmp_path):
    torch.manual_seed(0)
    x, path = torch.randn(24, 6, 4), tmp_path / "model.pt2"
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    torch.export.save(
        torch.export.export(WritesBuffers(where).eval(), (x[:3].clone(),), dynamic_shapes=dynamic), path
    )
    written = "user input x" if where == "input" else "buffer seen"
    with warnings.catch_warnings(action="error"), pytest.raises(InputError, match=f"the {written}\n"):
        asapc.compile(str(path), {"x": x}, recipe=LOSSLESS, examples=8, quiet=True)


class OfSharedCell(nn.Module):
    """Sets what its layers read, in a container that they share, for one after the other."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.place = "tau" if isinstance(cell, dict) else -1
        kind = layer(lambda one, x: attended(one, x, one.cell[one.place]),
                     lambda: {"cell": cell, "place": self.place})  # fmt: skip
        self.cell, self.layers = cell, nn.ModuleList([kind(), kind()])
        self.cells = {"first": cell, "more": [cell]}

    def forward(self, x: Tensor) -> Tensor:
        for tau, one in zip((3.0, 1.0), self.layers, strict=True):
            self.cell[self.place] = tau
            x = x + one(x)
        return x


@torch.no_grad()
def test_a_container_that_layers_share_is_set_for_each():
    torch.manual_seed(0)
    x, kinds = torch.randn(48, 6, 4), [OfSharedCell({"tau": 1.0}), OfSharedCell([1.0])]
    model = nn.Sequential(*kinds).eval()
    cells, expected = [one.cell for one in kinds], model(x)
    compiled = asapc.compile(model, {"input": x}, recipe=LOSSLESS, examples=8, quiet=True).model
    for one, cell in zip(model, cells, strict=True):
        held = [one.cell, *(layer.cell for layer in one.layers), *one.cells["more"]]
        assert all(own is cell for own in held)
    assert torch.equal(model(x), expected)
    for _ in range(2):
        assert own_code(model, compiled, x[:3]) == []


def of_shared(self: Layer, x: Tensor) -> Tensor:
    bias = 0.0 if self.shared.hidden is None else -1e9 * self.shared.hidden[:, None].float()
    return attended(self, x, self.shared.tau, bias=bias)


class SetsShared(nn.Module):
    """What layers read is set at every call; the temperature is read before that, too, if reads."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.shared, self.reads = types.SimpleNamespace(hidden=None, tau=1.0), reads
        self.layers = nn.ModuleList(layer(of_shared, lambda: {"shared": self.shared})() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared
        x = x * shared.tau if self.reads else x
        shared.hidden, shared.tau = x[..., 0] > 9, 2.0
        for layer in self.layers:
            x = x + layer(x)
        return x * ~shared.hidden[..., None]


@pytest.mark.parametrize("reads", [False, True])
@torch.no_grad()
def test_what_is_set_before_it_is_read_is_no_state(reads):
    torch.manual_seed(0)
    model, x = SetsShared(reads).eval(), torch.randn(24, 6, 4)
    model(x)
    compiled = asapc.compile(model, {"x": x}, recipe=LOSSLESS, examples=8, quiet=True).model
    assert torch.is_tensor(model.shared.hidden) and model.shared.tau == 2.0
    for x in (torch.randn(3, 6, 4), torch.randn(2, 9, 4)):
        x[:, 1:3, 0] += 20
        for kept in (torch.ones(5, 7), None, "nothing"):
            for one in (model, compiled):
                one.shared.hidden, one.shared.tau = kept, 2.0
            assert own_code(model, compiled, x) == []
    assert not hasattr(compiled.shared, "hidden")  # which would be that of another call
    for one in (model, compiled):
        one.shared.tau = 0.5
    assert_told(own_code(model, compiled, x), "shared.tau" if reads else None)


def of_float_mask(self: Layer, x: Tensor, mask: Tensor) -> Tensor:
    """One that is 1 or 0, of which the scores beside a 0 have a gradient in the model's own code."""
    scores = (products(self, x) + (1.0 - mask[:, None]) * -10000.0).exp()
    rows = torch.ones_like(scores[..., :1])
    for _ in range(6):
        columns = 1 / (scores.mT @ rows + 1e-9)
        rows = 1 / (scores @ columns + 1e-9)
    return (rows * scores * columns.mT) @ self.out(x)


def test_no_gradient_of_a_mask_is_compared():
    torch.manual_seed(0)
    model, x = layer(of_float_mask)().eval(), torch.randn(24, 6, 4)
    mask = (torch.arange(6) < torch.arange(24)[:, None] % 4 + 3).float()
    compiled = asapc.compile(model, {"x": x, "mask": mask}, recipe=LOSSLESS, examples=8, quiet=True).model
    found = []
    for one in (model, compiled):
        given = x[:5].clone().requires_grad_()
        with warnings.catch_warnings(action="error", category=OwnCodeWarning):
            one(given, mask[:5]).square().sum().backward()
        found.append([given.grad, *(weight.grad for weight in one.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_tensor_in_two_places():
    torch.manual_seed(0)
    model = module(
        lambda self, x, y: attended(self.layer, x, 3.0 if y is x else 1.0) + y, layer=Layer()
    ).eval()
    data = {"x": torch.randn(24, 6, 4), "y": torch.randn(24, 6, 4)}
    recipe = {"operator": "lossless", "batch_size": 8}
    compiled, x = asapc.compile(model, data, recipe=recipe, examples=8).model, torch.randn(2, 6, 4)
    with pytest.warns(OwnCodeWarning, match="same_objects"):
        torch.testing.assert_close(compiled(x, x), model(x, x))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * 2 if isinstance(module, nn.Linear) else None


def replaced(*what: Any) -> Callable[[], Any]:
    """An object, the name of what it has, and what it has instead."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*what)
            yield

    return around


def set_to(**values: Any) -> Callable[[Any], None]:
    return lambda one: [setattr(one, name, value) for name, value in values.items()]


@dataclasses.dataclass
class Other:
    """A layer, what the warning says (None: there is none), what is changed of the layer, what around it,
    and what it is given."""

    kind: Callable[[], nn.Module]
    text: str | None
    change: Callable[[Any], Any] = id
    around: Callable[[], Any] = contextlib.nullcontext
    given: Callable[[Tensor], Tensor] = Tensor.clone


def of_gate(self: Layer, x: Tensor) -> Tensor:
    """A branch on a weight, which goes the way of a loop that goes on."""
    return attended(self, x * 2 if self.gate > 0 else x)


def with_attribute(x: Tensor) -> Tensor:
    x.sharp = True  # type: ignore[attr-defined]
    return x


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


OfInputs = layer(
    lambda self, x: attended(self, x, 1.0 + isinstance(x, nn.Parameter) + 2 * x.storage_offset())
)
OfExamples = layer(
    lambda self, x: attended(self, x, (torch.ones(x.shape[0]).sum().clamp(min=600) / 600) ** 4)
)
OfCalled = layer(lambda self, x: attended(self, self.called(x)), lambda: {"called": ELSEWHERE.Called()})
OWN = layer(lambda self, x: attended(self, x))
BFLOAT16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
OTHERS = [
    Other(OfTheWorld, "relu was captured as", around=replaced(nn.functional, "relu", torch.sigmoid)),
    Other(OfTheWorld, "sin was captured as", around=replaced(torch, "sin", torch.sigmoid)),
    Other(OfTheWorld, "LOCK was captured as", around=lambda: LOCK),
    Other(OfTheWorld, "are_deterministic_algorithms_enabled", around=deterministic),
    Other(OfTheWorld, "TAU_OF_TEST", around=replaced(drop_in_nets, "TAU_OF_TEST", 3.0)),
    Other(OfTheWorld, "hooks of all modules",
          around=lambda: nn.modules.module.register_module_forward_hook(doubled)),
    Other(OfTheWorld, "precision()=torch.float32", nn.Module.double),
    Other(OfTheWorld, "gradients()=False",
          lambda one: setattr(one.out.weight, "grad", torch.ones(4, 4))),
    Other(layer(of_autocast), "autocast is on", around=BFLOAT16),
    Other(layer(of_precision), "precision()=torch.float32, which is now torch.float32 under autocast",
          around=BFLOAT16),
    Other(OfWidth, "size 2 of what its q gives", wider),
    Other(OfAbsentBias, "q.bias", lambda one: setattr(one, "q", nn.Linear(4, 8, bias=False))),
    Other(OfChildren, "structure", lambda one: one.add_module("more", nn.Linear(4, 4))),
    Other(OfChildren, "structure", lambda one: one.register_parameter("gate", None)),
    Other(lambda: module(
        lambda self, x: self.layers[1](self.layers[0](x)), layers=nn.ModuleList([Layer()] * 2)),
          "is no longer its layers.0", lambda one: one.layers.__setitem__(1, Layer())),
    Other(Positions, "base was captured as 2.0", set_to(base=3.0), given=lambda x: torch.randn(2, 8, 4)),
    Other(layer(of_gate, lambda: {"gate": nn.Parameter(torch.tensor(0.5))}),
          "x * 2 if self.gate > 0 else x", lambda one: one.gate.neg_()),
    # modes
    Other(OfModes, "gradients are recorded", around=torch.enable_grad),
    Other(OfModes, "training mode", nn.Module.train),
    Other(Layer, None, nn.Module.train, torch.enable_grad),
    # functions that run unnamed or elsewhere
    Other(OfSuper, "was captured as", around=replaced(ELSEWHERE, "TAU", 2.0)),
    Other(OfSuper, "was captured as",
          around=replaced(ELSEWHERE.Base, "forward", lambda self, x: self.attend(x * 2.0))),
    Other(OfPairs, "was captured as", around=replaced(ELSEWHERE, "TAU", 3.0)),
    Other(OfPairs, "was captured as",
          around=replaced(ELSEWHERE.scaled, "__code__", (lambda x: x * 2.0).__code__)),
    Other(OfCalled, "was captured as",
          around=replaced(ELSEWHERE.Called, "__call__", lambda self, x: x * 2.0)),
    Other(OfGivenFunction, "was captured as", set_to(sharp=2.0)),
    Other(OWN, "forward was captured as",
          around=replaced(OWN, "forward", lambda self, x: attended(self, x, 2.0))),
    # what is in containers that no steps lead into
    Other(OfPairs, "by_pair was captured as", lambda one: setattr(one.by_pair[1, 2], "tau", 2.0)),
    Other(OfPairs, "set was captured as", lambda one: setattr(*one.set, "tau", 2.0)),
    Other(OfPairs, "long was captured as", lambda one: one.long[66].__setitem__(0, 2.0)),
    # what an input is besides its numbers
    Other(OfInputs, "no plain", given=nn.Parameter),
    Other(OfInputs, "no plain", given=with_attribute),
    Other(OfInputs, "part of a tensor", given=lambda x: x[1:]),
    Other(layer(into_a_copy), "an input is not contiguous", given=transposed),
    Other(layer(into_a_copy_by_place), "an input is not contiguous", given=transposed),
    Other(OfNames, None, given=transposed),
    Other(OfExamples, "size 0", given=lambda x: torch.randn(700, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=[str(other.text) for other in OTHERS])
@torch.no_grad()
def test_what_makes_another_layer_of_it(other):
    model, compiled = copy.deepcopy(made(other.kind))
    assert own_code(model, compiled, torch.randn(2, 6, 4)) == []
    for one in (model[0], compiled[0]):
        torch.manual_seed(0)
        other.change(one)
    x = torch.randn(2, 6, 4).to(next(model.parameters()).dtype)
    with other.around():
        assert_told(own_code(model, compiled, other.given(x)), other.text)
    if other.change is id:
        assert own_code(model, compiled, x) == []


class Massed(Layer):
    """A loop of the masses that it is given."""

    def forward(self, x: Tensor, keep: Tensor, masses: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        kernel, a, b = (q @ k.mT).exp() * (keep[:, :, None] & keep[:, None]), 1.0, masses[:, None]
        for _ in range(2):
            rows = (kernel * b).sum(-1, keepdim=True)
            a = masses[:, :, None] / rows.masked_fill(~keep[:, :, None], 1.0)
            b = masses[:, None] / (kernel * a).sum(-2, keepdim=True).masked_fill(~keep[:, None], 1.0)
        return a * kernel * b @ self.out(x)


class OfCallers(nn.Module):
    """Masses of sizes alone, or of the mask, as an attribute of the model says, which no loop reads."""

    def __init__(self, of_mask: bool) -> None:
        super().__init__()
        self.layer, self.of_mask, self.share = Massed(), of_mask, 1.0

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        masses = keep.to(x.dtype) if self.of_mask else torch.ones_like(keep, dtype=x.dtype)
        if self.share != 1:
            masses = masses * torch.where(torch.arange(x.shape[1]) % 2 == 0, self.share, 1.0)
        return self.layer(x, keep, masses)


@pytest.mark.parametrize("of_mask", [False, True], ids=["of sizes", "of a mask"])
@torch.no_grad()
def test_what_a_caller_gives_to_a_loop_may_be_something_else_later(of_mask: bool) -> None:
    torch.manual_seed(0)
    model, keep = OfCallers(of_mask).eval(), torch.arange(6) < torch.randint(3, 7, (48, 1))
    given = {"x": torch.randn(48, 6, 4), "keep": keep}
    compiled = asapc.compile(model, given, recipe=LOSSLESS, examples=8).model
    for share, text in ((1.0, None), (0.25, "share was captured as 1.0")):
        model.share = compiled.share = share
        with warnings.catch_warnings(record=True, action="always") as caught:
            torch.testing.assert_close(compiled(**given), model(**given), rtol=1e-4, atol=1e-5)
        assert_told([str(w.message) for w in caught if issubclass(w.category, OwnCodeWarning)], text)


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        x *= 2.0
        return self.layer(x)


@torch.no_grad()
def test_a_model_that_writes_into_what_it_is_given():
    model, compiled = made(WritesIntoItsInput)
    x = torch.randn(2, 6, 4)
    theirs, ours = x.clone(), x.clone()
    torch.testing.assert_close(compiled(ours), model(theirs))
    assert torch.equal(ours, theirs) and torch.equal(ours, 2 * x)


def test_a_backward_that_clips_large_gradients():
    model, compiled = made(layer(lambda self, x: attended(self, Clipped.apply(x))))
    x = torch.randn(2, 6, 4)
    grads = []
    for one in (model, compiled):
        given = x.clone().requires_grad_()
        with warnings.catch_warnings(action="ignore", category=OwnCodeWarning):
            (1e4 * one(given)).sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)
