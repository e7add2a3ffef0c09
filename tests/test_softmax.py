"""`from: softmax`: softmax layers are loops of one half-step, and become other operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_zoo import module
from torch import Tensor, nn
from torch.nn import functional

import asapc
from asapc.artifact import read_artifact
from asapc.errors import InputError, NoSiteError
from asapc.inputs.recipe import Recipe, load_recipe
from asapc.ir import Convention
from asapc.passes.capture import capture
from asapc.passes.fused import FUSED, fused_calls, spelt_out
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.observe import eager_calls
from asapc.passes.patches import compiled_modules
from asapc.passes.regions import Refusal
from asapc.stages import emit

DIM, HEADS = 16, 2


class Encoder(nn.Module):
    """[B, N] token ids, 0 is padding -> [B, 3].  fused: torch's attention, else written out; added: its
    mask is added to the scores."""

    def __init__(self, layers: int = 2, fused: bool = True, added: bool = False, **given: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, DIM)
        self.made = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, 3)
        self.fused, self.added, self.given = fused, added, given

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        if self.fused:
            mask = None if self.given else keep[:, None, None, :]
            if mask is not None and self.added:
                mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.given)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(~keep[:, None, None, :], float("-inf")).softmax(-1) @ v

    def forward(self, inputs: Tensor) -> Tensor:
        keep, x = inputs != 0, self.embed(inputs)
        for layer, (made, out) in enumerate(zip(self.made, self.out, strict=True)):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in made(x).chunk(3, -1))
            x = x + out(self.attend(layer, q, k, v, keep).transpose(1, 2).flatten(2))
        return self.head((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1))


def teacher(**given: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(**given).eval()


def tokens(examples: int = 160) -> np.ndarray:
    random = np.random.default_rng(0)
    inputs = random.integers(1, 40, (examples, 12))
    for row, length in enumerate(random.integers(4, 13, examples)):
        inputs[row, length:] = 0
    return inputs


def found_in(model: nn.Module, *args: Tensor, softmax: bool = True) -> Any:
    (program,) = capture(model, args, {}).programs
    return matched_program(replace(program, softmax=softmax))


@pytest.mark.parametrize("fused", [True, False])
def test_layers_are_sites_where_that_is_asked_for(fused: bool) -> None:
    model, inputs = teacher(fused=fused, layers=1), torch.from_numpy(tokens(3))
    _, left = found_in(model, inputs, softmax=False)
    assert [type(one) for one in left] == [Refusal]
    assert all("rows only" in one.reason for one in left)
    program, sites = found_in(model, inputs)
    for site in sites:
        rule = site.convention
        assert isinstance(rule, Convention)
        assert (rule.half_steps, rule.first_side, rule.mask) == (1, "row", "key")
        assert rule.score_multiplier == pytest.approx((DIM / HEADS) ** -0.5)
    torch.testing.assert_close(program.graph(inputs), model(inputs))


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("mask, scale", [
    ("none", None), ("bool", 0.3), ("every query its own", None), ("a filled bias", 0.3),
    ("a chosen bias", None),
])  # fmt: skip
def test_a_fused_call_spelt_out_is_the_same(mask: str, scale: float | None) -> None:
    class Net(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
            given = {
                "none": None, "bool": keep[:, None, None, :],
                "every query its own": keep[:, None, None, :] & keep[:, None, :, None],
                "a filled bias": (q[..., :1] - k[..., 0][:, :, None]).masked_fill(
                    ~keep[:, None, None, :], -math.inf
                ),
                "a chosen bias": torch.where(
                    keep[:, None, None], q[..., :1] - k[..., 0][:, :, None], LOWEST
                ),
            }[mask]  # fmt: skip
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=given, scale=scale)

    def inputs(batch: int, length: int) -> tuple[Tensor, ...]:
        q, k, v = torch.randn(3, batch, HEADS, length, 8, generator=torch.Generator().manual_seed(length))
        return q, k, v, torch.arange(length) < torch.arange(batch)[:, None] % length + 1

    (program,) = capture(Net(), inputs(3, 6), {}).programs
    (call,) = fused_calls(program)
    spelt, products = spelt_out(program, [call])
    assert FUSED not in {node.target for node in spelt.graph.graph.nodes} and list(products) == [call]
    assert spelt.untouched is program
    for size in ((3, 6), (1, 1), (4, 9)):
        given = inputs(*size)
        torch.testing.assert_close(spelt.graph(*given), Net()(*given))


class OfTorch(nn.Module):
    """[B, N] token ids -> [B, 3] by torch's own encoder, whose fast path calls none of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, DIM), nn.Linear(DIM, 3)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(inputs), src_key_padding_mask=inputs == 0)[:, 0])


def compiled(model: nn.Module, data: dict[str, np.ndarray], out: Path, **recipe: Any) -> nn.Module:
    """Whose layers all became the operator, the model left as it was; the artefact is in `out`."""
    recipe = {"from": "softmax", "pivots": 4, "max_examples": 32} | recipe
    done = asapc.compile(model, data, recipe=recipe, examples=20, out=out)
    sites = done.report.facts["sites"]
    assert len(sites) > 0 and {site["operator"] for site in sites} == {recipe["operator"]}
    assert not read_artifact(out, ()).manifest["live"]["left"]
    return done.model


def test_layers_of_torch_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OfTorch().eval()
    live = compiled(model, {"inputs": tokens()}, tmp_path / "out", operator="lot", depthwise=3)
    whole = asapc.load(tmp_path / "out")
    for length in (12, 7):
        inputs = torch.from_numpy(tokens(5)[:, :length])
        for grad in (True, False):  # with gradients torch's encoder calls its modules
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(live(inputs), whole(inputs), rtol=1e-4, atol=1e-5)
                assert (live(inputs) - model(inputs)).abs().max() > 1e-3


def test_multi_head_attention_of_torch() -> None:
    """With weights, where its scores are one operator with the mask."""

    torch.manual_seed(0)
    model = module(
        lambda self, x, padding: self.attention(
            x, x, x, key_padding_mask=padding, average_attn_weights=False),
        attention=nn.MultiheadAttention(DIM, HEADS, batch_first=True),
    ).eval()  # fmt: skip

    def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, length, DIM), torch.arange(length) > torch.arange(batch)[:, None] + 2

    program, (found,) = found_in(model, *inputs(3, 9))
    lifted = lift(program, [found]).graph
    for size in ((3, 9), (1, 4), (5, 12)):
        x, padding = inputs(*size)
        (ours, shown), (theirs, meant) = lifted(x, padding), model(x, padding)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(shown, meant)


class Inside(Encoder):
    """Whose attention is a module that returns its map, which nobody reads."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers, fused=False)
        self.blocks = nn.ModuleList(nn.ModuleList([Mapped()]) for _ in self.made)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        (block,) = self.blocks[layer]
        return block(q, k, v, keep)[0]


class Mapped(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None, :], -math.inf)
        weights = scores.softmax(-1)
        return weights @ v, weights


def patched(artifact: Path) -> list[str]:
    programs = read_artifact(artifact, ()).manifest["live"]["programs"]
    return [module["name"] for program in programs for module in program["modules"]]


def test_a_map_that_lacks_a_convolution_is_not_given(tmp_path: Path) -> None:
    """The module around the one that would return it is patched instead."""
    torch.manual_seed(0)
    recipe = {"operator": "lot", "depthwise": 3}
    live = compiled(Inside(1).eval(), {"inputs": tokens()}, tmp_path / "out", **recipe)
    assert patched(tmp_path / "out") == [""]
    whole, inputs = asapc.load(tmp_path / "out"), torch.from_numpy(tokens(5))
    torch.testing.assert_close(live(inputs), whole(inputs), rtol=1e-4, atol=1e-5)


def test_a_live_model_is_verified_with_the_layers_that_stay_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without_the_last(*given: Any) -> Any:
        modules, left = compiled_modules(*given)
        *kept, last = modules
        return kept, {**left, last.sites[0]: "as this test has it"}

    monkeypatch.setattr(emit, "compiled_modules", without_the_last)
    torch.manual_seed(0)
    recipe = {"from": "softmax", "operator": "lossless"}
    model = Inside(2).eval()
    asapc.compile(model, {"inputs": tokens()}, recipe=recipe, examples=20, out=tmp_path / "out")
    assert patched(tmp_path / "out") == ["blocks.0.0"]
    with pytest.warns(UserWarning, match="left to the model's own code.*as this test has it"):
        live = asapc.load(tmp_path / "out", model=model)
    assert isinstance(live, Inside)
    assert ["forward" in vars(block[0]) for block in live.blocks] == [True, False]


def test_examples_without_tokens_stay_as_the_teacher_has_them() -> None:
    """Fused attention gives 0 for them; written out with -inf it gives NaN, which no operator does."""
    inputs = tokens()
    inputs[::3] = 0
    recipe = {"from": "softmax", "operator": "lossless"}
    model, given = teacher(layers=1, added=True), torch.from_numpy(inputs[:4])
    done = asapc.compile(model, {"inputs": inputs}, recipe=recipe, examples=20)
    (site,) = done.report.facts["sites"]
    assert site["operator"] == "sinkhorn" and site["metrics"]["attention_rel_l2"] < 1e-5
    torch.testing.assert_close(done.model(given), model(given), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="outputs must be numbers on the data"):  # torch's fast path
        asapc.compile(OfTorch().eval(), {"inputs": inputs}, recipe=recipe)
    with pytest.raises(NoSiteError, match="gives NaN or infinity on the data"):
        asapc.compile(teacher(layers=1, fused=False), {"inputs": inputs}, recipe=recipe)


Masks = Callable[[Tensor, Tensor], Tensor]
MASKS_OF_HEADS: list[tuple[Masks, bool]] = [
    # [B, M], whether keys below 20 are kept: [B * H, 1, M], or without the 1; are heads alike?
    (lambda keep, low: keep.repeat_interleave(HEADS, 0)[:, None], True),
    (lambda keep, low: torch.zeros(keep.shape[0] * HEADS, keep.shape[1]).masked_fill(
        ~keep.repeat_interleave(HEADS, 0), -1e9).unsqueeze(1), True),
    (lambda keep, low: torch.stack([keep, low], 1).flatten(0, 1)[:, None], False),
    (lambda keep, low: keep.repeat(HEADS, 1)[:, None], False),
    (lambda keep, low: (
        low.repeat_interleave(HEADS, 0) | (torch.arange(keep.shape[0] * HEADS) % HEADS == 0)[:, None]
    )[:, None] & keep.repeat_interleave(HEADS, 0)[:, None], False),
]  # fmt: skip


def test_masks_that_may_differ_between_merged_heads_are_refused() -> None:
    """Though on the example's tokens, all below 20, they do not."""

    class Net(nn.Module):
        def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
            keep, attend, found = inputs != 0, functional.scaled_dot_product_attention, []
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for t in x.chunk(3, -1))
            for mask_of, _ in MASKS_OF_HEADS:
                mask = mask_of(keep, keep & (inputs < 20))
                found.append(attend(q, k, v, attn_mask=mask))
                scores = q @ k.transpose(-1, -2)
                if mask.is_floating_point():
                    found.append((scores + mask).softmax(-1) @ v)
                else:
                    found.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v)
            return torch.stack(found)

    inputs = torch.from_numpy(tokens(3)).clamp(max=19)
    x = torch.randn(3, 12, 3 * DIM, generator=torch.Generator().manual_seed(0))
    program, found = found_in(Net(), x, inputs)
    reasons = [one.reason if isinstance(one, Refusal) else "" for one in found]
    expected = [alike for _, alike in MASKS_OF_HEADS for _ in range(2)]
    assert [not reason for reason in reasons] == expected
    assert all("differs between heads" in reason for reason in reasons if reason)
    lifted = lift(program, [one for one in found if not isinstance(one, Refusal)]).graph
    x = torch.randn(5, 12, 3 * DIM, generator=torch.Generator().manual_seed(1))
    others = torch.from_numpy(tokens(5))
    torch.testing.assert_close(lifted(x, others), Net()(x, others))


KEY_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda keep: (1 - keep[:, None, None].float()).masked_fill(~keep[:, None, None], LOWEST),
    "multiplied, filled": lambda keep: ((1 - keep.float()) * -1e9).masked_fill(
        ~keep, -math.inf)[:, None, None],
    "rows": lambda keep: (1 - keep[:, None, None].expand(-1, 1, keep.shape[1], -1).float()).masked_fill(
        ~keep[:, None, None], LOWEST),
    "-2e4": lambda keep: torch.zeros(keep.shape).masked_fill(~keep, -2e4)[:, None, None],
    "-inf, last": lambda keep: torch.zeros(len(keep), 1, 1, keep.shape[1]).masked_fill(
        ~keep[:, None, None], -math.inf),
    "bool": lambda keep: keep[:, None, None],
}  # fmt: skip


def attention(mask_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Fused, of q, k and v [B, N, D] each, which are queries, keys and values side by side."""

    def forward(self: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in x.chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(keep))

    return module(forward)


def test_key_masks_of_any_making_are_one_mask() -> None:
    model = module(
        lambda self, x, keep: torch.stack([layer(x, keep) for layer in self.layers]),
        layers=nn.ModuleList(map(attention, KEY_MASKS.values())),
    )
    keep = torch.from_numpy(tokens(4)) != 0
    program, found = found_in(model, torch.randn(4, 12, 3 * DIM), keep)
    assert len(found) == len(KEY_MASKS)
    assert not any(isinstance(one, Refusal) or one.bias is not None or one.mask is None for one in found)
    x, keep = torch.randn(6, 12, 3 * DIM), torch.from_numpy(tokens(6)) != 0
    keep[0], keep[1] = True, torch.arange(12) == 5
    torch.testing.assert_close(lift(program, found).graph(x, keep), model(x, keep))


@pytest.mark.parametrize("name, padded", [("-inf, last", True), ("bool", False)])
def test_rows_without_keys_are_0_whatever_was_seen(name: str, padded: bool) -> None:
    keep = torch.ones(4, 12, dtype=torch.bool)
    keep[1:, 7:] = not padded
    model = attention(KEY_MASKS[name])
    program, (found,) = found_in(model, torch.randn(4, 12, 3 * DIM), keep)
    x = torch.randn(3, 12, 3 * DIM)
    keep = torch.tensor([[True], [False], [True]]).expand(3, 12)
    ours = lift(program, [found]).graph(x, keep)
    assert not ours[1].any() and ours[0].any()
    torch.testing.assert_close(ours, model(x, keep))


def test_the_lowest_number_of_another_dtype() -> None:
    def mask_of(keep: Tensor) -> Tensor:
        return torch.where(keep[:, None, None], torch.ones(1, 1, 12, 12).half(), LOWEST)

    given = torch.randn(3, 12, 3 * DIM).half(), torch.from_numpy(tokens(3)) != 0
    found_in(attention(mask_of), *given)  # where LOWEST is -inf


def test_a_hidden_number_that_is_a_size_is_left_in_the_mask() -> None:
    def forward(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = torch.where(keep[:, None, None], q[..., :1], -1e5 * k.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = torch.randn(3, 2, HEADS, 6, 8)
    _, (found,) = found_in(module(forward), q, k, v, torch.arange(6) < torch.tensor([[6], [4]]))
    assert isinstance(found, Refusal)


def test_the_reason_why_a_softmax_layer_is_none() -> None:
    shared = module(lambda self, q, k: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True))

    def reason(model: nn.Module, *args: Tensor) -> str:
        program, (refusal,) = found_in(model, *args)
        assert sum(node.target is FUSED for node in program.graph.graph.nodes) == 1  # as it was
        return str(refusal.reason)

    inputs = torch.from_numpy(tokens(3))
    assert "causal" in reason(teacher(layers=1, is_causal=True), inputs)
    assert "dropout" in reason(teacher(layers=1, dropout_p=0.1), inputs)
    assert "enable_gqa" in reason(shared, torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8))
    assert "one query" in reason(teacher(layers=1), inputs[:, :1])


def test_they_become_other_operators(tmp_path: Path) -> None:
    recipe = {"from": "softmax", "operator": "esp_hard", "max_examples": 32, "slices": 4}
    model, data = teacher(layers=1), {"inputs": tokens()}
    done = asapc.compile(model, data, recipe=recipe, examples=20, out=tmp_path / "out")
    (site,) = done.report.facts["sites"]
    assert site["operator"] == "esp_hard" and 0.01 < site["metrics"]["attention_rel_l2"] < 2
    inputs = torch.from_numpy(tokens(5))
    loaded = asapc.load(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(inputs), done.model(inputs), rtol=1e-4, atol=1e-5)
    assert load_recipe(tmp_path / "out" / "recipe.yaml").from_ == "softmax"


def test_where_too_much_is_lost_the_layer_stays() -> None:
    """The budget's 5 % of the maps is less than what random layers lose to four pivots."""
    recipe = {
        "from": "softmax", "candidates": [{"operator": "lot"}], "pivots": 4, "max_examples": 32,
        "selection_examples": 16,
    }  # fmt: skip
    done = asapc.compile(teacher(layers=1), {"inputs": tokens()}, recipe=recipe, examples=20)
    assert {site["operator"] for site in done.report.facts["sites"]} <= {"teacher", "sinkhorn"}


def test_they_are_left_alone_otherwise() -> None:
    with pytest.raises(NoSiteError, match="rows only"):
        asapc.compile(teacher(layers=1), {"inputs": tokens()})
    with pytest.raises(InputError, match="from"):
        Recipe.from_dict({"from": "linear"})


@pytest.mark.parametrize(
    ("dtype", "masked"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)]
)
def test_one_half_step_on_rows_is_torchs_attention(masked: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 7, 4, generator=generator).to(dtype) for _ in range(3))
    keep = torch.tensor([[True] * 7, [True] * 3 + [False] * 4, [True] + [False] * 6])
    keep = keep if masked else None
    found = torch.ops.asapc.sinkhorn(q, k, v, keep, None, 0.5, 1, True, [1.0, 1.0, 0.0, 0.0])
    given = None if keep is None else keep[:, None, None, :]
    wide = (x.double() for x in (q, k, v))
    exact = functional.scaled_dot_product_attention(*wide, attn_mask=given, scale=0.5).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact)


class Wrapper(nn.Module):
    """Hands what is set on it to its child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.add_module("child", child)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            setattr(self.child, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Any:
        return self.child(x)


class Sets(nn.Module):
    """Chooses its forward on the first call."""

    def forward(self, x: Tensor) -> Tensor:
        self.forward = self.fast
        return x + 1

    def fast(self, x: Tensor) -> Tensor:
        return x + 1


def test_calls_are_noted_whatever_a_module_does_with_its_forward() -> None:
    layer = nn.Linear(2, 2)
    own = layer.forward = functools.partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
    model = Wrapper(nn.Sequential(Sets(), layer))
    x = torch.randn(3, 2)
    expected = model(x)
    assert "forward" in vars(model.child[0])
    del vars(model.child[0])["forward"]
    calls = eager_calls(model, (x,), {})
    assert {name: len(seen) for name, seen in calls.items()} == {
        "": 1, "child": 1, "child.0": 1, "child.1": 1,
    }  # fmt: skip
    assert calls[""][0][0][0] is x
    assert "forward" not in vars(model) and "forward" not in vars(model.child)
    assert vars(layer)["forward"] is own and vars(model.child[0])["forward"] == model.child[0].fast
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(RuntimeError):
        eager_calls(model, (torch.randn(3, 5),), {})
    assert "forward" not in vars(model) and vars(layer)["forward"] is own
