"""A compiled model where the teacher was: called, copied, moved, traced, trained, patched, quantised."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import json
import pickle
import shutil
import subprocess
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drop_in_nets
import pytest
import torch
from attention_zoo import module
from junk import resigned
from torch import Tensor, nn

import asapc
from asapc import pipeline
from asapc.api import teacher_of
from asapc.artifact import read_artifact, write_refreshed
from asapc.errors import InputError, VerificationError
from asapc.inputs.data import data_of
from asapc.inputs.recipe import Recipe
from asapc.measure.differences import largest_difference
from asapc.passes.candidates import Choice
from asapc.passes.capture import capture
from asapc.passes.match import match
from asapc.passes.module_programs import module_programs
from asapc.passes.observe import eager_calls
from asapc.passes.regions import Refusal
from asapc.passes.state import Observed
from asapc.program import live
from asapc.program.call import Call, described, known_of, parameters_of, rebuilt, types_at_hand
from asapc.program.code import GraphCode, flat_graph
from asapc.program.compiled import CompiledModel, Inside, OwnCodeWarning
from asapc.program.state import Reads
from asapc.stages.analyse import analysed_once, forward_signature
from asapc.terminal.progress import make_progress

RECIPE = {
    "operator": "asap", "side": "target", "c_transforms": 1, "features": ["coarse:4"], "batch_size": 16,
    "max_examples": 48, "selection_examples": 16, "sites": {"blocks.1": {"operator": "lossless"}},
}  # fmt: skip
FORMS = ("whole", "live")


def inputs(count: int = 5, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, length, 8, generator=generator)
    keep = torch.ones(count, length, dtype=torch.bool)
    keep[::2, 6:] = False
    return x, keep


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One layer amortised, one lossless, captured with a mask."""
    x, keep = inputs(120, 9)
    folder = tmp_path_factory.mktemp("drop_in")
    return compiled(drop_in_nets.net(), {"x": x, "keep": keep}, folder, RECIPE)


LOSSLESS = {"operator": "lossless", "batch_size": 16}


def compiled(
    model: nn.Module, data: dict[str, Tensor], folder: Path, recipe: dict[str, Any] = LOSSLESS
) -> Path:
    teacher, own, quiet = teacher_of(model), Recipe.from_dict(recipe), make_progress(quiet=True)
    source = data_of(data, forward_signature(teacher))
    analyse = analysed_once()
    pipeline.calibrate(teacher, source, folder / "calib", own, quiet, analyse=analyse)
    pipeline.compile(teacher, folder / "calib", folder / "out", own, source, quiet, analyse=analyse)
    return folder / "out"


@pytest.fixture(scope="module")
def loaded(out):
    """A compiled model rebuilt from the artefact, and one put into the teacher's own module."""
    return {"whole": asapc.load(out), "live": asapc.load(out, model=drop_in_nets.net())}


@pytest.fixture(params=FORMS)
def make(request, loaded):
    return lambda: copy.deepcopy(loaded[request.param])


@pytest.fixture(scope="module")
def expected(loaded):
    with torch.no_grad():
        return logits(loaded["whole"], *inputs())


def logits(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return model(*args, **kwargs)["logits"]


# The call


def test_it_is_called_as_the_teacher_is(make, expected):
    model, teacher, (x, keep) = make(), drop_in_nets.net(), inputs()
    assert not model.training
    own = inspect.signature(model.forward)
    assert list(own.parameters) == ["x", "keep", "sharp", "labels", "extra"]
    assert own.parameters["sharp"].default is False and own.parameters["keep"].default is None
    with torch.no_grad():
        exact = logits(teacher, x, keep)
        for args, kwargs in (
            ((x, keep), {}), ((x,), {"keep": keep}), ((), {"keep": keep, "x": x}),
            ((x, keep), {"sharp": False, "labels": None}),
        ):  # fmt: skip
            found = logits(model, *args, **kwargs)
            assert torch.equal(found, expected)
            assert float((found - exact).abs().max()) < 0.05
        one = logits(model, x[:1], keep[:1])  # any batch and length
        torch.testing.assert_close(one, expected[:1], rtol=1e-5, atol=1e-6)
        assert logits(model, x[:, :4], keep[:, :4]).shape == (5, 3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sharp": True}, "sharp was captured as False, but is True"),
        ({"sharp": 0}, "sharp was captured as False, but is 0"),
        ({"labels": torch.zeros(5).long()}, "labels was captured as None, but is a tensor"),
        ({"keep": None}, "keep was captured as a tensor, but is None"),
        ({"keep": torch.ones(5, 9)}, "keep was captured as a tensor of bool, but is torch.float32"),
        ({"keep": torch.ones(5, 8).bool()}, "keep: size 1 was captured as 9, but is 8"),
        ({"keep": torch.ones(5, 9, 1).bool()}, "keep was captured with 2 dimensions, but has 3"),
        ({"x": torch.ones(5, 9, 7)}, "x: size 2 was captured as 8, but is 7"),
        ({"more": 1}, "extra was captured as a dict of nothing, but is a dict of more"),
        ({"more": None}, "extra was captured as a dict of nothing, but is a dict of more"),
    ],
)
def test_another_call_is_refused_by_name(loaded, kwargs, message):
    x, keep = inputs()
    with pytest.raises(InputError) as raised:
        loaded["whole"](**{"x": x, "keep": keep, **kwargs})
    assert message in str(raised.value)


def test_python_refuses_what_no_forward_takes(make):
    model, (x, keep) = make(), inputs()
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        model(x, keep, x=x)
    with pytest.raises(TypeError, match="positional arguments"):
        model(x, keep, False)
    with pytest.raises(TypeError, match="missing"):
        model(keep=keep)
    if isinstance(model, CompiledModel):
        with pytest.raises(InputError, match="keep was captured as a tensor, but is missing"):
            model(x)


def test_outputs_keep_their_structure(make):
    model = make()
    found = model(*inputs())
    assert type(found) is drop_in_nets.Output and found.loss is None
    assert type(found.hidden) is tuple and len(found.hidden) == 2
    if isinstance(model, CompiledModel):  # in a process that does not have the class
        model.forward.types = {}
        plain = model(*inputs())
        assert type(plain) is dict and list(plain) == ["logits", "hidden"]
        assert torch.equal(plain["logits"], found.logits)


# Copies


def test_it_is_copied_whole(make, expected):
    model, (x, keep) = make(), inputs()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        pickle.loads(pickle.dumps(model)), copy.deepcopy(model),
        torch.load(buffer, weights_only=False), copy.deepcopy(pickle.loads(pickle.dumps(model))),
    ]  # fmt: skip
    with torch.no_grad():
        for own in copies:
            assert torch.equal(logits(own, x, keep), expected) and not own.training
            for parameter in own.parameters():
                parameter.zero_()
            assert not logits(own, x, keep).any()  # it reads its own weights
        assert torch.equal(logits(model, x, keep), expected)


def test_another_process_reads_it_without_the_teachers_code(out, loaded, expected, tmp_path):
    """Pickled, and from its folder, which was moved."""
    x, keep = inputs()
    torch.save((loaded["whole"], x, keep, expected), tmp_path / "model.pt")
    shutil.copytree(out, tmp_path / "moved")
    code = (
        "import sys, torch, asapc\n"
        "pickled, x, keep, expected = torch.load('model.pt', weights_only=False)\n"
        "for model in (pickled, asapc.load('moved')):\n"
        "    assert torch.equal(model(x, keep=keep)['logits'], expected)\n"
        "assert 'drop_in_nets' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


# Dtypes and devices


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_it_moves_to_another_dtype(make, dtype, expected):
    x, keep = inputs()
    model = make().to(dtype)
    with torch.no_grad():
        found = logits(model, x.to(dtype), keep)
    assert found.dtype == dtype
    budget = 20 * torch.finfo(dtype).eps + 1e-6
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=budget)
    fitted = [t.dtype for name, t in model.named_buffers() if "asapc." in name]
    assert fitted and set(fitted) == {torch.float32}  # no fit is rounded
    back = model.float()
    with torch.no_grad():
        torch.testing.assert_close(logits(back, x, keep), expected, rtol=0, atol=0.05)


def test_its_own_constants_follow_it():
    """A trace says in which dtype, and on which device, forward made its tensors."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.full((3,), -1e9, dtype=torch.float32)
        return x * self.weight + torch.where(x > 0, torch.zeros(3), hidden)

    model = module(forward, weight=nn.Parameter(torch.ones(3)))
    exported = torch.export.export(model, (torch.ones(3),)).module()
    code = GraphCode(flat_graph(exported), torch.float32)
    x = torch.tensor([1.0, 2.0, -1.0])
    assert code(model, [x])[0].tolist() == model(x).tolist()
    (half,) = code(model.half(), [x.half()])
    assert half.dtype == torch.float16 and half.tolist() == [1.0, 2.0, torch.finfo(torch.float16).min]
    (meta,) = code(model.to("meta"), [x.half().to("meta")])
    assert meta.device.type == "meta" and meta.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_positions_keep_their_dtype(dtype):
    """Of which bfloat16 holds those up to 256."""

    def forward(self: Any, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[0]).float()[:, None] * self.speed
        return x * angles.cos().to(x.dtype) + self.table[(angles[:, 0] * 8).long()]

    model = module(forward, table=nn.Parameter(torch.randn(800, 3)))
    model.register_buffer("speed", torch.tensor([0.25, 0.5, 2.0]))
    exported = torch.export.export(model, (torch.ones(400, 3),)).module()
    code = copy.deepcopy(GraphCode(flat_graph(exported), torch.float32))
    x = torch.randn(400, 3).to(dtype)
    (ours,) = code(model.to(dtype), [x])
    torch.testing.assert_close(ours, model(x), rtol=0, atol=1e-6)


def test_it_runs_in_inference_mode_and_under_autocast(make, expected):
    with torch.inference_mode():
        torch.testing.assert_close(logits(make(), *inputs()), expected, rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert float((logits(make(), *inputs()).float() - expected).abs().max()) < 0.1


# Compilers, training


def test_torch_compile_follows_it(make, expected):
    torch._dynamo.reset()
    x, keep = inputs()
    with torch.no_grad():
        found = torch.compile(make(), backend="aot_eager", fullgraph=True)(x, keep=keep)["logits"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_torch_export_takes_it(make, expected):
    x, keep = inputs()
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: auto, 1: auto}, "keep": {0: auto, 1: auto}}
    exported = torch.export.export(make(), (x,), {"keep": keep}, dynamic_shapes=shapes, strict=False)
    with torch.no_grad():
        found = exported.module()(x[:3], keep=keep[:3])["logits"]
    torch.testing.assert_close(found, expected[:3], rtol=1e-5, atol=1e-6)


def test_it_trains_under_ddp(make, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = make().train()
        wrapped = nn.parallel.DistributedDataParallel(model)
        x, keep = inputs()
        wrapped(x, keep=keep)["logits"].square().sum().backward()
        # Before its process group: as the group's last owner it would wait for a thread of the group,
        # which may wait for the interpreter that is waiting for it.
        del wrapped
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
    assert model.training and all(p.grad is not None for p in model.parameters())
    assert not model.eval().training


def test_it_trains_under_checkpointing(make):
    """Which recomputes what is saved for the backward pass, and lets it be read once."""
    model, (x, keep) = make().train(), inputs()
    plain = torch.autograd.grad(logits(model, x, keep).square().sum(), list(model.parameters()))
    found = torch.utils.checkpoint.checkpoint(logits, model, x, keep, use_reentrant=False)
    again = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_the_state_goes_round(make, expected):
    x, keep = inputs()
    model = make()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    teacher = drop_in_nets.net().state_dict()
    assert set(teacher) <= set(state)  # the teacher's names, and what the operators were fitted with
    assert all("asapc." in name for name in set(state) - set(teacher)) and len(state) > len(teacher)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
        assert not torch.equal(logits(model, x, keep), expected)
        model.load_state_dict(state)
        assert torch.equal(logits(model, x, keep), expected)


# The live model


@pytest.fixture
def patched(loaded):
    return copy.deepcopy(loaded["live"]), *inputs()


def test_the_model_stays_the_object_it_was(out, expected):
    model = drop_in_nets.net()
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    model.blocks[0].to_q.register_forward_hook(lambda *_: seen.append("to_q"))
    layers = dict(model.named_modules())
    loaded = asapc.load(out, model=model)
    assert loaded is model and type(model) is drop_in_nets.Net
    assert type(model.blocks[0]) is drop_in_nets.Attention and "forward" in vars(model.blocks[0])
    assert all(dict(model.named_modules())[name] is own for name, own in layers.items())
    x, keep = inputs()
    assert torch.equal(logits(model, x, keep), expected) and seen == ["to_q", "block"]
    asapc.load(out, model=model)  # again: patched anew, not twice
    assert torch.equal(logits(model, x, keep), expected)
    live.remove(model)
    assert torch.equal(logits(model, x, keep), logits(drop_in_nets.net(), x, keep))
    assert list(model.state_dict()) == list(drop_in_nets.net().state_dict())


class Wrapped(nn.Module):
    """As adapters replace a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale


def test_replaced_layers_take_effect(out, patched):
    """Values that are all zero give what the bias of the last layer gives."""
    model, x, keep = patched
    block = model.blocks[0]
    block.to_v = Wrapped(block.to_v)
    with torch.no_grad():
        torch.testing.assert_close(block(x, keep=keep, sharp=False), block.out.bias.expand(5, 9, 8))
    logits(model, x, keep).sum().backward()
    assert block.to_v.scale.grad is not None and bool(block.to_v.scale.grad)


@pytest.mark.filterwarnings("ignore")  # torch's own, of its quantisation
def test_dynamic_quantisation_finds_the_layers(expected, patched):
    model, x, keep = patched
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert "quantized" in type(quantised.blocks[0].to_q).__module__
    with torch.no_grad():
        found = logits(quantised, x, keep)
    assert 0 < float((found - expected).abs().max()) < 0.1
    assert "forward" in vars(quantised.blocks[0]) and type(model.blocks[0].to_q) is nn.Linear


def test_another_call_runs_the_modules_own_code_and_says_so_once(expected, patched):
    model, x, keep = patched
    teacher = drop_in_nets.net()
    with torch.no_grad():
        with pytest.warns(OwnCodeWarning) as warned:
            found = model(x, keep, sharp=True)
        assert torch.equal(found.logits, teacher(x, keep, sharp=True).logits)
        texts = [str(own.message) for own in warned]
        assert len(texts) == 2 and "blocks.0" in texts[0] and "sharp was captured as False" in texts[0]
        with warnings.catch_warnings(action="error"):
            model(x, keep, sharp=True)
            assert torch.equal(logits(model, x, keep), expected)
        with pytest.warns(OwnCodeWarning, match="keep was captured as a tensor, but is None"):
            assert torch.equal(logits(model, x), logits(teacher, x))


def test_the_artefacts_weights_are_loaded(out, tmp_path, expected):
    x, keep = inputs()
    other = drop_in_nets.Net().eval()  # other random weights
    assert torch.equal(logits(asapc.load(out, model=lambda: other), x, keep), expected)
    with pytest.raises(InputError, match=r"must be the one that was compiled.*blocks\.0"):
        asapc.load(out, model=drop_in_nets.Net(width=4))
    artifact = read_artifact(out)
    trained = {(0, "head.weight"): torch.zeros(3, 8),
               (0, "asapc_site_0_target_coefficients"): torch.zeros_like(
                   artifact.programs["graph"][0].graph.asapc_site_0_target_coefficients)}  # fmt: skip
    (tmp_path / "new").mkdir()
    write_refreshed(tmp_path / "new", artifact, artifact.manifest, trained, [])
    model = asapc.load(tmp_path / "new", model=drop_in_nets.net())
    assert torch.equal(logits(model, x, keep), model.head.bias.expand(5, 3))
    fitted = dict(model.blocks[0].asapc.named_buffers())
    assert any(not own.any() for own in fitted.values())
    whole, live_hidden = asapc.load(tmp_path / "new")(x, keep)["hidden"], model(x, keep).hidden
    assert all(torch.equal(a, b) for a, b in zip(whole, live_hidden, strict=True))


def state_of(model: nn.Module) -> list[Any]:
    """All that loading could change."""
    bits = {name: own.detach().clone() for name, own in model.state_dict().items()}
    own = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
    return [bits, [id(m) for m in model.modules()], own]


def assert_untouched(model: nn.Module, before: list[Any]) -> None:
    bits, modules, own = state_of(model)
    assert list(bits) == list(before[0]) and all(torch.equal(bits[n], t) for n, t in before[0].items())
    assert modules == before[1] and own == before[2]


def altered(out: Path, folder: Path, *edits: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(out, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for edit in edits:
        edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return resigned(folder)


def broken(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        place: Any = manifest
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        place[int(last) if last.isdigit() else last] = value

    return edit


TENSORS = "live/programs/0/modules/0/tensors"


@pytest.mark.parametrize(
    "edit",
    [
        broken("forward", None), broken("forward/parameters/0/name", "x y"),
        broken("forward/parameters/0/captured", {"tensor": 9}), broken("forward/output", []),
        broken("live/programs/0/file", "../graph.pt2"),
        broken("live/programs/0/dtype", "int8"), broken("live/programs/0/dtype", ["int8"]),
        broken("live/programs/0/children/0/layer", "other"), broken("live/programs/0/children", []),
        broken("live/programs/1/children/0/layer", "other"),  # the second patch, after a first one
        broken("live/programs/0/modules/0/name", "blocks.7"), broken("live/left", ["reason"]),
        broken("live/programs/0/modules/0/sites", ["nothing"]),
        broken("live/programs/1/modules/0/sites", []),
        broken("live/programs/0/call/output", {"tensor": 3}),
        broken("live/programs/0/call/output", {"constant": None}),
        broken(f"{TENSORS}/asapc_site_0_target_coefficients", "other"),
        broken(f"{TENSORS}/asapc_site_0_target_coefficients", "0.head.weight"),
    ],
)  # fmt: skip
def test_a_model_is_left_as_it_was_where_a_manifest_is_refused(out, tmp_path, patched, edit):
    folder = altered(out, tmp_path / "out", edit)
    for model in (patched[0], drop_in_nets.Net()):  # patched before, or never
        with torch.no_grad():
            model.head.weight.add_(1)
        before = state_of(model.train())
        with pytest.raises(InputError):
            asapc.load(folder, model=model)
        assert_untouched(model, before)


@pytest.mark.parametrize("output", [{"tensor": 40}, {"tensor": 0}, {"constant": None}], ids=str)
def test_another_output_than_the_programs_is_refused(out, tmp_path, output):
    """A patched model's own forward gives its outputs."""
    with pytest.raises(InputError):
        asapc.load(altered(out, tmp_path / "out", broken("forward/output", output)))


def test_weights_that_cannot_be_copied_are_refused(out):
    with torch.device("meta"):
        meta = drop_in_nets.Net()
    with pytest.raises(InputError, match="must have memory"):
        asapc.load(out, model=meta)
    model = drop_in_nets.Net().half()
    model.blocks[1].temperature = nn.Parameter(torch.tensor(1 + 1j))
    before = state_of(model)
    with pytest.raises(InputError, match=r"blocks\.1\.temperature"):
        asapc.load(out, model=model)
    assert_untouched(model, before)


def wrapped(module: nn.Module) -> Callable[..., Any]:
    """As tools put a forward on an instance, around the one that was there."""
    inner = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return 2 * inner(*args, **kwargs)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    return module.forward


def test_a_forward_of_the_users_own_is_not_taken_off(out, patched):
    fresh, (model, x, keep) = drop_in_nets.net(), patched
    for own in (fresh, model):  # before a patch, and over one
        block = own.blocks[0]
        theirs = wrapped(block)
        before = state_of(own)
        with torch.no_grad():
            exact = block(x, keep=keep, sharp=False)
            with pytest.raises(InputError, match=r"blocks\.0: .*put on the instance") as raised:
                asapc.load(out, model=own)
            assert "del module.forward" in str(raised.value)
            assert_untouched(own, before)
            live.remove(own)
            assert block.forward is theirs and torch.equal(block(x, keep=keep, sharp=False), exact)
        del block.forward
        loaded, anew = (asapc.load(out, model=model) for model in (own, drop_in_nets.net()))
        assert torch.equal(logits(loaded, x, keep), logits(anew, x, keep))


# A layer called twice, a forward on an instance, casts of the teacher's own


@pytest.fixture(scope="module")
def odd_out(tmp_path_factory):
    return compiled(drop_in_nets.odd(), {"x": inputs(60)[0]}, tmp_path_factory.mktemp("odd"))


def test_a_layer_that_is_called_twice(odd_out):
    """The forward around it is compiled, with both calls: the layer has none of its own for them."""
    x = inputs()[0]
    with torch.no_grad():
        exact = drop_in_nets.odd()(x)
        model = asapc.load(odd_out, model=drop_in_nets.odd())
        for own in (asapc.load(odd_out), model):
            torch.testing.assert_close(own(x), exact, rtol=1e-4, atol=1e-5)
            own.shared.attention.to_v.weight.zero_()  # of both calls
            own.shared.attention.to_v.bias.zero_()
            teacher = drop_in_nets.odd()
            teacher.load_state_dict(own.state_dict(), strict=False)
            torch.testing.assert_close(own(x), teacher(x), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(own(x), exact, atol=1e-3)
    assert "forward" in vars(model.shared) and "forward" not in vars(model.shared.attention)


def test_a_forward_that_was_captured_is_compiled_and_comes_back(odd_out):
    x, model = inputs()[0], drop_in_nets.odd()
    theirs = model.halved.forward
    with torch.no_grad():
        exact = model(x)
        asapc.load(odd_out, model=model)
        with warnings.catch_warnings(action="error"):  # its counter is another than at the capture
            torch.testing.assert_close(model(x), exact, rtol=1e-4, atol=1e-5)
        assert model.halved.forward is not theirs and model.halved.calls == 1
        model.halved.share = 1.0
        with pytest.warns(OwnCodeWarning, match=r"halved: .*share was captured as 0\.5, but is 1\.0"):
            model(x)
        assert model.halved.calls == 2
    live.remove(model)
    assert model.halved.forward is theirs


def test_casts_outside_of_the_compiled_forwards_stay(odd_out):
    """A trace in float32 does not have them; a patched model's own code has."""
    x = inputs()[0].half()
    teacher, model = drop_in_nets.odd().half(), asapc.load(odd_out, model=drop_in_nets.odd()).half()
    normed: list[Tensor] = []
    model.shared.norm.register_forward_hook(lambda *a: normed.append(a[-1]))
    with torch.no_grad():
        exact, rounded = drop_in_nets.odd()(x.float()), teacher(x)
        budget = 2 * float((rounded - exact).abs().max()) + 1e-6
        whole, found = asapc.load(odd_out).half()(x), model(x)
        model.shared(400 * x)  # whose squares half precision does not have
    assert found.dtype == rounded.dtype == torch.float32
    assert whole.dtype == torch.float16  # rebuilt: throughout
    for own in (found, whole.float()):
        assert float((own - exact).abs().max()) <= budget
    assert normed[1].dtype == torch.float16 and bool((normed[1].float().square().mean(-1) > 0.9).all())


# Attributes


def test_a_number_that_is_set_is_not_ignored(expected, patched):
    model, x, keep = patched
    block, teacher = model.blocks[0], drop_in_nets.net()
    with torch.no_grad():
        block.heads = teacher.blocks[0].heads = 4
        with pytest.warns(OwnCodeWarning, match="blocks.0: .*heads was captured as 2, but is 4") as seen:
            found = block(x, keep=keep, sharp=False)
            assert torch.equal(found, teacher.blocks[0](x, keep=keep, sharp=False))
            block(x, keep=keep, sharp=False)
        assert len(seen) == 1
        for value, text in ((torch.tensor(2), "is a tensor"), (None, "is None"), (2.0, r"is 2\.0")):
            block.heads = value
            with pytest.warns(OwnCodeWarning, match=text), contextlib.suppress(TypeError):
                block(x, keep=keep, sharp=False)
        del block.heads
        with pytest.warns(OwnCodeWarning, match="is gone"), pytest.raises(AttributeError):
            block(x, keep=keep, sharp=False)
        block.heads = 2
        block.anything = 3  # no code of the capture knew it
        with warnings.catch_warnings(action="error"):
            assert torch.equal(logits(model, x, keep), expected)


class Shared:
    """What several modules hold, and none owns."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {"maps": SimpleNamespace(last=None)}


class Keeping(nn.Module):
    """Attention that keeps its last map in an attribute, as is usual for pictures.

    shared: an object of others, in which it keeps it as well.
    """

    def __init__(self, shared: Shared | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.last: Tensor | None = None
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        plan = torch.softmax(self.q(x) @ self.k(x).mT / 8**0.5, -1)
        for _ in range(4):
            plan = plan / plan.sum(-2, keepdim=True)
            plan = plan / plan.sum(-1, keepdim=True)
        if self.shared is None:
            self.last = plan.detach()
        else:
            self.shared.notes["maps"].last = [plan.detach()]
        return plan @ self.v(x)


def reading(self: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Cannot be traced as a whole, and reads what its layer keeps elsewhere."""
    return self.layer(x) * (1.0 + round(x.mean().item(), 1)), self.layer.shared.notes["maps"].last


def test_an_attribute_that_the_compiled_forward_does_not_set_is_gone(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(Keeping(), nn.Linear(8, 3)).eval(), torch.randn(40, 7, 8)
    patched = asapc.compile(model, x, recipe={"operator": "lossless"}).model
    with torch.no_grad():
        assert largest_difference(model(x[:3]), patched(x[:3])) < 1e-5
    assert not hasattr(patched[0], "last") and model[0].last is not None
    with pytest.warns(OwnCodeWarning), torch.no_grad():
        patched(x[0])
    assert patched[0].last.shape == (7, 7)
    live.remove(patched)
    with torch.no_grad():
        patched(x[:3])
    assert patched[0].last.shape == (3, 7, 7)


@pytest.mark.parametrize(
    "steps", [[["attr", "forward"], ["attr", "x"]], [["attr", "__dict__"]], [["attr", "_modules"]], [],
              [["global", "os"], ["attr", "environ"]], [["attr", "last"], ["item", 0]]],
)  # fmt: skip
def test_a_file_cannot_have_anything_else_taken_away(steps):
    known = Inside.of(nn.Linear(2, 2), "", Reads()).to_json()
    assert Inside.from_json({**known, "keeps": [[["attr", "ctx"], ["attr", "last"]]]}, "inside").keeps
    with pytest.raises((InputError, ValueError), match="keeps"):
        Inside.from_json({**known, "keeps": [steps]}, "inside")


def test_what_the_model_reads_of_such_an_attribute_is_refused():
    torch.manual_seed(0)
    model = module(reading, layer=Keeping(Shared())).eval()
    with pytest.raises(VerificationError, match="last is only stored"):
        asapc.compile(model, torch.randn(40, 7, 8), recipe={"operator": "lossless"})


# Replicas


def test_replicas_run_on_their_own_weights(make, expected, monkeypatch):
    """As torch.nn.DataParallel makes them; here what is sent to the second device is doubled."""
    place = sys.modules["torch.nn.parallel.replicate"]

    def sent(tensors: Any, devices: Any, detach: bool = False) -> Any:
        return [[(1 + copy) * own for own in tensors] for copy in range(len(devices))]

    monkeypatch.setattr(place, "_broadcast_coalesced_reshape", sent)
    monkeypatch.setattr(place, "_get_device_index", lambda device, _: device)
    model, (x, keep) = make(), inputs()
    first, second = nn.parallel.replicate(model, [0, 1])
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for own in (*doubled.parameters(), *doubled.buffers()):
            own.mul_(2)
        assert torch.equal(logits(first, x, keep), expected)
        assert torch.equal(logits(second, x, keep), logits(doubled, x, keep))
        assert not torch.equal(logits(doubled, x, keep), expected)
        assert torch.equal(logits(model, x, keep), expected)
        for own in first.modules():
            for name in own.__dict__.get("_former_parameters", {}):
                vars(own)[name] = own._former_parameters[name] = vars(own)[name].bfloat16()
        assert logits(first, x.bfloat16(), keep).dtype == torch.bfloat16
    logits(second, x, keep).sum().backward()
    assert all(own.grad is not None for own in model.parameters())
    assert torch.equal(logits(nn.DataParallel(model), x, keep), expected)


def of_epsilon(self: Any, x: Tensor) -> Tensor:
    """Which is a constant of the compiled code; the gain is guarded."""
    scores, f = self.gain * self.q(x) @ x.mT / 8**0.5, 0.0
    for _ in range(3):
        g = -self.epsilon * torch.logsumexp((scores + f) / self.epsilon, -2, keepdim=True)
        f = -self.epsilon * torch.logsumexp((scores + g) / self.epsilon, -1, keepdim=True)
    return torch.exp((scores + f + g) / self.epsilon) @ self.v(x)


@torch.no_grad()
def test_shallow_copies_have_attributes_and_weights_of_their_own():
    torch.manual_seed(0)
    model, other = (
        module(of_epsilon, q=nn.Linear(8, 8), v=nn.Linear(8, 8), gain=1.0,
               epsilon=nn.Parameter(torch.tensor(1.0), requires_grad=False)).eval()
        for _ in "12"
    )  # fmt: skip
    x = torch.randn(24, 6, 8)
    patched = asapc.compile(model, {"x": x}, recipe={"operator": "lossless"}, examples=8).model
    for change, warned in (
        (lambda one: vars(one).update(gain=2.0), "gain was captured as 1.0, but is 2.0"),
        (lambda one: vars(one).update(_modules={**one._modules, "v": nn.Identity()}), None),
        (lambda one: vars(one).update(_parameters={"epsilon": torch.tensor(0.5)}), "epsilon no longer"),
    ):
        copies = [copy.copy(one) for one in (model, patched)]
        for one in copies:
            change(one)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2):  # it is bound to its own forward by the first call
                torch.testing.assert_close(copies[1](x), copies[0](x), rtol=1e-5, atol=1e-6)
        texts = [str(w.message) for w in caught if issubclass(w.category, OwnCodeWarning)]
        assert len(texts) == (warned is not None) and all(warned in text for text in texts), texts
        with warnings.catch_warnings(action="error", category=OwnCodeWarning):
            torch.testing.assert_close(patched(x), model(x), rtol=1e-5, atol=1e-6)
    other.forward = patched.forward  # as a method of another module, it stays that module's
    torch.testing.assert_close(other(x), model(x), rtol=1e-5, atol=1e-6)


# Nothing is faster


def test_a_model_that_keeps_its_own_code_stays_itself(tmp_path, monkeypatch):
    def kept(model: Any, recipe: Any, choices: Any) -> Any:
        return dict.fromkeys(choices, Choice("teacher", "nothing is faster")), None

    monkeypatch.setattr("asapc.passes.select._settled", kept)
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(60, 5, 4)
    with pytest.warns(UserWarning, match="nothing is patched: every site keeps .* own code .*inner"):
        found, _ = asapc.compile(model, {"x": x}, recipe=LOSSLESS, out=tmp_path / "out", examples=8)
    assert type(found) is Model and found is not model and type(found.inner.q) is nn.Linear
    twin = Model()
    twin.register_forward_hook(lambda *a: a[-1] + 1)
    with pytest.warns(UserWarning, match="nothing is patched"):
        loaded = asapc.load(tmp_path / "out", model=twin)
    assert loaded is twin and not twin.training and "(asapc)" not in repr(twin)
    with torch.no_grad():
        assert torch.equal(found(x), model(x)) and torch.equal(twin(x), model(x) + 1)
    rebuilt_model = asapc.load(tmp_path / "out")
    assert isinstance(rebuilt_model, CompiledModel) and "the teacher's own code" in repr(rebuilt_model)
    with pytest.raises(InputError, match="must be the one that was compiled"):
        asapc.load(tmp_path / "out", model=nn.Linear(2, 2))


def test_stages_and_programs_have_no_live_form(out):
    with pytest.raises(InputError, match="patched with the compiled stage"):
        asapc.load(out, model=drop_in_nets.net(), stage="teacher")
    assert isinstance(asapc.load(out, stage="teacher"), CompiledModel)


def test_a_captured_module_returns_its_own_type(tmp_path):
    torch.manual_seed(0)
    model, (x, _) = drop_in_nets.ThroughNumpy().eval(), inputs(60)
    assert read_artifact(compiled(model, {"x": x}, tmp_path), ()).capture == "module"
    with torch.no_grad():
        exact = model(x[:4])
        loaded = asapc.load(tmp_path / "out", model=copy.deepcopy(model))
        assert type(loaded.attention(x[:4])) is drop_in_nets.Pair
        torch.testing.assert_close(loaded(x[:4]), exact, rtol=1e-4, atol=1e-5)
        stage = asapc.load(tmp_path / "out", model=copy.deepcopy(model), stage="lossless")
        torch.testing.assert_close(stage(x[:4]), exact, rtol=1e-4, atol=1e-5)


# Which module is patched


class Loop(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        target = torch.zeros_like(scores[..., :1, :])
        for _ in range(3):
            source = -torch.logsumexp(scores + target, -1, keepdim=True)
            target = -torch.logsumexp(scores + source, -2, keepdim=True)
        return self.given(torch.exp(scores + source + target), source, target)

    def given(self, plan: Tensor, *_: Tensor) -> Any:
        return plan


class WithDuals(Loop):
    """Of scores that are no products, which makes it a plan."""

    def forward(self, scores: Tensor) -> Tensor:
        return super().forward(scores.tanh())

    def given(self, *plan_and_duals: Tensor) -> Any:
        return plan_and_duals


class Around(nn.Module):
    """One attention between two layers; subclasses break what a module alone could compute."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.loop = Loop()

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.q(x) @ self.k(x).mT) @ self.v(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Around()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x.relu()))


class Beside(Around):
    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(self.beside)


class Aside(Model):
    """The inner module reads what it is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Beside()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.beside.append(x * 2)
        found = self.inner(x.relu())
        self.inner.beside.clear()
        return self.last(found)


class Hooked(Model):
    """Hooks that were there when the model was captured change what goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.inner.register_forward_hook(lambda *a: a[-1] + 1)
        self.inner.q.register_forward_hook(lambda *a: a[-1] * 3)
        self.inner.k.register_forward_pre_hook(lambda _, args: (args[0] - 1,))


class Unread(Model):
    """Nothing reads the duals that the loop returns beside its plan: it does not run twice for them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.loop = nn.Sequential(WithDuals(), First())


class First(nn.Module):
    def forward(self, found: tuple[Tensor, ...]) -> Tensor:
        return found[0]


def cut(model: nn.Module, x: Tensor) -> Any:
    (program,) = capture(model, (x,), {}).programs
    sites = [own for own in match(program) if not isinstance(own, Refusal)]
    assert sites
    return module_programs(model, program, sites, eager_calls(model, (x,), {}), Observed())


@pytest.mark.parametrize(
    ("model", "name", "layers"),
    [(Hooked, "inner", {"q", "k", "v"}), (Aside, "", {"inner.q", "inner.k", "inner.v", "last"}),
     (Unread, "inner.loop", set())],
)  # fmt: skip
def test_the_smallest_module_that_computes_the_site_by_itself(model, name, layers):
    torch.manual_seed(0)
    built, x = model().eval(), torch.randn(3, 5, 4)
    (made,), left = cut(built, x)
    assert made.program.name == name and not left
    called = {child.name for child in made.children}
    assert layers <= called and "loop" not in str(called)
    patch = live.Patch(
        made.program.name, made.program.graph, made.call, made.children, {}, (), torch.float32,
        own_forward=True,
    )
    with torch.no_grad(), warnings.catch_warnings(action="error", category=OwnCodeWarning):
        exact = built(x)
        with live.installed_patches(built, [patch], []):
            torch.testing.assert_close(built(x), exact)
            built.last = nn.Identity()
            assert not torch.allclose(built(x), exact)


def test_structures_go_through_plain_data():
    def forward(
        x: Tensor, rest: Any, *more: Tensor, scale: float = 0.5, dtype: Any = torch.float32
    ) -> None: ...

    a, b, c = torch.ones(2, 3), torch.ones(2), torch.ones(3)
    signature = inspect.signature(forward)
    parameters = parameters_of(signature, (a, {"k": [b, None, 7]}, c), {"scale": 0.5}, [])
    output = described((a, {"z": [b, True], "y": (None,)}), [], output=True)
    call = Call(parameters, output, *known_of([a, b, c]))
    again = Call.from_json(json.loads(json.dumps(call.to_json())), "call")
    assert again == call
    assert str(again.signature()) == "(x, rest, *more, scale=0.5, dtype=torch.float32)"
    flat, problem = again.flat((a, {"k": [b, None, 7]}, c), {})
    assert problem is None and [t is own for t, own in zip(flat, (a, b, c), strict=True)] == [True] * 3
    for rest, message in (
        ({"k": [b, None, 8]}, "rest was captured as 7, but is 8"),
        ({"k": [b, None]}, "rest was captured as a list of 3"),
        ({"q": 1}, "rest was captured as a dict of k"),
    ):
        assert message in str(again.flat((a, rest, c), {})[1])
    assert "dtype was captured at its default" in str(
        again.flat((a, {"k": [b, None, 7]}, c), {"dtype": torch.float64})[1]
    )
    extra = parameters_of(inspect.signature(lambda x, **rest: x), (a,), {"p": None, "q": 2}, [])
    named = Call(extra, output, *known_of([a]))
    assert named.flat((a,), {"p": None, "q": 2})[1] is None
    # Nor is None as good as left out, or the order free: code may ask `"p" in rest`, or take the values.
    for kwargs in (
        {"q": 2}, {"p": None, "q": 2, "r": None}, {"q": 2, "p": None}, {"q": None}, {}, {"p": 1, "q": 2},
    ):  # fmt: skip
        assert named.flat((a,), kwargs)[1] is not None, kwargs
    ordered = described(OrderedDict(z=a), [], output=True)
    assert type(rebuilt(ordered, [a], types_at_hand(ordered))) is OrderedDict
    found = rebuilt(again.output, [a, b], {})
    assert found[0] is a and found[1]["z"][0] is b and found[1] == {"z": [b, True], "y": (None,)}


# Lengths that were equal


class Paired(Model):
    """Adds more of a memory that is as long as the tokens; no tensor says that the lengths are equal."""

    def forward(self, x: Tensor, mem: Tensor) -> Tensor:
        share = 0.5 if x.shape[1] == mem.shape[1] else 0.25
        return super().forward(x + share * mem.mean(1, keepdim=True))


def test_lengths_that_were_equal_are_equal_in_the_artefact_too(tmp_path):
    """The program on disk keeps two names; the branch that was traced is for one length."""
    torch.manual_seed(0)
    model = Paired().eval()
    x, mem = torch.randn(32, 9, 4), torch.randn(32, 9, 4)
    rebuilt = asapc.load(compiled(model, {"x": x, "mem": mem}, tmp_path))
    with torch.no_grad():
        for tokens in (9, 7):
            own = rebuilt(x[:, :tokens], mem[:, :tokens])
            torch.testing.assert_close(own, model(x[:, :tokens], mem[:, :tokens]))
        with pytest.raises(InputError, match="mem"):
            rebuilt(x, mem[:, :7])
