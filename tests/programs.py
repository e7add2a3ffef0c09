"""The adversary writes programs: whole modules as users write them, compiled and then held against the original.

A program is drawn from INGREDIENTS by its seed and written as source text. It is compiled losslessly on mild
data that shows no padding, and judged on inputs drawn to separate it from its original: padding, sizes,
scores, modes, state, parameters, gradients. `python tests/programs.py --count 200 --seed 0` counts what became
of them; `--one SEED` prints a program and every case, `--shrink` the plainest program that fails alike.
"""

from __future__ import annotations

import ast
import copy
import linecache
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asapc import pipeline
from asapc.api import _teacher
from asapc.artifact import load, read_manifest
from asapc.calibration.stored import Calibration, save_calibration
from asapc.errors import AsapcError
from asapc.inputs.data import data_of
from asapc.inputs.recipe import Recipe
from asapc.program.compiled import OwnCodeWarning
from asapc.stages.analyse import forward_signature
from asapc.terminal.progress import SILENT

Spec = dict[str, Any]
EXAMPLES, BATCH, LENGTH, KEYS, DIM = 24, 3, 7, 5, 8
TOLERANCE = 1e-4  # of outputs, relative to the largest entry, beside the original's own rounding
STEEP = 10  # times as much for gradients
VOCABULARY = 9

# --- what programs are made of ---------------------------------------------------------------------
# The first value of each is the plain one, to which shrinking goes back.

INGREDIENTS: dict[str, list[Any]] = {
    "family": ["sinkhorn"] * 14 + ["differential", "matcher", "matcher", "mixer", "esp", "esp", "lot", "lot"],
    "form": ["lse", "log_softmax", "potentials", "scaling", "plan", "softmax_plan"],
    "steps": [5, 4, 2, 3, 8, 11],
    "first": ["rows", "columns"],
    "paired": [False, False, True],
    "guard": ["", "", " + 1e-8", " + 1e-6", ".clamp(min=1e-9)", " + torch.finfo(s.dtype).eps"],
    "offset": ["row", "none", "matrix"],
    "marginals": ["ones", "ones", "shares", "active"],
    "factor": ["1", "1", "N", "M"],
    "home": ["inline", "inline", "function", "submodule", "method"],
    "scores": ["matmul", "matmul", "einsum", "distance", "cosine"],
    "heads": [2, 1],
    "cross": [False, False, True],
    "mask": ["none", "none", "padded_bm", "active_bm", "active_b1m", "padded_b11m", "float_keep", "int_keep",
             "additive", "lengths", "tokens", "optional"],
    "way": ["fill", "fill", "where", "add", "add_where", "multiply", "both_sides"],
    "value": ["-1e9", "-1e9", "-1e4", "torch.finfo(s.dtype).min", "float('-inf')"],
    "place": ["before", "before", "before", "inside", "after_each"],
    "rows_zeroed": [False, False, False, True],
    "padding_shown": [False, False, False, True],
    "bias": ["none", "none", "none", "alibi", "relative", "token", "table", "distance", "cached", "learnt_alibi"],
    "dtype": ["none", "none", "none", "none", "half", "double", "float"],
    "gradient": ["none", "none", "none", "none", "no_grad", "detach", "custom", "checkpoint"],
    "damping": ["none", "none", "none", "none", "constant", "parameter"],
    "parent": ["bare", "block", "block", "two", "shared", "root", "item", "numpy"],
    "returns": ["tensor", "tensor", "tuple", "dict", "stash", "attribute"],
    "hook": ["none", "none", "none", "none", "post", "pre"],
    "dropout": [0.0, 0.0, 0.0, 0.1],
    "effect": ["scores", "scores", "steps", "output", "hard"],
    "twist": ["none"],
    "second": ["none"],
}  # fmt: skip


@dataclass(frozen=True)
class Twist:
    """What a program asks besides its scores.

    asks:   an expression, of a condition or, with `factor`, of a number that scores are multiplied with.
    init:   lines of the layer's __init__.  parent: lines of the parent before it calls `layer` on x.
    before: lines of the layer's forward.  top: lines of the module.  event: what is done to a compiled model.
    """

    asks: str
    init: str = ""
    parent: str = ""
    before: str = ""
    top: str = ""
    event: str = ""
    factor: bool = False


TWISTS: dict[str, Twist] = {
    # modes
    "grad_enabled": Twist("torch.is_grad_enabled()"),
    "requires_grad": Twist("s.requires_grad"),
    "inference_mode": Twist("torch.is_inference_mode_enabled()"),
    "autocast": Twist("torch.is_autocast_enabled('cpu')"),
    "training": Twist("self.training"),
    "compiling": Twist("torch.compiler.is_compiling()"),
    "exporting": Twist("torch.compiler.is_exporting()"),
    "tracing": Twist("torch.jit.is_tracing()"),
    "frozen": Twist("not self.q.weight.requires_grad", event="for p in net.parameters(): p.requires_grad_(False)"),
    # sizes
    "one_example": Twist("B == 1"),
    "one_example_long": Twist("B == 1 and M > 16"),
    "few": Twist("B * M <= 2"),
    "one_query": Twist("N == 1"),
    "long": Twist("M > 24"),
    "longer": Twist("M > 100"),
    "fifths": Twist("M % 5 == 0"),
    "unequal": Twist("N != M"),
    "many_examples": Twist("B > 8"),
    "numel": Twist("x.numel() < 60"),
    "examples_and_tokens": Twist("B * N > 150"),
    "contiguous": Twist("not x.is_contiguous()"),
    "log_n": Twist("math.log(M + 1)", factor=True),
    "log_n_512": Twist("max(1.0, math.log(M) / math.log(25))", factor=True),
    "ninth": Twist("torch.where(torch.arange(B) > 7, 1.6, 1.0)[:, None, None, None]", factor=True),
    "by_length": Twist("(1.0 if N <= 24 else (N / 24) ** 0.5)", factor=True),
    # data
    "hot": Twist("bool(s.abs().max() > 60)"),
    "std": Twist("s.std().item() > 200"),
    "flat_heads": Twist("torch.where(s.abs().amax((-2, -1), keepdim=True) < 0.05, 0.0, 1.0)", factor=True),
    "clamp": Twist("1.0", before="s = s.clamp(-1e3, 1e3)", factor=True),
    "softcap": Twist("1.0", before="s = 20 * torch.tanh(s / 20)", factor=True),
    "nan_to_num": Twist("1.0", before="s = torch.nan_to_num(s, neginf=-1e4, posinf=1e4)", factor=True),
    "rare_clamp": Twist("1.0", before="s = torch.where(s.abs() > 300, s.sign() * 300, s)", factor=True),
    # state
    "ctx_layer": Twist("self.ctx.layer == 1", parent="self.ctx.layer = i"),
    "ctx_size": Twist("self.ctx.long", parent="self.ctx.long = x.shape[1] > 24"),
    "ctx_data": Twist("self.ctx.hot", parent="self.ctx.hot = bool(x.abs().max() > 12)"),
    "ctx_tensor": Twist("self.ctx.tau", parent="self.ctx.tau = 1 + x.abs().mean()", factor=True),
    "ctx_keep": Twist("self.ctx.keep", parent="self.ctx.keep = (x.abs().amax() < 12).to(x.dtype) + 0.5",
                      factor=True),
    "private": Twist("self._long", init="self._long = False", parent="layer._long = x.shape[1] > 24"),
    "private_data": Twist("self._hot", init="self._hot = False",
                          parent="layer._hot = bool(x.abs().max() > 12)"),
    "public_by_size": Twist("self.sharp", init="self.sharp = False", parent="layer.sharp = len(x) > 8"),
    "options": Twist("self.opts['n'] > 5", init="self.opts = {'n': 5}",
                     parent="layer.opts['n'] = 20 if x.shape[1] > 24 else 5"),
    "counter": Twist("self.calls > 3", init="self.calls = 0", before="self.calls += 1"),
    "late_counter": Twist("self.calls > 60", init="self.calls = 0", before="self.calls += 1"),
    "buffer_counter": Twist("(1 + 0.1 * self.count)", init="self.register_buffer('count', torch.zeros(()))",
                            before="self.count.add_(1)", factor=True),
    "buffer_branch": Twist("int(self.count) > 3", init="self.register_buffer('count', torch.zeros(()))",
                           before="self.count += 1"),
    "decay": Twist("self.tau", init="self.tau = 1.0", before="self.tau *= 0.97", factor=True),
    "average": Twist("self.mean", init="self.register_buffer('mean', torch.ones(()))",
                     before="self.mean.copy_(0.9 * self.mean + 0.1 * s.detach().abs().mean())", factor=True),
    "history": Twist("len(self.history) > 3", init="self.history = []",
                     before="self.history.append(float(N))"),
    "global": Twist("SHARP", top="SHARP = False", event="space['SHARP'] = True"),
    "registry": Twist("SETTINGS['sharp']", top="SETTINGS = {'sharp': False}",
                      event="space['SETTINGS']['sharp'] = True"),
    "closure": Twist("self.asked()", top="def asking(cell):\n    def asked():\n        return cell[0]\n"
                     "    return asked\n\n\nCELL = [False]", init="self.asked = asking(CELL)",
                     event="space['CELL'][0] = True"),
    "attribute": Twist("self.kind == 'sharp'", init="self.kind = 'soft'", event="layer.kind = 'sharp'"),
    "private_attribute": Twist("self._sharp", init="self._sharp = False", event="layer._sharp = True"),
    "nested": Twist("self.config.sharp", init="self.config = types.SimpleNamespace(sharp=False)",
                    event="layer.config.sharp = True"),
    "class_attribute": Twist("self.SHARP", init="type(self).SHARP = False", event="type(layer).SHARP = True"),
    "buffer_set": Twist("self.gain", init="self.register_buffer('gain', torch.ones(()))",
                        event="layer.gain.fill_(1.7)", factor=True),
    "tensor_attribute": Twist("self.gain", init="self.gain = torch.ones(())",
                              event="layer.gain = torch.tensor(1.7)", factor=True),
    "hidden_buffer": Twist("self.gain", init="self.register_buffer('gain', torch.ones(()), persistent=False)",
                           event="layer.gain.mul_(1.7)", factor=True),
    # parameters
    "temperature": Twist("(1 / self.tau)", init="self.tau = nn.Parameter(torch.tensor(0.9))", factor=True),
    "log_temperature": Twist("self.log_tau.exp()",
                             init="self.log_tau = nn.Parameter(torch.zeros(H, 1, 1) + 0.1)", factor=True),
    "softplus": Twist("F.softplus(self.raw)", init="self.raw = nn.Parameter(torch.tensor(0.5))", factor=True),
    "gain": Twist("(1 + self.gain * 0.1)", init="self.gain = nn.Parameter(torch.ones(()))", factor=True),
    "fixed": Twist("self.tau.item()", init="self.tau = nn.Parameter(torch.tensor(0.9))", factor=True),
}  # fmt: skip
INGREDIENTS["twist"] += sorted(TWISTS)
INGREDIENTS["second"] += ["none"] * len(TWISTS) + sorted(TWISTS)


def plain() -> Spec:
    return {name: values[0] for name, values in INGREDIENTS.items()}


def drawn(seed: int) -> Spec:
    """The ingredients of one program: most are plain, so that many programs are accepted."""
    chance = random.Random(seed)
    spec = {name: chance.choice(values) for name, values in INGREDIENTS.items()}
    for name in INGREDIENTS:
        if name not in ("family", "form", "steps", "first", "mask", "way", "value", "twist", "parent"):
            if chance.random() < 0.45:
                spec[name] = INGREDIENTS[name][0]
    return settled(spec)


def settled(spec: Spec) -> Spec:
    """Without what does not go together."""
    s = dict(spec)
    exp = s["form"] in ("scaling", "plan", "softmax_plan")
    if not exp:
        s.update(guard="", offset="row")
    if s["family"] in ("matcher", "mixer", "esp", "lot"):
        s.update(cross=False, scores="matmul", bias="none", damping="none")
        s.update(guard="" if s["family"] != "mixer" else s["guard"], factor="1", marginals="ones")
        if s["family"] != "lot":
            s.update(home="inline")
        if s["family"] in ("matcher", "mixer"):
            s.update(rows_zeroed=False, mask="none" if s["family"] == "mixer" else s["mask"])
        if s["family"] == "esp" and s["mask"] != "none":
            s.update(mask="padded_bm")
        s.update(place="before", dropout=0.0)
    if s["family"] == "matcher":
        s.update(cross=True, returns="tensor", form="potentials", heads=1)
        if s["mask"] == "tokens":
            s.update(mask="active_bm")
    if s["form"] in ("potentials", "scaling"):
        s.update(place="before")
        if s["damping"] == "parameter" and s["form"] == "scaling":
            s.update(damping="none")
    if s["form"] in ("plan", "softmax_plan"):
        s.update(damping="none")
    if s["place"] == "inside" and exp:
        s.update(place="after_each")
    if s["place"] == "after_each" and not exp:
        s.update(place="inside")
    if s["mask"] in ("none", "additive"):
        s.update(way="fill", place="before", rows_zeroed=False)
    if s["marginals"] == "active" and s["mask"] in ("none", "additive"):
        s.update(marginals="shares")
    if s["mask"] == "none":
        s.update(value="-1e9", padding_shown=False)
    if s["way"] == "add_where" and s["dtype"] == "double" and "finfo" in s["value"]:
        s.update(value="-1e9")  # which no float32 holds
    if s["way"] == "add" and "inf" in s["value"]:
        s.update(way="fill")
    if s["way"] == "multiply" and not exp:
        s.update(way="fill")
    if exp and s["mask"] != "none" and not s["guard"]:
        s.update(guard=" + 1e-8")  # without it sums of hidden columns are 0, and the original is NaN
    if (s["way"] == "both_sides" and s["cross"]) or (s["rows_zeroed"] and s["cross"]):
        s.update(way="fill" if s["way"] == "both_sides" else s["way"], rows_zeroed=False)
    if s["mask"] == s["bias"] + "s":
        s.update(mask="padded_bm")
    if s["mask"] == "tokens" or s["bias"] == "token":
        s.update(cross=False)
    if s["parent"] == "root" and any(TWISTS[t].parent for t in (s["twist"], s["second"]) if t != "none"):
        s.update(parent="bare")
    if s["parent"] == "root":
        s.update(returns="tensor" if s["returns"] in ("stash", "attribute") else s["returns"], hook="none")
    if s["second"] == s["twist"]:
        s.update(second="none")
    return s


# --- a program as text -----------------------------------------------------------------------------


def _indented(lines: list[str], depth: int) -> str:
    return "\n".join(" " * 4 * depth + part for line in lines for part in line.splitlines())


def twists_of(spec: Spec) -> list[Twist]:
    return [TWISTS[name] for name in (spec["twist"], spec["second"]) if name != "none"]


def parameters_of(spec: Spec) -> list[str]:
    """The names of what the model is called with."""
    if spec["mask"] == "tokens":
        return ["tokens"]
    names = ["x"] + (["memory"] if spec["cross"] else [])
    names += ["tokens"] if spec["bias"] == "token" else []
    return names + ([] if spec["mask"] == "none" else ["lengths" if spec["mask"] == "lengths" else "mask"])


def source_of(spec: Spec, seed: int) -> str:
    """The program: classes, and make(), which gives the model in evaluation mode."""
    tops = [
        "import math", "import types", "import torch", "import torch.nn.functional as F",
        "from torch import nn", "", f"H, D, T = {spec['heads']}, {DIM // spec['heads']}, {spec['steps']}",
        *(twist.top for twist in twists_of(spec) if twist.top),
    ]  # fmt: skip
    tops.append(_hard_map(spec))
    loop, outside = _loop(spec)
    layer = _layer(spec, loop)
    return "\n".join([*tops, *outside, "", "", layer, "", "", _parent(spec), "", "", _make(spec, seed), ""])


def _hard_map(spec: Spec) -> str:
    if spec["gradient"] != "custom":
        return ""
    return (
        "\n\nclass Clipped(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, p):\n"
        "        return p.clone()\n\n    @staticmethod\n    def backward(ctx, g):\n        return 0.5 * g\n"
    )


def _layer(spec: Spec, loop: list[str]) -> str:
    init = ["self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))", "self.h = H",
            "self.ctx = ctx"]  # fmt: skip
    if spec["dropout"]:
        init.append(f"self.dropout = nn.Dropout({spec['dropout']})")
    init += [twist.init for twist in twists_of(spec) if twist.init]
    names = [name for name in parameters_of(spec) if name != "tokens" or spec["bias"] == "token"]
    names = ["x", *(name for name in names if name != "x")]
    if spec["mask"] == "tokens":
        names = ["x", "hidden"]
    signature = ", ".join(n + ("=None" if n == "mask" and spec["mask"] == "optional" else "") for n in names)
    body = {"matcher": _matcher, "mixer": _mixer, "esp": _esp, "lot": _lot}.get(spec["family"], _attention)
    lines, own = body(spec, loop)
    method = ""
    if spec["home"] == "method":
        method = "\n\n    def sinkhorn(self, s, steps, hide=None):\n" + _indented(loop, 2)
    return (
        "class Attention(nn.Module):\n    def __init__(self, ctx):\n        super().__init__()\n"
        + _indented([*init, *own], 2) + method + f"\n\n    def forward(self, {signature}):\n"
        + _indented(lines, 2)
    )  # fmt: skip


def _twisted(spec: Spec, twists: list[Twist]) -> list[str]:
    """Lines that change the scores `s`, or the number of steps, or set `gain` of the output."""
    lines = ["steps, gain = T, 1.0"]
    for twist in twists:
        lines += [twist.before] if twist.before else []
        if twist.factor:
            lines += [f"s = s * {twist.asks}"] if twist.asks != "1.0" else []
        elif spec["effect"] == "steps":
            lines += [f"if {twist.asks}:", "    steps = T + 3"]
        elif spec["effect"] == "scores":
            lines += [f"if {twist.asks}:", "    s = s * 1.7 + 0.3 * s.roll(1, -1)"]
        elif spec["effect"] == "output":
            lines += [f"gain = 1.5 if {twist.asks} else gain"]
        else:
            lines += [f"if {twist.asks}:", "    s = s.round()"]
    return lines


def _heads(spec: Spec) -> list[str]:
    other = "memory" if spec["cross"] else "x"
    return [
        f"B, N, M = x.shape[0], x.shape[1], {other}.shape[1]",
        "q = self.q(x).view(B, N, H, D).transpose(1, 2)",
        f"k = self.k({other}).reshape(B, M, H, D).transpose(1, 2)",
        f"v = self.v({other}).unflatten(-1, (H, -1)).transpose(1, 2)",
    ]


def _scores(spec: Spec) -> list[str]:
    return {
        "matmul": ["s = q @ k.transpose(-2, -1) / math.sqrt(D)"],
        "einsum": ["s = torch.einsum('bhnd,bhmd->bhnm', q, k) * D**-0.5"],
        "distance": ["s = -0.5 * torch.cdist(q, k) ** 2"],
        "cosine": ["s = 5 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT"],
    }[spec["scores"]]  # fmt: skip


def _bias(spec: Spec) -> tuple[list[str], list[str]]:
    apart = "(torch.arange(N)[:, None] - torch.arange(M)[None]).abs()"
    slopes = "torch.tensor([0.5, 0.25])[:H, None, None]"
    return {
        "none": ([], []),
        "alibi": ([f"s = s - {slopes}.to(s.dtype) * {apart}"], []),
        "learnt_alibi": ([f"s = s - self.slope * {apart}"], ["self.slope = nn.Parameter(torch.rand(H, 1, 1))"]),
        "relative": ([f"s = s + self.rel({apart}.clamp(max=11)).permute(2, 0, 1)"], ["self.rel = nn.Embedding(12, H)"]),
        "token": (["s = s + self.by_token(tokens).transpose(1, 2)[:, :, None]"],
                  [f"self.by_token = nn.Embedding({VOCABULARY}, H)", "with torch.no_grad():",
                   "    self.by_token.weight[0] = -1e4"]),
        "table": (["s = s + self.table[:, :N, :M]"], ["self.table = nn.Parameter(torch.randn(H, 600, 600) * 0.3)"]),
        "distance": ([f"s = torch.where({apart} > 20, s - 2.0, s)"], []),
        "cached": (["if self._pos is None or self._pos.shape != (N, M):", f"    self._pos = {apart}.to(s.dtype)",
                    "s = s - 0.2 * self._pos"], ["self._pos = None"]),
    }[spec["bias"]]  # fmt: skip


def _hide(spec: Spec) -> list[str]:
    """`hide`: bool [B, 1, 1, M], True on hidden keys."""
    lines = {
        "none": [], "additive": [],
        "padded_bm": ["hide = mask[:, None, None, :]"],
        "active_bm": ["hide = ~mask[:, None, None, :]"],
        "active_b1m": ["hide = mask.unsqueeze(1) == 0"],
        "padded_b11m": ["hide = mask"],
        "float_keep": ["hide = mask[:, None, None] < 0.5"],
        "int_keep": ["hide = mask.eq(0)[:, None, None]"],
        "lengths": ["hide = (torch.arange(M)[None] >= lengths[:, None])[:, None, None]"],
        "tokens": ["hide = hidden[:, None, None]"],
        "optional": ["hide = torch.zeros(B, 1, 1, M, dtype=torch.bool)", "if mask is not None:",
                     "    hide = ~mask[:, None, None]"],
    }[spec["mask"]]  # fmt: skip
    return lines + (["hide = hide | hide.transpose(-1, -2)"] if spec["way"] == "both_sides" else [])


def _masking(spec: Spec) -> list[str]:
    """Scores with hidden keys, before the loop."""
    if spec["mask"] == "additive":
        return ["s = s + mask"]
    if spec["mask"] == "none" or spec["way"] == "multiply":
        return []
    value = spec["value"]
    return {
        "fill": [f"s = s.masked_fill(hide, {value})"],
        "both_sides": [f"s = s.masked_fill(hide, {value})"],
        "where": [f"s = torch.where(hide, torch.full_like(s, {value}), s)"],
        "add": [f"s = s + hide.to(s.dtype) * {value}"],
        "add_where": [f"s = s + torch.where(hide, {value}, 0.0).to(s.dtype)"],
    }[spec["way"]]  # fmt: skip


def _loop(spec: Spec) -> tuple[list[str], list[str]]:
    """(the lines that make p of s, what stands outside of the layer)."""
    rows, columns = ("-1", "-2") if spec["first"] == "rows" else ("-2", "-1")
    form, damped = spec["form"], {"none": "", "constant": "0.8 * ", "parameter": "damping * "}[spec["damping"]]
    takes = spec["mask"] not in ("none", "additive")
    inside = _masking(spec) if spec["place"] == "inside" else []
    if spec["place"] == "after_each" and takes:
        inside = ["p = p * ~hide" if spec["way"] == "multiply" else "p = p.masked_fill(hide, 0.0)"]
    log, share = ("", "") if spec["marginals"] == "ones" else (" - log_n", " / n_here")
    count = {"ones": [], "shares": ["n_here = s.shape[dim]", "log_n = math.log(n_here)"],
             "active": ["n_here = (~hide).sum(-1, keepdim=True).to(s.dtype) if dim == -2 else s.shape[-2]",
                        "log_n = torch.as_tensor(n_here).log()"]}[spec["marginals"]]  # fmt: skip
    g, start, end = spec["guard"], [], ["p = s.exp()"]
    total = f"(p.sum(dim, keepdim=True){g})"
    start = ["damping = 0.85"] if spec["damping"] == "parameter" else []  # replaced below where it is learnt
    if form == "lse":
        body = [f"s = s - {damped}(s.logsumexp(dim, keepdim=True)){log}"]
    elif form == "log_softmax":
        body = ["s = F.log_softmax(s, dim=dim)" + log] if not damped else [
            f"s = s - {damped}(s - F.log_softmax(s, dim=dim)){log}"]  # fmt: skip
    elif form == "potentials":
        start += ["f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])"]
        body = ["if dim == -1:", f"    f = f - {damped}(torch.logsumexp(s + f + g, -1, keepdim=True){_plus(log)})",
                "else:", f"    g = g - {damped}(torch.logsumexp(s + f + g, -2, keepdim=True){_plus(log)})"]
        end = ["p = torch.exp(s + f + g)"]
    elif form == "scaling":
        start += _kernel(spec, "kernel") + ["a, b = torch.ones_like(kernel[..., :1]), torch.ones_like(kernel[..., :1, :])"]
        numerator = "1.0" if not share else "1 / n_here"
        body = ["if dim == -1:", f"    a = {numerator} / ((kernel * b).sum(-1, keepdim=True){g})",
                "else:", f"    b = {numerator} / ((kernel * a).sum(-2, keepdim=True){g})"]  # fmt: skip
        end = ["p = a * kernel * b"]
    else:
        start += _kernel(spec, "p") if form == "plan" else [f"p = s.softmax({rows})"]
        if form == "softmax_plan" and takes and spec["way"] == "multiply":
            start += ["p = p * ~hide"]
        body, end = [f"p = p / {total}{share}"], []
    if spec["paired"]:
        body = [f"for dim in ({rows}, {columns}):"] + _shift(count + inside + body)
    else:
        body = [f"dim = {rows} if i % 2 == 0 else {columns}", *count, *inside, *body]
    lines = [*start, "for i in range(steps):", *_shift(body), *end]
    return _housed(spec, lines)


def _plus(log: str) -> str:
    return log.replace("-", "+")


def _shift(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _kernel(spec: Spec, name: str) -> list[str]:
    offset = {"row": "s - s.amax(-1, keepdim=True)", "matrix": "s - s.amax((-2, -1), keepdim=True)",
              "none": "s"}[spec["offset"]]  # fmt: skip
    lines = [f"{name} = torch.exp({offset})"]
    if spec["way"] == "multiply" and spec["mask"] not in ("none", "additive"):
        lines += [f"{name} = {name} * ~hide"]
    return lines


def _housed(spec: Spec, lines: list[str]) -> tuple[list[str], list[str]]:
    if spec["home"] == "inline":
        return lines, []
    if spec["home"] == "method":
        return [*lines, "return p"], []
    text = _indented([*lines, "return p"], 1)
    if spec["home"] == "function":
        return ["p = sinkhorn(s, steps, hide)"], [f"\n\ndef sinkhorn(s, steps, hide=None):\n{text}"]
    text = _indented([*lines, "return p"], 2)
    return ["p = self.sinkhorn(s, steps, hide)"], [
        f"\n\nclass Sinkhorn(nn.Module):\n    def forward(self, s, steps, hide=None):\n{text}"]


def _called(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """The lines that make p of s in the forward, and those of __init__."""
    init = ["self.sinkhorn = Sinkhorn()"] if spec["home"] == "submodule" else []
    if spec["home"] == "method":
        loop = ["p = self.sinkhorn(s, steps, hide)"]
    takes = spec["mask"] not in ("none", "additive")
    if spec["home"] != "inline" and not takes:
        loop = [line.replace(", hide)", ")") for line in loop]
    if spec["damping"] == "parameter" and spec["home"] == "inline":
        init += ["self.damping = nn.Parameter(torch.tensor(0.85))"]
        loop = [line.replace("damping = 0.85", "damping = self.damping") for line in loop]
    if spec["gradient"] == "no_grad":
        loop = ["with torch.no_grad():", *_shift(loop)]
        if spec["form"] == "potentials" and spec["home"] == "inline":
            loop = [*loop, "p = torch.exp(s + f + g)"]
    if spec["gradient"] == "checkpoint" and spec["home"] == "function":
        loop = [f"p = torch.utils.checkpoint.checkpoint(sinkhorn, s, steps{', hide' if takes else ''}, use_reentrant=False)"]
    loop = [*loop, *{"detach": ["p = p.detach()"], "custom": ["p = Clipped.apply(p)"]}.get(spec["gradient"], [])]
    return loop, init


def _cast(spec: Spec) -> list[str]:
    return {"none": [], "half": ["s = s.half().float()"], "double": ["s = s.double()"],
            "float": ["s = s.float()"]}[spec["dtype"]]  # fmt: skip


def _finished(spec: Spec) -> list[str]:
    """The output of p and v [B, H, M, D]."""
    lines = ["p = p.to(v.dtype)"] if spec["dtype"] in ("double", "float") else []
    lines += [] if spec["factor"] == "1" else [f"p = p * {spec['factor']}"]
    if spec["dropout"]:
        lines += ["out = self.dropout(p) @ v"]
    else:
        lines += ["out = p @ v"]
    if spec["rows_zeroed"]:
        lines += ["out = out * ~hide[:, :, :1].transpose(-1, -2)[:, :, :N]" if spec["way"] != "both_sides"
                  else "out = out * (~hide).any(-1, keepdim=True)"]  # fmt: skip
    lines += ["out = self.o(out.transpose(1, 2).reshape(B, N, -1)) * gain"]
    return lines + _returned(spec)


def _returned(spec: Spec) -> list[str]:
    return {
        "tensor": ["return out"], "tuple": ["return out, p"], "dict": ["return {'out': out, 'map': p}"],
        "stash": ["self.last = p.detach()", "return out"], "attribute": ["return out"],
    }[spec["returns"]]  # fmt: skip


def _attention(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    bias, own = _bias(spec)
    loop, init = _called(spec, loop)
    before = _masking(spec) if spec["place"] != "inside" else []
    scores = [*_scores(spec), *bias, *_twisted(spec, twists_of(spec)), *_cast(spec), *_hide(spec), *before]
    if spec["family"] == "differential":
        second = [line.replace("p = ", "p2 = ", 1) if line == "p = s.exp()" else line for line in loop]
        del second
        lines = [*_heads(spec), *scores, "kept = s", *loop, "first = p", "s = kept * 0.6", *loop,
                 "p = first - self.mix * p", *_finished(spec)]  # fmt: skip
        return lines, [*own, *init, "self.mix = nn.Parameter(torch.tensor(0.3))"]
    return [*_heads(spec), *scores, *loop, *_finished(spec)], [*own, *init]


def _matcher(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """A learnt dustbin beside scores of two sets; the log plan is returned."""
    hide = [line for line in _hide(spec)]
    lines = [
        "B, N, M = x.shape[0], x.shape[1], memory.shape[1]", "q, k = self.q(x)[:, None], self.k(memory)[:, None]",
        "s = q @ k.mT / 8**0.5", *_twisted(spec, twists_of(spec)), *_cast(spec), *hide,
        *([] if spec["way"] == "multiply" else _masking(spec)),
        "dust = self.dustbin.to(s.dtype)",
        "s = torch.cat([s, dust.expand(B, 1, N, 1)], -1)",
        "s = torch.cat([s, dust.expand(B, 1, 1, M + 1)], -2)",
        "norm = -math.log(N + M)",
        "log_mu = torch.full((N + 1,), norm, dtype=s.dtype)", "log_nu = torch.full((M + 1,), norm, dtype=s.dtype)",
        "log_mu[-1], log_nu[-1] = math.log(M) + norm, math.log(N) + norm",
        "f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])",
        "for i in range(steps):",
        "    f = log_mu - torch.logsumexp(s + g[..., None, :], -1)",
        "    g = log_nu - torch.logsumexp(s + f[..., None], -2)",
        "out = (s + f[..., None] + g[..., None, :] - norm)[:, 0].exp() * gain",
        *([] if spec["gradient"] != "detach" else ["out = out.detach() + 0 * x.sum()"]), "return out",
    ]  # fmt: skip
    return lines, ["self.dustbin = nn.Parameter(torch.tensor(0.7))"]


def _mixer(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """Four streams of a token, mixed by a doubly-stochastic matrix that the token gives."""
    loop, init = _called(spec, loop)
    lines = [
        "B, N, M = x.shape[0], x.shape[1], x.shape[1]", "s = self.to_mix(x)[:, :, None].unflatten(-1, (4, 4))",
        "s = s[:, :, 0]", *_twisted(spec, twists_of(spec)), *_cast(spec), *loop, "p = p.to(x.dtype)",
        "out = (p @ x.unflatten(-1, (4, 2))).flatten(-2) * gain", *_returned(spec),
    ]  # fmt: skip
    return lines, ["self.to_mix = nn.Linear(8, 16)", *init]


def _esp(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """Expected sliced plans of soft sorts, weighed by their costs."""
    lines = [
        *_heads(spec), "s = q", *_twisted(spec, twists_of(spec)), "q = s.to(v.dtype)", "plans = []",
        *(["hide = mask[:, None, None, :]"] if spec["mask"] != "none" else []), "for points in (q, k):",
        "    points = points.transpose(-1, -2)",
        *(["    points = points.masked_fill(hide, -1e4)"] if spec["mask"] != "none" else []),
        "    ordered = points.sort(dim=-1, descending=True).values",
        "    plan = -((ordered.unsqueeze(-1) - points.unsqueeze(-2)) ** 2) / self.temperature",
        *(["    plan = plan.masked_fill(hide.unsqueeze(-2), -1e30)"] if spec["mask"] != "none" else []),
        "    plan = plan.softmax(-1)",
        *(["    plan = plan * (ordered > -1e3).unsqueeze(-1)"] if spec["mask"] != "none" else []),
        "    plans.append(plan)", "maps = plans[0].transpose(-1, -2) @ plans[1]",
        "cost = (torch.cdist(q, k).unsqueeze(2) * maps).sum((-1, -2))",
        "weights = torch.softmax(-0.3 * cost, -1)", "p = (weights[..., None, None] * maps).sum(2)",
        *{"detach": ["p = p.detach()"], "custom": ["p = Clipped.apply(p)"]}.get(spec["gradient"], []),
        *_finished({**spec, "dtype": "none", "rows_zeroed": False}),
    ]  # fmt: skip
    return lines, ["self.temperature = 0.1"]


def _lot(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """Two finite loops through learnt pivots."""
    masked = spec["mask"] not in ("none", "additive")
    plan = [
        "def plan(s, log_a, log_b):", "    u, w = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])",
        "    for i in range(steps):", "        if i % 2 == 0:",
        "            u = log_a - torch.logsumexp(s + w.unsqueeze(-2), -1)", "        else:",
        "            w = log_b - torch.logsumexp(s + u.unsqueeze(-1), -2)",
        "    return torch.exp(s + u.unsqueeze(-1) + w.unsqueeze(-2))",
    ]  # fmt: skip
    masses = [
        "keep = ~hide[:, 0, :1].expand(B, 1, N)", "count = keep.sum(-1, keepdim=True).to(s.dtype)",
        "uniform = (-count.log()).expand(B, H, N).masked_fill(~keep, -1e30)", "count = count[..., None]",
    ] if masked else ["count = N", "uniform = torch.full_like(q[..., 0], -math.log(N))"]  # fmt: skip
    lines = [
        *_heads(spec), "s = q", *_twisted(spec, twists_of(spec)), "q = s.to(v.dtype)", *_hide({**spec, "way": "fill"}),
        *plan, *masses, "sigma = torch.softmax(self.masses, -1)",
        "first = plan(0.7 * q @ self.pivots.mT, uniform, sigma.log())",
        "second = plan(0.7 * self.pivots @ k.mT, sigma.log(), uniform)",
        "out = count * ((first / sigma[:, None]) @ (second @ v))",
        "out = self.o(out.transpose(1, 2).flatten(2)) * gain",
        "return out" if spec["returns"] != "dict" else "return {'out': out}",
    ]  # fmt: skip
    return lines, ["self.pivots = nn.Parameter(torch.randn(H, 3, D))", "self.masses = nn.Parameter(torch.randn(H, 3))"]


def _parent(spec: Spec) -> str:
    names = parameters_of(spec)
    layers = 2 if spec["parent"] == "two" else 1
    init = ["self.ctx = types.SimpleNamespace(layer=0)",
            f"self.layers = nn.ModuleList(Attention(self.ctx) for _ in range({layers}))",
            "self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)"]  # fmt: skip
    if spec["mask"] == "tokens":
        init += [f"self.embed = nn.Embedding({VOCABULARY}, 8)"]
    if spec["hook"] == "post":
        init += ["self.layers[0].o.register_forward_hook(scaled)"]
    if spec["hook"] == "pre":
        init += ["self.layers[0].v.register_forward_pre_hook(shifted)"]
    hooks = "def scaled(module, args, out):\n    return out * 1.3\n\n\ndef shifted(module, args):\n    return (args[0] + 0.1,)\n\n\n"
    signature = ", ".join(n + ("=None" if n == "mask" and spec["mask"] == "optional" else "") for n in names)
    lines = ["x = self.embed(tokens)", "hidden = tokens == 0"] if spec["mask"] == "tokens" else []
    passed = ["hidden"] if spec["mask"] == "tokens" else names[1:]
    given = ", ".join(f"{n}={n}" if n == "mask" else n for n in passed)
    lines += [f"for i, layer in enumerate({'[self.layers[0]] * 2' if spec['parent'] == 'shared' else 'self.layers'}):"]
    inner = [twist.parent for twist in twists_of(spec) if twist.parent]
    normed = "self.norm(x)" if spec["parent"] in ("block", "two") else "x"
    inner += [f"out = layer({normed}{', ' if given else ''}{given})"]
    if spec["family"] in ("matcher",):
        return hooks * (spec["hook"] != "none") + _net(init, signature, [*lines, *_shift(inner), "return out"])
    if spec["returns"] == "tuple":
        inner += ["out, p = out"] if spec["family"] != "lot" else ["p = out"]
    if spec["returns"] == "dict":
        inner += ["p = out.get('map', x)", "out = out['out']"]
    if spec["returns"] == "stash" and spec["family"] != "lot":
        inner += ["p = layer.last"]
    elif spec["returns"] in ("stash", "attribute"):
        inner += ["p = torch.tensor(layer.h)"]
    inner += ["x = x + out"] if spec["parent"] != "bare" else ["x = out"]
    lines += _shift(inner)
    if spec["parent"] == "block":
        lines += ["x = x + F.gelu(self.head(x))"]
    if spec["parent"] == "item":
        lines += ["x = x * (1.0 + 0.1 * round(x.mean().item(), 1))"]
    ends = "x.detach().numpy()" if spec["parent"] == "numpy" else "x"
    extra = spec["returns"] not in ("tensor", "attribute")
    lines += [f"return ({ends}, p)" if extra and spec["returns"] != "dict" else
              f"return {{'out': {ends}, 'map': p}}" if extra else f"return {ends}"]  # fmt: skip
    return hooks * (spec["hook"] != "none") + _net(init, signature, lines)


def _net(init: list[str], signature: str, lines: list[str]) -> str:
    return ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n" + _indented(init, 2)
            + f"\n\n    def forward(self, {signature}):\n" + _indented(lines, 2))  # fmt: skip


def _make(spec: Spec, seed: int) -> str:
    root = spec["parent"] == "root" and spec["mask"] != "tokens"
    made = "Attention(types.SimpleNamespace(layer=0))" if root else "Net()"
    return f"def make():\n    torch.manual_seed({seed})\n    return {made}.eval()"


def space_of(source: str, name: str) -> dict[str, Any]:
    """The program's own globals."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module: dict[str, Any] = {"__name__": "written"}
    exec(compile(source, name, "exec"), module)
    return module


# --- inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call, or several, of the original and of the compiled model.

    keep:   which keys are active: all, some, one, none, mixed, but_one.
    soft:   value of an additive mask, where not that of the program.
    mode:   eval, grad, inputs (that require gradients), inference, train, autocast, load, step, event.
    calls:  how often it is called.
    """

    name: str
    examples: int = BATCH
    length: int = LENGTH
    keys: int = KEYS
    spread: float = 1.0
    keep: str = "all"
    soft: float | None = None
    mode: str = "eval"
    calls: int = 1
    transposed: bool = False
    left_out: bool = False


def cases_of(spec: Spec) -> list[Case]:
    twists = {spec["twist"], spec["second"]}
    cases = [
        Case("mild"), Case("grad on", mode="grad"), Case("inputs require grad", mode="inputs"),
        Case("inference", mode="inference"), Case("five calls", calls=5),
        Case("one example", examples=1), Case("one example, long", examples=1, length=18, keys=18),
        Case("one token", length=1), Case("two examples, one key", examples=2, length=1, keys=1),
        Case("one, one", examples=1, length=1, keys=1), Case("one key", keys=1, length=4),
        Case("long", examples=2, length=28, keys=27), Case("tens", length=10, keys=10),
        Case("very long", examples=1, length=120, keys=120), Case("many", examples=20),
        Case("many, long", examples=9, length=30, keys=26),
        Case("faint", spread=1e-3), Case("loud", spread=6.0), Case("very loud", spread=40.0),
        Case("huge", spread=1e3), Case("strided", transposed=True),
        Case("loaded", mode="load"), Case("stepped", mode="step"),
    ]  # fmt: skip
    if not spec["dropout"]:
        cases += [Case("training", mode="train")]
    if spec["mask"] != "none":
        cases += [
            Case("padded", keep="some"), Case("one active", keep="one"), Case("none active", keep="none"),
            Case("mixed", keep="mixed", examples=6), Case("all but one", keep="but_one"),
            Case("padded, one example", keep="some", examples=1), Case("none, alone", keep="none", examples=1),
            Case("padded, long", keep="some", examples=2, length=28, keys=28),
            Case("mixed, loud", keep="mixed", examples=6, spread=6.0),
            Case("padded, inputs require grad", keep="some", mode="inputs"),
        ]  # fmt: skip
    if spec["mask"] == "additive":
        cases += [Case(f"soft {value}", keep="some", soft=value) for value in (-2.0, -100.0, -1e4, -1e9)]
        cases += [Case("finfo.min", keep="mixed", examples=6, soft=torch.finfo(torch.float32).min)]
    if spec["mask"] == "optional":
        cases += [Case("left out", left_out=True)]
    if "autocast" in twists:
        cases += [Case("autocast", mode="autocast")]
    if "late_counter" in twists:
        cases += [Case("seventy calls", calls=70)]
    cases += [Case("event", mode="event")] if any(twist.event for twist in twists_of(spec)) else []
    return cases


def kept(case: Case, m: int, chance: torch.Generator) -> Tensor:
    """[B, M], True on active keys, which come first."""
    b = case.examples
    some = torch.randint(max(1, m // 3), max(2, m), (b,), generator=chance)
    active = {
        "all": torch.full((b,), m), "some": some, "one": torch.ones(b), "none": torch.zeros(b),
        "but_one": torch.full((b,), max(1, m - 1)),
        "mixed": torch.where(torch.arange(b) % 3 == 1, 0, torch.where(torch.arange(b) % 3 == 2, 1, some)),
    }[case.keep]  # fmt: skip
    return torch.arange(m)[None] < active[:, None]


def inputs_of(spec: Spec, case: Case, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    n, m = case.length, case.keys if spec["cross"] else case.length
    x = case.spread * torch.randn(case.examples, n, 8, generator=chance)
    memory = torch.randn(case.examples, m, 8, generator=chance)
    keep = kept(case, m, chance)
    tokens = torch.randint(1, VOCABULARY, (case.examples, n), generator=chance)
    if case.transposed:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    value = {"-1e9": -1e9, "-1e4": -1e4, "torch.finfo(s.dtype).min": torch.finfo(x.dtype).min}.get(spec["value"], -1e9)
    value = value if case.soft is None else case.soft
    masks = {
        "padded_bm": ~keep, "active_bm": keep, "active_b1m": keep[:, None], "padded_b11m": ~keep[:, None, None],
        "float_keep": keep.float(), "int_keep": keep.long(), "optional": keep,
        "additive": torch.where(keep, 0.0, value)[:, None, None], "lengths": keep.sum(-1),
    }  # fmt: skip
    tokens = tokens.masked_fill(~keep, 0) if spec["mask"] == "tokens" or not spec["cross"] else tokens
    drawn_inputs = {"x": x, "memory": memory, "tokens": tokens}
    if spec["mask"] in masks:
        drawn_inputs["lengths" if spec["mask"] == "lengths" else "mask"] = masks[spec["mask"]]
    if case.left_out:
        del drawn_inputs["mask"]
    return {name: drawn_inputs[name] for name in parameters_of(spec) if name in drawn_inputs}


def examples_of(spec: Spec, seed: int) -> dict[str, Tensor]:
    """Calibration data: mild, and without padding unless the program's data shows it."""
    keep = "some" if spec["padding_shown"] else "all"
    return inputs_of(spec, Case("data", examples=EXAMPLES, keep=keep), seed)


# --- compiling -------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A model with the globals of its code."""

    model: nn.Module
    space: dict[str, Any]
    own: frozenset[str]

    def copied(self) -> Subject:
        return Subject(copy.deepcopy(self.model), self.space, self.own)


def compiled_of(model: nn.Module, data: dict[str, Tensor]) -> tuple[nn.Module, nn.Module | None, list[str]]:
    """(the patched copy, the model read from the artefact alone, the sites' operators)."""
    with tempfile.TemporaryDirectory(prefix="programs-") as place:
        folder, teacher = Path(place), _teacher(model)
        recipe = Recipe.from_dict({"operator": "lossless", "batch_size": 8})
        source = data_of(data, forward_signature(teacher))
        calibration = Calibration(teacher.fingerprint, recipe.to_dict(), "whole", {}, "", "parallel", ())
        save_calibration(folder / "calibration", calibration)
        pipeline.compile(teacher, folder / "calibration", folder / "out", recipe, source, SILENT)
        manifest = read_manifest(folder / "out")
        patchable = manifest["capture"] == "module" or not manifest["live"]["left"]
        live = load(folder / "out", model=copy.deepcopy(model), trust=True) if patchable else None
        alone = None if manifest["capture"] == "module" else load(folder / "out", trust=True)
        sites = [str(site["operator"]) for site in manifest["sites"]]
        return live or alone, alone if live is not None else None, sites  # type: ignore[return-value]


# --- judging ---------------------------------------------------------------------------------------


@dataclass
class Results:
    """Tensors by name, or the exception that was raised."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None
    warned: bool = False


def run(subject: Subject, spec: Spec, case: Case, seed: int, dtype: torch.dtype, fuzz: float = 0.0) -> Results:
    """One case on a copy of the subject, from the same beginning every time."""
    results = Results()
    space = copy.copy(subject.space)
    settings = {name: copy.deepcopy(space[name]) for name in ("SHARP", "SETTINGS", "CELL") if name in space}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results.tensors = _results(subject.copied(), spec, case, seed, dtype, fuzz)
        except Exception as error:
            results.error = error
        finally:
            _restore(subject.space, settings)
    results.warned = any(issubclass(warning.category, OwnCodeWarning) for warning in caught)
    return results


def _restore(space: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(space[name], bool):
            space[name] = value
        elif isinstance(space[name], dict):
            space[name].update(value)
        else:
            space[name][:] = value
    if "Attention" in space and hasattr(space["Attention"], "SHARP"):
        space["Attention"].SHARP = False


def _results(
    subject: Subject, spec: Spec, case: Case, seed: int, dtype: torch.dtype, fuzz: float
) -> dict[str, Tensor]:
    model = subject.model
    chance = torch.Generator().manual_seed(seed + 1)
    if case.mode == "load":
        _load_others(model, subject.own, chance)
    if case.mode == "event":
        _event(subject, spec)
    model.train(case.mode == "train")
    found: dict[str, Tensor] = {}
    for call in range(case.calls):
        inputs = {
            name: t * (1 + fuzz * torch.randn(t.shape, generator=chance)).to(dtype) if t.is_floating_point() and fuzz
            else t.to(dtype) if t.is_floating_point() else t
            for name, t in inputs_of(spec, case, seed + call).items()
        }  # fmt: skip
        if dtype == torch.float64 and "mask" in inputs and spec["mask"] == "additive":
            inputs["mask"] = inputs["mask"].clamp(min=torch.finfo(torch.float32).min)
        found |= {f"{call}.{name}": t for name, t in _called_once(model, case, inputs, seed).items()}
    return found


def _called_once(model: nn.Module, case: Case, inputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    if case.mode == "inference":
        with torch.inference_mode():
            return _leaves(model(**inputs))
    if case.mode == "autocast":
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return _leaves(model(**inputs))
    if case.mode == "grad":
        return _leaves(model(**inputs))
    if case.mode in ("inputs", "train", "step"):
        return _with_gradients(model, case, inputs, seed)
    with torch.no_grad():
        return _leaves(model(**inputs))


def _leaves(output: Any) -> dict[str, Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return {str(i): torch.as_tensor(leaf).detach().clone() for i, leaf in enumerate(leaves) if leaf is not None}


def _with_gradients(model: nn.Module, case: Case, inputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Outputs, and gradients of a random sum of them, of parameters and of inputs; then an SGD step."""
    if case.mode == "inputs":
        inputs = {n: t.clone().requires_grad_(n in ("x", "memory")) for n, t in inputs.items()}
    output = model(**inputs)
    found = {f"output {name}": t for name, t in _leaves(output).items()}
    total = torch.zeros(())
    for i, leaf in enumerate(torch.utils._pytree.tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            cotangent = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed + i))
            total = total + (leaf * cotangent).sum()
    if not total.requires_grad:
        return found
    model.zero_grad()
    total.backward()
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad} if case.mode != "inputs" else {
        n: t for n, t in inputs.items() if t.requires_grad}  # fmt: skip
    found |= {f"gradient {n}": torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in wanted.items()}
    if case.mode == "step":
        norm = max([float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None] or [1.0])
        with torch.no_grad():
            for p in wanted.values():
                p -= 0.3 * (p.grad if p.grad is not None else 0) / max(norm, 1e-9)
        with torch.no_grad():
            found |= {f"after {n}": t for n, t in _leaves(model(**{k: t.detach() for k, t in inputs.items()})).items()}
    return found


def _load_others(model: nn.Module, own: frozenset[str], chance: torch.Generator) -> None:
    """Other values for all parameters and floating-point buffers of the original, by load_state_dict.

    own: their names; an artefact has numbers of the code beside them.
    """
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if name in own and tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=chance.manual_seed(sum(map(ord, name))))
            state[name] = tensor * (0.8 + 0.4 * noise).to(tensor.dtype)
    model.load_state_dict(state)


def _event(subject: Subject, spec: Spec) -> None:
    net, space = subject.model, subject.space
    layer = net.layers[0] if hasattr(net, "layers") else net
    with torch.no_grad():
        for twist in twists_of(spec):
            exec(twist.event, {"net": net, "layer": layer, "space": space, "torch": torch})


def difference(ours: Results, theirs: Results, exacts: list[Results], case: Case) -> tuple[float, str]:
    """(the largest error in units of its budget, where), by examples.

    exacts: the original in float64, or with its inputs' last digits changed, which tell its own rounding.
    """
    worst, where = 0.0, ""
    steepest = max([_largest(t) for n, t in theirs.tensors.items() if "gradient" in n] or [0.0])
    for name, true in theirs.tensors.items():
        found = ours.tensors.get(name)
        if found is None and "gradient" in name and not _largest(true):
            continue  # a parameter that the artefact leaves out
        if found is None or found.shape != true.shape:
            return float("inf"), f"{name}: {None if found is None else [*found.shape]} for {[*true.shape]}"
        steep = "gradient" in name
        largest = max(_largest(true), 1e-3 * steepest if steep else 0.0, 1e-30)
        tolerance = 0.1 if case.mode == "autocast" else TOLERANCE * (STEEP if steep else 1)
        precise = [exact.tensors[name] for exact in exacts if name in exact.tensors]
        known = torch.stack([t.isfinite() for t in (true, *precise)]).all(0)
        rounding = torch.zeros(())
        for other in precise:
            own = _by_example((other.double() - true.double()).abs().where(known, 0.0)) / largest
            rounding = torch.maximum(rounding, own)
        error = _by_example((found.double() - true.double()).abs().where(known, 0.0).nan_to_num(torch.inf)) / largest
        if steep or (case.spread > 10 and case.keep == "all"):
            rounding = rounding.max()
        ratio = error / (tolerance + 4 * rounding)
        if ratio.numel() and float(ratio.max()) > worst:
            worst, where = float(ratio.max()), f"{name}: {float(error.max()):.2g}"
    return worst, where


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _by_example(errors: Tensor) -> Tensor:
    return errors.flatten(1).amax(1) if errors.dim() > 1 and errors.numel() else errors.reshape(-1)


@dataclass
class Verdict:
    """What became of a program.

    outcome: refused, kept, error, warned, equal, raw error or SILENT.  cases: that are not equal, with what.
    """

    outcome: str
    text: str = ""
    cases: dict[str, str] = field(default_factory=dict)
    sites: list[str] = field(default_factory=list)
    seconds: float = 0.0


    @property
    def huge_alone(self) -> bool:
        """Whether it differs nowhere but at scores a thousand times those of the data."""
        silent = [name for name, text in self.cases.items() if text.startswith("SILENT")]
        return bool(silent) and all(name.endswith("huge") for name in silent)


ORDER = ("equal", "warned", "error", "raw error", "SILENT")
SAFE = ("refused", "kept", "error", "warned", "equal")


def judge(spec: Spec, seed: int, only: Callable[[Case], bool] = lambda case: True) -> Verdict:
    """Compile the program and hold it against fresh originals, case by case."""
    started = time.process_time()
    source, data = source_of(spec, seed), examples_of(spec, seed)
    spaces = [space_of(source, f"<program {seed}.{i}>") for i in range(3)]
    models = [space["make"]() for space in spaces]
    own = frozenset(models[0].state_dict())
    original, plain64 = Subject(models[0], spaces[0], own), Subject(models[1].double(), spaces[1], own)
    try:
        with torch.no_grad():
            original.copied().model(**{n: t[:BATCH] for n, t in data.items()})
    except Exception as error:
        return Verdict("broken", f"{type(error).__name__}: {error}")
    rng = torch.get_rng_state()
    before = {n: t.clone() for n, t in models[2].state_dict().items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            live, alone, sites = compiled_of(models[2], data)
    except AsapcError as error:
        return Verdict("refused", str(error).splitlines()[0], seconds=time.process_time() - started)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({where.filename}:{where.lineno})"
        return Verdict("raw error", text, {"compile": text}, seconds=time.process_time() - started)
    verdict = Verdict("equal", sites=sites)
    if any(not torch.equal(before[n], t) for n, t in models[2].state_dict().items()):
        verdict.cases["original"] = "SILENT: compiling changed the model's buffers"
    if not torch.equal(rng, torch.get_rng_state()):
        verdict.cases["generator"] = "SILENT: compiling moved the random generator"
    subjects = {"live": Subject(live, spaces[2], own), "original": Subject(models[2], spaces[2], own)}
    if alone is not None:
        subjects["artefact"] = Subject(alone, spaces[2], own)
    for case in cases_of(spec):
        if only(case):
            verdict.cases |= _case_verdicts(spec, case, seed, original, plain64, subjects)
    outcomes = [text.split(":")[0] for text in verdict.cases.values()]
    verdict.outcome = max(outcomes or ["equal"], key=ORDER.index)
    if verdict.outcome in ("equal", "warned") and all(site == "teacher" for site in sites):
        verdict.outcome = "kept"
    verdict.text = next((f"{n}: {t}" for n, t in verdict.cases.items() if t.startswith(verdict.outcome)), "")
    verdict.seconds = time.process_time() - started
    return verdict


def _case_verdicts(
    spec: Spec, case: Case, seed: int, original: Subject, plain64: Subject, subjects: dict[str, Subject]
) -> dict[str, str]:
    theirs = run(original, spec, case, seed, torch.float32)
    if theirs.error is not None:
        return {}
    exact = run(plain64, spec, case, seed, torch.float64)
    exacts = [] if exact.error is not None or spec["dtype"] == "half" else [exact]
    if not exacts or case.spread > 1:  # what the last digits of the inputs do
        exacts.append(run(original, spec, case, seed, torch.float32, 1e-6 if not exacts else 2e-7))
    told = {}
    for name, subject in subjects.items():
        if (name == "original" and case.name != "mild") or (name == "artefact" and case.mode == "event"):
            continue
        if name == "artefact" and spec["dropout"] and case.mode == "train":
            continue
        text = _verdict(run(subject, spec, case, seed, torch.float32), theirs, exacts, case)
        if text:
            told[case.name if name == "live" else f"{name}: {case.name}"] = text
    return told


def _verdict(ours: Results, theirs: Results, exacts: list[Results], case: Case) -> str:
    if ours.error is not None:
        named = isinstance(ours.error, AsapcError) or (case.mode == "load" and "state_dict" in str(ours.error))
        where = traceback.extract_tb(ours.error.__traceback__)[-1]
        text = f"{type(ours.error).__name__}: {' '.join(str(ours.error).split())[:160]}"
        return f"error: {text}" if named else f"raw error: {text} ({Path(where.filename).name}:{where.lineno})"
    worst, where = difference(ours, theirs, exacts, case)
    if worst > 1:
        return f"SILENT: {where} ({worst:.0f} times the budget{', warned' if ours.warned else ''})"
    return "warned" if ours.warned else ""


# --- shrinking, running ----------------------------------------------------------------------------


def shrunk(spec: Spec, seed: int, verdict: Verdict) -> tuple[Spec, Verdict]:
    """The plainest program that still fails in a case in which this one fails."""
    failing = {name.removeprefix("artefact: ") for name, text in verdict.cases.items()
               if text.startswith(verdict.outcome)}  # fmt: skip
    # The cases that cost least tell as much.
    chosen = set(sorted(failing)[:3]) or {"mild"}

    def fails(candidate: Spec) -> Verdict | None:
        found = judge(candidate, seed, lambda case: case.name in chosen)
        return found if found.outcome == verdict.outcome else None

    best, base = verdict, plain()
    for name in [*INGREDIENTS, *INGREDIENTS]:
        if spec[name] == base[name]:
            continue
        candidate = settled({**spec, name: base[name]})
        if candidate == spec:
            continue
        found = fails(candidate)
        if found is not None:
            spec, best = candidate, found
    return spec, best


def differing(spec: Spec) -> Spec:
    return {name: value for name, value in spec.items() if value != plain()[name]}


def show(spec: Spec, seed: int, shrink: bool) -> None:
    verdict = judge(spec, seed)
    if shrink and verdict.outcome in ("SILENT", "raw error"):
        spec, verdict = shrunk(spec, seed, verdict)
    print(f"# seed {seed}: {differing(spec)}\n{source_of(spec, seed)}")
    print(f"{verdict.outcome}: {verdict.text}  sites {verdict.sites}  {verdict.seconds:.1f} s")
    for name, text in verdict.cases.items():
        print(f"  {name}: {text}")


def _one(seed: int) -> tuple[int, Verdict]:
    torch.set_num_threads(1)
    return seed, judge(drawn(seed), seed)


def verdicts(seeds: range, jobs: int) -> Iterator[tuple[int, Verdict]]:
    if jobs == 1:
        yield from map(_one, seeds)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_one, seeds)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--one", type=int, help="print this program and all that became of it")
    parser.add_argument("--spec", help="the program of these ingredients, such as \"twist='training', steps=2\"")
    parser.add_argument("--shrink", action="store_true", help="the plainest program that fails alike")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="refusals, errors and ingredients, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.spec is not None:
        named = ast.parse(f"dict({arguments.spec})", mode="eval").body.keywords  # type: ignore[attr-defined]
        spec = {keyword.arg: ast.literal_eval(keyword.value) for keyword in named}
        show(settled(plain() | spec), arguments.one or 0, arguments.shrink)
        return
    if arguments.one is not None:
        show(drawn(arguments.one), arguments.one, arguments.shrink)
        return
    counts: Counter[str] = Counter()
    seconds = 0.0
    for seed, verdict in verdicts(range(arguments.seed, arguments.seed + arguments.count), arguments.jobs):
        counts[verdict.outcome] += 1
        counts["SILENT, at huge scores alone"] += verdict.huge_alone
        seconds += verdict.seconds
        loud = verdict.outcome in ("SILENT", "raw error", "broken")
        if loud or arguments.verbose:
            print(f"{seed} {verdict.outcome} {verdict.seconds:.1f} s  {verdict.text[:300]}", flush=True)
        if loud:
            failing = [n for n, t in verdict.cases.items() if t.startswith(verdict.outcome)]
            print(f"     in {failing}\n     {differing(drawn(seed))}", flush=True)
    print(f"{arguments.count} programs, {seconds / max(1, arguments.count):.1f} s each")
    for outcome, number in sorted(counts.items()):
        print(f"{number:5d}  {outcome}")
    sys.exit(1 if counts["SILENT"] or counts["raw error"] or counts["broken"] else 0)


if __name__ == "__main__":
    main()
