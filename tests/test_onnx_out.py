"""Compiled models as ONNX files: written, run with onnxruntime, compared; refused where they differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_zoo import module
from steps import files, run_json
from steps import run as call
from torch import Tensor, nn
from torch.export import Dim

import asapc
from asapc.artifact import read_artifact
from asapc.errors import InputError
from asapc.formats.limits import MOST, demand, free_sizes, limits
from asapc.inputs.data import Batch
from asapc.inputs.onnx.settings import DOMAIN, OnnxSettings, read_record

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
import onnx
import onnx_ir
import onnxruntime
import small_text
from onnx import numpy_helper

from asapc.inputs.onnx import verify as verifying
from asapc.inputs.onnx.session import open_session, run
from asapc.onnx import bench
from asapc.onnx import export as exporting
from asapc.onnx.export import write_onnx
from asapc.onnx.half import in_half, rounding
from asapc.terminal.progress import make_progress

QUIET = make_progress(quiet=True)
# The first two layers share the exact loop, the last has a predicted dual.
RECIPE = (
    "operator: asap\nfeatures: ['norm']\nside: target\nc_transforms: 1\ndrop_attention_maps: true\n"
    "sites: {'layers.[01].mha': {operator: sinkhorn}}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small text teacher, and out/, which was compiled from it and has a verified model.onnx."""
    place = tmp_path_factory.mktemp("onnx")
    # Torch's exporter takes its time for every operator: short loops are enough.
    small_text.write_teacher(place / "teacher", n_layers=3, max_iter=2)
    small_text.write_data(place / "data.npz", 120)
    (place / "recipe.yaml").write_text(RECIPE)
    given = ("--data", place / "data.npz", "--recipe", place / "recipe.yaml")
    assert call("calibrate", place / "teacher", *given, "-o", place / "calibration", "-q") == 0
    emit = ("--calibration", place / "calibration", "-o", place / "out", "-q", "--emit", "onnx")
    assert call("compile", place / "teacher", *emit) == 0
    return place


@pytest.fixture
def out(folder, tmp_path):
    return Path(shutil.copytree(folder / "out", tmp_path / "out"))


@pytest.fixture
def translated(folder, monkeypatch):
    """Every program of this test is translated to the file of out/, without the exporter's seconds."""
    path = folder / "out" / "model.onnx"
    monkeypatch.setattr(exporting, "onnx_model", lambda *_: onnx_ir.load(path))


def test_every_operator_is_a_function_of_standard_operators(out):
    record = read_record(out)
    assert record is not None and record["largest"] <= record["tolerance"] == 1e-4
    assert len(record["shapes"]) == verifying.SHAPES
    lengths = {shape["length"] for shape in record["shapes"]}
    assert len(lengths) >= 3 and min(lengths) < 12 and {s["batch"] for s in record["shapes"]} >= {1, 2, 5}
    model = onnx.load(out / "model.onnx")
    calls = [node.op_type for node in model.graph.node if node.domain == DOMAIN]
    functions = {own.name: own for own in model.functions}
    assert set(calls) == set(functions) and record["functions"] == sorted(functions)
    assert {node.domain for own in model.functions for node in own.node} == {""}
    assert {node.domain for node in model.graph.node} == {DOMAIN, ""}
    assert calls.count("sinkhorn") == 2  # layers of one convention share their function
    assert "half_steps=2" in functions["sinkhorn"].doc_string
    kinds = [own.op_type for own in functions["asap"].node]
    products = [kind for kind in kinds if kind in ("MatMul", "Softmax", "Reshape")]
    assert products == ["MatMul", "Softmax", "MatMul"]  # the pattern that runtimes fuse
    text = (out / "model.onnx").read_bytes()
    assert str(Path(asapc.__file__).parent).encode() not in text  # no traces of this machine
    assert call("report", out, "-q", "--examples", 8, "--fast") == 0
    report = json.loads((out / "report.json").read_text())
    assert report["onnx"]["largest"] == record["largest"]
    assert "run with ONNX Runtime" in (out / "report.md").read_text()


def test_the_file_runs_on_padded_batches_of_any_length(out):
    """By hand, without the code that verified it."""
    model, session = asapc.load(out), open_session(out / "model.onnx")
    random = np.random.default_rng(3)
    for batch, length in ((7, 9), (2, 1)):
        ids = torch.from_numpy(random.integers(1, 40, (batch, length)))
        ids[0, length // 2 + 1 :] = 0
        with torch.no_grad():
            ours = model(ids)
        theirs = run(session, {"inputs": ids})
        assert float((ours[0] - theirs[0]).abs().max()) < 1e-5


def optimised(artifact: Path, place: Path) -> list[onnx.NodeProto]:
    """What onnxruntime makes of model.onnx: its functions written out, its patterns fused."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(place / "optimised.onnx"), 4
    onnxruntime.InferenceSession(artifact / "model.onnx", options, ["CPUExecutionProvider"])
    return list(onnx.load(place / "optimised.onnx").graph.node)


def test_float16_is_allowed_what_it_costs_in_pytorch_and_opset_23_has_attention(out, tmp_path):
    full = (out / "model.onnx").stat().st_size
    assert call("export", out, "-q", "--opset", 23, "--float16") == 0
    record = read_record(out)
    assert record is not None and 1e-5 < record["largest"] <= record["tolerance"] < 0.1
    model = onnx.load(out / "model.onnx")
    weights = [own for own in model.graph.initializer if own.data_type == onnx.TensorProto.FLOAT16]
    assert weights and (out / "model.onnx").stat().st_size < full
    c_transform = next(own for own in model.functions if own.name.startswith("asap"))
    assert [node.op_type for node in c_transform.node].count("Attention") == 1
    assert next(own.version for own in model.opset_import if own.domain == "") == 23
    assert [own.op_type for own in optimised(out, tmp_path)].count("Attention") == 1


class Pooled(nn.Module):
    """Masked mean pooling: a cast in the middle, positions that bound the length."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gain = nn.Linear(4, 4), gain
        self.register_buffer("positions", torch.randn(9, 4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        weight = keep.to(torch.float32)[..., None]
        mean = ((x + self.positions[: x.shape[1]]) * weight).sum(1) / weight.sum(1)
        return self.inner(mean) * self.gain


def pooled(gain: float) -> tuple[Any, list[str], list[Batch]]:
    x, keep = torch.randn(3, 7, 4), torch.arange(7) < torch.tensor([[3], [7], [1]])
    free = {0: Dim("batch"), 1: Dim("length", max=9)}
    with torch.no_grad():
        program = torch.export.export(Pooled(gain), (x, keep), dynamic_shapes=(free, free))
    return program, ["x", "keep"], [Batch((x, keep), {}, None, [0, 1, 2])]


def test_float16_keeps_positions_that_it_has_no_numbers_for():
    x = torch.randn(2, 9, 4)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=torch.float32) + (x == x).all(-1).sum() * 100
        return self.inner(x) + (place[:, None] * self.rates).sin()

    waves = module(forward, inner=nn.Linear(4, 4))
    waves.register_buffer("rates", torch.tensor([1.0, 0.3, 0.1, 0.03]))
    program = torch.export.export(waves, (x,), dynamic_shapes=({1: Dim("length")},))
    half = in_half(program, ["x"])
    long = torch.randn(2, 3000, 4)
    with torch.no_grad():
        (found,), exact = half.module(long.half()), waves(long)
    assert found.dtype == torch.float16 and float((found - exact).abs().max()) < 0.01


def test_float16_of_a_program_that_casts():
    program, names, examples = pooled(1.0)
    batch, _ = free_sizes(program.graph).values()
    demand(batch.node.shape_env, batch.node.expr, 2)
    half = in_half(program, names)
    assert [*map(limits, free_sizes(half.exported.graph).values())] == [(2, MOST), (0, 9)]
    products = [node for node in half.exported.graph.nodes if node.name.startswith("mul")]
    assert {node.meta["val"].dtype for node in products} == {torch.float16}
    assert 0 < rounding(program.module(), half, names, examples) < 0.01
    program, names, examples = pooled(1e6)
    with pytest.raises(InputError, match=r"float16 keeps the outputs.*inf"):
        rounding(program.module(), in_half(program, names), names, examples)


@pytest.mark.usefixtures("translated")
def test_a_file_that_computes_something_else_is_not_written(out, monkeypatch, capsys):
    before = files(out)
    write = exporting.save

    def spoilt(model: Any, path: Path) -> None:
        write(model, path)
        proto = onnx.load(path)
        weight = next(own for own in proto.graph.initializer if len(own.dims) == 2)
        array = numpy_helper.to_array(weight).copy()
        array[0] += 1.0
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))
        onnx.save(proto, path)

    monkeypatch.setattr(exporting, "save", spoilt)
    capsys.readouterr()
    assert call("export", out, "-q") == 4
    message = capsys.readouterr().err
    assert "outputs are those of the compiled program" in message and "first in " in message
    assert files(out) == before


@pytest.mark.usefixtures("translated")
def test_a_compile_whose_file_differs_writes_nothing(folder, tmp_path):
    arguments = ("compile", folder / "teacher", "--calibration", folder / "calibration")
    out = tmp_path / "out"
    assert call(*arguments, "-o", out, "-q", "--emit", "onnx", "--tolerance", 1e-12) == 4
    assert not out.exists()


@pytest.mark.usefixtures("translated")
def test_large_weights_lie_beside_the_file(out, monkeypatch):
    monkeypatch.setattr(exporting, "INLINE_BYTES", 100)
    assert call("export", out, "-q") == 0
    assert (out / "model.onnx.data").stat().st_size > 1000
    assert (out / "model.onnx").stat().st_size < 100_000
    session = open_session(out / "model.onnx")
    assert run(session, {"inputs": torch.ones(2, 7, dtype=torch.int64)})[0].shape == (2, 3)


OPS = torch.ops.asapc
THETA = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
PIVOTS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
MASS = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])
TAU = torch.tensor([0.5])
KERNEL = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(2))
FACTOR = [1.0, 1.0, 0.0, 0.0]


def predicted(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Any:
    features, weights = "sliced:2 coarse:3 lse raw gaussian", torch.ones(2, 11)
    dual = OPS.dual(q, k, keep, None, [THETA[:2], PIVOTS], weights, features, "source", 0.5, 2, True)
    return OPS.asap(q, k, v, keep, None, dual, None, 0.5, 2, FACTOR)


# The loop is in out/; other hybrids are made of their operators as the one here is.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "asap": predicted,
    "banded": lambda q, k, v, keep: OPS.banded_sinkhorn(q, k, v, keep, 0.5, 2, True, FACTOR, -2, 1),
    "plan": lambda q, k, v, keep: OPS.plan(
        q @ k.transpose(-1, -2), q[..., 0].log_softmax(-1), k[..., 0], 0.5, 3, True, FACTOR, True, None,
        None, "plan", "clamp", "plain", False, False, [0.7, 1.0],
    ),
    # Its constant decides in rows of small entries.
    "division": lambda q, k, v, keep: OPS.plan(
        (9 * q @ k.mT).softmax(-2), None, None, 1.0, 4, False, FACTOR, False, None, 1e-8, "plan", "add",
        shares=True, is_kernel=True,
    ),
    # The plans of lot, beside summary tokens and a convolution.
    "hybrid_lot": lambda q, k, v, keep: OPS.hybrid_lot(
        q, k, v, keep, None, 1, 0.5, KERNEL, None, PIVOTS, MASS, 0.5, 0.4, 2, True, 2, False, FACTOR
    ),
    # The exact coupling, and the branch on whether tokens tie, of which a mask would trace twice as much.
    "esp_hard": lambda q, k, v, keep: OPS.esp_hard(
        q[..., :2], k[..., :2], v, None, None, None, TAU, False, True, 1.0, "monotone", "shared"
    ),
    "esp_soft": lambda q, k, v, keep: OPS.esp_soft(
        q[..., :2], k[..., :2], v, keep, None, None, TAU, 0.1, True, False, 1.0, "monotone"
    ),
}


def test_operators_run_at_lengths_they_were_not_traced_at(tmp_path):
    """Against the operators in PyTorch, with padded examples; side by side in one file."""
    model = module(lambda self, q, k, v, keep: [call(q, k, v, keep) for call in CALLS.values()])

    def inputs(batch: int, length: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(length)
        q, k, v = (torch.randn(batch, 2, length, 4, generator=generator) for _ in range(3))
        active = torch.arange(batch)[:, None] % length + 1
        return q, k, v, torch.arange(length) < active

    batch, length = Dim("batch"), Dim("length")
    shapes = [{0: batch, 2: length}] * 3 + [{0: batch, 1: length}]
    with torch.no_grad():
        program = torch.export.export(model, inputs(3, 6), dynamic_shapes=tuple(shapes))
    path = tmp_path / "model.onnx"
    exporting.save(exporting.onnx_model(program, 18), path)
    exporting.check(path)
    session = open_session(path)
    names = [own.name for own in session.get_inputs()]
    for size in ((3, 6), (1, 2), (5, 11), (2, 1), (4, 9)):
        given = inputs(*size)
        if size == (4, 9):  # some tokens tie
            given = (*(t.round() for t in given[:2]), *given[2:])
        found = run(session, dict(zip(names, given, strict=True)))
        for name, ours, theirs in zip(CALLS, model(*given), found, strict=True):
            assert ours.shape == theirs.shape
            error = float((ours - theirs).abs().max())
            assert error < 1e-4 * max(1.0, float(ours.abs().max())), (name, size)


def test_names_of_inputs_and_outputs(tmp_path):
    """Names that the exporter gives to values of its own, an output that is an input, a text argument."""

    model = module(
        lambda self, x, linear, mode: {
            "logits": self.inner(x) + linear, "linear": linear, "again": linear},
        inner=nn.Linear(4, 4),
    )  # fmt: skip
    given = (torch.randn(3, 4), torch.randn(3, 4))
    program = torch.export.export(model, (*given, "mean"), dynamic_shapes=({0: Dim("b")},) * 2 + (None,))
    names, outputs = exporting.input_names(program), exporting.output_names(program)
    assert names == ["x", "linear"] and outputs == ["logits", "linear_", "again"]
    model = exporting.onnx_model(program, 18, (names, outputs))
    path = tmp_path / "model.onnx"
    exporting.save(model, path)
    exporting.check(path)
    session = open_session(path)
    assert [own.name for own in session.get_outputs()] == outputs
    found = run(session, dict(zip(names, given, strict=True)))
    wanted = program.module()(*given, "mean")
    for own, value in zip(found, wanted.values(), strict=True):
        torch.testing.assert_close(own, value)


def test_what_a_file_was_not_compiled_for_is_an_error(tmp_path):
    """Sizes beyond limits, a branch that goes the other way, and a soft mask where there was none."""

    def forward(self: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        OPS.holds(x.abs().max() > 9, False, "max > 9")
        scale = 2.0 if y.shape[1] < 12 else 1.0
        return scale * x[:, :7] @ y if x.shape[1] == 7 else y, x.sum(), OPS.kept_keys(y, -1e4)

    free = {0: Dim.AUTO, 1: Dim.AUTO}
    x, y = torch.ones(3, 7), torch.zeros(7, 9)
    exported = torch.export.export(module(forward), (x, y), dynamic_shapes=(free, free), strict=False)
    batch = next(node.meta["val"].shape[0] for node in exported.graph.nodes if node.name == "x")
    demand(batch.node.shape_env, batch.node.expr, 2)
    model = exporting.onnx_model(exported, 18)
    assert [[str(size) for size in value.shape] for value in model.graph.inputs] == [
        ["batch", "7"], ["7", "length"]
    ]  # fmt: skip
    assert model.metadata_props["sizes"] == "batch is 2 to any, length is 0 to 11"
    exporting.save(model, tmp_path / "model.onnx")
    exporting.check(tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    for given in ((x, y), (x[:2], y[:, :1])):
        found = run(session, dict(zip("xy", given, strict=True)))
        torch.testing.assert_close(found, [*module(forward)(*given)])
    for given in ((x[:1], y), (x, torch.zeros(7, 12)), (10 * x, y), (x, y - 2)):
        with pytest.raises(InputError, match="out of data bounds"):
            run(session, dict(zip("xy", given, strict=True)))


def test_an_output_that_is_no_tensor():
    model = module(lambda self, x: {"y": x + 1, "count": 3})
    program = torch.export.export(model, (torch.randn(3, 4),))
    with pytest.raises(InputError, match=r"outputs of the model are tensors.*count: int 3"):
        exporting.output_names(program)


def test_what_is_asked_for_wrongly(folder, capsys):
    out = folder / "out"
    cases = [
        ((out, "--format", "tflite"), "--format must be onnx"),
        ((out, "--opset", 12), "opset must be from 18 to 23"),
        ((out, "--tolerance", 0), "tolerance must lie between 0 and 1"),
        ((folder,), "not a compiled artefact"),
    ]
    for case, words in cases:
        assert call("export", *case) == 2
        assert words in capsys.readouterr().err


def test_what_cannot_be_written(folder):
    loaded = read_artifact(folder / "out", ("graph",))
    with pytest.raises(InputError, match="not seen"):
        write_onnx(loaded, [], OnnxSettings(), QUIET)
    loaded.manifest["capture"] = "module"
    with pytest.raises(InputError, match="one graph of the whole model"):
        write_onnx(loaded, [], OnnxSettings(), QUIET)


def test_differences_count_shapes_integers_and_nan():
    one = torch.tensor([1.0, 2.0])
    difference = verifying.difference_of
    assert difference([one], [one + 0.5]) == 0.25
    assert difference([one / 1e3], [one / 1e3 + 0.0005]) == pytest.approx(0.25)
    assert difference([one / 1e6], [one / 1e6 + 0.0005]) == pytest.approx(0.5)  # of the floor
    assert difference([one], [one[:1]]) == float("inf") == difference([one], [])
    assert difference([torch.tensor([1])], [torch.tensor([2])]) == float("inf")
    nan = torch.tensor([1.0, torch.nan])
    assert np.isnan(difference([one], [nan])) and difference([nan], [nan]) == 0.0
    assert not difference([one], [nan]) <= 1.0  # so that NaN never passes


@pytest.mark.usefixtures("translated")
def test_bench_times_the_file_and_its_teacher(out, monkeypatch, capsys):
    monkeypatch.setattr(bench, "onnx_model", exporting.onnx_model)
    timed = run_json(capsys, "bench", out, "--repeats", 1, "--no-torch-compile")["onnx"]
    assert timed["speedup"] == pytest.approx(timed["latency_teacher_ms"] / timed["latency_compiled_ms"])
    sizes = [timed[f"megabytes_{stage}"] for stage in ("teacher", "lossless", "compiled")]
    assert sizes == pytest.approx([(out / "model.onnx").stat().st_size / 1e6] * 3, rel=0.02)
    assert timed["threads"] == torch.get_num_threads() and timed["provider"] == "CPUExecutionProvider"


def test_a_missing_extra_is_named(folder, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "onnxruntime" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(InputError, match=r"pip install '\.\[onnx\]'"):
        open_session(folder / "model.onnx")
    assert call("export", folder / "out", "-q") == 2
