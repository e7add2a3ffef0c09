"""The models of benchmarks/released.py that need no checkout: from packages, and in the released styles.

Modules in the released styles come from the tests, where they are written for asapc.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
Attention = Callable[[Tensor, Tensor], Tensor]


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


class PaddedText(nn.Module):
    """A layer of padded texts, 20 half-steps, as it is first written; keep: [B, N]."""

    def __init__(self, attention: Attention, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        plan = self.attention(q @ k.mT / q.shape[-1] ** 0.5, keep)
        found: Tensor = self.out((plan @ v).transpose(1, 2).flatten(2))
        return found


def masked_logs(s: Tensor, keep: Tensor, both: bool) -> Tensor:
    """Queries and keys hidden in every half-step, or keys once, which brings them back."""
    shown = keep[:, None, :, None] & keep[:, None, None] if both else keep[:, None, None]
    s = s.masked_fill(~shown, -1e9)
    for step in range(20):
        s = s - s.logsumexp(-1 - step % 2, keepdim=True)
        s = s.masked_fill(~shown, -1e9) if both else s
    return s.exp()


def masked_divisions(s: Tensor, keep: Tensor) -> Tensor:
    plan = s.exp() * (keep[:, None, :, None] & keep[:, None, None])
    for step in range(20):
        plan = plan / (plan.sum(-1 - step % 2, keepdim=True) + 1e-8)
    return plan


class HiddenStates(nn.Module):
    """The last hidden states of a language model without its cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids, use_cache=False).last_hidden_state
        return found


def language_model(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A small model of transformers with hyper-connections, whole: four layers of width 128."""

    def make() -> nn.Module:
        import transformers

        sizes: dict[str, Any] = {
            "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "q_lora_rank": 32, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32,
            "pad_token_id": 0,
        }  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
        return HiddenStates(getattr(transformers, f"{kind}Model")(config))

    return make


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


class Mixer(nn.Module):
    """Streams mixed by a doubly-stochastic matrix a token: n x n by softmax over both axes."""

    def __init__(self, streams: int = 4, half_steps: int = 6, dim: int = 8) -> None:
        super().__init__()
        self.streams, self.half_steps = streams, half_steps
        self.to_mix = nn.Linear(dim * streams, streams * streams)

    def forward(self, x: Tensor) -> Tensor:
        mix = self.to_mix(x.flatten(-2)).unflatten(-1, (self.streams, self.streams))
        for step in range(self.half_steps):
            mix = mix.log_softmax(-2 if step % 2 == 0 else -1)
        return torch.einsum("btij,btjd->btid", mix.exp(), x)


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
        Row("transformers DeepSeek-V4, whole, small, 512 tokens", language_model(
            "DeepseekV4", head_dim=64, o_groups=2, o_lora_rank=32, sliding_window=64),
            words(512, "input_ids"), (1, 512), (2, 70), False),
        Row("transformers GLM-5-next, whole, small, 512 tokens", language_model(
            "Glm5NextText", intermediate_size=128, num_key_value_heads=4, kv_lora_rank=32,
            v_head_dim=32, qk_nope_head_dim=32, qk_head_dim=32, linear_head_dim=32, linear_num_heads=4),
            words(512, "input_ids"), (1, 512), (2, 70), False),
        Row("padded texts, queries and keys hidden, logarithms", lambda: PaddedText(
            partial(masked_logs, both=True)), masked(64, "keep"), (32, 64), (3, 57)),
        Row("padded texts, queries and keys hidden, divisions", lambda: PaddedText(masked_divisions),
            masked(64, "keep"), (32, 64), (3, 57), False),
        Row("padded texts, keys hidden once, logarithms", lambda: PaddedText(
            partial(masked_logs, both=False)), masked(64, "keep"), (32, 64), (3, 57)),
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
        Row("mixer of streams", Mixer, lambda b, n, g: {"x": normal(b, n, 4, 8, generator=g)},
            (4, 512), (3, 100)),
        Row("latent queries, cdist costs", plans.Latents, features(8), (8, 256), (3, 40)),
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
