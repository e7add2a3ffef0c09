"""What softmax layers become: fitted loops, rows of summary tokens that stay, convolutions on values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collected import take
from test_softmax import tokens
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

import asapc
from asapc.artifact import read_artifact
from asapc.calibration import distill
from asapc.calibration.checked import check_fit
from asapc.calibration.distill import Distiller, fit_depthwise, fit_loop
from asapc.calibration.stored import fit_document, fit_from, fit_part, load_calibration
from asapc.calibration.students import Maker, hybrid_of, maker_of
from asapc.cli import app
from asapc.errors import InputError
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, Distilled, OutputFactor, SiteTensors
from asapc.operators.catalogue import HYBRIDS, OPERATORS, reference_named
from asapc.operators.tokens import depthwise_values
from asapc.passes.candidates import fits_needed
from asapc.program.apply import apply_distilled
from asapc.program.calls import call_of, site_function
from asapc.report.tables import amortised_text

ops = torch.ops.asapc
BATCH, HEADS, TOKENS, DIM, WIDTH = 3, 2, 7, 4, 5
ROWS = [1.0, 1.0, 0.0, 0.0]
SOFTMAX = Convention(1, "row", 0.5, OutputFactor(queries=1))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks(batch: int, count: int) -> Tensor:
    """All tokens active, some, and the first one alone."""
    return torch.arange(count) < torch.tensor([count, max(1, count - 3), 1])[:batch, None]


def seen(
    batch: int = BATCH, count: int = TOKENS, masked: bool = False, biased: bool = False
) -> SiteTensors:
    q, k = normal(2, batch, HEADS, count, DIM)
    bias = normal(1, HEADS, count, count, seed=2) if biased else None
    keep = masks(batch, count) if masked else None
    return SiteTensors(q, k, keep, bias, None, normal(batch, HEADS, count, WIDTH, seed=1))


def softmax(t: SiteTensors, multiplier: float = 0.5) -> Tensor:
    """Softmax attention, written out."""
    scores = multiplier * t.q @ t.k.transpose(-1, -2)
    scores = scores if t.bias is None else scores + t.bias
    if t.keep is not None:
        scores = scores.masked_fill(~t.keep[:, None, None, :], -torch.inf)
    return scores.softmax(-1) @ t.v


def fitted(kind: str) -> Distilled:
    """With parameters of no particular fit, of rows that sum to 1."""
    settings: dict[str, dict[str, Any]] = {
        "lot": {
            "key_bias": None, "pivots": normal(HEADS, 3, DIM),
            "pivot_mass": torch.full((HEADS, 3), 1 / 3),
            "query_multiplier": 0.5, "key_multiplier": 0.5, "query_half_steps": 5, "queries_first": True,
            "key_half_steps": 5, "keys_first": True, "output_factor": [1.0, 0.0, 0.0, 1.0],
        },
        "esp_hard": {
            "slices": normal(HEADS, 3, DIM), "inverse_temperature": torch.ones(HEADS).double(),
            "squared_cost": False, "mean_cost": True, "output_factor": 1.0, "coupling": "monotone",
            "ties": "shared",
        },
        "fitted_sinkhorn": {
            "head_multiplier": torch.tensor([0.5, 2.0]), "score_multiplier": 0.5, "half_steps": 3,
            "rows_first": True, "output_factor": ROWS,
        },
    }  # fmt: skip
    return Distilled(kind, settings[kind])


def others(t: SiteTensors, count: int) -> SiteTensors:
    keep = None if t.keep is None else t.keep[:, count:]
    bias = None if t.bias is None else t.bias[..., count:, count:]
    q, k, v = (x[:, :, count:] for x in (t.q, t.k, t.v) if x is not None)
    return SiteTensors(q, k, keep, bias, None, v)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fitted_loop_has_an_epsilon_for_each_head(masked, dtype):
    t = seen(masked=masked, biased=True)
    own = torch.tensor([0.5, 2.0])
    alone = [
        ops.sinkhorn(t.q[:, h : h + 1], t.k[:, h : h + 1], t.v[:, h : h + 1], t.keep,
                     t.bias[:, h : h + 1] * own[h], 0.5 * float(own[h]), 3, True, ROWS)
        for h in range(HEADS)
    ]  # fmt: skip
    q, k, v, bias = (x.to(dtype) for x in (t.q, t.k, t.v, t.bias))
    settings = (t.keep, bias, own, 0.5, 3, True, ROWS)
    found = ops.fitted_sinkhorn(q, k, v, *settings)
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in settings)
    exact = reference_named("fitted_sinkhorn")(q.double(), k.double(), v.double(), *wide)
    honest = (reference_named("fitted_sinkhorn")(q, k, v, *settings) - exact).abs().max()
    assert found.dtype == dtype and (found - exact).abs().max() <= 2 * honest + 1e-12
    if dtype == torch.float64:
        torch.testing.assert_close(found, torch.cat(alone, 1))
    sums = ops.fitted_sinkhorn_attention(q, k, *settings).double().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize(("count", "masked"), [(1, False), (2, True), (TOKENS, False), (9, True)])
def test_summary_tokens_keep_softmax_and_the_others_are_among_themselves(kind, masked, count):
    t = seen(masked=masked, biased=kind == "fitted_sinkhorn")
    student = hybrid_of(fitted(kind), count, 0.5, None)
    found, exact = apply_distilled(student, t, t.v), softmax(t)
    torch.testing.assert_close(found[:, :, :count], exact[:, :, :count])
    if count < TOKENS:
        rest = others(t, count)
        among = apply_distilled(fitted(kind), rest, rest.v)
        if rest.keep is not None:
            among[~rest.keep.any(-1)] = 0.0
        torch.testing.assert_close(found[:, :, count:], among)
    whole = apply_distilled(student, t, None)
    torch.testing.assert_close(whole @ t.v, found)
    assert not whole[:, :, count:, :count].any()


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 1), (1, 2), (2, 4)], ids=str)
def test_hostile_shapes(kind, shape):
    """No example, no other token, one; values at masked keys are anything."""
    t = seen(*shape, masked=True)
    assert t.v is not None and t.keep is not None
    t = replace(t, v=t.v.masked_fill(~t.keep[:, None, :, None], torch.nan))
    student = hybrid_of(fitted(kind), 1, 0.5, normal(HEADS, WIDTH, 3))
    found = apply_distilled(student, t, t.v)
    assert found.shape == (*t.q.shape[:3], WIDTH) and found.isfinite().all()
    torch.testing.assert_close(found[:, :, :1], softmax(replace(t, v=t.v.nan_to_num()))[:, :, :1])
    assert apply_distilled(student, t, None).shape == (*t.q.shape[:3], shape[1])


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_convolution_is_added_to_the_other_tokens_and_has_no_map(kind):
    t, kernel = seen(masked=True), normal(HEADS, WIDTH, 3, seed=4)
    with_it, without = (hybrid_of(fitted(kind), 1, 0.5, x) for x in (kernel, None))
    rest = others(t, 1)
    added = depthwise_values(rest.v, kernel, rest.keep)
    found = apply_distilled(with_it, t, t.v) - apply_distilled(without, t, t.v)
    torch.testing.assert_close(found, functional.pad(added, (0, 0, 1, 0)))
    torch.testing.assert_close(apply_distilled(with_it, t, None), apply_distilled(without, t, None))


def pieces(count: int, target: Any) -> list[distill._Piece]:
    """Two of three examples, with targets that `target` makes."""
    found = []
    for seed in range(2):
        q, k, v = (normal(BATCH, HEADS, count, width, seed=seed * 3 + i).float() for i, width in
                   enumerate((DIM, DIM, WIDTH)))  # fmt: skip
        t = SiteTensors(q, k, masks(BATCH, count), None, None, v)
        found.append(distill._Piece(t, target(t)))
    return found


def loop_maker(half_steps: int) -> Maker:
    settings = {"operator": "fitted_sinkhorn", "half_steps": half_steps}
    return maker_of("site", SOFTMAX, settings, True)


def test_a_planted_multiplier_is_found():
    own = torch.tensor([0.6, 2.5])

    def target(t: SiteTensors) -> Tensor:
        return ops.fitted_sinkhorn(t.q, t.k, t.v, t.keep, None, own, 0.5, 3, True, ROWS)

    given = pieces(24, target)
    fit = fit_loop(given, given, loop_maker(3))
    torch.testing.assert_close(fit.distilled.settings["head_multiplier"], own, rtol=0.02, atol=0)
    assert fit.errors.sqrt().max() < 0.02
    same = fit_loop(pieces(24, softmax), given, loop_maker(1))
    assert same.distilled.settings["head_multiplier"].tolist() == [1, 1]  # the layer itself


def test_a_planted_convolution_is_found():
    kernel, inner = normal(HEADS, WIDTH, 3).float(), fitted("fitted_sinkhorn")

    def target(t: SiteTensors) -> Tensor:
        found = apply_distilled(hybrid_of(inner, 0, 0.5, kernel), t, t.v)
        padding = ~masks(BATCH, 24)[:, None, :, None]
        return found.masked_fill(padding, 3.0)  # what padded rows hold is not asked for

    torch.testing.assert_close(fit_depthwise(pieces(24, target), inner, 3), kernel, rtol=0, atol=2e-3)


def distiller(convention: Convention = SOFTMAX, **recipe: Any) -> Distiller:
    return Distiller("site", convention, Recipe.from_dict({"operator": "fitted_sinkhorn", **recipe}))


def test_what_cannot_be_is_refused():
    loop = Convention(6, "row", 0.5, OutputFactor(queries=1))
    with pytest.raises(InputError, match=r"half_steps must be odd.* rows.*got half_steps: 4"):
        distiller(half_steps=4)
    with pytest.raises(InputError, match=r"half_steps must be even.*columns"):
        distiller(loop)
    with pytest.raises(InputError, match=r"summary_tokens: 1` is for softmax layers.*loop of 6"):
        distiller(loop, half_steps=2, summary_tokens=1)
    with pytest.raises(InputError, match=r"depthwise: 3` is for softmax layers"):
        distiller(loop, half_steps=2, depthwise=3)
    t = seen()
    with pytest.raises(InputError, match=r"tokens to themselves.*got 4 queries and 7 keys"):
        take(distiller(summary_tokens=1), replace(t, q=t.q[:, :, :4]))
    with pytest.raises(InputError, match=r"besides the summary tokens.*got 7 tokens"):
        take(distiller(summary_tokens=7), t)
    with pytest.raises(InputError, match="leaves no map"):
        take(distiller(depthwise=3), replace(t, v=None))
    scaled = replace(SOFTMAX, output_factor=OutputFactor(0.5, queries=1))
    with pytest.raises(InputError, match=r"rows sum to 1.*0.5\*N"):
        take(distiller(scaled, summary_tokens=1), t)
    for key, value in (("depthwise", 4), ("depthwise", True), ("half_steps", 0), ("summary_tokens", -1)):
        with pytest.raises(InputError, match=key):
            Recipe.from_dict({key: value})


def forged(**recipe: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the tensors of a fit of a softmax layer."""
    one = distiller(**{"pivots": 3, "slices": 3, "max_examples": 8} | recipe)
    for seed in range(3):
        q, k = normal(2, BATCH, HEADS, 12, DIM, seed=seed).float()
        v = normal(BATCH, HEADS, 12, WIDTH, seed=seed + 3).float()
        take(one, SiteTensors(q, k, None, None, None, v))
    tensors, document = fit_part("site", one.calibration())
    return json.loads(json.dumps(document)), tensors


@pytest.mark.parametrize("operator", ["fitted_sinkhorn", "lot", "esp_hard"])
@pytest.mark.parametrize("beside", [{}, {"summary_tokens": 1, "depthwise": 3}], ids=["alone", "hybrid"])
def test_a_forged_fit_is_no_other_operator(operator, beside, monkeypatch):
    """Whatever does not follow from the convention and the settings is one message."""
    monkeypatch.setattr(distill, "STEPS", 2)
    document, tensors = forged(operator=operator, **beside)
    again = fit_from("site", document, tensors)
    assert {**json.loads(json.dumps(fit_document(again))), "seconds": again.fit_seconds} == document
    facts: list[tuple[str, Any]] = [
        ("arguments", {**document["arguments"], key: other})
        for key, value in document["arguments"].items() if value != "tensor"
        for other in (None, not value, float(value) if type(value) is int else -1)
        if json.dumps(other) != json.dumps(value)
    ]  # fmt: skip
    assert len(facts) > 9
    facts += [
        ("share", True), ("share", "x"), ("settings", {**document["settings"], "summary_tokens": 2}),
        ("settings", {**document["settings"], "depthwise": 5 if beside else 3, "summary_tokens": 0}),
        ("convention", {**document["convention"], "score_multiplier": 0.7}),
        ("convention", {**document["convention"], "first_side": "column"}),
    ]  # fmt: skip
    size = OPERATORS[operator].size
    facts.append(("settings", {**document["settings"], size: document["settings"][size] + 2}))
    for key, other in facts:
        if key == "convention" and operator != "fitted_sinkhorn" and not beside:
            continue  # the operator alone does not know all of it
        with pytest.raises((InputError, KeyError, TypeError, ValueError)):
            fit_from("site", {**document, key: other}, tensors)
    for name, tensor in tensors.items():
        if name.endswith(("pivot_mass", "inverse_temperature", "head_multiplier")):
            with pytest.raises(InputError, match=r"must not be negative, got -1"):
                fit_from("site", document, {**tensors, name: tensor * 0 - 1})


@pytest.mark.parametrize("width", [1, 4])
def test_a_convolution_is_as_wide_as_was_asked_for(width):
    document, tensors = forged(summary_tokens=1, depthwise=3)
    document["arguments"]["depthwise"], name = "tensor", "site.hybrid_fitted_sinkhorn.depthwise"
    with pytest.raises(InputError, match=rf"float32 \[2, any, 3\], got float32 \[2, 5, {width}\]"):
        fit_from("site", document, {**tensors, name: torch.zeros(HEADS, WIDTH, width)})
    fit = fit_from("site", document, {**tensors, name: torch.zeros(HEADS, 9, 3)})
    with pytest.raises(InputError, match=r"float32 \[2, 5, any\], got float32 \[2, 9, 3\]"):
        check_fit("site", fit.replacement, HEADS, DIM, WIDTH)


def test_labels_tell_candidates_apart():
    block = {"operator": ["lot", "fitted_sinkhorn"], "summary_tokens": [0, 1], "depthwise": [0, 3]}
    labels = [one.label() for one in Recipe.from_dict({"candidates": [block]}).alternatives()]
    assert len({*labels}) == 8
    assert "lot 32 summary_tokens 1 depthwise 3" in labels and "fitted_sinkhorn 3" in labels


FACTORY = """
import torch
from test_softmax import Encoder

def build():
    torch.manual_seed(0)
    return Encoder(layers=1)
"""


def test_from_calibrate_to_refresh(tmp_path, monkeypatch):
    """One layer, by the command line; what is read back from the artefact is what was fitted."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FACTORY)
    ids = tokens()
    np.savez("data.npz", inputs=ids, labels=ids[:, 0] % 3)
    Path("recipe.yaml").write_text(
        "{from: softmax, operator: fitted_sinkhorn, summary_tokens: 1, depthwise: 3, max_examples: 32}"
    )

    def run(*words: str) -> None:
        done = CliRunner().invoke(app, [*words, "--quiet"])
        assert done.exit_code == 0, done.output

    run("calibrate", "net.py:build", "--data", "data.npz", "--recipe", "recipe.yaml", "-o", "calib")
    (fits,) = load_calibration("calib").sites.values()
    run("compile", "net.py:build", "--calibration", "calib", "-o", "out")
    artifact = read_artifact("out")
    (name,) = artifact.site_names
    _, call = call_of(artifact.programs["graph"], name)
    assert call.operator.name == "hybrid_fitted_sinkhorn"
    t = seen(masked=True)
    t = SiteTensors(*(x.float() for x in (t.q, t.k)), t.keep, None, None, t.v.float()[..., :DIM])
    t = replace(t, q=torch.cat([t.q, t.q], -1), k=torch.cat([t.k, t.k], -1), v=torch.cat([t.v, t.v], -1))
    replacement = fits[0].replacement
    for values in (t.v, None):
        back = site_function(artifact.programs["graph"], name)(t, values)
        torch.testing.assert_close(back, apply_distilled(replacement, t, values))
    site = artifact.manifest["sites"][0]
    assert (site["operator"], site["half_steps"], site["summary_tokens"], site["depthwise"]) == (
        "fitted_sinkhorn", 3, 1, 3,
    )  # fmt: skip
    assert amortised_text(site) == "3 half-steps, 1 summary token, convolution of 3"
    run("refresh", "out", "--data", "data.npz", "--labels", "--epochs", "1", "-o", "refreshed")
    trained = read_artifact("refreshed").manifest["refresh"]["parameters"]
    assert sum("head_multiplier" in label or "depthwise" in label for label in trained) == 2
    with torch.no_grad():
        assert asapc.load("refreshed")(torch.from_numpy(ids[:5, :9])).shape == (5, 3)


@pytest.mark.parametrize("key", ["summary_tokens", "depthwise"])
def test_a_key_that_nothing_would_read_is_refused(key):
    for operator in ("auto", "asap", "lossless"):
        with pytest.raises(InputError, match=f"{key} is for lot, esp_hard, fitted_sinkhorn"):
            Recipe.from_dict({"operator": operator, key: 3})
    Recipe.from_dict({"operator": "auto", key: 3, "candidates": [{"operator": "lot"}]})
    Recipe.from_dict({"operator": "lossless", "sites": {"*": {"operator": "lot", key: 3}}})


def test_candidates_that_a_layer_cannot_become_are_left_out():
    """In a model of several kinds of layers; what is forced is refused."""
    loop, softmax = (Convention(half_steps, "row", 1.0) for half_steps in (8, 1))
    lot = {"operator": "lot"}
    blocks = [{"operator": "fitted_sinkhorn"}, {**lot, "summary_tokens": 1}, lot]
    recipe = Recipe.from_dict({"candidates": blocks})
    assert [fit.label() for fit, _ in fits_needed(loop, recipe)] == ["lot 32"]
    assert len(fits_needed(softmax, recipe)) == 3
    with pytest.raises(InputError, match="half_steps must be even"):
        Distiller("a", loop, Recipe.from_dict(blocks[0]))
