"""Data sources: order, splits, names and dtypes, and one message for every unusable input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from asapc.errors import InputError
from asapc.inputs.data import Batch, DataSource, open_data, split_of


def forward(img: Tensor, mask: Tensor | None = None, *, scale: Tensor | None = None) -> None:
    """The signature that the data below is for."""


SIGNATURE = inspect.signature(forward)
Open = Callable[..., DataSource]


@pytest.fixture
def npz(tmp_path: Path) -> Open:
    def save(signature: inspect.Signature | None = SIGNATURE, **arrays: Any) -> DataSource:
        np.savez(tmp_path / "data.npz", **arrays)
        return open_data(str(tmp_path / "data.npz"), signature)

    return save


@pytest.fixture
def code(tmp_path: Path) -> Callable[[str], str]:
    """Writes the body of `batches()` and returns its spec."""

    def write(body: str) -> str:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        header = "import torch, numpy as np\ndef batches():\n"
        (tmp_path / "stream.py").write_text(header + lines)
        return f"{tmp_path}/stream.py:batches"

    return write


def images(n: int) -> np.ndarray[Any, Any]:
    return np.arange(n * 4, dtype=np.float32).reshape(n, 2, 2)


def message_of(action: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    return str(caught.value)


def read(data: DataSource, batch_size: int = 4, **options: Any) -> list[Batch]:
    return list(data.batches(batch_size, **options))


def test_arrays_are_batched_in_order_and_can_be_read_again(npz: Open) -> None:
    data = npz(img=images(10), labels=np.arange(10, dtype=np.uint8))
    assert data.examples == 10
    for _ in range(2):
        batches = read(data)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        img = torch.cat([batch.args[0] for batch in batches])
        assert torch.equal(img, torch.from_numpy(images(10)))
        assert batches[1].labels is not None and batches[1].labels.tolist() == [4, 5, 6, 7]
        assert batches[1].labels.dtype == torch.int64 and not batches[1].kwargs


def test_names_that_python_cannot_have(npz: Open) -> None:
    """As the inputs of ONNX graphs may be called."""

    def graph(input_1: Tensor, attention_mask: Tensor) -> None: ...

    arrays = {"input.1": np.ones((3, 2)), "attention-mask": np.zeros((3, 2))}
    batch = next(npz(inspect.signature(graph), **arrays).batches(3))
    assert [float(own.sum()) for own in batch.tensors()] == [6.0, 0.0]
    for name in ("input", "input.2"):
        with pytest.raises(InputError, match="must be named after"):
            npz(inspect.signature(graph), **{name: np.ones((3, 2)), "attention-mask": np.zeros((3, 2))})
    with pytest.raises(InputError, match="must be named after"):
        npz(inspect.signature(graph), **arrays, input_1=np.ones((3, 2)))


def test_arguments_keep_the_order_of_forward(npz: Open) -> None:
    both = npz(mask=np.ones((3, 2), bool), scale=np.ones(3), img=images(3))
    (batch,) = read(both)
    assert [tuple(x.shape) for x in batch.args] == [(3, 2, 2), (3, 2)]
    assert batch.args[1].dtype == torch.bool and list(batch.kwargs) == ["scale"]
    (batch,) = read(npz(signature=None, mask=np.ones((3, 2), bool), img=images(3)))
    assert batch.args == () and set(batch.kwargs) == {"mask", "img"}
    anything = inspect.signature(lambda *args, **kwargs: None)
    assert set(read(npz(signature=anything, x=images(3)))[0].kwargs) == {"x"}


@pytest.mark.parametrize(
    ("given_dtype", "passed"),
    [("f2", "float16"), (">f4", "float32"), ("u4", "int64"), ("i4", "int64"), ("?", "bool")],
)
def test_dtypes(npz: Open, given_dtype: str, passed: str) -> None:
    array = np.ones((2, 3), dtype=given_dtype)
    tensor = read(npz(img=array))[0].args[0]
    assert str(tensor.dtype) == f"torch.{passed}" and tensor.sum() == 6


def test_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "data.safetensors"
    save_file({"img": torch.ones(3, 2, dtype=torch.bfloat16), "labels": torch.arange(3)}, path)
    (batch,) = read(open_data(str(path), SIGNATURE))
    assert batch.args[0].dtype == torch.bfloat16 and batch.labels is not None


def test_hash_depends_on_content_only(npz: Open) -> None:
    first = npz(img=images(6), labels=np.arange(6))
    hashes = [h for batch in read(first) for h in batch.hashes]
    assert len(set(hashes)) == 6 and all(0 <= h < 2**64 for h in hashes)
    order = np.array([5, 0, 3, 3])
    shuffled = npz(img=images(6)[order], labels=np.zeros(4, int))
    assert read(shuffled)[0].hashes == [hashes[i] for i in order]
    assert read(npz(mask=np.ones((6, 2), bool), img=images(6)))[0].hashes != hashes[:4]
    assert first.fingerprint != shuffled.fingerprint
    assert first.fingerprint == npz(img=images(6), labels=np.arange(6)).fingerprint


def test_hashes_do_not_change_between_versions(npz: Open) -> None:
    """A split must stay a split: a calibration file outlives the process that wrote it."""
    assert read(npz(img=images(2)))[0].hashes == [4302187257276669730, 1696376050662220681]


def test_select_and_limit(npz: Open) -> None:
    data = npz(img=images(400), labels=np.arange(400))
    splits: dict[str, list[int]] = {}
    for split in ("calibration", "selection", "gate"):
        batches = read(data, 32, select=lambda h, split=split: split_of(h) == split)
        assert all(len(batch) == 32 for batch in batches[:-1])
        assert all(split_of(h) == split for batch in batches for h in batch.hashes)
        splits[split] = [int(x) for batch in batches for x in batch.labels]  # type: ignore[union-attr]
    assert sorted(x for part in splits.values() for x in part) == list(range(400))
    assert 0.6 < len(splits["calibration"]) / 400 < 0.8
    limited = read(data, 32, select=lambda h: split_of(h) == "gate", limit=33)
    assert [len(batch) for batch in limited] == [32, 1]
    assert int(limited[0].labels[0]) == splits["gate"][0]  # type: ignore[index]
    assert read(data, 32, limit=0) == [] and read(data, 32, select=lambda _: False) == []
    assert sum(map(len, read(data, 300, limit=299))) == 299


@given(st.integers(0, 2**64 - 1))
def test_split_is_by_hash_modulo_100(hash: int) -> None:
    expected = "calibration" if hash % 100 < 70 else "selection" if hash % 100 < 85 else "gate"
    assert split_of(hash) == expected


def test_callable_yields_tensor_tuple_or_dict(code: Callable[[str], str], npz: Open) -> None:
    expected = read(npz(img=images(8), mask=np.ones((8, 2), bool)))
    for item in ("(x, m)", "[x.numpy(), m]", "{'mask': m, 'img': x, 'labels': [0, 1, 2, 3]}"):
        body = (
            "for i in range(2):\n"
            "    x = torch.arange(16 * i, 16 * i + 16).float().view(4, 2, 2)\n"
            "    m = torch.ones(4, 2, dtype=torch.bool)\n"
            f"    yield {item}"
        )
        data = open_data(code(body), SIGNATURE)
        assert data.examples is None
        for _ in range(2):
            batches = read(data)
            assert [b.hashes for b in batches] == [b.hashes for b in expected], item
            assert torch.equal(batches[1].args[0], expected[1].args[0])
    assert batches[0].labels is not None
    single = open_data(code("return [torch.ones(3, 2, 2), torch.ones(3, 2, 2)]"), SIGNATURE)
    assert [len(batch) for batch in read(single, 4)] == [4, 2]


def test_examples_of_different_shapes_never_share_a_batch(code: Callable[[str], str]) -> None:
    body = "yield torch.ones(3, 5)\nyield torch.ones(2, 5)\nyield torch.ones(2, 7)\n"
    shapes = [tuple(b.args[0].shape) for b in read(open_data(code(body), SIGNATURE), 4)]
    assert shapes == [(4, 5), (1, 5), (2, 7)]


def test_constants_pass_through(code: Callable[[str], str]) -> None:
    body = "yield {'img': torch.ones(3, 2), 'mask': None, 'scale': 0.5}"
    (batch,) = read(open_data(code(body), SIGNATURE), 2, limit=1)
    assert batch.args[1] is None and batch.kwargs == {"scale": 0.5} and len(batch.args[0]) == 1


# --- bad input -----------------------------------------------------------------------------------


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        return message_of(lambda: open_data(str(tmp_path / name), SIGNATURE))

    assert "no such data file" in refused("gone.npz")
    assert "no such data file" in refused("gone.safetensors")
    assert "no such file" in refused("gone.csv")
    assert "no such file" in refused("gone.py:batches")
    (tmp_path / "data.csv").touch()
    assert ".npz or .safetensors" in refused("data.csv")
    np.save(tmp_path / "x.npy", images(2))
    assert "np.savez('data.npz', img=np.load(" in refused("x.npy")


@pytest.mark.parametrize("damage", [0, 3, 200, -30, "inside"])
def test_a_damaged_npz(tmp_path: Path, damage: int | str) -> None:
    """Cut after or before so many bytes, or overwritten inside."""
    path = tmp_path / "data.npz"
    for save in (np.savez, np.savez_compressed)[damage == "inside" :]:
        save(path, img=np.random.default_rng(0).random((50, 9)))
        content = bytearray(path.read_bytes())
        if isinstance(damage, int):
            content = content[:damage]
        else:
            content[200:260] = bytes(60)
        path.write_bytes(content)
        message = message_of(lambda: open_data(str(path), SIGNATURE))
        assert "not an .npz archive, or a truncated one" in message


def test_other_files_in_place_of_data(tmp_path: Path, npz: Open) -> None:
    path = tmp_path / "data.safetensors"
    save_file({"img": torch.ones(3, 2)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    assert "not a safetensors file" in message_of(lambda: open_data(str(path), SIGNATURE))
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, images(2))
    message = message_of(lambda: open_data(str(tmp_path / "one.npz"), SIGNATURE))
    assert "a single unnamed array" in message
    ragged = np.array([[1], [1, 2]], dtype=object)
    message = message_of(lambda: npz(img=ragged))  # whose pickle is never run
    assert "arrays must hold numbers" in message and "pickle" in message


def test_wrong_names(npz: Open, tmp_path: Path) -> None:
    message = message_of(lambda: npz(images=images(2), labels=np.zeros(2, int)))
    assert "named after the arguments of forward(img, mask, scale), got images" in message
    assert "img=" in message
    np.savez(tmp_path / "unnamed.npz", images(2))
    message = message_of(lambda: open_data(str(tmp_path / "unnamed.npz"), SIGNATURE))
    assert "got arr_0" in message
    message = message_of(lambda: npz(mask=np.ones((2, 2), bool)))
    assert "got mask: missing a required argument: 'img'" in message
    assert "got no arrays: missing" in message_of(lambda: npz(labels=np.zeros(2, int)))


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"img": images(3), "labels": np.zeros(4, int)}, "equally many examples, got img 3, labels 4"),
        ({"img": np.float32(3)}, "needs a first dimension"),
        ({"img": np.array(["a", "b"])}, "got dtype <U1"),
        ({"img": images(2), "labels": np.ones((2, 10), np.float32)}, "one class number"),
        ({"img": np.where(np.arange(5) < 3, 1.0, np.nan)}, "img must be finite, got NaN in example 3"),
        ({"img": images(0)}, "no examples"), ({}, "no examples"),
    ],
)
def test_arrays_that_are_no_data(npz: Open, arrays: dict[str, Any], expected: str) -> None:
    assert expected in message_of(lambda: npz(**arrays))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return []", "no examples"), ("yield torch.ones(0, 2)", "no examples"),
        ("yield torch.ones(2, 2)\nraise OSError('disk gone')", "OSError: disk gone (stream.py"),
        ("raise SystemExit(1)", "SystemExit: 1"), ("return 5", "must return or yield batches, got a int"),
        ("yield torch.ones(2, 2), torch.ones(2), torch.ones(2)", "3 positional values"),
        ("yield {'image': torch.ones(2, 2)}", "got image"),
        ("yield torch.ones(2, 2), torch.ones(3)", "got img 2, mask 3"),
        ("yield torch.ones(2, 2), [torch.ones(2), {1}]", "mask[1] must be a tensor"),
        ("yield 'text'", "at least one array"), ("yield None", "at least one array"),
        ("yield torch.ones(3, 2)\nyield torch.tensor([[1.0], [float('nan')]])", "NaN in example 4"),
        ("yield {'img': torch.ones(2, 2), 'labels': torch.ones(2)}", "one class number"),
    ],
)
def test_bad_batches(code: Callable[[str], str], body: str, expected: str) -> None:
    message = message_of(lambda: read(open_data(code(body), SIGNATURE)))
    assert expected in message
