"""The built-in teachers: released names, released conventions, closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainable_loop import set_loop, trainable_sinkhorn_attention

from asapc.models import SinkformerText, SinkformerViT
from asapc.models.sinkhorn import PADDED_SCORE, sinkhorn_attention


def small_vit(**kwargs: object) -> SinkformerViT:
    torch.manual_seed(0)
    config = {
        "image_size": 8, "patch_size": 4, "num_classes": 3, "dim": 12, "depth": 2,
        "heads": 2, "mlp_dim": 16, "channels": 2, "dim_head": 5, "max_iter": 4,
    }  # fmt: skip
    return SinkformerViT(**{**config, **kwargs}).eval()  # type: ignore[arg-type]


def small_text(**kwargs: object) -> SinkformerText:
    torch.manual_seed(0)
    config = {
        "vocab_size": 20, "seq_len": 9, "d_model": 8, "n_layers": 2,
        "n_heads": 2, "d_ff": 16, "max_iter": 4,
    }  # fmt: skip
    return SinkformerText(**{**config, **kwargs}).eval()  # type: ignore[arg-type]


def scaled_plan(scores: Tensor, half_steps: int, keep: list[bool]) -> Tensor:
    """An independent loop: float64 scalings in the linear domain, padded keys left out.

    scores: [N, M].  Rows weigh 1/N, active keys 1/M; rows first.
    """
    rows, keys = scores.shape
    kernel = [
        [math.exp(scores[i, j].item()) if keep[j] else 0.0 for j in range(keys)] for i in range(rows)
    ]
    a, b = [1.0] * rows, [1.0] * keys
    for t in range(half_steps):
        if t % 2 == 0:
            a = [1 / rows / sum(kernel[i][j] * b[j] for j in range(keys)) for i in range(rows)]
        else:
            sums = [sum(kernel[i][j] * a[i] for i in range(rows)) for j in range(keys)]
            b = [1 / keys / total if total else 1.0 for total in sums]
    plan = [[a[i] * kernel[i][j] * b[j] for j in range(keys)] for i in range(rows)]
    return torch.tensor(plan, dtype=torch.float64)


@pytest.mark.parametrize("half_steps", [0, 1, 2, 21])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (4, 7), (7, 3)], ids=str)
def test_loop_equals_independent_scaling_loop(half_steps: int, shape: tuple[int, int]) -> None:
    scores = 2 * torch.randn(shape, dtype=torch.float64, generator=torch.manual_seed(1))
    expected = scaled_plan(scores, half_steps, [True] * shape[1]) * shape[1]
    actual = sinkhorn_attention(scores, half_steps, 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    cold = sinkhorn_attention(scores * 0.3, half_steps, 0.3)
    torch.testing.assert_close(cold, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("half_steps", [1, 10])
@pytest.mark.parametrize("active", [1, 3, 6], ids="{}_of_6_active".format)
def test_padded_keys_get_nothing_and_padded_queries_keep_mass(half_steps: int, active: int) -> None:
    scores = torch.randn(6, 6, dtype=torch.float64, generator=torch.manual_seed(2))
    keep = [j < active for j in range(6)]
    padded = torch.tensor([not k for k in keep])
    attention = sinkhorn_attention(scores.masked_fill(padded, PADDED_SCORE), half_steps, 1.0)
    expected = scaled_plan(scores, half_steps, keep) * 6
    torch.testing.assert_close(attention, expected, rtol=0, atol=1e-12)
    assert attention[:, padded].eq(0).all()
    if half_steps % 2 == 0:
        torch.testing.assert_close(attention.sum(), torch.tensor(float(active)).double())
    else:
        torch.testing.assert_close(attention.sum(-1), torch.ones(6).double())


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_vit_forward_equals_one_written_out(pool: str) -> None:
    """From all of its weights, under the names of released checkpoints."""
    model = small_vit(pool=pool, depth=1, eps=0.7)
    img = torch.randn(3, 2, 8, 8)
    logits, maps = model(img)
    w = model.state_dict()
    assert len(w) == 2 + 2 + 11 + 4 and len(small_vit().state_dict()) == len(w) + 11
    x = torch.stack([
        img[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].movedim(1, -1).flatten(1)
        for i in range(2) for j in range(2)
    ], dim=1)  # fmt: skip
    x = x @ w["to_patch_embedding.1.weight"].T + w["to_patch_embedding.1.bias"]
    x = torch.cat((w["cls_token"].repeat(3, 1, 1), x), 1) + w["pos_embedding"]
    layer = "transformer.layers.0."
    normed = torch.nn.functional.layer_norm(
        x, (12,), w[layer + "0.norm.weight"], w[layer + "0.norm.bias"]
    )
    qkv = normed @ w[layer + "0.fn.to_qkv.weight"].T  # q heads, then k heads, then v heads
    outs = []
    for h in range(2):
        q, k, v = (qkv[..., 10 * part + 5 * h : 10 * part + 5 * h + 5] for part in range(3))
        scores = (q @ k.mT / math.sqrt(5)).double() / 0.7
        plans = torch.stack([scaled_plan(s, 4, [True] * 5) for s in scores])
        torch.testing.assert_close(maps[0][:, h], (5 * plans).float(), rtol=0, atol=1e-5)
        outs.append((5 * plans).float() @ v)
    x = x + torch.cat(outs, -1) @ w[layer + "0.fn.to_out.0.weight"].T
    x = x + w[layer + "0.fn.to_out.0.bias"]
    normed = torch.nn.functional.layer_norm(
        x, (12,), w[layer + "1.norm.weight"], w[layer + "1.norm.bias"]
    )
    hidden = normed @ w[layer + "1.fn.net.0.weight"].T + w[layer + "1.fn.net.0.bias"]
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    x = x + hidden @ w[layer + "1.fn.net.3.weight"].T + w[layer + "1.fn.net.3.bias"]
    x = x.mean(1) if pool == "mean" else x[:, 0]
    x = torch.nn.functional.layer_norm(x, (12,), w["mlp_head.0.weight"], w["mlp_head.0.bias"])
    expected = x @ w["mlp_head.1.weight"].T + w["mlp_head.1.bias"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_text_forward_equals_one_written_out() -> None:
    """From all of its weights, under the names of released checkpoints."""
    model = small_text(n_layers=1, pad_id=3, num_classes=4)
    assert len(model.state_dict()) == 2 + 16 + 2 and model.pos_embedding.weight.shape == (10, 8)
    tokens = torch.tensor([[5, 7, 1, 9, 3, 3], [2, 3, 4, 19, 0, 6]])  # one pad in the middle
    output, maps = model(tokens)
    w = model.state_dict()
    rows = []
    for b in range(2):
        keep = [t != 3 for t in tokens[b].tolist()]
        positions = [j + 1 if keep[j] else 0 for j in range(6)]
        x = w["embedding.weight"][tokens[b]] + w["pos_embedding.weight"][positions]

        def linear(name: str, x: Tensor) -> Tensor:
            return x @ w[name + ".weight"].T + w[name + ".bias"]

        def norm(name: str, x: Tensor) -> Tensor:
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6) ** 0.5
            return x * w[name + ".weight"] + w[name + ".bias"]

        q, k, v = (linear(f"layers.0.mha.{n}", x) for n in ("WQ", "WK", "WV"))
        outs = []
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            plan = scaled_plan((q[:, part] @ k[:, part].T / 2).double(), 4, keep)
            torch.testing.assert_close(maps[0][b, h], (6 * plan).float(), rtol=0, atol=1e-5)
            outs.append((6 * plan).float() @ v[:, part])
        x = norm("layers.0.layernorm1", x + linear("layers.0.mha.linear", torch.cat(outs, -1)))
        feed = linear("layers.0.ffn.linear2", linear("layers.0.ffn.linear1", x).clamp(min=0))
        x = norm("layers.0.layernorm2", x + feed)
        rows.append(linear("linear", x.max(0).values).softmax(-1))
    torch.testing.assert_close(output, torch.stack(rows), rtol=0, atol=1e-5)


def test_image_size_may_be_a_pair() -> None:
    logits, maps = small_vit(image_size=[8, 4], patch_size=[4, 2])(torch.randn(2, 2, 8, 4))
    assert logits.shape == (2, 3) and maps[0].shape[-1] == 5


def test_shipped_digits_teacher() -> None:
    folder = Path(__file__).resolve().parents[1] / "asapc" / "demo_data" / "digits"
    weights = folder / "teacher" / "model.safetensors"
    assert weights.stat().st_size + (folder / "digits.npz").stat().st_size < 2_000_000
    import numpy as np

    from asapc.inputs.data import open_data, split_of
    from asapc.inputs.load import load_teacher

    model = load_teacher(str(folder / "teacher")).model
    data = open_data(str(folder / "digits.npz"), None)
    with np.load(folder / "digits.npz") as arrays:
        assert arrays["img"].dtype == np.float32 and arrays["img"].shape[1:] == (1, 8, 8)
    right = total = 0
    with torch.no_grad():
        for batch in data.batches(64, select=lambda h: split_of(h) == "gate"):
            right += int((model(**batch.kwargs)[0].argmax(-1) == batch.labels).sum())
            total += len(batch)
    assert total > 80 and right / total > 0.9


def test_shipped_code_teacher() -> None:
    """Loads, is small, has padded windows, and is right as often as README.md says, on a part of them."""
    from asapc.inputs.data import open_data
    from asapc.inputs.load import load_teacher

    folder = Path(__file__).resolve().parents[1] / "asapc" / "demo_data" / "code"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1_000_000
    model = load_teacher(str(folder / "teacher")).model
    batches = list(open_data(str(folder / "code.npz"), None).batches(2, limit=16))
    with torch.no_grad():
        usual = model(**batches[0].kwargs)[0]
        set_loop(model, trainable_sinkhorn_attention)  # the same map, ten times as fast
        found = [model(**batch.kwargs)[0] for batch in batches]
    torch.testing.assert_close(found[0], usual, rtol=1e-3, atol=1e-4)
    labels = torch.cat([batch.labels for batch in batches if batch.labels is not None])
    tokens = torch.cat([batch.kwargs["inputs"] for batch in batches])
    assert tokens.shape == (16, 896) and tokens.eq(0).any(-1).sum() > 8 and tokens.max() < 1024
    assert (torch.cat(found).argmax(-1) == labels).double().mean() > 0.85


@pytest.mark.parametrize("max_iter", [1, 2, 25])
@pytest.mark.parametrize("active", [16, 3], ids=["open", "padded"])
def test_the_trainable_loop_is_the_teachers_and_so_are_its_gradients(max_iter: int, active: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(2, 2, 16, 16, dtype=torch.float64, generator=generator)
    weights = torch.randn(2, 2, 16, 16, dtype=torch.float64, generator=generator)
    scores[..., active:] = PADDED_SCORE
    results, gradients = [], []
    for function in (sinkhorn_attention, trainable_sinkhorn_attention):
        leaf = scores.clone().requires_grad_()
        results.append(function(leaf, max_iter, 0.7))
        (results[-1] * weights).sum().backward()
        gradients.append(leaf.grad[..., :active])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
    single = trainable_sinkhorn_attention(scores.float(), max_iter, 0.7)
    assert float((single - results[0]).detach().abs().max()) < 1e-5
