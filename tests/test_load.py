"""Teachers from folders, factories and checkpoints, and one message for every unusable one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from asapc import cli
from asapc.errors import InputError
from asapc.inputs.load import build_factory, example_inputs, load_teacher
from asapc.inputs.weights import fingerprint, read_state_dict
from asapc.models import SinkformerText, SinkformerViT

VIT = {
    "image_size": 4, "patch_size": 2, "num_classes": 3, "dim": 8, "depth": 1,
    "heads": 2, "mlp_dim": 8, "channels": 1, "dim_head": 4, "max_iter": 3,
}  # fmt: skip
FACTORY = """
import helper_of_factory
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(helper_of_factory.INPUTS, width)

    def forward(self, x):
        return self.linear(x)

def build(width=3):
    print("building")
    return Net(width)

def broken():
    raise KeyError("no such backbone")

def leaves():
    raise SystemExit("usage: train.py")

def number():
    return 7

def diverged():
    net = Net()
    net.linear.weight.data[1, 0] = float("nan")
    return net

CONSTANT = 3
"""


@pytest.fixture
def vit_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": "sinkformer-vit", **VIT}))
    save_file(SinkformerViT(**VIT).state_dict(), folder / "model.safetensors")  # type: ignore[arg-type]
    return folder


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_factory.py").write_text("INPUTS = 2\n")
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    return path


def refused(model: str | Path, **options: object) -> str:
    """The message of the InputError that load_teacher raises."""
    with pytest.raises(InputError) as caught:
        load_teacher(str(model), **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_builtin_folder(vit_folder: Path) -> None:
    teacher = load_teacher(str(vit_folder))
    assert isinstance(teacher.model, SinkformerViT) and not teacher.model.training
    assert teacher.builtin and teacher.factory is None and teacher.program is None
    assert teacher.source == str(vit_folder)
    assert len(teacher.fingerprint) == 64
    assert load_teacher(str(vit_folder)).fingerprint == teacher.fingerprint
    inputs = example_inputs(teacher)
    assert inputs is not None and inputs["img"].shape == (3, 1, 4, 4)
    assert teacher.model(**inputs)[0].shape == (3, 3)


def test_builtin_text_folder(tmp_path: Path) -> None:
    config = {"vocab_size": 7, "seq_len": 5, "d_model": 4, "n_layers": 1, "n_heads": 2, "d_ff": 4}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "sinkformer-text", **config}))
    save_file(SinkformerText(**config).state_dict(), tmp_path / "model.safetensors")  # type: ignore[arg-type]
    teacher = load_teacher(str(tmp_path))
    inputs = example_inputs(teacher)
    assert inputs is not None and teacher.model is not None
    assert teacher.model(**inputs)[0].shape == (3, 2)


def test_fingerprint_sees_names_dtypes_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3), "c": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(1.5)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3)},
    ]
    assert fingerprint(dict(reversed(base.items()))) == fingerprint(base)
    assert fingerprint({**base, "a": torch.zeros(3, 2).t()}) == fingerprint(base)
    assert len({fingerprint(state) for state in [base, *others]}) == 6
    fingerprint({"half": torch.ones(2, dtype=torch.bfloat16), "flag": torch.tensor([True])})


def test_factory_from_file(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, modules = list(sys.path), set(sys.modules)
    state = torch.get_rng_state()
    teacher = load_teacher(f"{factory}:build", kwargs='{"width": 5}')
    assert sys.path == path
    new = set(sys.modules) - modules
    assert len(new) == 1 and new.pop().startswith("asapc_user_model_")
    assert not list(tmp_path.rglob("__pycache__"))
    assert torch.equal(torch.get_rng_state(), state)
    output = capsys.readouterr()
    assert output.out == "" and "building" in output.err
    assert teacher.model is not None and teacher.model(torch.ones(1, 2)).shape == (1, 5)
    assert not teacher.builtin and example_inputs(teacher) is None
    assert "the weights it built" in teacher.source
    again = load_teacher(f"{factory}:build", kwargs={"width": 5})
    assert again.fingerprint == teacher.fingerprint


def test_factory_model_can_be_exported(factory: Path) -> None:
    model = build_factory(f"{factory}:build")
    program = torch.export.export(model, (torch.ones(4, 2),))
    torch.testing.assert_close(program.module()(torch.ones(4, 2)), model(torch.ones(4, 2)))


def test_what_torch_compile_returns_is_the_module_in_it(factory: Path) -> None:
    factory.write_text(
        factory.read_text() + "\n\ndef compiled():\n    import torch\n"
        "    return torch.compile(build(), backend='eager')\n"
    )
    plain, compiled = (load_teacher(f"{factory}:{name}") for name in ("build", "compiled"))
    assert type(compiled.model).__name__ == type(plain.model).__name__
    assert compiled.fingerprint == plain.fingerprint  # names without _orig_mod


def test_two_files_with_equally_named_helpers(factory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "helper_of_factory.py").write_text("INPUTS = 6\n")
    (other / "model.py").write_text(FACTORY)
    assert build_factory(f"{factory}:build").linear.in_features == 2  # type: ignore[union-attr]
    assert build_factory(f"{other}/model.py:build").linear.in_features == 6  # type: ignore[union-attr]


def test_factory_from_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pkg_in_cwd").mkdir()
    (tmp_path / "pkg_in_cwd" / "__init__.py").touch()
    (tmp_path / "pkg_in_cwd" / "net.py").write_text(
        "from torch import nn\nclass Holder:\n    @staticmethod\n    def make():\n"
        "        return nn.Linear(2, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert isinstance(build_factory("pkg_in_cwd.net:Holder.make"), nn.Linear)
    assert sys.path == path


@pytest.mark.parametrize("wrap", [None, "state_dict", "model_state_dict", "model"], ids=str)
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "data_parallel"])
def test_factory_with_weights(factory: Path, tmp_path: Path, wrap: str | None, prefix: str) -> None:
    state = {f"{prefix}linear.weight": torch.ones(3, 2), f"{prefix}linear.bias": torch.ones(3)}
    path = tmp_path / "w.pt"
    torch.save(state if wrap is None else {wrap: state, "epoch": 3}, path)
    teacher = load_teacher(f"{factory}:build", weights=str(path))
    assert teacher.model is not None
    assert teacher.model(torch.ones(1, 2)).tolist() == [[3.0, 3.0, 3.0]]
    assert teacher.source.endswith(f"with {path}")


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "tied.py"
    path.write_text(
        "from torch import nn\ndef build():\n"
        "    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        "    net[1].weight = net[0].weight\n    return net\n"
    )
    save_file(
        {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "1.bias": torch.ones(2)},
        tmp_path / "w.safetensors",
    )
    model = load_teacher(f"{path}:build", weights=str(tmp_path / "w.safetensors")).model
    assert model is not None and torch.equal(model[1].weight, torch.ones(2, 2))  # type: ignore[index]


def test_buffer_of_minus_infinity_is_a_mask_not_an_error(tmp_path: Path) -> None:
    path = tmp_path / "masked.py"
    path.write_text(
        "import torch\nfrom torch import nn\ndef build():\n    net = nn.Linear(2, 2)\n"
        "    net.register_buffer('mask', torch.tensor([0.0, float('-inf')]))\n    return net\n"
    )
    load_teacher(f"{path}:build")


# --- bad input -----------------------------------------------------------------------------------


def test_missing_model(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert "no such model" in message and "config.json" in message
    assert "no such model" in refused(tmp_path / "gone.pt2")
    assert "no such file" in refused(f"{tmp_path}/gone.py:build")


def test_other_files(tmp_path: Path, factory: Path) -> None:
    for name in ("w.safetensors", "w.pt", "w.pth"):
        (tmp_path / name).touch()
        assert "file.py:factory --weights" in refused(tmp_path / name)
    assert f"{factory}:NAME" in refused(factory)
    assert "no such model" in refused(tmp_path / "teacher.onnx")
    (tmp_path / "notes.txt").touch()
    assert "is not a model" in refused(tmp_path / "notes.txt")


def test_options_of_a_factory_with_a_folder(vit_folder: Path) -> None:
    assert "drop --weights" in refused(vit_folder, weights="w.safetensors")
    assert "drop --kwargs" in refused(vit_folder, kwargs="{}")


def test_folder_without_files(tmp_path: Path) -> None:
    assert "must hold config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "must hold model.safetensors" in refused(tmp_path)


def test_compiled_folder_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert "already compiled" in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "must be JSON"),
        ("[]", "must be one of sinkformer-vit, sinkformer-text"),
        ('{"architecture": "vit"}', "got 'vit'"),
        ('{"architecture": "sinkformer-vit"}', "must hold the arguments of sinkformer-vit"),
        (json.dumps({"architecture": "sinkformer-vit", **VIT, "colour": 1}), "colour"),
        (json.dumps({"architecture": "sinkformer-vit", **VIT, "patch_size": 3}), "do not tile"),
        (json.dumps({"architecture": "sinkformer-vit", **VIT, "dim": "8"}), "dim must be of type int"),
    ],
    ids=["syntax", "list", "unknown", "arguments", "extra_key", "value", "type"],
)
def test_bad_config(vit_folder: Path, config: str, expected: str) -> None:
    (vit_folder / "config.json").write_text(config)
    assert expected in refused(vit_folder)


def test_config_that_disagrees_with_the_weights(vit_folder: Path) -> None:
    deeper = {"architecture": "sinkformer-vit", **VIT, "depth": 2, "dim_head": 8}
    (vit_folder / "config.json").write_text(json.dumps(deeper))
    message = refused(vit_folder)
    assert "missing from the weights: transformer.layers.1.0.norm.weight" in message
    assert "and 7 more" in message
    assert "transformer.layers.0.0.fn.to_qkv.weight" in message
    assert "float32 [24, 8] in the weights, float32 [48, 8] in the model" in message


@pytest.mark.parametrize("size", [0, 5, 300], ids="{}_bytes".format)
def test_truncated_weights(vit_folder: Path, size: int) -> None:
    path = vit_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    message = refused(vit_folder)
    assert "not a safetensors file, or a truncated one" in message and f"{size} bytes" in message


def test_text_in_place_of_weights(vit_folder: Path) -> None:
    (vit_folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "not a safetensors file" in refused(vit_folder)


def test_weights_that_do_not_fit_the_factory(factory: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"linear.weight": torch.ones(4, 2), "head.bias": torch.ones(3)}, path)
    message = refused(f"{factory}:build", weights=str(path))
    assert "missing from the weights: linear.bias" in message
    assert "not in the model: head.bias" in message
    assert "linear.weight (float32 [4, 2] in the weights, float32 [3, 2] in the model)" in message
    save_file({"linear.weight": torch.ones(3, 2).int(), "linear.bias": torch.ones(3)}, path)
    assert "int32 [3, 2] in the weights" in refused(f"{factory}:build", weights=str(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", "KeyError: 'no such backbone' (model.py, line 18)"),
        ("leaves", "SystemExit: usage: train.py"),
        ("number", "must return a torch.nn.Module, got a int"),
        ("CONSTANT", "must define a callable 'CONSTANT', got a int"),
        ("biuld", "it defines Net, build, broken"),
        ("diverged", "1 NaN of 6 values in linear.weight"),
    ],
)
def test_bad_factory(factory: Path, name: str, expected: str) -> None:
    assert expected in refused(f"{factory}:{name}")


def test_factory_arguments(factory: Path) -> None:
    assert "unexpected keyword argument 'depth'" in refused(
        f"{factory}:build", kwargs='{"depth": 1}'
    )
    assert "--kwargs must be JSON" in refused(f"{factory}:build", kwargs="{width: 1}")
    assert "must be a JSON object" in refused(f"{factory}:build", kwargs="[1]")


def test_file_that_does_not_import(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    modules = set(sys.modules)
    for source, expected in (
        ("import no_such_package_at_all\n", "No module named 'no_such_package_at_all'"),
        ("def build(:\n", "SyntaxError"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
        ("\n\n1 / 0\n", "ZeroDivisionError: division by zero (model.py, line 3)"),
    ):
        path.write_text(source)
        message = refused(f"{path}:build")
        assert "could not be imported" in message and expected in message
    assert set(sys.modules) == modules
    assert "No module named 'no_such_package_at_all'" in refused("no_such_package_at_all:build")


def test_interrupt_passes_through(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def build():\n    raise KeyboardInterrupt\n")
    before = list(sys.path)
    with pytest.raises(KeyboardInterrupt):
        load_teacher(f"{path}:build")
    assert sys.path == before


def test_weights_file_is_checked_before_the_factory_runs(factory: Path, tmp_path: Path) -> None:
    assert "no such weights file" in refused(f"{factory}:broken", weights=str(tmp_path / "w.pt"))
    (tmp_path / "w.npz").touch()
    assert "must be a .safetensors" in refused(f"{factory}:build", weights=str(tmp_path / "w.npz"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_weights_that_are_not_finite(factory: Path, tmp_path: Path, value: float) -> None:
    state = {"linear.weight": torch.ones(3, 2), "linear.bias": torch.ones(3)}
    state["linear.bias"][2] = value
    save_file(state, tmp_path / "w.safetensors")
    message = refused(f"{factory}:build", weights=str(tmp_path / "w.safetensors"))
    assert "weights must be finite" in message and "linear.bias" in message


class NeedsCode:
    """Unpickling this would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (_would_run, ("",))


def _would_run(_: str) -> None:
    raise AssertionError("a pickle ran code")


def test_pickle_that_needs_code(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "args": NeedsCode()}, path)
    with pytest.raises(InputError) as caught:
        read_state_dict(path)
    message = str(caught.value)
    assert "needs to run code" in message and "save_file" in message
    assert "weights_only=False" in message and str(tmp_path / "whole.safetensors") in message


def test_conversion_in_the_message_works(tmp_path: Path) -> None:
    import os
    import subprocess

    (tmp_path / "user_net.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    program = "import torch, user_net; torch.save(user_net.Net(2, 2), 'whole.pt')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env=environment)
    with pytest.raises(InputError) as caught:
        read_state_dict(tmp_path / "whole.pt")
    assert caught.value.help is not None
    command = caught.value.help.split('python -c "', 1)[1].removesuffix('"')
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True, env=environment)
    assert read_state_dict(tmp_path / "whole.safetensors").keys() == {"weight", "bias"}


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 half an archive"], ids=repr)
def test_broken_pickle(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a PyTorch checkpoint, or a truncated one"):
        read_state_dict(path)


def test_truncated_pickle(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for zipped in (True, False):
        torch.save({"w": torch.ones(500)}, path, _use_new_zipfile_serialization=zipped)
        path.write_bytes(path.read_bytes()[:-700])
        with pytest.raises(InputError, match="not a PyTorch checkpoint, or a truncated one"):
            read_state_dict(path)


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}], ids=str)
def test_checkpoint_without_tensors(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(InputError, match="must hold tensors by name"):
        read_state_dict(tmp_path / "w.pt")


@pytest.mark.parametrize(("name", "value"), [
    ("eps", "1e-3"), ("eps", float("nan")), ("eps", 1e308), ("eps", None), ("pad_id", []),
    ("pad_id", 2**63), ("pad_id", 1.0), ("n_heads", True), ("dropout", {}), ("num_classes", "3"),
    ("num_classes", 10**400),
])  # fmt: skip
def test_a_config_of_other_types(tmp_path: Path, name: str, value: object) -> None:
    """They may build a model that fails only when it is run."""
    config = {"vocab_size": 9, "seq_len": 4, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8}
    model = SinkformerText(**config)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    document = {"architecture": "sinkformer-text", **config}
    (tmp_path / "config.json").write_text(json.dumps(document))
    load_teacher(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**document, name: value}))
    with pytest.raises(InputError, match=f"{name} must be of type (int|float)"):
        load_teacher(str(tmp_path))


def test_a_literal_and_a_list_in_a_config(vit_folder: Path) -> None:
    path = vit_folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in (("pool", "max"), ("image_size", "8"), ("image_size", [8, "8"])):
        path.write_text(json.dumps({**config, name: value}))
        with pytest.raises(InputError, match=f"{name} must be of type"):
            load_teacher(str(vit_folder))
    path.write_text(json.dumps({**config, "image_size": [config["image_size"]] * 2}))
    load_teacher(str(vit_folder))


def test_names_that_no_disk_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    for name in (f"{tmp_path}/{'x' * 300}:make", "x" * 5000 + ":make", f"{tmp_path}/loop.py:make"):
        assert cli.main(["inspect", name]) == 2
        assert "internal error" not in capsys.readouterr().err


def test_an_argument_called_self(factory: Path) -> None:
    with pytest.raises(InputError, match="unexpected keyword argument"):
        load_teacher(f"{factory}:build", kwargs={"self": 1})
