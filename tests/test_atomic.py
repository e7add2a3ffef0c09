"""replace_folder: the old folder or the new one, never a mixture."""

from __future__ import annotations

import errno
import os

import pytest
from safetensors import SafetensorError

from asapc.errors import InputError
from asapc.formats import atomic
from asapc.formats.atomic import replace_folder


def write(folder, text):
    (folder / "manifest.json").write_text(text)


def read(folder):
    return (folder / "manifest.json").read_text()


def test_creates_parents_and_replaces(tmp_path):
    out = tmp_path / "a" / "b"
    with replace_folder(out) as folder:
        write(folder, "one")
        assert not out.exists()
    with replace_folder(str(out)) as folder:
        write(folder, "two")
        (folder / "extra").write_text("x")
        assert read(out) == "one"
    assert read(out) == "two" and (out / "extra").exists()
    assert os.listdir(out.parent) == ["b"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("existing", [True, False], ids=["over_old", "fresh"])
def test_interrupted_leaves_the_old_or_none(tmp_path, failure, existing):
    out = tmp_path / "out"
    if existing:
        out.mkdir()
        write(out, "old")
    with pytest.raises(failure), replace_folder(out) as folder:
        write(folder, "half")
        raise failure
    assert os.listdir(tmp_path) == (["out"] if existing else [])
    assert not existing or read(out) == "old"


def test_interrupt_between_the_renames_restores(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    write(out, "old")
    rename, calls = os.rename, []

    def interrupted(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(atomic.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), replace_folder(out) as folder:
        write(folder, "new")
    assert read(out) == "old" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
        RuntimeError("PytorchStreamWriter failed writing file data/0"),
    ],
    ids=["os", "safetensors", "torch"],
)
def test_full_disk_is_one_clear_message(tmp_path, failure):
    with pytest.raises(InputError, match="cannot write the output folder"), replace_folder(
        tmp_path / "out"
    ):
        raise failure
    assert os.listdir(tmp_path) == []


def test_reading_errors_are_not_blamed_on_the_output(tmp_path):
    with pytest.raises(FileNotFoundError), replace_folder(tmp_path / "out"):
        (tmp_path / "absent").read_text()


def test_unwritable_parent(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot write"), replace_folder(tmp_path / "file" / "out"):
        pass

    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(atomic.Path, "mkdir", read_only)
    with pytest.raises(InputError, match="Read-only"), replace_folder(tmp_path / "out"):
        pass


def test_refuses_what_asapc_did_not_write(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="must be a folder"), replace_folder(tmp_path / "file"):
        pass
    own = tmp_path / "thesis"
    own.mkdir()
    (own / "chapter.tex").write_text("precious")
    with pytest.raises(InputError, match="only folders that it wrote"), replace_folder(own):
        pass
    assert (own / "chapter.tex").read_text() == "precious"


def test_follows_a_link_to_a_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replace_folder(tmp_path / "link") as folder:
        write(folder, "new")
    assert (tmp_path / "link").is_symlink() and read(tmp_path / "real") == "new"
