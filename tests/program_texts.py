"""What the programs of programs.py are made of, and how their ingredients become source text."""

from __future__ import annotations

import linecache
import random
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
DIM = 8
VOCABULARY = 9


# --- what programs are made of ---------------------------------------------------------------------
# The first value of each is the plain one.

DIVIDED = ["torch.where(t > 0, p / t, 0.0)", "p / torch.where(t == 0, 1.0, t)", "torch.nan_to_num(p / t)"]
"""Divisions of a plan p by its sums t that are guarded otherwise than by a constant."""

INGREDIENTS: dict[str, list[Any]] = {
    "family": ["sinkhorn"] * 14 + ["differential", "matcher", "matcher", "mixer", "esp", "esp", "lot",
        "lot"],
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
    "mask": ["none", "none", "padded_bm", "active_bm", "active_b1m", "padded_b11m", "float_keep",
        "int_keep",
             "additive", "lengths", "tokens", "optional"],
    "way": ["fill", "fill", "where", "add", "add_where", "multiply", "both_sides"],
    "value": ["-1e9", "-1e9", "-1e4", "torch.finfo(s.dtype).min", "float('-inf')"],
    "place": ["before", "before", "before", "inside", "after_each"],
    "rows_zeroed": [False, False, False, True],
    "padding_shown": [False, False, False, True],
    "bias": ["none", "none", "none", "alibi", "relative", "token", "table", "distance", "cached",
        "learnt_alibi"],
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
    before: lines of the layer's forward.  top: lines of the module.
    event: what is done after compiling.  undo: of what is no program's own.
    """

    asks: str
    init: str = ""
    parent: str = ""
    before: str = ""
    top: str = ""
    event: str = ""
    factor: bool = False
    undo: str = ""


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
    "frozen": Twist("not self.q.weight.requires_grad",
        event="for p in net.parameters(): p.requires_grad_(False)"),
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
    "flat_heads": Twist("torch.where(s.abs().amax((-2, -1), keepdim=True) < 0.05, 0.0, 1.0)",
        factor=True),
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
    "buffer_counter": Twist("(1 + 0.1 * self.count)",
        init="self.register_buffer('count', torch.zeros(()))",
                            before="self.count.add_(1)", factor=True),
    "buffer_branch": Twist("int(self.count) > 3", init="self.register_buffer('count', torch.zeros(()))",
                           before="self.count += 1"),
    "decay": Twist("self.decayed", init="self.decayed = 1.0", before="self.decayed *= 0.97", factor=True),
    "average": Twist("self.mean", init="self.register_buffer('mean', torch.ones(()))",
                     before="self.mean.copy_(0.9 * self.mean + 0.1 * s.detach().abs().mean())",
                     factor=True),
    "history": Twist("len(self.history) > 3", init="self.history = []",
                     before="self.history.append(float(N))"),
    "global": Twist("SHARP", top="SHARP = False", event="space['SHARP'] = True",
                    undo="space['SHARP'] = False"),
    "registry": Twist("SETTINGS['sharp']", top="SETTINGS = {'sharp': False}",
                      event="space['SETTINGS']['sharp'] = True",
                      undo="space['SETTINGS']['sharp'] = False"),
    "closure": Twist("self.asked()", top="def asking(cell):\n    def asked():\n        return cell[0]\n"
                     "    return asked\n\n\nCELL = [False]", init="self.asked = asking(CELL)",
                     event="space['CELL'][0] = True", undo="space['CELL'][0] = False"),
    "attribute": Twist("self.kind == 'sharp'", init="self.kind = 'soft'", event="layer.kind = 'sharp'"),
    "private_attribute": Twist("self._sharp", init="self._sharp = False", event="layer._sharp = True"),
    "nested": Twist("self.config.sharp", init="self.config = types.SimpleNamespace(sharp=False)",
                    event="layer.config.sharp = True"),
    "class_attribute": Twist("self.SHARP", init="type(self).SHARP = False",
        event="type(layer).SHARP = True", undo="space['Attention'].SHARP = False"),
    "buffer_set": Twist("self.level", init="self.register_buffer('level', torch.ones(()))",
                        event="layer.level.fill_(1.7)", factor=True),
    "tensor_attribute": Twist("self.share", init="self.share = torch.ones(())",
                              event="layer.share = torch.tensor(1.7)", factor=True),
    "hidden_buffer": Twist("self.hidden",
        init="self.register_buffer('hidden', torch.ones(()), persistent=False)",
                           event="layer.hidden.mul_(1.7)", factor=True),
    # parameters
    "temperature": Twist("(1 / self.tau)", init="self.tau = nn.Parameter(torch.tensor(0.9))",
        factor=True),
    "log_temperature": Twist("self.log_tau.exp()",
                             init="self.log_tau = nn.Parameter(torch.zeros(H, 1, 1) + 0.1)", factor=True),
    "softplus": Twist("F.softplus(self.raw)", init="self.raw = nn.Parameter(torch.tensor(0.5))",
        factor=True),
    "gain": Twist("(1 + self.gain * 0.1)", init="self.gain = nn.Parameter(torch.ones(()))", factor=True),
    "fixed": Twist("self.tau.item()", init="self.tau = nn.Parameter(torch.tensor(0.9))", factor=True),
}  # fmt: skip
INGREDIENTS["twist"] += sorted(TWISTS)
INGREDIENTS["second"] += ["none"] * len(TWISTS) + sorted(TWISTS)
LATE: dict[str, Twist] = {  # drawn apart, so that the programs of a seed are what they were besides
    "longest": Twist("(self.longest / 16)", init="self.longest = 16", factor=True,
                     before="self.longest = max(self.longest, N)"),
    "context_variable": Twist("LEVEL.get()", factor=True, top="import contextvars\n"
                              "LEVEL = contextvars.ContextVar('level', default=1.0)\n",
                              event="space['LEVEL'].set(1.7)", undo="space['LEVEL'].set(1.0)"),
    "first_data": Twist("self.first", init="self.first = None", factor=True,
                        before="self.first = 1 / s.std() if self.first is None else self.first"),
    "first_size": Twist("(self.first or 1.0)", init="self.first = None", factor=True,
                        before="self.first = self.first or M ** -0.5"),
    "first_known": Twist("KNOWN.setdefault('level', float(x.std()) + 0.5)", factor=True, top="KNOWN = {}",
                         undo="space['KNOWN'].clear()"),
    "first_weight": Twist("self.first", init="self.first = None", factor=True,
                          before="self.first = self.first or 1 + self.q.weight.std().item()"),
}  # fmt: skip
INGREDIENTS["late"] = ["none"] * 8 * len(LATE) + sorted(LATE)  # most are refused for it


FREE = ("family", "form", "steps", "first", "mask", "way", "value", "twist", "parent")


def plain() -> Spec:
    return {name: values[0] for name, values in INGREDIENTS.items()}


def drawn(seed: int) -> Spec:
    """The ingredients of one program: most are plain, so that many programs are accepted."""
    chance = random.Random(seed)
    names = [name for name in INGREDIENTS if name != "late"]
    spec = {name: chance.choice(INGREDIENTS[name]) for name in names}
    for name in names:
        if name not in FREE and chance.random() < 0.45:
            spec[name] = INGREDIENTS[name][0]
    if chance.random() < 0.15:
        spec["guard"] = chance.choice(DIVIDED)
    spec["late"] = random.Random(f"late {seed}").choice(INGREDIENTS["late"])
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
    if s["family"] == "mixer" and "log_temperature" in (s["twist"], s["second"]):
        s.update(twist="temperature", second="none")  # a mixer has no heads
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
    if s["guard"] in DIVIDED and s["form"] not in ("plan", "softmax_plan"):
        s.update(guard="")
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
        s.update(returns="tensor" if s["returns"] in ("stash", "attribute") else s["returns"],
            hook="none")
    if s["second"] == s["twist"]:
        s.update(second="none")
    return s


# --- a program as text -----------------------------------------------------------------------------


def _indented(lines: list[str], depth: int) -> str:
    return "\n".join(" " * 4 * depth + part for line in lines for part in line.splitlines())


def twists_of(spec: Spec) -> list[Twist]:
    names = (spec["twist"], spec["second"], spec["late"])
    return [{**TWISTS, **LATE}[name] for name in names if name != "none"]


def parameters_of(spec: Spec) -> list[str]:
    """The names of what the model is called with."""
    if spec["mask"] == "tokens":
        return ["tokens"]
    names = ["x"] + (["memory"] if spec["cross"] else [])
    names += ["tokens"] if spec["bias"] == "token" else []
    mask = "lengths" if spec["mask"] == "lengths" else "mask"
    return names if spec["mask"] == "none" else [*names, mask]


def _signature(spec: Spec, names: list[str]) -> str:
    optional = spec["mask"] == "optional"
    return ", ".join(f"{name}=None" if name == "mask" and optional else name for name in names)


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
    return "\n".join([*tops, *outside, "", "", layer, "", "", _parent(spec), "", "", _make(spec, seed),
        ""])


def _hard_map(spec: Spec) -> str:
    if spec["gradient"] != "custom":
        return ""
    return (
        "\n\nclass Clipped(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, p):\n"
        "        return p.clone()\n\n    @staticmethod\n    def backward(ctx, g):\n"
        "        return 0.5 * g\n"
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
    signature = _signature(spec, names)
    body = {"matcher": _matcher, "mixer": _mixer, "esp": _esp, "lot": _lot}.get(spec["family"],
        _attention)
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
        "learnt_alibi": ([f"s = s - self.slope * {apart}"],
            ["self.slope = nn.Parameter(torch.rand(H, 1, 1))"]),
        "relative": ([f"s = s + self.rel({apart}.clamp(max=11)).permute(2, 0, 1)"],
            ["self.rel = nn.Embedding(12, H)"]),
        "token": (["s = s + self.by_token(tokens).transpose(1, 2)[:, :, None]"],
                  [f"self.by_token = nn.Embedding({VOCABULARY}, H)", "with torch.no_grad():",
                   "    self.by_token.weight[0] = -1e4"]),
        "table": (["s = s + self.table[:, :N, :M]"],
            ["self.table = nn.Parameter(torch.randn(H, 600, 600) * 0.3)"]),
        "distance": ([f"s = torch.where({apart} > 20, s - 2.0, s)"], []),
        "cached": (["if self._pos is None or self._pos.shape != (N, M):",
            f"    self._pos = {apart}.to(s.dtype)",
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
    form, damped = spec["form"], {"none": "", "constant": "0.8 * ",
        "parameter": "damping * "}[spec["damping"]]
    takes = spec["mask"] not in ("none", "additive")
    inside = _masking(spec) if spec["place"] == "inside" else []
    if spec["place"] == "after_each" and takes:
        inside = ["p = p * ~hide" if spec["way"] == "multiply" else "p = p.masked_fill(hide, 0.0)"]
    log, share = ("", "") if spec["marginals"] == "ones" else (" - log_n", " / n_here")
    count = {"ones": [], "shares": ["n_here = s.shape[dim]", "log_n = math.log(n_here)"],
             "active": ["n_here = (~hide).sum(-1, keepdim=True).to(s.dtype) "
                        "if dim == -2 else s.shape[-2]",
                        "log_n = torch.as_tensor(n_here).log()"]}[spec["marginals"]]  # fmt: skip
    g, start, end = spec["guard"], [], ["p = s.exp()"]
    total = f"(p.sum(dim, keepdim=True){'' if g in DIVIDED else g})"
    start = ["damping = 0.85"] if spec["damping"] == "parameter" else []  # or learnt, see _called
    if form == "lse":
        body = [f"s = s - {damped}(s.logsumexp(dim, keepdim=True)){log}"]
    elif form == "log_softmax":
        body = ["s = F.log_softmax(s, dim=dim)" + log] if not damped else [
            f"s = s - {damped}(s - F.log_softmax(s, dim=dim)){log}"]  # fmt: skip
    elif form == "potentials":
        start += ["f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])"]
        body = ["if dim == -1:",
            f"    f = f - {damped}(torch.logsumexp(s + f + g, -1, keepdim=True){_plus(log)})",
                "else:",
                    f"    g = g - {damped}(torch.logsumexp(s + f + g, -2, keepdim=True){_plus(log)})"]
        end = ["p = torch.exp(s + f + g)"]
    elif form == "scaling":
        ones = "torch.ones_like(kernel[..., :1]), torch.ones_like(kernel[..., :1, :])"
        start += [*_kernel(spec, "kernel"), f"a, b = {ones}"]
        numerator = "1.0" if not share else "1 / n_here"
        body = ["if dim == -1:", f"    a = {numerator} / ((kernel * b).sum(-1, keepdim=True){g})",
                "else:", f"    b = {numerator} / ((kernel * a).sum(-2, keepdim=True){g})"]  # fmt: skip
        end = ["p = a * kernel * b"]
    else:
        start += _kernel(spec, "p") if form == "plan" else [f"p = s.softmax({rows})"]
        if form == "softmax_plan" and takes and spec["way"] == "multiply":
            start += ["p = p * ~hide"]
        divided = [f"t = {total}", f"p = ({g}){share}"] if g in DIVIDED else [f"p = p / {total}{share}"]
        body, end = divided, []
    if spec["paired"]:
        body = [f"for dim in ({rows}, {columns}):", *_shift([*count, *inside, *body])]
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
        hide = ", hide" if takes else ""
        loop = [f"p = torch.utils.checkpoint.checkpoint(sinkhorn, s, steps{hide}, use_reentrant=False)"]
    loop = [*loop, *{"detach": ["p = p.detach()"],
        "custom": ["p = Clipped.apply(p)"]}.get(spec["gradient"], [])]
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
    scores = [*_scores(spec), *bias, *_twisted(spec, twists_of(spec)), *_cast(spec), *_hide(spec),
        *before]
    if spec["family"] == "differential":
        lines = [*_heads(spec), *scores, "kept = s", *loop, "first = p", "s = kept * 0.6", *loop,
                 "p = first - self.mix * p", *_finished(spec)]  # fmt: skip
        return lines, [*own, *init, "self.mix = nn.Parameter(torch.tensor(0.3))"]
    return [*_heads(spec), *scores, *loop, *_finished(spec)], [*own, *init]


def _matcher(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """A learnt dustbin beside scores of two sets; the log plan is returned."""
    hide = _hide(spec)
    lines = [
        "B, N, M = x.shape[0], x.shape[1], memory.shape[1]",
            "q, k = self.q(x)[:, None], self.k(memory)[:, None]",
        "s = q @ k.mT / 8**0.5", *_twisted(spec, twists_of(spec)), *_cast(spec), *hide,
        *([] if spec["way"] == "multiply" else _masking(spec)),
        "dust = self.dustbin.to(s.dtype)",
        "s = torch.cat([s, dust.expand(B, 1, N, 1)], -1)",
        "s = torch.cat([s, dust.expand(B, 1, 1, M + 1)], -2)",
        "norm = -math.log(N + M)",
        "log_mu = torch.full((N + 1,), norm, dtype=s.dtype)",
            "log_nu = torch.full((M + 1,), norm, dtype=s.dtype)",
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
        "B, N, M = x.shape[0], x.shape[1], x.shape[1]",
            "s = self.to_mix(x)[:, :, None].unflatten(-1, (4, 4))",
        "s = s[:, :, 0]", *_twisted(spec, twists_of(spec)), *_cast(spec), *loop, "p = p.to(x.dtype)",
        "out = (p @ x.unflatten(-1, (4, 2))).flatten(-2) * gain", *_returned(spec),
    ]  # fmt: skip
    return lines, ["self.to_mix = nn.Linear(8, 16)", *init]


def _esp(spec: Spec, loop: list[str]) -> tuple[list[str], list[str]]:
    """Expected sliced plans of soft sorts, weighed by their costs."""
    low = spec["value"] if spec["value"] in ("-1e4", "-1e9") else "-1e30"
    lines = [
        *_heads(spec), "s = q", *_twisted(spec, twists_of(spec)), "q = s.to(v.dtype)", "plans = []",
        *(["hide = mask[:, None, None, :]"] if spec["mask"] != "none" else []), "for points in (q, k):",
        "    points = points.transpose(-1, -2)",
        *([f"    points = points.masked_fill(hide, {low})"] if spec["mask"] != "none" else []),
        "    ordered = points.sort(dim=-1, descending=True).values",
        "    plan = -((ordered.unsqueeze(-1) - points.unsqueeze(-2)) ** 2) / self.temperature",
        *(["    plan = plan.masked_fill(hide.unsqueeze(-2), -1e30)"] if spec["mask"] != "none" else []),
        "    plan = plan.softmax(-1)",
        *([f"    plan = plan * (ordered > {low} / 10).unsqueeze(-1)"] if spec["mask"] != "none" else []),
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
        "def plan(s, log_a, log_b):",
            "    u, w = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])",
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
        *_heads(spec), "s = q", *_twisted(spec, twists_of(spec)), "q = s.to(v.dtype)", *_hide({**spec,
        "way": "fill"}),
        *plan, *masses, "sigma = torch.softmax(self.masses, -1)",
        "first = plan(0.7 * q @ self.pivots.mT, uniform, sigma.log())",
        "second = plan(0.7 * self.pivots @ k.mT, sigma.log(), uniform)",
        "out = count * ((first / sigma[:, None]) @ (second @ v))",
        "out = self.o(out.transpose(1, 2).flatten(2)) * gain",
        "return out" if spec["returns"] != "dict" else "return {'out': out}",
    ]  # fmt: skip
    return lines, ["self.pivots = nn.Parameter(torch.randn(H, 3, D))",
        "self.masses = nn.Parameter(torch.randn(H, 3))"]


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
    hooks = "def scaled(module, args, out):\n    return out * 1.3\n\n\n"
    hooks += "def shifted(module, args):\n    return (args[0] + 0.1,)\n\n\n"
    signature = _signature(spec, names)
    lines = ["x = self.embed(tokens)", "hidden = tokens == 0"] if spec["mask"] == "tokens" else []
    passed = ["hidden"] if spec["mask"] == "tokens" else names[1:]
    given = ", ".join(f"{n}={n}" if n == "mask" else n for n in passed)
    over = "[self.layers[0]] * 2" if spec["parent"] == "shared" else "self.layers"
    lines += [f"for i, layer in enumerate({over}):"]
    inner = [twist.parent for twist in twists_of(spec) if twist.parent]
    normed = "self.norm(x)" if spec["parent"] in ("block", "two") else "x"
    inner += [f"out = layer({normed}{', ' if given else ''}{given})"]
    if spec["family"] in ("matcher",):
        return hooks * (spec["hook"] != "none") + _net(init, signature, [*lines, *_shift(inner),
            "return out"])
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
    top = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    return (top + _indented(init, 2)
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
