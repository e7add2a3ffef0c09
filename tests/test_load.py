"""Teachers from folders, factories and checkpoints, and one message for every unusable one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from asapc import cli
from asapc.errors import InputError
from asapc.inputs.load import build_factory, example_inputs, load_teacher
from asapc.inputs.weights import fingerprint, read_state_dict
from asapc.models import ARCHITECTURES

CONFIGS: dict[str, dict[str, Any]] = {
    "sinkformer-vit": {
        "image_size": 4, "patch_size": 2, "num_classes": 3, "dim": 8, "depth": 1, "heads": 2,
        "mlp_dim": 8, "channels": 1, "dim_head": 4, "max_iter": 3,
    },
    "sinkformer-text": {
        "vocab_size": 7, "seq_len": 5, "d_model": 4, "n_layers": 1, "n_heads": 2, "d_ff": 4,
    },
}  # fmt: skip
# What it imports, and the last two functions, are for one test each.
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

def compiled():
    import torch
    return torch.compile(build(), backend="eager")

def masked():
    import torch
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    return net

def tied():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net
"""


def built_in(folder: Path, name: str = "sinkformer-vit") -> Path:
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": name, **CONFIGS[name]}))
    save_file(ARCHITECTURES[name](**CONFIGS[name]).state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def vit_folder(tmp_path):
    return built_in(tmp_path / "teacher")


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "helper_of_factory.py").write_text("INPUTS = 2\n")
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    return path


def refused(model: str | Path, **options: object) -> str:
    """The message of the InputError that load_teacher raises."""
    with pytest.raises(InputError) as caught:
        load_teacher(str(model), **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_built_in_folder(tmp_path, name):
    folder = built_in(tmp_path / "teacher", name)
    teacher = load_teacher(str(folder))
    assert isinstance(teacher.model, ARCHITECTURES[name]) and not teacher.model.training
    assert teacher.builtin and teacher.program is None
    assert teacher.source == str(folder) and len(teacher.fingerprint) == 64
    assert load_teacher(str(folder)).fingerprint == teacher.fingerprint
    inputs = example_inputs(teacher)
    assert inputs is not None and len(teacher.model(**inputs)[0]) == 3


def test_fingerprint_sees_names_dtypes_shapes_and_bytes():
    base = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3), "c": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(1.5)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3)},
        {"half": torch.ones(2, dtype=torch.bfloat16), "flag": torch.tensor([True])},
    ]
    assert fingerprint(dict(reversed(base.items()))) == fingerprint(base)
    assert fingerprint({**base, "a": torch.zeros(3, 2).t()}) == fingerprint(base)
    assert len({fingerprint(state) for state in [base, *others]}) == 7


def test_a_factory_leaves_nothing_behind(factory, tmp_path, capsys):
    path, modules, state = list(sys.path), set(sys.modules), torch.get_rng_state()
    teacher = load_teacher(f"{factory}:build", kwargs='{"width": 5}')
    (new,) = set(sys.modules) - modules
    assert sys.path == path and new.startswith("asapc_user_model_")
    assert not list(tmp_path.rglob("__pycache__"))
    assert torch.equal(torch.get_rng_state(), state)
    output = capsys.readouterr()
    assert output.out == "" and "building" in output.err
    assert teacher.model is not None and teacher.model(torch.ones(1, 2)).shape == (1, 5)
    assert not teacher.builtin and example_inputs(teacher) is None
    assert "the weights it built" in teacher.source
    again = load_teacher(f"{factory}:build", kwargs={"width": 5})
    assert again.fingerprint == teacher.fingerprint


def test_what_a_factory_may_return(factory, tmp_path):
    plain, compiled = (load_teacher(f"{factory}:{name}") for name in ("build", "compiled"))
    assert type(compiled.model).__name__ == type(plain.model).__name__
    assert compiled.fingerprint == plain.fingerprint  # names without _orig_mod
    program = torch.export.export(plain.model, (torch.ones(4, 2),))
    torch.testing.assert_close(program.module()(torch.ones(4, 2)), plain.model(torch.ones(4, 2)))
    load_teacher(f"{factory}:masked")  # a buffer of -inf is a mask, and no error
    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "1.bias": torch.ones(2)}
    save_file(weights, tmp_path / "w.safetensors")
    tied = load_teacher(f"{factory}:tied", weights=str(tmp_path / "w.safetensors")).model
    assert torch.equal(tied[1].weight, torch.ones(2, 2))  # type: ignore[index]


def test_where_a_factory_may_be(factory, tmp_path, monkeypatch):
    """In two files with equally named helpers, or in a package of the working folder."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "helper_of_factory.py").write_text("INPUTS = 6\n")
    (other / "model.py").write_text(FACTORY)
    assert build_factory(f"{factory}:build").linear.in_features == 2  # type: ignore[union-attr]
    assert build_factory(f"{other}/model.py:build").linear.in_features == 6  # type: ignore[union-attr]
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


@pytest.mark.parametrize(
    ("wrap", "prefix"), [(None, "module."), (None, "_orig_mod.module."), ("state_dict", "model."),
                         ("model_state_dict", ""), ("model", "")],
)  # fmt: skip
def test_a_factory_with_weights(factory, tmp_path, wrap, prefix):
    """As checkpoints have them, those of DataParallel, torch.compile and trainers, too."""
    state = {f"{prefix}linear.weight": torch.ones(3, 2), f"{prefix}linear.bias": torch.ones(3)}
    path = tmp_path / "w.pt"
    torch.save(state if wrap is None else {wrap: state, "epoch": 3}, path)
    teacher = load_teacher(f"{factory}:build", weights=str(path))
    assert teacher.model(torch.ones(1, 2)).tolist() == [[3.0, 3.0, 3.0]]
    assert teacher.source.endswith(f"with {path}")


# --- what is no model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("nowhere", None, "no such model"), ("gone.pt2", None, "no such model"),
        ("teacher.onnx", None, "no such model"), ("gone.py:build", None, "no such file"),
        ("w.safetensors", "", "file.py:factory --weights"), ("w.pt", "", "is read for its weights only"),
        ("model.py", "", "model.py:NAME"), ("notes.txt", "", "is not a model"),
        ("folder/notes", "", "must hold config.json"),
        ("folder/config.json", "{}", "must hold model.safetensors"),
        ("folder/manifest.json", "{}", "already compiled"),
    ],
)  # fmt: skip
def test_what_is_no_model(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert expected in refused(path.parent if name.startswith("folder") else path)


VIT = {"architecture": "sinkformer-vit", **CONFIGS["sinkformer-vit"]}
ODD = {"architecture": "sinkformer-text", **CONFIGS["sinkformer-text"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "must be JSON"), ([], "must be one of sinkformer-vit, sinkformer-text"),
        ({"architecture": "vit"}, "got 'vit'"),
        ({"architecture": "sinkformer-vit"}, "must hold the arguments of sinkformer-vit"),
        ({**VIT, "colour": 1}, "colour"), ({**VIT, "patch_size": 3}, "do not tile"),
        *[({**VIT, key: value}, f"{key} must be of type") for key, value in (
            ("dim", "8"), ("pool", "max"), ("image_size", "8"), ("image_size", [8, "8"]))],
        # Which may build a model that fails only when it is run.
        *[({**ODD, key: value}, f"{key} must be of type") for key, value in (
            ("eps", float("nan")), ("pad_id", 2**63), ("n_heads", True), ("dropout", {}),
            ("num_classes", "3"), ("num_classes", 10**400))],
    ],
    ids=lambda value: str(value)[-40:],
)  # fmt: skip
def test_a_config_that_builds_no_model(tmp_path, config, expected):
    name = config.get("architecture") if isinstance(config, dict) else None
    folder = built_in(tmp_path / "teacher", name if name in CONFIGS else "sinkformer-vit")
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    assert expected in refused(folder)


def test_a_config_that_disagrees_with_the_weights(vit_folder):
    (vit_folder / "config.json").write_text(json.dumps({**VIT, "depth": 2, "dim_head": 8}))
    message = refused(vit_folder)
    assert "missing from the weights: transformer.layers.1.0.norm.weight" in message
    assert "and 7 more" in message
    assert "transformer.layers.0.0.fn.to_qkv.weight" in message
    assert "float32 [24, 8] in the weights, float32 [48, 8] in the model" in message
    assert "drop --weights" in refused(vit_folder, weights="w.safetensors")
    assert "drop --kwargs" in refused(vit_folder, kwargs="{}")


@pytest.mark.parametrize("content", [b"cut", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_folder_whose_weights_are_cut_or_text(vit_folder, content):
    path = vit_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:300] if content == b"cut" else content)
    message = refused(vit_folder)
    assert "not a safetensors file, or a truncated one" in message
    assert f"{path.stat().st_size} bytes" in message


def test_weights_that_do_not_fit_the_factory(factory, tmp_path):
    path = tmp_path / "w.safetensors"

    def weights(**tensors: torch.Tensor) -> str:
        save_file({name.replace("_", "."): tensor for name, tensor in tensors.items()}, path)
        return refused(f"{factory}:build", weights=str(path))

    message = weights(linear_weight=torch.ones(4, 2), head_bias=torch.ones(3))
    assert "missing from the weights: linear.bias" in message
    assert "not in the model: head.bias" in message
    assert "linear.weight (float32 [4, 2] in the weights, float32 [3, 2] in the model)" in message
    message = weights(linear_weight=torch.ones(3, 2).int(), linear_bias=torch.ones(3))
    assert "int32 [3, 2] in the weights" in message
    for value in (float("nan"), float("inf")):
        message = weights(linear_weight=torch.ones(3, 2), linear_bias=torch.full((3,), value))
        assert "weights must be finite" in message and "linear.bias" in message
    # Before the factory runs:
    assert "no such weights file" in refused(f"{factory}:broken", weights=str(tmp_path / "w.pt"))
    (tmp_path / "w.npz").touch()
    assert "must be a .safetensors" in refused(f"{factory}:build", weights=str(tmp_path / "w.npz"))


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("broken", None, "KeyError: 'no such backbone' (model.py, line 18)"),
        ("leaves", None, "SystemExit: usage: train.py"),
        ("number", None, "must return a torch.nn.Module, got a int"),
        ("CONSTANT", None, "must define a callable 'CONSTANT', got a int"),
        ("biuld", None, "it defines Net, build, broken"),
        ("diverged", None, "1 NaN of 6 values in linear.weight"),
        ("build", '{"depth": 1}', "unexpected keyword argument 'depth'"),
        ("build", {"self": 1}, "unexpected keyword argument"),
        ("build", "{width: 1}", "--kwargs must be JSON"), ("build", "[1]", "must be a JSON object"),
    ],
)  # fmt: skip
def test_bad_factory(factory, name, kwargs, expected):
    assert expected in refused(f"{factory}:{name}", kwargs=kwargs)


def test_file_that_does_not_import(tmp_path):
    path, modules, places = tmp_path / "model.py", set(sys.modules), list(sys.path)
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
    path.write_text("def build():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):  # which nothing takes for an error of the code
        load_teacher(f"{path}:build")
    assert sys.path == places


def test_names_that_no_disk_has(tmp_path, capsys):
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    for name in (f"{tmp_path}/{'x' * 300}:make", "x" * 5000 + ":make", f"{tmp_path}/loop.py:make"):
        assert cli.main(["inspect", name]) == 2
        assert "internal error" not in capsys.readouterr().err


# --- checkpoints ----------------------------------------------------------------------------------


class NeedsCode:
    """Unpickling this would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (_would_run, ("",))


def _would_run(_: str) -> None:
    raise AssertionError("a pickle ran code")


def test_a_pickle_that_needs_code_is_not_run(tmp_path):
    path = tmp_path / "whole.pt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "args": NeedsCode()}, path)
    with pytest.raises(InputError) as caught:
        read_state_dict(path)
    message = str(caught.value)
    assert "needs to run code" in message and "save_file" in message
    assert "weights_only=False" in message and str(tmp_path / "whole.safetensors") in message


def test_conversion_in_the_message_works(tmp_path, monkeypatch):
    (tmp_path / "user_net.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    torch.save(importlib.import_module("user_net").Net(2, 2), "whole.pt")
    with pytest.raises(InputError) as caught:
        read_state_dict(Path("whole.pt"))
    exec(caught.value.help.split('python -c "', 1)[1].removesuffix('"'), {})
    assert read_state_dict(Path("whole.safetensors")).keys() == {"weight", "bias"}


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 half an archive", True, False])
def test_broken_checkpoints(tmp_path, content):
    """Of no kind, or cut: True for an archive, False for the older format."""
    path = tmp_path / "w.pt"
    if isinstance(content, bool):
        torch.save({"w": torch.ones(500)}, path, _use_new_zipfile_serialization=content)
        content = path.read_bytes()[:-700]
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a PyTorch checkpoint, or a truncated one"):
        read_state_dict(path)


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}], ids=str)
def test_checkpoint_without_tensors(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(InputError, match="must hold tensors by name"):
        read_state_dict(tmp_path / "w.pt")
