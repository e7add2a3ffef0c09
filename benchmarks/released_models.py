"""The models of benchmarks/released.py: from packages, in the released styles, from public checkouts.

Modules in the released styles come from the tests, where they are written for asapc. What a checkout
holds is imported from there and copied nowhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import attention_zoo as zoo  # noqa: E402
import plan_nets as plans  # noqa: E402
import test_differences as differences  # noqa: E402

Inputs = Callable[[int, int, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Row:
    """A model to be compiled.

    inputs: (examples, tokens, generator) -> a call's arguments by name.  size: examples and tokens of
    the call that is timed; other: those of another batch size and another length, None where the model
    has no other lengths.  scaled: whether four times its inputs is a call of the model.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    size: tuple[int, int]
    other: tuple[int, int | None]
    scaled: bool = True


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def features(dim: int, name: str = "x") -> Inputs:
    return lambda b, n, g: {name: normal(b, n, dim, generator=g)}


def padded(b: int, n: int, g: torch.Generator) -> Tensor:
    """[B, N], True on the first half of the tokens and on some of the others."""
    return torch.arange(n) < torch.randint(n // 2, n + 1, (b, 1), generator=g)


def masked(dim: int, name: str, number: bool = False, true_means_padded: bool = False) -> Inputs:
    def inputs(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
        keep = padded(b, n, g) != true_means_padded
        return {"x": normal(b, n, dim, generator=g), name: keep.float() if number else keep}

    return inputs


def words(vocabulary: int, ids: str, mask: str | None = None) -> Inputs:
    def inputs(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
        keep = padded(b, n, g).long()
        found = {ids: torch.randint(1, vocabulary, (b, n), generator=g) * keep}
        return found if mask is None else {**found, mask: keep}

    return inputs


def images(side: int, channels: int = 3, name: str = "img") -> Inputs:
    return lambda b, _, g: {name: normal(b, channels, side, side, generator=g)}


# Packages


class Transport(nn.Module):
    """SuperGlue's optimal transport, 100 iterations as it is configured, on scores."""

    def __init__(self, iterations: int = 100) -> None:
        super().__init__()
        from transformers.models.superglue.modeling_superglue import log_optimal_transport

        self.transport, self.iterations = log_optimal_transport, iterations
        self.bin = nn.Parameter(torch.tensor(1.0))

    def forward(self, scores: Tensor) -> Tensor:
        found: Tensor = self.transport(scores, self.bin, iterations=self.iterations)
        return found


class Streams(nn.Module):
    """A residual stream in four copies, mixed a token by hyper-connections."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        from hyper_connections.manifold_constrained_hyper_connections import (
            ManifoldConstrainedHyperConnections,
        )

        self.mix = ManifoldConstrainedHyperConnections(
            4, dim=dim, branch=nn.Linear(dim, dim), layer_index=0, log_domain_sinkhorn=True
        )
        for parameter in self.parameters():
            parameter.data += 0.5 * torch.randn_like(parameter)

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.arange(1.0, 5.0).repeat(x.shape[0])[:, None, None]
        found: Tensor = self.mix(x.repeat_interleave(4, 0) * scales)
        return found


class Apart(nn.Module):
    """K (b V) scaled by a: code that never forms its plan."""

    def __init__(self, dim: int = 64, half_steps: int = 10) -> None:
        super().__init__()
        self.qkv, self.half_steps = nn.Linear(dim, 3 * dim), half_steps

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        kernel = torch.exp(q @ k.mT / x.shape[-1] ** 0.5)
        b = torch.ones_like(kernel[..., 0, :])
        for _ in range(self.half_steps // 2):
            a = 1 / (kernel @ b[..., None])[..., 0]
            b = 1 / (kernel.mT @ a[..., None])[..., 0]
        return a[..., None] * (kernel @ (b[..., None] * v))


class Connections(nn.Module):
    """The same with DeepSeek-V4's own module."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as released

        self.mix = released.DeepseekV4HyperConnection(released.DeepseekV4Config(hidden_size=dim))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        streams = x[:, :, None] * torch.arange(1.0, 5.0)[:, None]
        post, comb, one = self.mix(streams)
        found: Tensor = (post[..., None] * one[..., None, :] + comb.mT @ streams).flatten(2)
        return found


class Matching(nn.Module):
    """pygmtools.sinkhorn, as called by a matcher."""

    def forward(self, scores: Tensor) -> Tensor:
        import pygmtools

        found: Tensor = pygmtools.sinkhorn(scores, max_iter=10, backend="pytorch")
        return found


def registered(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers with the attention of examples/transformers/ registered, sharp."""

    def make() -> nn.Module:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        from asapc.formats.user_code import UserCode

        path = ROOT / "examples" / "transformers" / "sinkhorn_attention.py"
        function = UserCode(f"{path}:sinkhorn", "attention").target
        transformers.AttentionInterface.register("sinkhorn", function)
        AttentionMaskInterface.register("sinkhorn", eager_mask)
        sizes: dict[str, Any] = {
            "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3,
            "intermediate_size": 256, "vocab_size": 200, "max_position_embeddings": 256,
            "attn_implementation": "sinkhorn",
        }  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
        task = "ForImageClassification" if kind == "ViT" else "ForSequenceClassification"
        return sharpened(getattr(transformers, kind + task)(config), ("query", "key", "q_proj", "k_proj"))

    return make


def sharpened(model: nn.Module, names: tuple[str, ...], gain: float = 3.0) -> nn.Module:
    """Weights under which attention is far from uniform."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and any(part in name for part in names):
                weight.copy_(gain / weight.shape[-1] ** 0.5 * torch.randn(weight.shape))
    return model


# The released styles


class Pivots(nn.Module):
    """LOT on pivots that are expanded over the batch, both features over the square root of masses, a
    trailing division by row sums, padding as a cost."""

    def __init__(self, learnt: bool = True, rows: bool = True, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.rows = heads, rows
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.pivots = nn.Parameter(torch.randn(heads, 16, dim // heads))
        self.logits = nn.Parameter(torch.randn(heads, 16)) if learnt else None

    def plan(self, scores: Tensor, log_mu: Tensor, log_nu: Tensor) -> Tensor:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for step in range(5):
            m = scores + f[..., None] + g[..., None, :]
            if step % 2 == 0:
                f = log_mu - m.logsumexp(-1) + f
            else:
                g = log_nu - m.logsumexp(-2) + g
        return (scores + f[..., None] + g[..., None, :]).exp()

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2).reshape(b * self.heads, n, -1)
            for part in parts
        )
        z = self.pivots[None].expand(b, -1, -1, -1).reshape(b * self.heads, 16, -1)
        if self.logits is None:
            mass = torch.full((b * self.heads, 16), 1 / 16)
        else:
            mass = self.logits.softmax(-1)[None].expand(b, -1, -1).reshape(b * self.heads, 16)
        one, other = q @ z.mT * q.shape[-1] ** -0.5, z @ k.mT * q.shape[-1] ** -0.5
        if keep is not None:
            hidden = (1 - keep)[:, None].expand(b, self.heads, n).reshape(b * self.heads, n)
            other = other - 1e6 * hidden[:, None]
        uniform = torch.full((b * self.heads, n), -math.log(n))
        first, second = self.plan(one, uniform, mass.log()), self.plan(other, mass.log(), uniform)
        left, right = first * mass.rsqrt()[:, None], mass.rsqrt()[..., None] * second
        y = left @ (right @ v)
        if self.rows:
            y = y / (left @ (right @ torch.ones(b * self.heads, n, 1))).clamp_min(1e-6)
        else:
            y = n * y
        found: Tensor = self.out(y.reshape(b, self.heads, n, -1).transpose(1, 2).flatten(2))
        return found


class Slices(zoo.SlicedSoft):
    """The mean of the slices, or weights of theirs."""

    def __init__(self, learnt: bool = False) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(2, 8)) if learnt else None

    def weights(self, plans: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if self.logits is None:
            return torch.full(plans.shape[:3], 1 / plans.shape[2]).to(plans)
        return self.logits.softmax(-1).expand(plans.shape[0], -1, -1)


def matcher(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"x": normal(b, n, 8, generator=g), "y": normal(b, n - 5, 8, generator=g)}


def clouds(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    shown, others = (torch.arange(size) < size - 9 * torch.arange(b)[:, None] for size in (n, n - 5))
    return {**matcher(b, n, g), "shown": shown, "others": others}


def masses(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    mu, nu = (normal(b, size, generator=g).softmax(-1) for size in (n, n - 7))
    nu[:, 3] = 0.0
    return {"scores": normal(b, n, n - 7, generator=g), "mu": mu, "nu": nu}


def scores(columns: int | None = None) -> Inputs:
    return lambda b, n, g: {"scores": 3 * normal(b, n, columns or n, generator=g)}


def vision(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from asapc.models import ARCHITECTURES

        return ARCHITECTURES[kind](
            image_size=28, patch_size=7, num_classes=10, dim=64, depth=1, heads=1, mlp_dim=64,
            channels=1, **options,
        )  # fmt: skip

    return make


def own_rows() -> list[Row]:
    """From packages, and in the released styles."""
    text, short = (4, 128), (8, 40)
    return [
        Row("transformers BERT", registered("Bert"), words(200, "input_ids", "attention_mask"), text,
            (3, 57), False),
        Row("transformers EuroBERT, grouped queries", registered(
            "EuroBert", num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            mask_token_id=3), words(200, "input_ids", "attention_mask"), text, (3, 57), False),
        Row("transformers ViT", registered("ViT", image_size=48, patch_size=8),
            images(48, name="pixel_values"), (8, 0), (3, None)),
        Row("transformers SuperGlue transport, 512 keypoints", Transport, scores(), (1, 512), (2, 300)),
        Row("hyper-connections mixer, 8192 tokens", Streams, features(64), (1, 8192), (2, 700)),
        Row("transformers DeepSeek-V4 hyper-connections, 8192 tokens", Connections, features(64),
            (1, 8192), (2, 700)),
        Row("pygmtools.sinkhorn", Matching, scores(), (8, 60), (3, 31)),
        Row("Sinkformers text attention", zoo.LogDomainMasked, lambda b, n, g: {
            "x": normal(b, n, 16, generator=g), **words(9, "ids")(b, n, g)}, text, (3, 57)),
        Row("Sinkformers ViT, T = 3", vision("sinkformer-vit", max_iter=3), images(28, 1), (32, 0),
            (3, None)),
        Row("set transformer pooled by one seed", plans.OneQuery, features(8), text, (3, 57)),
        Row("ESPFormer ViT", vision("espformer-vit"), images(28, 1), (32, 0), (3, None)),
        Row("ESP, cdist, weighed slices", zoo.SlicedSoft, features(16), short, (3, 31)),
        Row("ESP, padded", zoo.SlicedMasked, masked(16, "padded", true_means_padded=True), short,
            (3, 31)),
        Row("ESP, plain mean", Slices, features(16), short, (3, 31)),
        Row("ESP, learnt slice weights", lambda: Slices(True), features(16), short, (3, 31)),
        Row("LOT as released", Pivots, features(64), (4, 512), (3, 200)),
        Row("LOT as released, masked", Pivots, masked(64, "keep", number=True), (4, 512), (3, 200)),
        Row("LOT, uniform masses, factor N (LRA core)", lambda: Pivots(False, False), features(64),
            (4, 512), (3, 200)),
        Row("LOT, learnt masses, factor N (DeiT)", lambda: Pivots(True, False), features(64), (4, 512),
            (3, 200)),
        Row("matcher with a dustbin, log plan", plans.Matcher, matcher, (4, 128), (2, 70)),
        Row("matcher with padded clouds, log plan", lambda: plans.PaddedMatcher(200), clouds, (4, 128),
            (2, 70)),
        Row("scalings applied apart", Apart, features(64), text, (3, 57)),
        Row("kernel of positive features", plans.Products, features(8), (8, 128), (3, 57)),
        Row("mixer of streams", plans.Mixer, lambda b, n, g: {"x": normal(b, n, 4, 8, generator=g)},
            (4, 512), (3, 100)),
        Row("latent queries, cdist costs", plans.Latents, features(8), (8, 256), (3, 40)),
        Row("squared distances, one epsilon a head", plans.Expanded, features(8), (8, 256), (3, 40)),
        Row("masses as inputs, some zero", plans.Masses, masses, (8, 128), (3, 60), False),
        Row("exp domain with a constant", plans.Scaled, lambda b, n, g: {
            "scores": normal(b, n, 6, generator=g)}, (8, 128), (3, 60)),
        Row("damped updates", plans.Damped, lambda b, n, g: {"scores": normal(b, n, 6, generator=g)},
            (8, 128), (3, 60)),
        Row("differential, two Sinkhorn maps", differences.Layer, features(8), text, (3, 57)),
        Row("differential, 2 H heads", differences.Transformer, features(16), text, (3, 57)),
        Row("differential, two ESP maps", lambda: differences.Layer(differences.sliced), features(8),
            short, (3, 31)),
        Row("differential, softmax", lambda: differences.Layer(differences.softmax), features(8), text,
            (3, 57)),
    ]  # fmt: skip


# Public checkouts


@contextlib.contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """With the folders first on sys.path, and their modules forgotten afterwards: names repeat."""
    path, before = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if any(file.startswith(f"{folder}{os.sep}") for folder in folders):
                del sys.modules[name]


class Heads(nn.Module):
    """A core that takes queries, keys and values, in the layer that its repository puts around it."""

    def __init__(self, core: nn.Module, heads: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.core, self.heads = core, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        found: Tensor = self.out(self.core(q, k, v, mask).transpose(1, 2).flatten(2))
        return found


class TokensFirst(nn.Module):
    """Tokens before examples, as fairseq has them."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.core(x.transpose(0, 1))[0]
        return found


class Pooled(nn.Module):
    def __init__(self, core: nn.Module, seeds: int) -> None:
        super().__init__()
        self.core, self.seeds = core, nn.Parameter(torch.randn(1, seeds, 32))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.core(self.seeds.repeat(x.shape[0], 1, 1), x)
        return found


def repository_rows(folder: Path) -> list[Row]:
    """Of michaelsdr/sinkformers, Anon4142/ESPFormer and anonymous13761234/LOTFormer below `folder`,
    which are cloned under their own names."""
    folder = folder.resolve()
    config: Mapping[str, Any] = {"head_dim": 16, "num_head": 2}

    def module(place: str, name: str, build: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            import importlib

            root = folder / place.split("/")[0]
            with importable(folder / place, root):
                return sharpened(build(importlib.import_module(name)), ("ref",), 2.0)

        return make

    lot = lambda m: Heads(m.LinearSinkAttention(config))  # noqa: E731
    seeds = lambda count: lambda m: Pooled(  # noqa: E731
        m.MABSINK(32, 32, 32, 2, sinkhorn=m.SinkhornDistance(eps=1, max_iter=21, cost=m.dotmat)), count
    )
    picture = {"image_size": 28, "patch_size": 7, "num_classes": 10, "dim": 64, "depth": 1, "heads": 1,
               "mlp_dim": 64, "channels": 1}  # fmt: skip
    return [
        Row("sinkformers: text classifier", module(
            "sinkformers/nlp-tutorial/text-classification-transformer", "model",
            lambda m: m.TransformerEncoder(200, 256, 32, 2, 2, d_ff=32, n_it=5)),
            words(200, "inputs"), (4, 128), (3, 57), False),
        Row("sinkformers: ViT", module("sinkformers/vit-pytorch", "vit_pytorch.vit",
            lambda m: m.ViT_only_Att(**picture, max_iter=5)), images(28, 1), (32, 0), (3, None)),
        Row("sinkformers: set transformer, four seeds", module(
            "sinkformers/set_transformer", "set_transformer.modules", seeds(4)), features(32), (8, 128),
            (3, 57)),
        Row("sinkformers: set transformer, one seed", module(
            "sinkformers/set_transformer", "set_transformer.modules", seeds(1)), features(32), (8, 128),
            (3, 57)),
        Row("ESPFormer: MNIST ViT", module("ESPFormer/experiments/mnist", "vit",
            lambda m: m.ViT_only_Att(**picture)), images(28, 1), (32, 0), (3, None)),
        Row("ESPFormer: attention", module("ESPFormer/attentions", "attentions.esp",
            lambda m: m.EspAttention(32, heads=2, dim_head=16)), features(32), (8, 40), (3, 31)),
        Row("ESPFormer: differential softmax", module("ESPFormer/attentions", "attentions.dif",
            lambda m: m.MultiHeadDifAttention(32, 2, -1, 16)), features(32), (8, 40), (3, 31)),
        Row("LOTFormer: bert-glue", module("LOTFormer/bert-glue", "lot_attention", lot), features(32),
            (4, 512), (3, 200)),
        Row("LOTFormer: bert-glue, masked", module("LOTFormer/bert-glue", "lot_attention", lot),
            masked(32, "mask", number=True), (4, 512), (3, 200)),
        Row("LOTFormer: LRA", module("LOTFormer/LRA", "linear_sinkformer", lot), features(32), (4, 512),
            (3, 200)),
        Row("LOTFormer: retrieval", module("LOTFormer/retrieval", "linear_attention.core",
            lambda m: Heads(m.LotAttentionCore(2, 16))), features(32), (4, 512), (3, 200)),
        Row("LOTFormer: DeiT attention", module("LOTFormer/deit-imagenet", "models.lot_deit",
            lambda m: m.LotAttention(32, 2, 49)), features(32), (8, 51), (3, None)),
        Row("LOTFormer: translation", module(
            "LOTFormer/fairseq-nmt", "lot_fairseq.lot_multihead_attention",
            lambda m: TokensFirst(m.LotMultiheadAttention(32, 2))), features(32), (4, 256), (3, 100)),
    ]  # fmt: skip
