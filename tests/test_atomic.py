"""replace_folder: the old folder or the new one, never a mixture."""

from __future__ import annotations

import errno
import os
import pathlib
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from asapc import pipeline
from asapc.calibration.stored import Calibration, save_calibration
from asapc.errors import InputError
from asapc.formats import atomic
from asapc.formats.atomic import (
    check_replaceable,
    clean_leftovers,
    read_whole,
    replace_file,
    replace_folder,
)
from asapc.inputs.recipe import Recipe
from asapc.report import Report, write_report
from asapc.terminal.progress import SILENT


def write(folder, text):
    (folder / "manifest.json").write_text(text)


def read(folder):
    return (folder / "manifest.json").read_text()


@pytest.fixture
def two_renames(monkeypatch):
    """A disk that cannot exchange two names."""
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)


@pytest.fixture(params=["exchange", "two_renames"])
def either_way(request):
    if request.param == "two_renames":
        request.getfixturevalue("two_renames")
    return request.param


def test_this_disk_exchanges(tmp_path):
    """So that the other tests say something about what runs here."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    assert atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_text() == "b" and (tmp_path / "b").is_dir()


def test_creates_parents_and_replaces(tmp_path, either_way):
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


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_interrupted_leaves_the_old_or_none(tmp_path, failure):
    out = tmp_path / "out"
    for existing in ([], ["out"]):
        if existing:
            out.mkdir()
            write(out, "old")
        with pytest.raises(failure), replace_folder(out) as folder:
            write(folder, "half")
            raise failure
        assert os.listdir(tmp_path) == existing
    assert read(out) == "old"


def test_interrupt_between_the_renames_restores(tmp_path, monkeypatch, two_renames):
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


def test_errors_of_reading_and_of_the_parent(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError), replace_folder(tmp_path / "out"):
        (tmp_path / "absent").read_text()  # which is not blamed on the output
    (tmp_path / "file").write_text("x")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for place in (tmp_path / "file" / "out", tmp_path / "a"):
        with pytest.raises(InputError, match="cannot write"), replace_folder(place):
            pass

    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(atomic.Path, "mkdir", read_only)
    with pytest.raises(InputError, match="Read-only"), replace_folder(tmp_path / "out"):
        pass


def test_refuses_what_asapc_did_not_write(tmp_path):
    """Also where it appears while the new folder is written."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="must be a folder"), replace_folder(tmp_path / "file"):
        pass
    for early in (True, False):
        own = tmp_path / f"thesis {early}"
        if early:
            own.mkdir()
            (own / "chapter.tex").write_text("precious")
        with pytest.raises(InputError, match="only folders that it wrote"), replace_folder(own):
            own.mkdir()
            (own / "chapter.tex").write_text("precious")
        assert (own / "chapter.tex").read_text() == "precious"
    assert len(os.listdir(tmp_path)) == 3


def test_follows_a_link_to_a_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replace_folder(tmp_path / "link") as folder:
        write(folder, "new")
    assert (tmp_path / "link").is_symlink() and read(tmp_path / "real") == "new"


def test_leftovers_of_dead_runs_go_and_of_live_ones_stay(tmp_path):
    out = tmp_path / "out"
    dead = tmp_path / ".out.0123abcd.partial"
    others = [tmp_path / ".out.notes.partial", tmp_path / ".outer.0123abcd.partial"]
    for folder in (dead, *others):
        folder.mkdir()
    with replace_folder(out) as live:
        assert not dead.exists()
        clean_leftovers(out)
        assert live.is_dir()
        write(live, "new")
    assert sorted(os.listdir(tmp_path)) == sorted(["out", *(other.name for other in others)])


def test_a_reader_between_the_two_renames_takes_nothing_from_the_writer(
    tmp_path, monkeypatch, two_renames
):
    out = tmp_path / "out"
    with replace_folder(out) as folder:
        write(folder, "old")
    rename, seen = os.rename, []

    def watched(source, target):
        rename(source, target)
        if str(target).endswith(".previous") and not seen:
            assert not out.exists()
            clean_leftovers(out)
            seen.append(read_whole(out, lambda: read(out)))

    monkeypatch.setattr(atomic.os, "rename", watched)
    with replace_folder(out) as folder:
        write(folder, "new")
    assert seen == ["old"] and read(out) == "new" and os.listdir(tmp_path) == ["out"]


def test_a_reader_never_sees_two_folders_mixed(tmp_path, either_way):
    out = tmp_path / "out"

    def save(text):
        with replace_folder(out) as folder:
            write(folder, text)
            (folder / "weights").write_text(text)

    def disturbed_read():
        first = read(out)
        if first == "one":
            save("two")
        return first, (out / "weights").read_text()

    save("one")
    assert read_whole(out, disturbed_read) == ("two", "two")


def test_everything_is_on_disk_before_the_name_changes(tmp_path, monkeypatch, either_way):
    out, events = tmp_path / "out", []
    flush, swap, fsync = atomic.flush, atomic._swap, os.fsync
    monkeypatch.setattr(atomic, "flush", lambda p: (flush(p), events.append(p.name))[0])
    monkeypatch.setattr(atomic, "_swap", lambda *a: (swap(*a), events.append("SWAP"))[0])
    for text in ("one", "two"):
        with replace_folder(out) as folder:
            write(folder, text)
            (folder / "modules").mkdir()
            (folder / "modules" / "0.pt2").write_text(text)
            events.clear()
    before, after = events[: events.index("SWAP")], events[events.index("SWAP") + 1 :]
    assert set(before) == {"manifest.json", "0.pt2", "modules", folder.name, tmp_path.name}
    assert after == [tmp_path.name]

    events.clear()
    replace = os.replace
    monkeypatch.setattr(atomic.os, "fsync", lambda fd: (fsync(fd), events.append("fsync"))[0])
    monkeypatch.setattr(atomic.os, "replace", lambda *a: (replace(*a), events.append("SWAP"))[0])
    replace_file(tmp_path / "file", "text")
    assert [e for e in events if not e.startswith(".")] == ["fsync", "SWAP", "fsync", tmp_path.name]


def test_an_output_that_holds_what_is_read_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write(out, "an artefact")
    (out / "data.npz").touch()
    (out / "stream.py").touch()
    (tmp_path / "link.npz").symlink_to(out / "data.npz")
    (tmp_path / "other").symlink_to(out)
    inputs = [out, out / "data.npz", f"{out}/stream.py:batches", tmp_path / "link.npz"]
    for target in (out, tmp_path / "other", tmp_path / "x" / ".." / "out"):
        for source in inputs:
            with pytest.raises(InputError, match="must not contain an input"):
                check_replaceable(target, [tmp_path / "beside", source])
    check_replaceable(out, [tmp_path, tmp_path / "outer", "pkg.module:batches", "a\0b", ""])


def test_no_command_writes_over_what_it_reads(tmp_path):
    """compile -o CALIB would delete the calibration."""
    folder, teacher = tmp_path / "calib", SimpleNamespace(source="teacher")
    folder.mkdir()
    (folder / "calibration.json").touch()
    (folder / "data.npz").touch()
    data, names = str(folder / "data.npz"), os.listdir(folder)
    for command in (
        lambda: pipeline.calibrate(teacher, data, folder, Recipe(), SILENT),
        lambda: pipeline.compile(teacher, folder, folder, None, None, SILENT),
        lambda: pipeline.refresh(folder, data, None, progress=SILENT),
    ):
        with pytest.raises(InputError, match="must not contain an input"):
            command()
    assert os.listdir(folder) == names


def test_what_commands_write_takes_its_place_at_last(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    for module, name in ((atomic.os, "rename"), (atomic.os, "replace"), (atomic, "_exchange")):
        monkeypatch.setattr(module, name, interrupted)
    calibration = Calibration("teacher", {}, "whole", {}, "data")
    for write in (
        lambda: save_calibration(tmp_path / "calibration", calibration),
        lambda: write_report(tmp_path, Report()),
    ):
        with pytest.raises(KeyboardInterrupt):
            write()
        assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_whole_and_a_link_is_not_followed(tmp_path):
    replace_file(tmp_path / "report.json", "one")
    replace_file(str(tmp_path / "report.json"), b"two")
    assert (tmp_path / "report.json").read_bytes() == b"two"
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "link").symlink_to(precious)
    replace_file(tmp_path / "link", "new")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_text() == "new"
    (tmp_path / ".report.json.0123abcd.partial").write_text("half")
    replace_file(tmp_path / "report.json", "three")
    assert sorted(os.listdir(tmp_path)) == ["link", "precious", "report.json"]


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    replace_file(tmp_path / "file", "old")
    for path in (tmp_path / "absent" / "file", tmp_path / ("x" * 250)):
        with pytest.raises(InputError, match="cannot be written"):
            replace_file(path, "new")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        replace_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_only_files_are_replaced_by_a_file(tmp_path):
    """A rename would take the place of a device as well: of /dev/null, by root."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    for path in (tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(InputError, match="must be a file, or not exist"):
            replace_file(path, "new")
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "pipe").is_fifo()
    # only looked at, for a test that fails must not write there
    for place in ("/dev/null", "/dev/absent", "/dev/stdout", "/proc/self/fd/1", "/proc/self/x", "/sys/a"):
        with pytest.raises(InputError, match="must be a file, or not exist"):
            atomic._check_is_file(pathlib.Path(place))
    atomic._check_is_file(pathlib.Path("/dev/shm/absent"))
