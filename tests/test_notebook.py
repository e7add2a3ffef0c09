"""Reports and compiled models in a notebook, figures on their own, and progress bars there."""

import io
import json
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import page_report
import pytest
from matplotlib.figure import Figure
from page_report import Reader, shown
from torch import nn

from asapc.api import Compiled, MeasuredReport
from asapc.errors import InputError
from asapc.program.summary import Summary, shown_by
from asapc.report.figures import FIGURES
from asapc.report.html import LISTED, model_html
from asapc.terminal.notebook import NotebookProgress, progress_here
from asapc.terminal.progress import PlainProgress

HOSTILE = "</table><script>alert(1)</script>\"'<img src=x onerror=alert(1)>\u202e\x1b$x$"


def test_a_report_shows_what_decides() -> None:
    report = page_report.typed(page_report.full_report())
    text = shown(report._repr_html_())
    for expected in (
        "teachers/imdb", "Look at layers.2.mha first.", "REGRESSION: 1 of 5 checks failed", "19.8x",
        "99.90%", "99.70% to 100.00%", "0.0221", "layers.1.mha asap 0.0142",
        "of the error and cost 19% of the speed.",
    ):  # fmt: skip
        assert expected in text
    measured = MeasuredReport(report)
    assert measured._repr_html_() == report._repr_html_()
    assert Compiled(nn.Identity(), measured)._repr_html_() == report._repr_html_()


def test_names_are_text_and_nothing_runs_or_is_fetched() -> None:
    document = page_report.full_report()
    document["gate"], document["model"]["source"] = {}, HOSTILE
    for site, tried in zip(document["sites"], document["selection"]["sites"], strict=True):
        site["name"] = tried["name"] = HOSTILE + "n" * 10_000
        site["metrics"]["attention_rel_l2"] = 0.9
    html = page_report.typed(document)._repr_html_()
    reader = Reader(html)
    assert {tag for tag, _ in reader.tags} <= {
        "div", "span", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "code",
    }  # fmt: skip
    assert all(set(attributes) <= {"style", "scope"} for _, attributes in reader.tags)
    assert all(attributes["scope"] in ("row", "col") for tag, attributes in reader.tags if tag == "th")
    assert "<script>alert(1)" in "".join(reader.text)
    assert not re.search("[\x1b\u202e]|https?:|url\\(", html) and len(html) < 10_000
    document["sites"] = [{**document["sites"][0], "name": f"layers.{i}"} for i in range(LISTED + 5)]
    assert "and 5 more" in page_report.typed(document)._repr_html_()


# Models


def test_a_compiled_model_shows_the_report_beside_it_or_its_layers(tmp_path: Path) -> None:
    lines = [f"layers.{i}: asap (target dual)" for i in range(LISTED + 2)]
    assert "layers.0: asap (target dual)" in model_html("a<b>", lines, str(tmp_path))
    text = shown(model_html("a<b>", lines, str(tmp_path)))
    assert "compiled model of a<b>" in text and "and 2 more" in text and "No report yet" in text
    (tmp_path / "report.json").write_text(json.dumps(page_report.full_report()))
    text = shown(model_html("a<b>", lines, str(tmp_path)))
    assert "compiled model of a<b>" in text and "Look at layers.2.mha first." in text


@pytest.mark.parametrize("content", ["", "[]", "{", '{"sites": 3}', "\x00", "[" * 100_000])
def test_a_report_that_cannot_be_read_is_left_aside(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    assert "No report yet" in model_html("m", ["a: asap"], str(tmp_path))


def test_a_model_is_shown_by_its_summary_and_keeps_its_own_way(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    shown_by(model, Summary("Linear", ["a: asap"], tmp_path))
    assert "a: asap" in model._repr_html_()
    again = pickle.loads(pickle.dumps(model))
    assert again._repr_html_() == model._repr_html_()
    shown_by(model, Summary("Linear", [], tmp_path, "<p>measured</p>"))
    assert model._repr_html_() == "<p>measured</p>"
    shown_by(model, None)
    assert not hasattr(model, "_repr_html_")

    class Own(nn.Linear):
        def _repr_html_(self) -> str:
            return "own"

    own = Own(2, 2)
    shown_by(own, Summary("Own", [], tmp_path))
    assert own._repr_html_() == "own"


# Figures


@pytest.mark.parametrize("what", FIGURES)
def test_every_figure_can_be_drawn_and_written(what: str) -> None:
    report = page_report.typed(page_report.full_report(), page_report.pictures())
    figure = MeasuredReport(report).figure(what)
    assert isinstance(figure, Figure)
    written = io.BytesIO()
    figure.savefig(written, format="png")
    assert written.getvalue().startswith(b"\x89PNG") and len(written.getvalue()) > 2000


def test_what_cannot_be_drawn_says_why() -> None:
    report = page_report.typed(page_report.full_report())
    with pytest.raises(InputError, match="there is no 'speed'"):
        report.figure("speed")
    with pytest.raises(InputError, match=r"there is no site 'layers\.9'"):
        report.figure("heads", "layers.9")
    with pytest.raises(InputError, match=r"report\.json has none"):
        report.figure("maps")
    minimal = page_report.typed(page_report.minimal_report())
    for what in FIGURES:
        with pytest.raises(InputError):
            minimal.figure(what)


# Progress


class Display:
    """IPython.display, as far as it is needed."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, bundle: dict[str, str], raw: bool, display_id: bool) -> "Display":
        assert display_id and not self.shown
        self.update(bundle, raw)
        return self

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(bundle["text/plain"])


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Display:
    """This process as the kernel of a notebook."""
    display = Display()
    shell = type("ZMQInteractiveShell", (), {})()
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython, ipython.display = lambda: shell, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    monkeypatch.setattr("asapc.terminal.notebook.INTERVAL", 0.0)
    return display


def test_a_notebook_has_a_line_in_its_cell(cell: Display, capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_here(quiet=False)
    assert isinstance(progress, NotebookProgress)
    for _ in progress.track([1, 2], "<fitting>"):
        with progress.phase("replaying\x1b"):
            pass
    assert "<fitting>: 2/2" in cell.shown and cell.shown.count("replaying\\u001b") == 2
    assert cell.shown[-1] == ""  # gone at the end
    loop = progress.track(iter([1, 2, 3]), "fitting")
    assert next(iter(loop)) == 1
    loop.close()  # type: ignore[attr-defined]
    assert cell.shown[-2:] == ["fitting", ""]  # nor is it left of a loop that stops early
    progress.note("noted")
    assert capsys.readouterr() == ("noted\n", "")


def test_elsewhere_and_when_quiet_there_is_none(cell: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*progress_here(quiet=True).track([1], "fitting")] == [1] and cell.shown == []
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(progress_here(quiet=False), PlainProgress)
