import io
import time

import pytest

from asapc.terminal.progress import PlainProgress, Progress, RichProgress, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=["silent", "plain", "rich"])
def progress(request: pytest.FixtureRequest) -> Progress:
    if request.param == "silent":
        return Progress()
    return PlainProgress(io.StringIO()) if request.param == "plain" else RichProgress(Terminal())


def test_every_item_passes_through_once_and_lazily(progress: Progress) -> None:
    """In loops that nest and follow each other, too."""
    taken: list[int] = []

    def source():
        for item in range(3):
            taken.append(item)
            yield item

    loop = progress.track(source(), "loop")
    assert taken == []
    assert next(iter(loop)) == 0
    assert taken == [0]
    assert list(loop) == [1, 2]
    seen = [
        (outer, inner)
        for outer in progress.track([1, 2], "outer")
        for inner in progress.track([3, 4], "inner", total=2)
    ]
    assert seen == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert list(progress.track([], "empty")) == []


def test_plain_lines_carry_counts_and_no_control_characters() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, interval=0.0)
    list(progress.track([1, 2], "calibrating [layer 0]"))
    progress.note("done")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["calibrating [layer 0]: 1/2", "calibrating [layer 0]: 2/2"]
    assert lines[2].startswith("calibrating [layer 0]: 2/2, ")
    assert lines[3] == "done"
    assert "\x1b" not in stream.getvalue()


def test_what_is_left_is_estimated() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, interval=0.0)
    clock = iter([0.0, 30.0, 40.0, 41.0, 42.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asapc.terminal.progress.time.monotonic", lambda: next(clock))
        list(progress.track("abc", "replaying", 3))
    assert stream.getvalue().splitlines() == [
        "replaying: 1/3, about 60 s left", "replaying: 2/3, about 20 s left", "replaying: 3/3",
        "replaying: 3/3, 42.0 s",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [1.5, 2.5])
def test_a_phase_is_told_of_if_it_took_long(seconds: float) -> None:
    stream = io.StringIO()
    clock = iter([10.0, 10.0 + seconds])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asapc.terminal.progress.time.monotonic", lambda: next(clock))
        with PlainProgress(stream).phase("tracing the model"):
            pass
    assert stream.getvalue() == ("tracing the model: 2.5 s\n" if seconds > 2 else "")


def test_a_long_phase_is_told_of_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asapc.terminal.progress.LONG", 0.01)
    monkeypatch.setattr("asapc.terminal.progress.LONGER", 0.02)
    stream = io.StringIO()
    progress = PlainProgress(stream)
    with progress.phase("matching its layers"):
        deadline = time.monotonic() + 10
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stream.getvalue() == "matching its layers ...\n"
    with pytest.raises(KeyError), progress.phase("tracing the model"):
        raise KeyError
    time.sleep(0.05)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "matching its layers ...", "matching its layers",
    ]  # fmt: skip


def test_a_loop_or_phase_that_fails_gives_the_terminal_back(progress: Progress) -> None:
    def source():
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(progress.track(source(), "loop"))
    with pytest.raises(KeyError), progress.phase("tracing the model"):
        progress.note("site [bold]x[/bold]")  # which is no markup
        raise KeyError
    loop = progress.track([1, 2], "label [0]")
    assert next(iter(loop)) == 1
    loop.close()  # type: ignore[attr-defined]
    if isinstance(progress, RichProgress):
        text = progress.console.file.getvalue()  # type: ignore[attr-defined]
        assert "tracing the model" in text and "site [bold]x[/bold]" in text
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_the_kind_follows_quiet_terminal_and_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert type(make_progress(quiet=True, stream=Terminal())) is Progress
    assert type(make_progress(stream=Terminal())) is RichProgress
    assert type(make_progress(stream=io.StringIO())) is PlainProgress
    monkeypatch.setenv("CI", "true")
    assert type(make_progress(stream=Terminal())) is PlainProgress
