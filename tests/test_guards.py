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
from asapc.program.state import Names, Reads, reachable

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


class OfModes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or exporting()
        return attended(self, x, steps=2 + torch.is_grad_enabled() + 2 * self.training + 4 * traced)


class OfLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, steps=SHARED.layer)


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


def stack(*layers: type[Layer]) -> Stack:
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


def assert_told(warned: list[str], text: str | None) -> None:
    """One warning that says so; None: no warning."""
    assert len(warned) == (text is not None) and (text is None or text in warned[0]), warned


@functools.cache
def made(kind: Callable[[], nn.Module], *size: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()).eval(), torch.randn(24, *size, 6, 4)
    return model, asapc.compile(model, {"input": x}, recipe=LOSSLESS, examples=8).model


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


@pytest.fixture(scope="module")
def made_names():
    return made(OfMadeNames)


@pytest.fixture(scope="module")
def hidden():
    return made(OfHidden)


@pytest.fixture(scope="module")
def named():
    return made(OfNames)


def bool_one() -> bool:
    return True


CHANGES: dict[str, list[tuple[Callable[..., Any], str | None]]] = {
    "hidden": [
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
    "made_names": [
        (lambda one, patch: None, None),
        (lambda one, patch: setattr(one.context, "tau", 2.0), "context.tau was captured as 1.0"),
        (lambda one, patch: patch.setenv("TAU_OF_3", "2"), "os.environ['TAU_OF_3']"),
        (lambda one, patch: one.hidden[0].weight.data.mul_(2.0), "the weights of hidden[0]"),
    ],
    "named": [
        (lambda one, patch: setattr(one, "calls", 7), None),
        (lambda one, patch: setattr(one, "context", Context()), None),
        (lambda one, patch: setattr(one.context, "tau", 2.0), "context.tau was captured as 1.0"),
        (lambda one, patch: one.options.update(n=6), "options['n'] was captured as 3, but is 6"),
        (lambda one, patch: setattr(one, "_steps", 6), "_steps was captured as 3, but is 6"),
        (lambda one, patch: one.taus.__setitem__(0, 2.0), "taus[0]"),
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
def test_state_off_the_beaten_track_is_guarded(kind, change, text, request, monkeypatch):
    """Changed after a first call, of objects that stay the same ones."""
    model, compiled = copy.deepcopy(request.getfixturevalue(kind))
    x = torch.randn(2, 5, 4)
    compiled(x)
    for one in (model[0], compiled[0]):
        change(one, monkeypatch)
    assert_told(own_code(model, compiled, x), text)


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


class OfChance(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, 3.0 if random.random() < 1e-12 else 1.0)


class OfFiles(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, 3.0 if os.path.exists("sharp") else 1.0)


class OfMemory(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, 3.0 if x.is_shared() else 1.0)


class OfIterators(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.rest = iter([1.0] * 99)

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, next(self.rest))


class OfCallbacks(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.keep = self.kept.append

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        return attended(self, x)


@pytest.mark.parametrize("kind", [OfChance, OfFiles, OfMemory, OfIterators, OfCallbacks])
def test_what_no_guard_can_compare_is_refused(kind):
    with pytest.raises(asapc.errors.NoSiteError, match="which is not always the same"):
        made(kind)


def test_context_variables_are_guarded(hidden):
    model, compiled = copy.deepcopy(hidden)
    x, token = torch.randn(2, 5, 4), VARIABLE.set(2.0)
    try:
        with pytest.warns(OwnCodeWarning, match="VARIABLE"):
            torch.testing.assert_close(compiled(x), model(x))
    finally:
        VARIABLE.reset(token)


def test_a_guard_passes_again_when_all_is_as_it_was(named):
    layer = copy.deepcopy(named[1])[0]
    inside = layer.forward.inside[0]
    assert inside.difference(layer) is None is inside.difference(layer)
    layer.context.tau = 2.0
    assert inside.difference(layer) is not None
    layer.context.tau = 1.0
    assert inside.difference(layer) is None
    reads = json.loads(json.dumps(inside.reads.to_json()))
    assert Reads.from_json(reads, "reads") == inside.reads
    for wrong in ([["call", "x"]], [["item", -1]], [["attr", None]]):
        with pytest.raises(InputError):
            Reads.from_json({"values": [[wrong, 1]], "questions": []}, "reads")
    with pytest.raises(InputError, match="a question"):
        Reads.from_json({"values": [], "questions": ["anything"]}, "reads")


@pytest.mark.parametrize(
    ("kind", "grad", "training", "text"),
    [
        (OfModes, False, False, None),
        (OfModes, True, False, "gradients are recorded"),
        (OfModes, False, True, "training mode"),
        (OfLayer, True, True, None),
    ],
)
def test_modes_are_guarded(pair, kind, grad, training, text):
    SHARED.layer = KINDS.index(kind)
    one, other = (model.layers[SHARED.layer].train(training) for model in copy.deepcopy(pair[:2]))
    with torch.set_grad_enabled(grad):
        assert_told(own_code(one, other, torch.randn(2, 5, 4)), text)


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


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return attended(self, x, steps=3 if self.calls < 9 else 6)


class CountsInABuffer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return attended(self, x, steps=3 if self.seen < 9 else 6)


class Decays(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.context.tau *= 0.9
        return attended(self, x, self.context.tau)


class Records(Layer):
    """Remembers what is larger than the data."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = max(self.calls, 40, x.shape[1])
        return attended(self, x, self.calls / 40)


class Caches(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.plain, Tensor) or len(self.taus) != x.shape[1]:
            self.taus = [0.1 * place for place in range(x.shape[1])]
        return attended(self, x + sum(self.taus))


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


@pytest.mark.parametrize("kind", [Positions, OfOneLength, OfFrequencies])
@pytest.mark.parametrize("used", [False, True])
def test_what_is_kept_of_sizes_alone_is_computed_anew(kind, used):
    model, x = nn.Sequential(kind()).eval(), torch.randn(60, 6, 4)
    if used:
        model(torch.randn(1, 20, 4))
    compiled = asapc.compile(model, {"input": x}, recipe=LOSSLESS, examples=8).model
    for size in (6, 1, 50, 9):  # shorter after longer, as no other call was made before
        assert_told(own_code(copy.deepcopy(model), compiled, torch.randn(3, size, 4)), None)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert_told(own_code(model, compiled, torch.randn(3, 60, 4)), "hooks of all modules")
    hook.remove()  # what its own code kept is no other state
    assert_told(own_code(model, compiled, torch.randn(3, 60, 4)), None)
    table = torch.randn(70, 1)
    for layer in (model[0], compiled[0]):
        layer.longest, layer.places, layer.kept = 70, table, (table,)
    text = "kept" if kind is OfOneLength else "longest"
    assert_told(own_code(model, compiled, torch.randn(3, 70, 4)), text)


def test_what_depends_on_more_than_sizes_is_not():
    for kind in (OfTheLongest, OfTheFirst, OfWeights):
        with pytest.raises(asapc.errors.NoSiteError, match=r"after calls with other|makes pla.* once"):
            made(kind)
    model, compiled = copy.deepcopy(made(Positions))
    model[0].base = compiled[0].base = 3.0
    assert_told(own_code(model, compiled, torch.randn(3, 8, 4)), "base was captured as 2.0")


def _analysed(model: nn.Module) -> Analysis:
    x = torch.randn(8, 6, 4)
    first, *more = (Batch((part,), {}, None, [0] * 4) for part in (x[:4], 3 * x[4:, :5]))
    return analyse(Teacher(model, None, "net", "", False, None), first, more=more)


def test_state_that_changes_is_left_to_the_code():
    analysis = _analysed(stack(Counts, CountsInABuffer, Decays, Caches, Records, Layer))
    assert analysis.capture.kind == "module" and analysis.names == ["layers.5"]
    texts = ("reads calls, which is not always the same", "seen, that is written", "reads context.tau",
             "reads taus", "reads calls, which is not always the same (40 and 522)")  # fmt: skip
    for number, (left, text) in enumerate(zip(analysis.left_alone, texts, strict=True)):
        assert left.name == f"layers.{number}" and text in left.reason


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

    def made_once(self, x: Tensor) -> Any:
        if self.level is None:
            self.level = x.abs().mean()
        return self.level

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, self.made_once(x))


class OnceOfSizes(Once):
    def made_once(self, x: Tensor) -> Any:
        self.level = self.level or x.shape[1] / 6
        return self.level


class OnceOfSizesOrNaN(OnceOfSizes):
    """All of a kernel leaves the format where inputs are large, and what is 0 / 0 tells nothing apart."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x.abs().amax() > 40, torch.nan, x))


class OnceOfWeights(Once):
    def made_once(self, x: Tensor) -> Any:
        self.level = self.level or float(self.qk.weight.abs().sum())
        return self.level


class OnceOfNothing(Once):
    def made_once(self, x: Tensor) -> Any:
        self.level = self.level or torch.tensor(self.qk.in_features / 8)
        return self.level


class OnceInAClass(Once):
    def made_once(self, x: Tensor) -> Any:
        OnceInAClass.of_class = self.of_class or float(x.abs().mean())
        return self.of_class


class OnceInADict(Once):
    def made_once(self, x: Tensor) -> Any:
        return FIRST_SEEN.setdefault("level", x.abs().mean())


class OnceInAGlobal(Once):
    def made_once(self, x: Tensor) -> Any:
        global FIRST_LENGTH
        FIRST_LENGTH = FIRST_LENGTH or len(x[0])
        return FIRST_LENGTH


class OnceAround(Once):
    made_once = staticmethod(once())


class OnceAroundAnAttribute(Once):
    """Of a function, which copies of the layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = {"level": [once()]}

    def made_once(self, x: Tensor) -> Any:
        return self.functions["level"][0](x)


class OnceInABuffer(Once):
    def made_once(self, x: Tensor) -> Any:
        if not self.known:
            self.known.copy_(x.abs().mean())
        return self.known


class OnceInAWeight(OnceInABuffer):
    def made_once(self, x: Tensor) -> Any:
        if not self.known:
            self.known.fill_(1.0)
            self.scale.data.copy_(x.abs().mean())
        return self.scale


@pytest.mark.parametrize("kind", [
    Once, OnceOfSizes, OnceOfSizesOrNaN, OnceOfWeights, OnceInAClass, OnceInADict, OnceInAGlobal,
    OnceAround, OnceInABuffer,
    OnceInAWeight, OnceAroundAnAttribute,
])  # fmt: skip
def test_what_is_made_of_the_first_data_is_no_constant(kind):
    model = stack(Layer, kind)
    whole = [*map(str, model.state_dict().values())]
    analysis = _analysed(copy.deepcopy(model))
    plainly = issubclass(kind, OnceOfSizes) or kind in (Once, OnceOfWeights)
    text = "makes level once" if plainly else "first"
    assert len(analysis.left_alone) == 1 and text in analysis.left_alone[0].reason
    assert [*map(str, model.state_dict().values())] == whole


def test_what_is_made_once_of_nothing_is_one():
    assert not _analysed(stack(Layer, OnceOfNothing)).left_alone


class Careless:
    """Everything of it that is not stored fails."""

    def __init__(self) -> None:
        self.itself, self.tau = self, 1.0

    @property
    def broken(self) -> float:
        raise AssertionError("a property was asked")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Odd(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, getattr(self, "".join(("care", "less"))).tau)


def test_looking_runs_no_code():
    model = stack(Odd)
    model.layers[0].careless = Careless()
    with torch.no_grad():
        found = observed(model, [Batch((torch.randn(2, 5, 4),), {}, None, [])] * 2)
    names = found.names["layers.0"]
    assert names.attributes is None  # a name that is made while it runs
    path = (("attr", "careless"), ("attr", "tau"))
    assert reachable(model.layers[0], names)[path] == 1.0 and not found.changing


@pytest.mark.parametrize("grow", [
    lambda layer: layer.taus.append(2.0), lambda layer: layer.named.update(other=2.0),
], ids=["a list", "a dict"])  # fmt: skip
def test_a_container_that_grows_after_a_call(grow):
    layer: Any = Layer()
    layer.taus, layer.named = [1.0], {"tau": 1.0}
    reads = Reads(tuple(reachable(layer, Names(None)).items()))
    assert reads.difference(layer) is None
    assert reads.difference(layer) is None  # known, and not compared again
    grow(layer)
    assert reads.difference(layer) is not None


class Unregistered(Layer):
    """Holds a layer that nothing registers, and the model that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.around = [nn.Linear(4, 4)], []

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, self.hidden[0](x), len(self.around[0].layers))


@torch.no_grad()
def test_weights_that_nothing_registers():
    torch.manual_seed(0)
    model = stack(Unregistered)
    model.layers[0].around.append(model)
    recipe = {"operator": "lossless", "batch_size": 8}
    compiled = asapc.compile(model, torch.randn(40, 6, 4), recipe=recipe, examples=8, quiet=True).model
    for of, told in (("out", None), ("hidden", "not registered in the model")):
        for layer in (model.layers[0], compiled.layers[0]):
            (layer.out if of == "out" else layer.hidden[0]).weight.mul_(2)
        assert_told(own_code(model, compiled, torch.randn(3, 6, 4)), told)
    model.layers[0].hidden[0] = nn.BatchNorm1d(6)  # in training mode, which model.eval() does not end
    with pytest.raises(asapc.errors.NoSiteError, match=r"in the model\), which is not always"):
        asapc.compile(model, torch.randn(40, 6, 4), recipe=recipe, examples=8, quiet=True)


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


class Mapped(Layer):
    """A loop of one matrix, mapped over batch and heads."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


def test_a_loop_that_is_mapped():
    torch.manual_seed(0)
    model = Mapped().eval()
    compiled = asapc.compile(model, {"x": torch.randn(40, 6, 4)}).model
    x = torch.randn(3, 11, 4)
    with warnings.catch_warnings(action="error", category=OwnCodeWarning):  # that is not what runs
        torch.testing.assert_close(compiled(x), model(x))
    assert "sinkhorn (4 half-steps)" in repr(compiled)


@torch.jit.script
def scripted(scores: Tensor, steps: int = 3) -> tuple[Tensor, Tensor]:
    f, g = torch.zeros_like(scores[:, :, :1]), torch.zeros_like(scores[:, :1])
    for _ in range(steps):
        f = -torch.logsumexp(scores + g, [2], True)
        g = -torch.logsumexp(scores + f, [1], True)
    return torch.exp(scores + f + g), g


class CallsAScript(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        return scripted(3 * q @ k.mT)[0] @ self.out(x)


class LogOfALength(Layer):
    """NumPy's, of how many tokens there are."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        plan = (3 * q @ k.mT).log_softmax(-1) - np.log(x.shape[1])
        for step in range(3):
            plan = plan - plan.logsumexp(-1 if step % 2 else -2, keepdim=True) - np.log(x.shape[1])
        return plan.exp() @ self.out(x) * np.sqrt(x.shape[1])


@pytest.mark.parametrize("kind", [CallsAScript, LogOfALength])
def test_a_script_and_numpy_leave_sizes_free(kind: type[Layer]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    compiled = asapc.compile(copy.deepcopy(model), {"x": torch.randn(40, 6, 4)}, recipe=LOSSLESS).model
    assert "sinkhorn" in repr(compiled)
    for shape in ((3, 11, 4), (1, 5, 4)):
        x = torch.randn(shape)
        with warnings.catch_warnings(action="error", category=OwnCodeWarning):
            torch.testing.assert_close(compiled(x), model(x))


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
    assert "layers.1" in analysis.names and "layers.0" in analysis.regions
    model.layers[0].out = nn.LazyLinear(4)
    with pytest.raises(asapc.errors.InputError, match=r"layers\.0\.out\.weight"):
        asapc.compile(model, {"x": torch.randn(8, 6, 4)})


# What was found later: each layer, and what makes another of it


class OfExamples(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, (torch.ones(x.shape[0]).sum().clamp(min=600) / 600) ** 4)


class OfInputs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, 1.0 + isinstance(x, nn.Parameter) + 2 * x.storage_offset())


class OfBias(Layer):
    """Of heads, queries and keys."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        bias = torch.randn(2, 6, 6)
        if trained:
            self.bias = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, bias=self.bias)


class OfWriting(Layer):
    """Whether what is doubled is a copy of x depends on how x is stored."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x + 0
        kept.mT.contiguous().mul_(2.0)
        return attended(self, kept)


class OfWritingByPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        kept = x + 0
        nn.functional.relu(kept.mT.contiguous(), True)
        return attended(self, kept)


class OfNoise(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x, bias=torch.empty(x.shape[1]).uniform_(0, 1))


class OfAnyKeywords(Layer):
    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        return attended(self, *args, named["x"], bias=named["bias"][:, None]) + named["more"]


TWO = torch.ones(2)


class OfDefaults(Layer):
    """By keyword, and one of them is a tensor."""

    def forward(self, x: Tensor, *, scale: float = 1.0, bias: Tensor = TWO) -> Tensor:
        return attended(self, x * scale, bias=bias.sum())


class OfNestedInputs(Layer):
    def forward(self, data: dict[str, Any]) -> Tensor:
        x, others = data["tokens"]
        return attended(self, x) + others["image"].mean((1, 2, 3))[:, None, None] * data["weight"]


class OfWrittenInputs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return attended(self, x)


class OfSuper(ELSEWHERE.Base, Layer):  # type: ignore[misc, name-defined]
    def attend(self, x: Tensor) -> Tensor:
        return attended(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


BY_PAIR = ELSEWHERE.BY_PAIR


class OfPairs(Layer):
    """What no steps lead to: keys that are neither texts nor numbers, what is in a set or a long list."""

    def __init__(self) -> None:
        super().__init__()
        self.by_pair, self.set, self.long = {(1, 2): Context()}, {Slots()}, [[1.0] for _ in range(70)]

    def forward(self, x: Tensor) -> Tensor:
        (slots,) = self.set
        tau = self.by_pair[1, 2].tau * slots.tau * self.long[66][0]
        return attended(self, BY_PAIR[1, 2](x), tau)


class OfCalled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.called = ELSEWHERE.Called()

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, self.called(x))


class OfGivenFunction(Layer):
    class Inner(Layer):
        def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
            return attended(self, function(x))

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.sharp = self.Inner(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, lambda y: y * self.sharp)


class OfWrittenResidual(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += attended(self, x)
        return x


class OfGivenDict(Layer):
    """What it writes is for its caller, and no output."""

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        out = attended(self, data["x"])
        data["sum"] = 0.5 * data["sum"] + out.sum((1, 2))
        return out


class OfGivenList(Layer):
    def forward(self, x: Tensor, maps: list[Tensor]) -> Tensor:
        maps.append(attended(self, x))
        return maps[-1]


class OfListOfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfGivenList() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        x = x + 1 if x.sum() > 1e9 else x
        for layer in self.layers:
            x = x + layer(x, maps)
        return x + maps[0]


class OfParts(Layer):
    """Queries four at a time, of which the last are what is left."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        parts = [3 * part @ k.mT for part in q.split(4, 1)]
        parts = [part - torch.logsumexp(part, -1, keepdim=True) for part in parts]
        parts = [(part - torch.logsumexp(part, -2, keepdim=True)).exp() for part in parts]
        return torch.cat(parts, 1) @ self.out(x)


class OfTwoNames(Layer):
    """A layer with two names, whose weights torch.func.functional_call does not put back."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.k = self.q

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        for axis in (-1, -2, -1, -2):
            scores = scores - torch.logsumexp(scores, axis, keepdim=True)
        return scores.exp() @ self.out(x)


class OfTheWorld(Layer):
    """Functions, locks, settings and imports; a gradient, and the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        import drop_in_nets

        tau = 3.0 if torch.are_deterministic_algorithms_enabled() else drop_in_nets.TAU_OF_TEST
        tau = tau * (3.0 if x.dtype == torch.float64 else 1.0)
        tau = tau * (1.0 if self.out.weight.grad is None else 3.0)
        return attended(self, nn.functional.relu(x) + torch.sin(x) + LOCK.locked(), tau)


class OfDevices(Layer):
    def forward(self, x: Tensor) -> Tensor:
        device = str(x.device)
        ones = torch.ones(x.shape[1:], device=x.device)
        ones = ones.to(x.device) if ones.device != x.device else ones
        return attended(self, ones * x * (1.0 if "cpu" in device else 2.0))


class OnAnyDevice(Layer):
    def forward(self, x: Tensor, device: torch.device | None = None) -> Tensor:
        other = x.device if device is None else device
        same = self.out.weight.device == other
        return attended(self, x * torch.full((4,), float(same), device=other))


LOCK = threading.Lock()


class OfDtype(Layer):
    """Which it hands on."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.out.weight
        return attended(self, x.to(weight.dtype)).to(x.dtype) + attended(self, x.type_as(weight)).to(x)


class OfAutocast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return attended(self, x.float())


class WithAutocast(Layer):
    """Around one of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.out(x)
        return attended(self, x + out.float())


def plan_of(layer: Layer, x: Tensor) -> Tensor:
    q, k = layer.qk(x).chunk(2, -1)
    plan = torch.softmax(q @ k.mT, -1)
    for _ in range(3):
        plan = plan / plan.sum(-2, keepdim=True)
        plan = plan / plan.sum(-1, keepdim=True)
    return plan


class OfDropout(Layer):
    """Of the map, and of what comes of it."""

    def forward(self, x: Tensor) -> Tensor:
        plan = nn.functional.dropout(plan_of(self, x), 0.5, self.training)
        return nn.functional.dropout(plan @ self.out(x), 0.5, self.training)


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


class OfChildren(Layer):
    """Through all of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        own = 3.0 if "gate" in self._parameters else 1.0
        return attended(self, x, own * sum(layer(x)[..., :1] ** 2 for layer in self.children()).mean())


class Scales(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.options, self.by = context, {"n": 1}, 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.context.tau / self.options["n"] / self.by


class TellsItsLayers(Layer):
    """What its layer reads is set by its own code, which is compiled: the layer is no longer called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Sequential(Scales(self.context), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.context.tau = 1.0 if x.shape[1] < 9 else 2.0
        self.scales[0].options["n"] = x.shape[1]
        self.scales[0].by = x.shape[1] + 1  # type: ignore[assignment]
        return self.scales(attended(self, x))


@torch.no_grad()
def test_layers_that_read_what_the_code_around_them_sets():
    model, compiled = made(TellsItsLayers)
    for length in (6, 11, 6, 3):
        x = torch.randn(3, length, 4)
        with warnings.catch_warnings(action="ignore", category=OwnCodeWarning):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


class InBlocks(Layer):
    """Of four tokens, the last of them padded: a length that is 4, whatever is given."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(len(x), -1, 4, 4)
        return attended(self, blocks).flatten(1, 2)[:, : x.shape[1]]


@torch.no_grad()
def test_a_length_that_is_a_number():
    model, compiled = made(InBlocks)
    for length in (5, 6, 7):
        assert own_code(model, compiled, torch.randn(3, length, 4)) == []


class OfSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return attended(self.layer, x, 3.0 if y is x else 1.0) + y


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-50, 50)


class OfClipping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, Clipped.apply(x))


class OfLen(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x).view(len(x), -1, 4) * log(x.shape[1])


@torch.no_grad()
def test_a_size_at_which_something_else_begins():
    model, compiled = made(OfExamples)
    assert own_code(model, compiled, torch.randn(2, 6, 4)) == []
    (warned,) = own_code(model, compiled, torch.randn(700, 3, 4))
    assert "size 0" in warned


@torch.no_grad()
def test_len_and_a_logarithm_by_itself_leave_sizes_free():
    model, compiled = made(OfLen)
    assert own_code(model, compiled, torch.randn(5, 9, 4)) == []


@torch.no_grad()
def test_what_an_input_is_besides_its_numbers():
    model, compiled = made(OfInputs)
    x = torch.randn(3, 6, 4)
    told = torch.randn(3, 6, 4)
    told.sharp = True  # type: ignore[attr-defined]
    cases = ((x, None), (nn.Parameter(x), "no plain"), (told, "no plain"), (x[1:], "part of a tensor"))
    for given, text in cases:
        assert_told(own_code(model, copy.deepcopy(compiled), given), text)


@pytest.mark.parametrize("trained", [False, True])
@torch.no_grad()
def test_a_bias_of_weights_that_hides_later(trained):
    model, compiled = made(lambda: OfBias(trained), 2)
    x, layers = torch.randn(3, 2, 6, 4), (model[0], compiled[0])
    for entries, low in ((2, 2.0), (3, -math.inf)):
        for layer in layers:
            layer.bias[1, 4, :entries] = low
        if low > 0:
            assert own_code(model, compiled, x) == []
    assert model(x).isfinite().all()
    with pytest.raises(InputError, match="a score bias holds numbers"):
        compiled(x)


@pytest.mark.parametrize("kind", [OfWriting, OfWritingByPlace])
@torch.no_grad()
def test_inputs_that_are_stored_otherwise_and_written_into(kind):
    model, compiled = made(kind)
    x = torch.randn(3, 6, 4)
    assert own_code(model, compiled, x) == []
    (warned,) = own_code(model, compiled, x.mT.contiguous().mT)
    assert "an input is not contiguous" in warned
    assert own_code(*made(OfNames), x.mT.contiguous().mT) == []


@pytest.mark.parametrize(("kind", "rule"), [
    (OfWrittenInputs, "the model writes into its inputs"),
    (OfWrittenResidual, "the model writes into its inputs"),
    (OfNoise, "the model must compute the same from the same inputs"),
])  # fmt: skip
def test_a_model_that_changes_its_inputs_or_draws_random_numbers(kind, rule):
    with pytest.raises(InputError, match=rule):
        made(kind)


@pytest.mark.parametrize(("kind", "owner", "name", "value"), [
    (OfSuper, ELSEWHERE, "TAU", 2.0),
    (OfSuper, ELSEWHERE.Base, "forward", lambda self, x: self.attend(x * 2.0)),
    (OfPairs, ELSEWHERE, "TAU", 3.0),
    (OfPairs, ELSEWHERE.scaled, "__code__", (lambda x: x * 2.0).__code__),
    (OfCalled, ELSEWHERE.Called, "__call__", lambda self, x: x * 2.0),
    (OfGivenFunction, None, "sharp", 2.0),
])  # fmt: skip
@torch.no_grad()
def test_functions_that_run_unnamed_or_elsewhere(kind, owner, name, value):
    model, compiled = made(kind)
    x = torch.randn(3, 6, 4)
    assert own_code(model, compiled, x) == []
    with contextlib.ExitStack() as stack:
        for one in (model[0], compiled[0]) if owner is None else (owner,):
            stack.callback(setattr, one, name, getattr(one, name))
            setattr(one, name, value)
        assert_told(own_code(model, compiled, x), "was captured as")


@pytest.mark.parametrize(("change", "text"), [
    (lambda layer: setattr(layer.by_pair[1, 2], "tau", 2.0), "by_pair"),
    (lambda layer: setattr(*layer.set, "tau", 2.0), "set"),
    (lambda layer: layer.long[66].__setitem__(0, 2.0), "long"),
])  # fmt: skip
@torch.no_grad()
def test_what_is_in_containers_that_no_steps_lead_into(change, text):
    pair, x = copy.deepcopy(made(OfPairs)), torch.randn(3, 6, 4)
    assert own_code(*pair, x) == []
    for model in pair:
        change(model[0])
    assert_told(own_code(*pair, x), f"{text} was captured as")


@torch.no_grad()
def test_a_class_that_gets_another_forward_after_a_call():
    class Own(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return attended(self, x)

    model, compiled = made(Own)
    x = torch.randn(3, 6, 4)
    assert own_code(model, compiled, x) == []
    Own.forward = lambda self, x: attended(self, x, 2.0)  # type: ignore[method-assign]
    assert_told(own_code(model, compiled, x), "forward was captured as")


@pytest.mark.parametrize(("model", "batch"), [
    (OfGivenDict, lambda: {"data": {"x": torch.randn(8, 6, 4), "sum": torch.zeros(8)}}),
    (OfGivenList, lambda: {"x": torch.randn(8, 6, 4), "maps": []}),
])  # fmt: skip
def test_a_model_that_writes_into_a_list_or_dict(model, batch):
    with pytest.raises(NoSiteError, match="writes into a list or dict that it is given"):
        asapc.compile(model().eval(), [batch() for _ in range(3)], recipe=LOSSLESS, examples=8)


@pytest.mark.parametrize("kind", [OfListOfLayers, OfParts, OfTwoNames])
@torch.no_grad()
def test_lists_for_layers_parts_of_queries_and_layers_with_two_names(kind):
    assert own_code(*made(kind), torch.randn(3, 6, 4)) == []


def by_name(examples: int, tokens: int) -> dict[str, Any]:
    shape = examples, tokens
    return {"x": torch.randn(*shape, 4), "bias": torch.randn(shape), "more": torch.randn(*shape, 1)}


def nested(examples: int, tokens: int) -> dict[str, Any]:
    inside = {"image": torch.randn(examples, 3, 4, 4)}
    return {"data": {"tokens": (torch.randn(examples, tokens, 4), inside), "weight": 0.5}}


def given_one(examples: int, tokens: int) -> dict[str, Any]:
    return {"x": torch.randn(examples, tokens, 4)}


@pytest.mark.parametrize(
    ("kind", "call"), [(OfAnyKeywords, by_name), (OfNestedInputs, nested), (OfDefaults, given_one)]
)
@torch.no_grad()
def test_sizes_of_keywords_and_nested_inputs_are_free(kind, call):
    model = kind().eval()
    compiled = asapc.compile(model, [call(8, 6) for _ in range(5)], recipe=LOSSLESS, quiet=True).model
    for examples, tokens in ((3, 6), (2, 11)):
        given = call(examples, tokens)
        with warnings.catch_warnings(action="error"):
            assert torch.allclose(compiled(**given), model(**given), atol=1e-5)


def test_an_input_that_is_no_tensor_is_named():
    with pytest.raises(InputError, match=r"data\['weight'\] must be a tensor"):
        asapc.compile(OfNestedInputs().eval(), [{"data": {"weight": object()}}], quiet=True)


@torch.no_grad()
def test_a_device_that_code_asks_for():
    """And not one that it only hands on, or compares with that of another tensor."""
    x = torch.randn(3, 6, 4)
    for kind in (OfDevices, OnAnyDevice):
        model, compiled = made(kind)
        assert own_code(model, compiled, x) == []
        with warnings.catch_warnings(record=True, action="always") as caught:
            compiled.to("meta")(x.to("meta"))
        warned = [str(w.message) for w in caught if issubclass(w.category, OwnCodeWarning)]
        assert len(warned) == (kind is OfDevices) and all("devices()=cpu" in text for text in warned)


@torch.no_grad()
def test_an_input_of_another_dtype_than_the_weights():
    x = torch.randn(3, 6, 4)
    model, compiled = copy.deepcopy(made(OfDtype))
    for kind in (torch.float64, torch.float16):
        other = copy.deepcopy(compiled)
        assert_told(own_code(model, other, x.to(kind)), "mixed_precision()=no, which is now torch")
        with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(action="error"):
            other(x)
    for one in (model, compiled):
        one.double()
    assert own_code(model, compiled, x.double()) == []
    assert_told(own_code(model, compiled, x), "mixed_precision")


class OfPrecision(Layer):
    """Asks for the dtype of what autocast may have made."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        return attended(self, x, bias=1.0 * (q @ k.mT).clamp(-0.1, 0.1) if q.dtype in LOW else 0.0)


LOW = (torch.bfloat16, torch.float16)


@torch.no_grad()
def test_a_dtype_that_autocast_changes():
    model, compiled = made(OfPrecision)
    x = torch.randn(3, 6, 4)
    assert own_code(model, compiled, x) == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (warned,) = own_code(model, compiled, x)
    assert "precision()=torch.float32, which is now torch.float32 under autocast" in warned


class OfLimits(Layer):
    """Hides the first key of every odd token by the lowest number of the dtype that scores have."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        hidden = torch.arange(x.shape[1])[:, None] % 2 > torch.arange(x.shape[1])
        scores = (q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min)
        for _ in range(3):
            scores = scores.log_softmax(-2).log_softmax(-1)
        return scores.exp() @ self.out(x)


@torch.no_grad()
def test_the_lowest_number_of_a_dtype_under_autocast():
    model, compiled = made(OfLimits)
    x = torch.randn(3, 6, 4)
    for one in (copy.deepcopy(compiled), compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(action="error"):
            torch.testing.assert_close(one(x), model(x), rtol=2e-2, atol=2e-2)
        assert own_code(model, one, x) == []


class OfValues(nn.Module):
    """Without a layer: what autocast makes of the product with the values decides."""

    def forward(self, x: Tensor) -> Tensor:
        return by_softmax(x @ x.mT) @ x


class OfGivenMass(nn.Module):
    """Scores in the dtype of autocast, next to masses that are not."""

    def forward(self, x: Tensor) -> Tensor:
        scores, masses = x @ x.mT, (x[..., 0] - 1).log_softmax(-1)[..., None]
        f, g = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1, :])
        for _ in range(3):
            g = -(scores + f).logsumexp(-2, keepdim=True)
            f = masses - (scores + g).logsumexp(-1, keepdim=True)
        return (scores + f + g).exp()


@pytest.mark.parametrize("kind", [OfValues, OfGivenMass])
@torch.no_grad()
def test_the_dtype_of_outputs_under_autocast(kind, tmp_path):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(48, 6, 4)
    live = asapc.compile(model, {"x": x}, recipe=LOSSLESS, examples=8, out=tmp_path / "out").model
    for one in (live, asapc.load(tmp_path / "out"), torch.compile(live, backend="eager")):
        assert own_code(model, one, x[:3]) == []
        for dtype in (torch.bfloat16, torch.float16):  # the second is not the one at compile time
            with torch.autocast("cpu", dtype=dtype):
                for given in (x[:3], x[:5].double()):
                    expected, found = model(given), one(given)
                    assert found.dtype == expected.dtype
                    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


class BesideTorchsEncoder(Layer):
    """Which takes a way of its own without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x + attended(self, x))


def test_dtypes_under_autocast_that_gradients_change(tmp_path):
    torch.manual_seed(0)
    model, x = BesideTorchsEncoder().eval(), torch.randn(48, 6, 4)
    asapc.compile(model, x, recipe=LOSSLESS, examples=8, out=tmp_path / "out")
    alone, dtypes = asapc.load(tmp_path / "out", trust=True), []
    for grad in (False, True):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            dtypes += [model(x[:3]).dtype]
            assert alone(x[:3]).dtype == dtypes[-1]
    assert dtypes == [torch.bfloat16, torch.float32]


@torch.no_grad()
def test_a_layer_that_is_called_under_autocast():
    assert own_code(*made(WithAutocast), torch.randn(3, 6, 4)) == []


def wider(layer: Any) -> None:
    layer.q, layer.k = nn.Linear(4, 16), nn.Linear(4, 16)


@torch.no_grad()
def test_dropout_besides_that_of_a_map():
    _, compiled = made(OfDropout)
    x = torch.randn(2, 6, 4)
    compiled.train()
    with pytest.warns(OwnCodeWarning, match="training mode"):
        assert not torch.equal(compiled(x), compiled(x))


class Drops(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)


class DropsInputs(Drops):
    """What is read more than once, and what the module gives."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        return self.drop(plan_of(self, x) @ self.out(x))


class DropsBesideItself(Layer):
    """Whose layer gives the very tensor that it is given, which is added to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.AlphaDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = plan_of(self, x) @ self.out(x)
        return y + self.drop(y)


class DropsAnotherMap(Layer):
    def forward(self, x: Tensor) -> Tensor:
        share = 0.5 if self.training else 0.0
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=share)
        return plan_of(self, x) @ self.out(x)


class DropsAnotherMapOfTorchs(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.MultiheadAttention(4, 2, 0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.before(x, x, x)[0]
        return plan_of(self, x) @ self.out(x)


class DropsScores(Drops):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        return by_softmax(self.drop(q @ k.mT)) @ self.out(x)


class DropsQueries(Layer):
    """By a function of torch, on the way to a product of which no factor is a map."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        return by_softmax(nn.functional.dropout(q, 0.5, self.training) @ k.mT) @ self.out(x)


class DropsOfItsMapInTrainingAlone(Layer):
    """By a share that is 0 in evaluation mode, whose graph has no dropout."""

    def forward(self, x: Tensor) -> Tensor:
        share = 0.5 if self.training else 0.0
        return nn.functional.dropout(plan_of(self, x), share) @ self.out(x)


class DropsInTrainingAlone(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        q = nn.functional.dropout(q, 0.5) if self.training else q
        return by_softmax(q @ k.mT) @ self.out(x)


class NormalisesScores(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.mT
        return by_softmax(self.norm(scores.flatten(1)[:, None]).view_as(scores)) @ self.out(x)


class DropsInPlace(DropsInputs):
    """Beside what is written in place, a graph keeps no dropout of evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        x += 1
        return super().forward(x)


class DropsScoresInPlace(DropsScores):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((2 * x).tanh_())


class NormalisesInPlace(NormalisesScores):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((2 * x).tanh_())


def by_softmax(scores: Tensor) -> Tensor:
    for half_step in range(6):
        scores = scores.log_softmax(-1 - half_step % 2)
    return scores.exp()


@pytest.mark.parametrize("kind", [
    DropsInputs, DropsBesideItself, DropsAnotherMap, DropsAnotherMapOfTorchs, DropsScores, DropsQueries,
    DropsInTrainingAlone, DropsOfItsMapInTrainingAlone, NormalisesScores, DropsInPlace,
    DropsScoresInPlace, NormalisesInPlace,
])  # fmt: skip
@torch.no_grad()
def test_layers_that_are_others_in_training_mode(kind):
    model, compiled = (copy.deepcopy(one) for one in made(kind))
    x = 1 + 3 * torch.randn(5, 6, 4)
    assert own_code(model, compiled, x) == []
    outputs = []
    for one in (model.train(), compiled.train()):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True, action="always") as caught:
            outputs.append(one(x))
    is_called = issubclass(kind, NormalisesScores)  # by the compiled code, which begins after it
    assert_told([str(warning.message) for warning in caught], None if is_called else "training mode")
    torch.testing.assert_close(*outputs, rtol=1e-5 * is_called, atol=1e-5 * is_called)
    assert not torch.allclose(outputs[1], made(kind)[0](x))
    for one in (model, compiled):
        for part in one.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, compiled.state_dict()[key])
    if kind in (DropsInputs, DropsScores):  # of nothing
        assert own_code(model, compiled, x) == []


class OfDroppedMaps(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.on_map, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.on_map(plan_of(self, x)) @ self.out(x))


class OfDroppedMapsByFunction(OfDroppedMaps):
    def forward(self, x: Tensor) -> Tensor:
        plan = nn.functional.dropout(plan_of(self, x), 0.5, self.training)
        return self.outside(plan @ self.out(x))


class OfDroppedMapsInPlace(OfDroppedMaps):
    def forward(self, x: Tensor) -> Tensor:
        return self.on_map(plan_of(self, (2 * x).tanh_())) @ self.out(x)


class OfDroppedFeatures(OfDroppedMaps):
    def __init__(self) -> None:
        super().__init__()
        self.on_map = nn.FeatureAlphaDropout(0.5)


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


class Trained(nn.Sequential):
    """Layers that are others in training mode, after one that is not."""

    def __init__(self, kind: nn.Module) -> None:
        super().__init__(Layer(), kind)


DROPOUT, STATISTICS = ", without dropout", ", without batch statistics (batch_norm)"
ITERATIONS = ", without power iterations (spectral_norm)"


@pytest.mark.parametrize(("kind", "left_out"), [
    (nn.Dropout(0.5), DROPOUT), (nn.BatchNorm1d(6), STATISTICS), (nn.LayerNorm(4), None),
    (nn.Dropout(0.0), None), (DropsScores(), DROPOUT), (OfDroppedMaps(), DROPOUT),
    (NormalisesScores(), STATISTICS), (DropsInPlace(), DROPOUT), (DropsScoresInPlace(), DROPOUT),
    (NormalisesInPlace(), STATISTICS),
    (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), ITERATIONS),
    (nn.utils.spectral_norm(nn.Linear(4, 4)), ITERATIONS),
], ids=lambda x: type(x).__name__)  # fmt: skip
@torch.no_grad()
def test_training_mode_of_a_model_that_is_rebuilt(kind, left_out, tmp_path):
    torch.manual_seed(0)
    data = {"input": torch.randn(48, 6, 4)}
    asapc.compile(Trained(kind).eval(), data, recipe=LOSSLESS, examples=8, out=tmp_path / "out")
    with warnings.catch_warnings(action="error"):
        loaded = asapc.load(tmp_path / "out", trust=True).eval()
    with warnings.catch_warnings(record=True, action="always") as caught:
        loaded.train()
    texts = [str(warning.message) for warning in caught]
    assert loaded.training and len(texts) == (left_out is not None)
    assert all(x.endswith(f"in evaluation mode{left_out}") for x in texts)


def test_frozen_weights_are_frozen_in_a_model_that_is_rebuilt(tmp_path):
    model = Trained(nn.LayerNorm(4)).eval()
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


class OfCell(Layer):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        cell = self.cell
        return attended(self, x, cell["tau"] if isinstance(cell, dict) else cell[-1])


class OfSharedCell(nn.Module):
    """Sets what its layers read, in a container that they share, for one after the other."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell, self.layers = cell, nn.ModuleList([OfCell(cell), OfCell(cell)])
        self.cells = {"first": cell, "more": [cell]}

    def forward(self, x: Tensor) -> Tensor:
        for tau, layer in zip((3.0, 1.0), self.layers, strict=True):
            self.cell["tau" if isinstance(self.cell, dict) else -1] = tau
            x = x + layer(x)
        return x


@pytest.mark.parametrize("cell", [{"tau": 1.0}, [1.0]], ids=str)
@torch.no_grad()
def test_a_container_that_layers_share_is_set_for_each(cell):
    torch.manual_seed(0)
    model, x = OfSharedCell(cell).eval(), torch.randn(24, 6, 4)
    with torch.no_grad():
        expected = model(x)
    compiled = asapc.compile(model, {"x": x}, recipe=LOSSLESS, examples=8, quiet=True).model
    held = [model.cell, *(layer.cell for layer in model.layers), *model.cells["more"]]
    assert all(one is cell for one in held) and torch.equal(model(x), expected)
    for _ in range(2):
        assert own_code(model, compiled, x[:3]) == []


class OfShared(Layer):
    def __init__(self, shared: types.SimpleNamespace) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        bias = 0.0 if self.shared.hidden is None else -1e9 * self.shared.hidden[:, None].float()
        return attended(self, x, self.shared.tau, bias=bias)


class SetsShared(nn.Module):
    """What layers read is set at every call; the temperature is read before that, too, if reads."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.shared, self.reads = types.SimpleNamespace(hidden=None, tau=1.0), reads
        self.layers = nn.ModuleList([OfShared(self.shared), OfShared(self.shared)])

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


class OfFloatMask(Layer):
    """One that is 1 or 0, of which the scores beside a 0 have a gradient in the model's own code."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = (q @ k.mT + (1.0 - mask[:, None]) * -10000.0).exp()
        rows = torch.ones_like(scores[..., :1])
        for _ in range(6):
            columns = 1 / (scores.mT @ rows + 1e-9)
            rows = 1 / (scores @ columns + 1e-9)
        return (rows * scores * columns.mT) @ self.out(x)


def test_no_gradient_of_a_mask_is_compared():
    torch.manual_seed(0)
    model, x = OfFloatMask().eval(), torch.randn(24, 6, 4)
    mask = (torch.arange(6) < torch.arange(24)[:, None] % 4 + 3).float()
    compiled = asapc.compile(model, {"x": x, "mask": mask}, recipe=LOSSLESS, examples=8, quiet=True).model
    found = []
    for one in (model, compiled):
        given = x[:5].clone().requires_grad_()
        with warnings.catch_warnings(action="error", category=OwnCodeWarning):
            one(given, mask[:5]).square().sum().backward()
        found.append([given.grad, *(weight.grad for weight in one.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class OfBaddbmm(Layer):
    """Scores as old code has them, which torch.export follows and its own check of shapes does not."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = torch.baddbmm(torch.zeros(1, 1, 1).to(q), q, k.mT, beta=0, alpha=0.5)
        for _ in range(3):
            scores = scores.log_softmax(-2).log_softmax(-1)
        return scores.exp() @ self.out(x)


@torch.no_grad()
def test_scores_of_baddbmm():
    model, compiled = made(OfBaddbmm)
    for tokens in (6, 9):
        assert own_code(model, compiled, torch.randn(3, tokens, 4)) == []


class OfRemadeBuffers(Layer):
    """Positions of the longest input, in a buffer that begins empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(0, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.positions) < x.shape[1]:
            self.positions = torch.arange(x.shape[1])[:, None].to(x)
        return attended(self, x + 0.1 * self.positions[: x.shape[1]])


def test_a_buffer_that_its_first_call_makes():
    with pytest.raises(asapc.errors.NoSiteError, match="writes into weights or buffers when it is first"):
        made(OfRemadeBuffers)


class OfGate(Layer):
    """A branch on a weight, which goes the way of a loop that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return attended(self, x * 2 if self.gate > 0 else x)


@torch.no_grad()
def test_a_branch_on_a_weight():
    model, compiled = copy.deepcopy(made(OfGate))
    x = torch.randn(3, 6, 4)
    assert own_code(model, compiled, x) == []
    for one in (model, compiled):
        one[0].gate.neg_()
    (warned,) = own_code(model, compiled, x)
    assert "x * 2 if self.gate > 0 else x" in warned and "here it is not" in warned


class Leaves(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.length = float(x.shape[1])
        return attended(self, x)


class ReadsWhatIsLeft(nn.Module):
    """From the call before, where there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Leaves()

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 0.01 * getattr(self.layer, "length", 7.0))
        return self.layer(self.layer(x))


def test_what_changes_between_the_calls_of_one_run():
    torch.manual_seed(0)
    with pytest.raises(VerificationError, match="where other data or weights came first"):
        asapc.compile(ReadsWhatIsLeft().eval(), torch.randn(24, 6, 4), recipe={"operator": "lossless"})


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


@pytest.mark.parametrize(
    "where", ["LAST_MAP", "slot.plan", "record.plan", "Publishes.kept", "last_map.plan", "length"]
)
def test_a_map_that_is_left_where_an_old_one_would_stay(where):
    with pytest.raises(asapc.errors.NoSiteError, match=f"sets (the global )?{where}, which comp"):
        made(functools.partial(Publishes, where))


class Twice(nn.Module):
    """Of one layer, and in Python that is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(torch.from_numpy(x.numpy())))


@torch.no_grad()
def test_a_layer_that_is_captured_alone_and_called_twice():
    torch.manual_seed(0)
    model = Twice().eval()
    compiled = asapc.compile(model, torch.randn(24, 6, 4), recipe=LOSSLESS, examples=8).model
    for tokens in (6, 9, 1):
        assert_told(own_code(model, compiled, torch.randn(3, tokens, 4)), None)


class Sharper(Layer):
    def forward(self, x: Tensor, tau: float) -> Tensor:
        return attended(self, x, tau)


class Rescaled(Twice):
    """Calls its layer with another number each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Sharper()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(torch.from_numpy(x.numpy()), 1.0), 2.0)


def test_a_layer_that_is_called_with_several_numbers_is_not_captured_alone():
    with pytest.raises(asapc.errors.NoSiteError, match="layer is called in more than one way"):
        asapc.compile(Rescaled().eval(), torch.randn(24, 6, 4), recipe=LOSSLESS, examples=8)


@torch.no_grad()
def test_one_tensor_in_two_places():
    torch.manual_seed(0)
    model, data = OfSame().eval(), {"x": torch.randn(24, 6, 4), "y": torch.randn(24, 6, 4)}
    recipe = {"operator": "lossless", "batch_size": 8}
    compiled, x = asapc.compile(model, data, recipe=recipe, examples=8).model, torch.randn(2, 6, 4)
    with pytest.warns(OwnCodeWarning, match="same_objects"):
        torch.testing.assert_close(compiled(x, x), model(x, x))


class Tied(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()] * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * 2 if isinstance(module, nn.Linear) else None


REPLACED = functools.partial(mock.patch.object, new=torch.sigmoid)
# A layer, what is changed around it, what of itself, and what the warning says.
OTHERS: list[tuple[Callable[[], nn.Module], Any, Callable[[Any], Any], str]] = [
    (OfTheWorld, lambda: REPLACED(nn.functional, "relu"), id, "relu was captured as"),
    (OfTheWorld, lambda: REPLACED(torch, "sin"), id, "sin was captured as"),
    (OfTheWorld, lambda: LOCK, id, "LOCK was captured as"),
    (OfTheWorld, deterministic, id, "are_deterministic_algorithms_enabled"),
    (OfTheWorld, lambda: mock.patch.object(drop_in_nets, "TAU_OF_TEST", 3.0), id, "TAU_OF_TEST"),
    (OfAutocast, lambda: torch.autocast("cpu", dtype=torch.bfloat16), id, "autocast is on"),
    (OfTheWorld, lambda: nn.modules.module.register_module_forward_hook(doubled), id,
     "hooks of all modules"),
    (OfTheWorld, contextlib.nullcontext, nn.Module.double, "precision()=torch.float32"),
    (OfTheWorld, contextlib.nullcontext,
     lambda layer: setattr(layer.out.weight, "grad", torch.ones(4, 4)), "gradients()=False"),
    (OfWidth, contextlib.nullcontext, wider, "size 2 of what its q gives"),
    (OfAbsentBias, contextlib.nullcontext,
     lambda layer: setattr(layer, "q", nn.Linear(4, 8, bias=False)), "q.bias"),
    (OfChildren, contextlib.nullcontext,
     lambda layer: layer.add_module("more", nn.Linear(4, 4)), "structure"),
    (OfChildren, contextlib.nullcontext,
     lambda layer: layer.register_parameter("gate", None), "structure"),
    (Tied, contextlib.nullcontext,
     lambda layer: layer.layers.__setitem__(1, Layer()), "is no longer its layers.0"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "around", "change", "text"), OTHERS, ids=[row[-1] for row in OTHERS])
@torch.no_grad()
def test_what_makes_another_layer_of_it(kind, around, change, text):
    model, compiled = copy.deepcopy(made(kind))
    assert own_code(model, compiled, torch.randn(2, 6, 4)) == []
    for one in (model[0], compiled[0]):
        torch.manual_seed(0)
        change(one)
    x = torch.randn(2, 6, 4).to(next(model.parameters()).dtype)
    with around():
        assert_told(own_code(model, compiled, x), text)
    if change is id:
        assert own_code(model, compiled, x) == []


class Massed(Layer):
    """A loop of the masses that it is given."""

    def forward(self, x: Tensor, keep: Tensor, masses: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        kernel, a, b = (q @ k.mT).exp() * (keep[:, :, None] & keep[:, None]), 1.0, masses[:, None]
        for _ in range(2):
            a = masses[:, :, None] / (kernel * b).sum(-1, True).masked_fill(~keep[:, :, None], 1.0)
            b = masses[:, None] / (kernel * a).sum(-2, True).masked_fill(~keep[:, None], 1.0)
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
    model, compiled = made(OfClipping)
    x = torch.randn(2, 6, 4)
    grads = []
    for one in (model, compiled):
        given = x.clone().requires_grad_()
        with warnings.catch_warnings(action="ignore", category=OwnCodeWarning):
            (1e4 * one(given)).sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)
