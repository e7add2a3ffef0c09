"""Shards: parts of an interrupted run, whole or absent, and never another run's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asapc.calibration.shards import Shards
from asapc.errors import InputError

FINGERPRINT = {"model": "a", "data": "b", "recipe": "c", "code version": "d"}


def shards(tmp_path: Path, **other: str) -> Shards:
    return Shards(tmp_path / "parts", {**FINGERPRINT, **other})


def filled(tmp_path: Path) -> Shards:
    with shards(tmp_path) as own:
        own.put("layers.0", {"gram": torch.eye(3), "count": torch.tensor(7)}, {"tokens": 12})
        own.put("layers.1", {"gram": torch.ones(2, 2)}, {})
    return own


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "parts").glob("*.safetensors"))


def test_a_later_run_finds_what_an_earlier_one_put(tmp_path: Path) -> None:
    filled(tmp_path)
    with shards(tmp_path) as own:
        assert own.keys() == ["layers.0", "layers.1"] and own.get("layers.2") is None
        found = own.get("layers.0")
        assert found is not None and found[1] == {"tokens": 12}
        assert torch.equal(found[0]["gram"], torch.eye(3)) and int(found[0]["count"]) == 7
        own.put("layers.0", {"gram": torch.zeros(1)}, {"tokens": 0})
        own.put("layers.2", {}, {"fitted": False})
    with shards(tmp_path) as own:
        assert own.keys() == ["layers.0", "layers.1", "layers.2"]
        assert own.get("layers.0") is not None and own.get("layers.0")[1] == {"tokens": 0}  # type: ignore[index]
        assert own.get("layers.2") == ({}, {"fitted": False})


@pytest.mark.parametrize("key", ["", "../../x", "/etc/passwd", "a/b", "a_b", "é\ud800", "x" * 400, "\0"],
                         ids=ascii)  # fmt: skip
def test_any_key_is_a_name_inside_the_folder(tmp_path: Path, key: str) -> None:
    with shards(tmp_path) as own:
        if key.isprintable() or key == "\0":
            own.put(key, {"x": torch.ones(1)}, {})
            assert own.get(key) is not None and own.keys() == [key]
        assert own.get(key + "!") is None
    assert os.listdir(tmp_path) == ["parts"]


def test_views_of_one_storage_and_other_dtypes(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with shards(tmp_path) as own:
        own.put("k", {"x": x, "t": x.t(), "row": x[0], "half": x.half(), "flag": x > 2}, {})
        tensors, _ = own.get("k")  # type: ignore[misc]
    assert torch.equal(tensors["t"], x.t()) and torch.equal(tensors["row"], x[0])
    assert tensors["half"].dtype == torch.float16 and torch.equal(tensors["flag"], x > 2)


def test_parts_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path)
    for other, named in (({"model": "x", "data": "y"}, "data, model"), ({"seed": "1"}, "seed")):
        with pytest.raises(InputError, match=f"another {named}") as caught:
            shards(tmp_path, **other).open()
        assert "--restart, or delete" in str(caught.value)
    assert filled(tmp_path).open().keys() == ["layers.0", "layers.1"]  # nothing was lost


def test_a_run_cut_short_before_its_first_part_stands_in_no_way(tmp_path: Path) -> None:
    shards(tmp_path).open().close()
    with shards(tmp_path, model="x") as own:
        own.put("k", {"x": torch.zeros(1)}, {})
    assert shards(tmp_path, model="x").open().keys() == ["k"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with shards(tmp_path), pytest.raises(InputError, match="one run at a time"):
        shards(tmp_path).open()
    with shards(tmp_path) as own:
        assert own.keys() == []


def test_torn_and_altered_parts_count_as_absent(tmp_path: Path) -> None:
    filled(tmp_path)
    path = files(tmp_path)[0]
    content = path.read_bytes()
    with shards(tmp_path) as own:
        whole = own.get("layers.0")
        for index in range(len(content)):
            path.write_bytes(content[:index])
            assert own.get("layers.0") is None and not path.exists(), index
            path.write_bytes(bytes([*content[:index], content[index] ^ 4, *content[index + 1 :]]))
            found = own.get("layers.0")
            if found is not None:  # a blank of the header's padding: the content is the same
                assert found[1] == whole[1]
                assert all(torch.equal(found[0][n], t) for n, t in whole[0].items())
        assert own.keys() in (["layers.1"], ["layers.0", "layers.1"])


def test_a_part_under_another_key_counts_as_absent(tmp_path: Path) -> None:
    filled(tmp_path)
    first, second = files(tmp_path)
    second.write_bytes(first.read_bytes())
    save_file({"x": torch.ones(1)}, tmp_path / "parts" / "foreign.safetensors")
    with shards(tmp_path) as own:
        assert own.keys() == ["layers.0"] and files(tmp_path) == [first]


def test_discard(tmp_path: Path) -> None:
    own = filled(tmp_path)
    shards(tmp_path, recipe="other").discard()
    own.discard()
    assert os.listdir(tmp_path) == []
    with own as again:
        assert again.keys() == []


def test_a_folder_of_something_else_is_neither_used_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "thesis.tex").write_text("precious")
    for act in (shards(tmp_path).open, shards(tmp_path).discard):
        with pytest.raises(InputError, match=r"thesis\.tex"):
            act()
    assert (tmp_path / "parts" / "thesis.tex").read_text() == "precious"
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="must be a folder"):
        Shards(tmp_path / "file", {}).open()


def test_a_damaged_index_or_one_of_another_format_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    damaged = ("", "{", "[]", "null", '{"format_version": 1}', "[" * 10**5,
               '{"format_version": 1, "fingerprint": [[]]}')  # fmt: skip
    old = json.dumps({"format_version": 0, "fingerprint": FINGERPRINT})
    rules = dict.fromkeys(damaged, "must say what") | {old: "another version of this format"}
    for text, rule in rules.items():
        (tmp_path / "parts" / "shards.json").write_text(text)
        with pytest.raises(InputError, match=rule):
            shards(tmp_path).open()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / ".out.shards").symlink_to(other)
    own = Shards.beside(tmp_path / "out", {"model": "a"})
    for action in (own.open, own.discard):
        with pytest.raises(InputError, match="got a link"):
            action()
    assert os.listdir(other) == []


def test_what_was_released_may_differ_once(tmp_path: Path) -> None:
    filled(tmp_path)
    with shards(tmp_path) as own:
        own.release("data")
    with pytest.raises(InputError, match="another model"):
        shards(tmp_path, data="y", model="x").open()
    with shards(tmp_path, data="y") as own:
        assert own.keys() == ["layers.0", "layers.1"]
        own.drop("layers.1")
        assert own.keys() == ["layers.0"]
    with pytest.raises(InputError, match="another data"):
        shards(tmp_path).open()
