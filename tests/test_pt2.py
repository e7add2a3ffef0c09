"""Programs that would run code, write files or fill the memory when they are read: all refused.

Each attack is one that torch.export.load (2.11 to 2.13) falls for: what it does not check is turned into
Python source, imported, unpickled, evaluated or allocated.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from junk import places, with_junk

from asapc.errors import InputError
from asapc.inputs.pt2 import load_program, save_program

MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CONSTANTS, SAMPLES = "data/constants/model_constants_config.json", "data/sample_inputs/model.pt"


class Net(torch.nn.Module):
    """Weights, a buffer, a constant, a scalar, several outputs and a block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("buffer", torch.arange(3.0))
        self.constant = torch.ones(3)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        with torch.no_grad():
            low, high = (x * self.buffer).split([1, 2], dim=-1)
        y = torch.nn.functional.gelu(self.linear(x), approximate="tanh") * scale + self.constant
        return {"y": y.reshape(-1, y.shape[0] * y.shape[1]), "parts": [low, high]}


Parts = dict[str, bytes]


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}, "scale": None}
    return torch.export.export(Net().eval(), (torch.ones(4, 3),), {"scale": 3.0}, dynamic_shapes=dynamic)


@pytest.fixture(scope="module")
def parts(program):
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def marker(tmp_path):
    """What an attack that succeeds makes."""
    yield tmp_path / "pwned"
    assert not (tmp_path / "pwned").exists()


def write(path: Path, parts: Parts, root: str = "model") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(f"{root}/{name}", content)
    return path


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_program(path).module(check_guards=False)(torch.ones(4, 3), scale=3.0)
    return str(caught.value)


def changed(parts: Parts, name: str, change: Callable[[Any], Any]) -> Parts:
    document = json.loads(parts[name])
    result = change(document)
    return {**parts, name: json.dumps(document if result is None else result).encode()}


def graph(model: Any) -> Any:
    return model["graph_module"]["graph"]


def rename(model: Any, old: str, new: str) -> Any:
    """Everywhere, a node's name."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {new if k == old else k: walk(v) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v) for v in value]
        return new if value == old else value

    return walk(model)


def node(target: str, inputs: list[Any], output: str | None = None) -> dict[str, Any]:
    return {
        "target": target, "inputs": [{"name": "", "arg": arg, "kind": 1} for arg in inputs],
        "outputs": [{"as_none": True}] if output is None else [{"as_tensor": {"name": output}}],
        "metadata": {}, "is_hop_single_tensor_return": True, "name": None,
    }


class Bomb:
    """Unpickling it creates the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_what_torch_writes_is_read(program, parts, tmp_path):
    x = torch.randn(5, 3)
    expected = program.module()(x, scale=3.0)
    torch.export.save(program, tmp_path / "teacher.pt2")
    save_program(copy.deepcopy(program), tmp_path / "graph.pt2")
    own = load_program(tmp_path / "graph.pt2", dict(program.state_dict))
    for loaded in (
        load_program(tmp_path / "teacher.pt2"), own, load_program(write(tmp_path / "again.pt2", parts)),
    ):
        found = loaded.module(check_guards=False)(x, scale=3.0)
        assert torch.equal(found["y"], expected["y"])
        assert torch.equal(found["parts"][1], expected["parts"][1])


def test_the_same_program_gives_the_same_bytes(program, tmp_path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        save_program(copy.deepcopy(program), tmp_path / str(number) / "graph.pt2")
    assert (tmp_path / "0/graph.pt2").read_bytes() == (tmp_path / "1/graph.pt2").read_bytes()


@pytest.mark.parametrize("place", ["data/weights/model.pt", "data/constants/model.pt", SAMPLES])
@pytest.mark.parametrize("torch_format", [True, False], ids=["torch", "plain"])
def test_a_pickle_is_never_run(parts, tmp_path, marker, place, torch_format):
    buffer = io.BytesIO()
    if torch_format:
        torch.save((Bomb(marker),), buffer)
    else:
        pickle.dump((Bomb(marker),), buffer)
    evil = {**parts, place: buffer.getvalue()}
    if place == SAMPLES:  # not used, so not read
        load_program(write(tmp_path / "x.pt2", evil))
    else:
        assert "runs code" in refused(write(tmp_path / "x.pt2", evil))


@pytest.mark.parametrize("config", [WEIGHTS, CONSTANTS], ids=["weights", "constants"])
@pytest.mark.parametrize("path", [
    "weight_0", "tensor_0", "custom_obj_0", "opaque_obj_/../tensor_0", "../../pwned", "/etc/passwd",
])  # fmt: skip
def test_a_config_that_names_a_pickle(parts, tmp_path, marker, config, path):
    def point(document: Any) -> None:
        for entry in document["config"].values():
            entry.update(path_name=path, use_pickle=True)

    evil = changed(parts, config, point)
    for folder in ("weights", "constants"):
        evil[f"data/{folder}/{path}"] = pickle.dumps(Bomb(marker))
    refused(write(tmp_path / "x.pt2", evil))


def test_the_older_format_is_never_tried(tmp_path, marker):
    from torch._export.serde.schema import SCHEMA_VERSION

    with zipfile.ZipFile(tmp_path / "x.pt2", "w") as archive:
        archive.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
        archive.writestr("serialized_exported_program.json", "{}")
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", pickle.dumps(Bomb(marker)))
    refused(tmp_path / "x.pt2")


@pytest.mark.parametrize("twin", [MODEL, MODEL.upper(), MODEL.replace("/", "\\"), f"./{MODEL}"])
@pytest.mark.parametrize("evil_first", [True, False], ids=["evil_first", "evil_last"])
def test_two_members_that_readers_may_confuse(parts, tmp_path, marker, twin, evil_first):
    evil = changed(parts, MODEL, lambda m: rename(m, "x", injected("x", marker)))[MODEL]
    with zipfile.ZipFile(tmp_path / "x.pt2", "w") as archive:
        if evil_first:
            archive.writestr(f"model/{twin}", evil)
        for name, content in parts.items():
            archive.writestr(f"model/{name}", content)
        if not evil_first:
            archive.writestr(f"model/{twin}", evil)
    refused(tmp_path / "x.pt2")


@pytest.mark.parametrize("name", [
    "../../pwned", "/tmp/pwned", "other/models/model.json", "model/data/aotinductor/model/x.so",
    "model/models/other.json", "model/data/weights/../../pwned",
])  # fmt: skip
def test_extra_members(parts, tmp_path, name):
    path = write(tmp_path / "x.pt2", parts)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"\x7fELF")
    refused(path)


def test_a_second_archive_behind_the_first(parts, tmp_path, marker):
    evil = changed(parts, MODEL, lambda m: rename(m, "x", injected("x", marker)))
    first, second = write(tmp_path / "a", parts), write(tmp_path / "b", evil)
    for pair in ((first, second), (second, first)):
        (tmp_path / "x.pt2").write_bytes(b"".join(path.read_bytes() for path in pair))
        refused_or_harmless(tmp_path / "x.pt2")


def refused_or_harmless(path: Path) -> None:
    try:
        load_program(path).module(check_guards=False)(torch.ones(4, 3), scale=3.0)
    except InputError:
        return


def injected(name: str, marker: Path) -> str:
    """A name that is a statement in the source that torch.fx generates."""
    return f"{name} = open({str(marker)!r}, 'w'); {name}"


FORMS = [
    "{0} = open({1}, 'w'); {0}", "{0}=open({1}, 'w')", "{0}\n    open({1}, 'w')",
    '{0}"), open({1}, "w"), getattr(self, "{0}',
]  # fmt: skip


@pytest.mark.parametrize("name", ["x", "b_buffer", "linear.weight", "y"])
@pytest.mark.parametrize("form", FORMS, ids=["statement", "default", "line", "quote"])
def test_names_are_never_source(parts, tmp_path, marker, name, form):
    new = form.format(name, repr(str(marker)))
    evil = changed(parts, MODEL, lambda m: rename(m, name, new))
    for config in (WEIGHTS, CONSTANTS):
        evil = changed(evil, config, lambda c: rename(c, name, new))
    if evil != parts:
        refused(write(tmp_path / "x.pt2", evil))


def with_nodes(parts: Parts, *nodes: dict[str, Any]) -> Parts:
    return changed(parts, MODEL, lambda m: graph(m)["nodes"].extend(nodes))


@pytest.mark.parametrize("target", [
    "torch.os.system", "torch.ops.os.system", "_operator.attrgetter", "torch.ops.aten.from_file.default",
    "torch.ops.aten.add.__init__", "math.factorial", "torch.sym_sum.__globals__", "#ext:x", "eval",
    "torch.ops.prim.Print", "torch.ops.aten.no_such_operator", "torch.ops.higher_order.while_loop",
    "torch.ops.load_library",
])  # fmt: skip
def test_only_operators_are_called(parts, tmp_path, marker, target):
    message = refused(
        write(tmp_path / "x.pt2", with_nodes(parts, node(target, [{"as_string": str(marker)}])))
    )
    assert "runs code" in message and target in message


def test_what_is_called_by_an_argument_is_looked_at_too(parts, tmp_path, marker):
    """An operator, or a graph in the graph."""
    touch = {"as_string": f"touch {marker}"}
    inner = {
        "inputs": [], "outputs": [], "tensor_values": {}, "nodes": [node("torch.os.system", [touch])],
        "sym_int_values": {}, "sym_bool_values": {}, "is_single_tensor_return": False,
    }  # fmt: skip
    for called in (
        [{"as_operator": "torch.os.system"}, touch], [{"as_graph": {"name": "inner", "graph": inner}}],
    ):
        call = node("torch.ops.higher_order.wrap_with_set_grad_enabled", [{"as_bool": True}, *called])
        refused(write(tmp_path / "x.pt2", with_nodes(parts, call)))


EXPRESSIONS = [
    "__import__('os').system('touch {0}')", "Symbol('s0').__class__", "Integer(open('{0}', 'w'))",
    "Symbol('a b')", "10**10**10", "Pow(10, 10**9)", "PowByNatural(10, 99999999999)",
    "Float('1e999999999')", "(" * 500 + "1" + ")" * 500, "+".join(["1"] * 10**5), "f'{{open(\"{0}\")}}'",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS, ids=[e[:20] for e in EXPRESSIONS])
def test_sizes_are_arithmetic(parts, tmp_path, marker, text):
    text = text.format(marker)

    def change(model: Any) -> None:
        graph(model)["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}

    assert "runs code" in refused(write(tmp_path / "x.pt2", changed(parts, MODEL, change)))


@pytest.mark.parametrize("symbol", ["u99999999999", "s0; x", "__import__"])
def test_symbols_are_short(parts, tmp_path, symbol):
    def change(model: Any) -> None:
        model["range_constraints"][symbol] = {"min_val": 2, "max_val": None}

    refused(write(tmp_path / "x.pt2", changed(parts, MODEL, change)))


LEAF = {"type": None, "context": None, "children_spec": []}
SPECS: dict[str, tuple[str, Any] | None] = {  # type and context; None for one that is deep
    "enum": ("builtins.dict", json.dumps([{"__enum__": True, "fqn": "evil_module:X", "name": "a"}])),
    "factory": ("collections.defaultdict", {
        "default_factory_module": "evil_module", "default_factory_name": "run", "dict_context": ["y"],
    }),
    "namedtuple": ("collections.namedtuple", "evil_module.X"),
    "name": ("builtins.dict", '["y = open(1)"]'), "text": ("os.system", None), "deep": None,
}  # fmt: skip


@pytest.mark.parametrize("which", ["in_spec", "out_spec"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_containers_import_nothing(parts, tmp_path, marker, monkeypatch, which, spec):
    (tmp_path / "evil_module.py").write_text(f"open({str(marker)!r}, 'w')\ndef run(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    deep = "[1, " + '{"type": "builtins.tuple", "context": "null", "children_spec": [' * 5000

    def change(model: Any) -> None:
        entry = model["graph_module"]["module_call_graph"][0]["signature"]
        kind, context = spec or ("", None)
        spec_of = {"type": kind, "context": context, "children_spec": [LEAF]}
        entry[which] = deep if spec is None else json.dumps([1, spec_of])

    refused(write(tmp_path / "x.pt2", changed(parts, MODEL, change)))


def test_source_in_other_places(parts, tmp_path, marker):
    statement = f"open({str(marker)!r}, 'w')"

    def argument_names(model: Any) -> None:
        model["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [
            f"x={statement}", "scale",
        ]

    def module_name(model: Any) -> None:
        model["graph_module"]["module_call_graph"][1]["fqn"] = f'a", {statement}, "'

    for change in (argument_names, module_name):
        refused(write(tmp_path / "x.pt2", changed(parts, MODEL, change)))

    def notes(model: Any) -> None:
        """Dropped, so harmless."""
        model["guards_code"] = [statement, "L['x'].size()[0] == 4"]
        graph(model)["nodes"][0]["metadata"].update(
            custom="[" * 10**5, from_node="[" * 10**5, stack_trace=f"\n{statement}",
            source_fn_stack="a,torch.os.system", nn_module_stack="L__self__,,M",
        )

    load_program(write(tmp_path / "y.pt2", changed(parts, MODEL, notes))).module()(
        torch.ones(4, 3), scale=3.0
    )


@pytest.mark.parametrize("config", [WEIGHTS, CONSTANTS], ids=["weights", "constants"])
@pytest.mark.parametrize("change", [
    {"sizes": [10**12]}, {"sizes": [2**62, 2**62], "strides": [0, 0]}, {"sizes": [-1]}, {"sizes": ["3"]},
    {"strides": [10**12, 1]}, {"storage_offset": 10**15}, {"dtype": 999},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("empty", [True, False], ids=["empty", "filled"])
def test_declared_shapes_fit_the_file(parts, tmp_path, config, change, empty):
    def lie(document: Any) -> None:
        for entry in document["config"].values():
            for key, value in change.items():
                sizes = [{"as_int": v} for v in value] if isinstance(value, list) else value
                entry["tensor_meta"][key] = {"as_int": value} if key == "storage_offset" else sizes

    evil = changed(parts, config, lie)
    if empty:
        evil = {
            n: b"" if n.startswith("data/") and not n.endswith("json") else c for n, c in evil.items()
        }
    refused(write(tmp_path / "x.pt2", evil))


def test_a_zip_bomb(parts, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(f"model/{name}", content)
        archive.writestr("model/data/weights/weight_7", bytes(2**22))
    refused(tmp_path / "x.pt2")


@pytest.mark.parametrize("name", [MODEL, WEIGHTS, CONSTANTS])
def test_damaged_json(parts, tmp_path, name):
    for text in ("", "{", "[]", "null", "[" * 10**5, '{"a":' * 10**5, "\xff", "1" * 5000, "NaN"):
        refused(write(tmp_path / "x.pt2", {**parts, name: text.encode("latin-1")}))


OTHER_TYPES: list[Any] = [None, [], {}, "x", 10**400]


@pytest.mark.parametrize("name", [MODEL, WEIGHTS, CONSTANTS])
def test_a_value_of_another_type(parts, tmp_path, monkeypatch, name):
    """One of them anywhere, with torch left out: what is checked before it reads the file is told."""

    def stop(*arguments: Any) -> None:
        raise ValueError("all checks passed")

    monkeypatch.setattr(torch.export, "load", stop)
    document, reached = json.loads(parts[name]), 0
    ways = {tuple(key for key in way if isinstance(key, str))[-2:]: way for way in places(document)}
    for index, way in enumerate(ways.values()):  # one under every pair of keys that there is
        evil = with_junk(document, way, OTHER_TYPES[index % len(OTHER_TYPES)])
        path = write(tmp_path / "x.pt2", {**parts, name: json.dumps(evil).encode()})
        with pytest.raises(InputError) as caught:
            load_program(path)
        reached += "all checks passed" in str(caught.value)
    assert reached or name != MODEL  # or nothing was tried


@pytest.mark.parametrize("name", [MODEL, WEIGHTS, CONSTANTS, "archive_format", "archive_version"])
def test_missing_members(parts, tmp_path, name):
    refused(write(tmp_path / "x.pt2", {n: c for n, c in parts.items() if n != name}))


@pytest.mark.parametrize("change", [
    lambda state: {**state, "linear.weight": torch.ones(3, 4)},
    lambda state: {**state, "linear.bias": torch.ones(3, dtype=torch.int64)},
    lambda state: {n: t for n, t in state.items() if n != "buffer"},
], ids=["shape", "dtype", "missing"])  # fmt: skip
def test_weights_that_do_not_fit(program, tmp_path, change):
    save_program(copy.deepcopy(program), tmp_path / "graph.pt2")
    state = {name: tensor.detach() for name, tensor in program.state_dict.items()}
    with pytest.raises(InputError, match=r"graph\.pt2"):
        load_program(tmp_path / "graph.pt2", change(state))
