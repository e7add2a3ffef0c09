"""A calibration that was cut short goes on, and ends in the same bytes; its parts are whole or absent."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_text import write_data, write_teacher

from asapc import pipeline
from asapc.calibration import distill, stream
from asapc.calibration.reading import Examples
from asapc.calibration.shards import Shards
from asapc.errors import InputError
from asapc.inputs.data import Batch
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention
from asapc.stages.calibrate import site_collector
from asapc.terminal.progress import Progress, make_progress

QUIET = make_progress(quiet=True)
TRIED: list[dict[str, Any]] = [
    {"features": ["coarse:4", "norm"]}, {"side": "both", "c_transforms": 0, "features": ["sliced:2"]},
    {"c_transforms": 3, "fit": "kl", "features": ["norm"]},
]  # fmt: skip
SMALL = {"candidates": TRIED, "max_examples": 40, "batch_size": 8}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_teacher(folder / "teacher", n_layers=2, max_iter=6)
    write_data(folder / "data.npz")
    return folder


def calibrate(work: Path, out: Path, recipe: dict[str, Any], **options: Any) -> None:
    teacher = load_teacher(str(work / "teacher"))
    data = str(work / "data.npz")
    pipeline.calibrate(teacher, data, out, Recipe.from_dict(recipe), QUIET, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "timings.json"}


class Killed(BaseException):
    """Not an Exception, so that nothing may handle it."""


def killed(work: Path, out: Path, recipe: dict[str, Any], owner: Any, name: str, fatal: Any) -> None:
    """A calibration that dies where `fatal` stands in for what the owner has of that name."""
    with pytest.MonkeyPatch.context() as crash:
        crash.setattr(owner, name, fatal)
        with pytest.raises(Killed):
            calibrate(work, out, recipe)


def cut_short(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """The next calibration dies after so many batches; returns where those to come begin to observe."""
    monkeypatch.setattr(stream, "ASIDE_EVERY", 0.0)
    monkeypatch.setattr(stream, "ASIDE_SHARE", math.inf)
    taken: list[int] = []
    true_take_in = stream.take_in

    def take_in(pending: Any, tensors: Any) -> None:
        if len(taken) == after:
            taken.append(-1)
            raise Killed
        taken.append(len(pending))
        true_take_in(pending, tensors)

    monkeypatch.setattr(stream, "take_in", take_in)
    return taken


@pytest.mark.parametrize(
    ("sequential", "after", "again"), [(False, 0, [6] * 5), (False, 3, [2, 2, 2, 6, 6]), (True, 3, None)]
)
def test_the_same_bytes_after_a_crash(work, tmp_path, monkeypatch, sequential, after, again):
    """Of five batches three are done: the statistics, of one dual and of both, see two more, the KL fits
    all five again."""
    calibrate(work, tmp_path / "whole", SMALL, sequential=sequential)
    with monkeypatch.context() as crash:
        cut_short(crash, after)
        with pytest.raises(Killed):
            calibrate(work, tmp_path / "cut", SMALL, sequential=sequential)
        assert not (tmp_path / "cut").exists()
        assert (tmp_path / ".cut.shards").exists() == (after > 0)
    with monkeypatch.context() as later:
        taken = cut_short(later, 99)
        calibrate(work, tmp_path / "cut", SMALL, sequential=sequential)
    assert again in (None, taken)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_ctrl_c_keeps_what_was_taken_in(work, tmp_path, monkeypatch):
    """It is pressed in the midst of the third batch, which is finished first."""
    true_take_in, batches = stream.take_in, list[int]()

    def take_in(pending: Any, tensors: Any) -> None:
        batches.append(len(pending))
        if len(batches) == 3:
            signal.raise_signal(signal.SIGINT)
        true_take_in(pending, tensors)

    with monkeypatch.context() as pressed:
        pressed.setattr(stream, "take_in", take_in)
        with pytest.raises(KeyboardInterrupt):
            calibrate(work, tmp_path / "cut", SMALL)
        assert batches == [6, 6, 6]
        calibrate(work, tmp_path / "cut", SMALL)
    assert batches[3:] == [2, 2, 2, 6, 6]


def test_finished_fits_are_not_made_again(work, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "STEPS", 2)
    recipe = {"operator": "lot", "pivots": 2, "max_examples": 16}
    calibrate(work, tmp_path / "whole", recipe)
    made: list[str] = []
    true_fit = distill.Distiller.calibration

    def fit(self: Any) -> Any:
        if len(made) == 1:
            raise Killed
        made.append(self.name)
        return true_fit(self)

    killed(work, tmp_path / "cut", recipe, distill.Distiller, "calibration", fit)
    made.clear()
    monkeypatch.setattr(distill.Distiller, "calibration", fit)
    calibrate(work, tmp_path / "cut", recipe)
    assert len(made) == 1
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_shared_coefficients_are_fitted_together_again(work, tmp_path):
    """Killed after the first site's fit was kept: the others must not be fitted among themselves."""
    shared = {"coefficients": "shared", "features": ["norm"]}
    recipe = {**SMALL, "candidates": [shared, {**shared, "c_transforms": 3}]}
    calibrate(work, tmp_path / "whole", recipe)
    true_put, kept = Shards.put, []

    def put(self: Shards, key: str, *rest: Any) -> None:
        if key.startswith("fit."):
            kept.append(key)
            if len(kept) == 3:
                raise Killed
        true_put(self, key, *rest)

    killed(work, tmp_path / "cut", recipe, Shards, "put", put)
    calibrate(work, tmp_path / "cut", recipe)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_other_work_is_not_gone_on_with(work, tmp_path, monkeypatch):
    with monkeypatch.context() as crash:
        cut_short(crash, 2)
        with pytest.raises(Killed):
            calibrate(work, tmp_path / "out", SMALL)
    with pytest.raises(InputError, match="recipe"):
        calibrate(work, tmp_path / "out", {**SMALL, "ridge": 0.5})
    calibrate(work, tmp_path / "out", {**SMALL, "ridge": 0.5}, restart=True)
    calibrate(work, tmp_path / "other", {**SMALL, "ridge": 0.5})
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


# --- data that was mended -------------------------------------------------------------------------

FAULTY = 150  # one of the calibration split, behind the sample and five batches of twelve
LONG = {"features": ["coarse:2", "norm"], "c_transforms": 1, "batch_size": 12, "max_examples": 110}


def tokens() -> Any:
    return np.random.default_rng(0).integers(1, 40, (400, 12))


def write(path: Path, ids: Any) -> Path:
    np.savez(path, inputs=ids)
    return path


class Said(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def calibrate_file(work: Path, data: Path, out: Path, **options: Any) -> list[str]:
    """What it said."""
    said = Said()
    teacher = load_teacher(str(work / "teacher"))
    recipe = Recipe.from_dict(options.pop("recipe", LONG))
    pipeline.calibrate(teacher, str(data), out, recipe, said, **options)
    return said.notes


def ended_by_a_fault(work: Path, data: Path, out: Path, **options: Any) -> None:
    ids = tokens()
    ids[FAULTY, 3] = 99
    with pytest.raises(InputError, match=rf"example {FAULTY} .*inputs\[3\] = 99"):
        calibrate_file(work, write(data, ids), out, **options)


def replaced(ids: Any) -> Any:
    ids[FAULTY, 3] = 7
    return ids


def removed(ids: Any) -> Any:
    return np.delete(ids, FAULTY, axis=0)


def earlier_too(ids: Any) -> Any:
    ids[60, 0] = ids[60, 0] % 39 + 1
    return replaced(ids)


@pytest.mark.parametrize(("mended", "again"), [(replaced, False), (removed, False), (earlier_too, True)])
def test_mended_data_is_gone_on_with(work, tmp_path, monkeypatch, mended, again):
    """From the batch of the fault on, or from the beginning where something before it has changed."""
    ended_by_a_fault(work, tmp_path / "data.npz", tmp_path / "out")
    data = write(tmp_path / "data.npz", mended(tokens()))
    with monkeypatch.context() as counting:
        taken = cut_short(counting, 99)
        notes = calibrate_file(work, data, tmp_path / "out")
        first = len(taken)
    with monkeypatch.context() as counting:
        taken = cut_short(counting, 99)
        calibrate_file(work, data, tmp_path / "scratch")
        batches = len(taken)
    assert contents(tmp_path / "out") == contents(tmp_path / "scratch")
    (told,) = [note for note in notes if "resuming" in note or "earlier run" in note]
    if again:
        assert first == batches and told.startswith("starting again: some of the ")
    else:
        assert 0 < first < batches - 4
        kept = 12 * (batches - first)
        assert told == f"resuming after the first {kept} examples"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def last_example_too(ids: Any) -> Any:
    ids[370, 0] = ids[370, 0] % 39 + 1
    return ids


def unchanged(ids: Any) -> Any:
    return ids


@pytest.mark.parametrize("mended", [unchanged, last_example_too])
def test_a_later_pass_depends_on_all_that_the_layers_before_were_fitted_on(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: Any
) -> None:
    """Sequentially the second site is seen behind the first one's fit, which has read every example."""
    data, true_check, recipe = tmp_path / "data.npz", stream._check, {**LONG, "max_examples": 4096}
    batches = []

    def check(pending: Any, tensors: Any, batch: Any) -> None:
        if pending[0].site == 1:
            batches.append(batch)
            if len(batches) == 3:
                raise InputError("a fault")
        true_check(pending, tensors, batch)

    with monkeypatch.context() as fault:
        fault.setattr(stream, "_check", check)
        with pytest.raises(InputError, match="a fault"):
            calibrate_file(work, write(data, tokens()), tmp_path / "out", recipe=recipe, sequential=True)
    write(data, mended(tokens()))
    notes = calibrate_file(work, data, tmp_path / "out", recipe=recipe, sequential=True)
    of_resuming = ("resuming", "earlier run", "finished fits")
    told = [note for note in notes if any(words in note for words in of_resuming)]
    first, second = told
    if mended is last_example_too:
        assert first.startswith("0 of 1 finished fits") and second.startswith("starting again")
    else:
        assert first.startswith("1 of 1 finished fits") and second.startswith("resuming after the first")
    calibrate_file(work, data, tmp_path / "scratch", recipe=recipe, sequential=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "scratch")


def test_other_data_is_refused_where_no_example_was_to_blame(work, tmp_path, monkeypatch):
    data = write(tmp_path / "data.npz", tokens())
    with monkeypatch.context() as crash:
        cut_short(crash, 6)
        with pytest.raises(Killed):
            calibrate_file(work, data, tmp_path / "out")
    with pytest.raises(InputError, match="another data"):
        calibrate_file(work, write(data, replaced(tokens())), tmp_path / "out")


def test_a_second_fault_keeps_what_comes_before_it(work, tmp_path):
    data = tmp_path / "data.npz"
    ended_by_a_fault(work, data, tmp_path / "out")
    ids = replaced(tokens())
    ids[FAULTY + 6, 0] = 99  # of the calibration split, two batches on or less
    with pytest.raises(InputError, match=rf"example {FAULTY + 6} "):
        calibrate_file(work, write(data, ids), tmp_path / "out")
    calibrate_file(work, write(data, replaced(tokens())), tmp_path / "out")
    calibrate_file(work, data, tmp_path / "scratch")
    assert contents(tmp_path / "out") == contents(tmp_path / "scratch")


def test_a_reading_is_of_these_batches_alone():
    def batch(*hashes: int, flag: bool = True) -> Batch:
        return Batch((torch.zeros(len(hashes), 1), flag), {}, None, list(hashes))

    def digest(sample: list[Batch], batches: list[Batch], behind: str = "") -> str:
        return Examples(lambda: sample, lambda: batches, behind=behind).digests(99)[-1]

    a, b = [batch(1, 2)], [batch(3, 4), batch(5)]
    own = digest(a, b)
    assert own == digest([batch(1, 2)], [batch(3, 4), batch(5)])
    others = [
        digest([batch(1), batch(2)], b), digest(a, [batch(3), batch(4, 5)]), digest(a, b[:1]),
        digest(b, a), digest([*a, *b[:1]], b[1:]), digest(a, [batch(3, 4, flag=False), batch(5)]),
        digest(a, b, "x"), digest([], [*a, *b]), Examples(lambda: a, lambda: b, lambda: b).whole(),
        Examples(lambda: a, lambda: b).whole(),
    ]  # fmt: skip
    assert len({own, *others}) == len(others) + 1


@pytest.mark.parametrize(
    "facts",
    [{}, {"done": "x", "read": "y"}, {"done": 10**30, "read": "a"}, {"done": -5, "read": []},
     {"done": math.inf, "read": None, "taken": None}, {"done": True, "read": "a", "taken": 1}],
    ids=str,
)  # fmt: skip
def test_parts_of_strangers_are_dropped(work, tmp_path, facts):
    with Shards(tmp_path / "parts", {}) as aside:
        for key in ("statistics.s.0", "fit.s.0"):
            aside.put(key, {"x": torch.ones(2)}, facts)
        collector = site_collector("s", Convention(4, "row", 1.0), Recipe.from_dict({}))
        pending = [stream.Pending(0, "s", 0, collector)]
        batch = Batch((torch.zeros(2, 1),), {}, None, [1, 2])
        examples = Examples(lambda: [batch], lambda: [batch])
        assert stream._taken_up(pending, examples, aside, QUIET) == {}
        assert pending[0].done == 0 and collector.examples == 0 and aside.keys() == []


# --- the parts --------------------------------------------------------------------------------------

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
