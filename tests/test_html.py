"""The page: everything on it, nothing but text from outside, and how a real browser shows it."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html import escape as html_escape
from html import unescape as html_unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import page_report
import pytest
import torch
from page_report import Reader, shown

from asapc.report import html as rendering
from asapc.report import write_report
from asapc.report.pictures import MapPair, SitePictures
from asapc.report.text import json_text

IMAGE = "data:image/svg+xml;base64,"


def html(document: dict[str, Any], pictures: Sequence[SitePictures] = ()) -> str:
    return rendering.html(page_report.typed(document, pictures))


def pair(value: float = 0.25) -> MapPair:
    teacher = torch.full((4, 4), 0.25)
    compiled = teacher.clone()
    compiled[0, 0] = value
    return MapPair(0, 0, 4, teacher.tolist(), compiled.tolist(), 0.1)


@pytest.fixture(scope="module")
def full() -> str:
    """With pictures of one layer of three."""
    return html(page_report.full_report(), page_report.pictures()[:1])


@pytest.fixture
def report() -> dict[str, Any]:
    """With one layer, without pictures that take their time."""
    document = page_report.full_report()
    site = document["sites"][0]
    document["sites"] = [{k: v for k, v in site.items() if k not in ("by_head", "by_length")}]
    return document


def test_the_worst_layer_comes_first_and_its_pictures_are_folded(full: str) -> None:
    assert re.findall("Pictures of <bdi>(.*?)</bdi>", full) == [f"layers.{i}.mha" for i in (2, 0, 1)]
    assert " open>" not in full
    captions = ", 256 active keys: error", "By length", "By head", "What was tried"
    assert all(caption in shown(full) for caption in captions)


@pytest.mark.parametrize("kind", ["full", "minimal"])
def test_it_is_self_contained_and_accessible(full: str, kind: str) -> None:
    text = full if kind == "full" else html(page_report.minimal_report())
    page = Reader(text)
    (policy,) = (
        m["content"] for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    beside = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]*", "", text)
    assert not re.search(r"https?:|//|@import|@font-face|javascript:", beside)
    assert not page.named("script")
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", IMAGE, "data:,"))
        if tag == "img":
            assert attributes["alt"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    for link in page.named("a"):
        assert (link["href"] or "")[1:] in ids


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder that another process has written reports into, without a library of the page, and what it
    said: last the hash of a page, with another hash seed and the user's own matplotlib style."""
    folder = tmp_path_factory.mktemp("elsewhere")
    program = (
        "import hashlib, page_report, sys\n"
        "from pathlib import Path\n"
        "from asapc.report import write_report\n"
        "for missing in ('jinja2', 'matplotlib'):\n"
        f"    Path({str(folder / 'report.html')!r}).write_text('of an earlier report')\n"
        "    sys.modules[missing] = None\n"
        "    report = page_report.typed(page_report.minimal_report())\n"
        f"    write_report({str(folder)!r}, report, note=print)\n"
        "    del sys.modules[missing]\n"
        "import matplotlib\n"
        "matplotlib.rcParams.update({'lines.linewidth': 9, 'svg.fonttype': 'path', 'font.size': 30})\n"
        "from asapc.report.html import html\n"
        "page = html(page_report.typed(page_report.small_report()))\n"
        "print(hashlib.sha256(page.encode()).hexdigest())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    return folder, result.stdout.splitlines()


def test_the_same_report_is_the_same_bytes(elsewhere: tuple[Path, list[str]]) -> None:
    page = html(page_report.small_report())
    assert elsewhere[1][-1] == hashlib.sha256(page.encode()).hexdigest()


TAGS = "</title></style></svg></text><script>alert(1)</script>"
HOSTILE = {
    "tags": TAGS + "\"'><img src=x onerror=alert(1)>{{ 3571 * 4001 }}{% raw %}",
    "text": "$\\frac{1}{0}$ #010101 font: 9px x; d=\"1.23456\" &amp; a\u202eb\x00c\x1bd\ud800e",
    "long": "n" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_are_text(name: str, report: dict[str, Any]) -> None:
    report = _renamed(report, name)
    report["gate"]["verdict"] = report["gate"]["baseline"]["verdict"] = "REGRESSION"
    text = html(report, [SitePictures(name, [pair()])])
    page = Reader(text)
    assert not page.named("script")
    assert all((image["src"] or "").startswith(IMAGE) for image in page.named("img"))
    assert not any(k.startswith("on") for _, a in page.tags for k in a)
    assert str(3571 * 4001) not in text
    assert not re.search("[\x00\x1b\u202e\ud800]", text)
    text.encode("utf-8")
    assert name[:20] in "".join(page.text)
    assert len(text) < 600_000


def _renamed(value: Any, name: str) -> Any:
    """Every text that does not say what the report means, and every key of the decision trail."""
    if isinstance(value, dict):
        kept = ("operator", "objective", "first_side", "last_side", "side", "convention", "mask", "class")
        return {k: v if k in kept else _renamed(v, name) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(item, name) for item in value]
    return name if isinstance(value, str) else value


FAST = {"latency_lossless_ms": 75.0, "speedup_lossless": 19.6}


def test_a_page_without_a_gate_has_limits_and_another_recipe_to_paste(report: dict[str, Any]) -> None:
    report["gate"] = {}
    limits = shown(html(report))
    assert all(words in limits for words in ("attention_rel_l2: {max: 0.02}", "speedup: {min: 1}"))
    assert not any(words in limits for words in ("ACCEPT", "REGRESSION", 'stage="lossless"'))
    recipe = shown(html({**report, "selection": None, "model": report["model"] | FAST}))
    assert 'asapc.load("OUT", stage="lossless")' in recipe and "--recipe lossless.yaml" in recipe


def test_values_that_are_not_finite_are_shown_as_such() -> None:
    report = page_report.full_report()
    report["sites"] = report["sites"][:1]
    site = report["sites"][0]
    report["model"]["speedup"] = math.nan
    site["metrics"]["attention_rel_l2"] = site["by_head"]["attention_rel_l2"][2] = math.inf
    site["by_length"][0]["attention_rel_l2"] = None
    text = html(report, [SitePictures("layers.0.mha", [pair(math.nan)])])
    assert ">inf" in text and not re.search(r"\bnan\b", shown(text), re.IGNORECASE)
    Reader(html(json.loads(json_text(report))))  # what report.json keeps of it


# A real browser


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--dump-dom")  # fmt: skip
DARK, PRINT = "@media screen and (prefers-color-scheme: dark)", "@media print"


def evaluated(folder: Path, text: str, width: int, *scripts: str, media: str = "") -> list[Any]:
    """JavaScript expressions on the page, in a frame of so many pixels.  media: a query that is true."""
    page = html_escape(text.replace(media, "@media all") if media else text)
    outer = (
        f"<iframe width={width} height=900 style='border: 0' srcdoc=\"{page}\"></iframe><pre></pre>"
        "<script>onload = () => {\n"
        "const frame = document.querySelector('iframe'), names = ['document', 'getComputedStyle'];\n"
        "const given = [frame.contentDocument, e => frame.contentWindow.getComputedStyle(e)];\n"
        "const run = script => new Function(...names, 'return ' + script)(...given);\n"
        f"const found = JSON.stringify({json.dumps(scripts)}.map(run));\n"
        "document.querySelector('pre').textContent = found;\n}</script>"
    )
    path = folder / "frame.html"
    path.write_text(outer, encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = done.stdout.rpartition("<pre>")[2].partition("</pre>")[0]
    return list(json.loads(html_unescape(found)))


CONTRAST = """(() => {
  const parts = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => parts(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {
    for (let at = e; at; at = at.parentElement) {
      const c = getComputedStyle(at).backgroundColor, p = parts(c);
      if (p.length < 4 || p[3] > 0) return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    if (e.tagName.toLowerCase() === 'title') continue;
    const style = getComputedStyle(e);
    const own = e.namespaceURI.endsWith('svg') ? style.fill : style.color;
    const [a, b] = [light(own), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([e.textContent.slice(0, 40), own, behind(e)]);
  }
  return poor;
})()
"""


# Nothing is cut off: what is wider than the page scrolls inside its own box.
OVERFLOW = """[...document.querySelectorAll('h1, h2, h3, p, dd, figcaption, summary')].filter(
  e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
).map(e => e.outerHTML)"""
UNFOLDED = "document.querySelectorAll('details').forEach(d => { d.open = true })"
IMAGES = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"


@BROWSER
@pytest.mark.parametrize(("kind", "width", "media"), [("full", 1280, ""), ("hostile", 390, DARK)])
def test_in_a_browser(full: str, kind: str, width: int, media: str, tmp_path: Path) -> None:
    text = full
    if kind == "hostile":
        hostile = _renamed(page_report.full_report(), TAGS + "n" * 2000)
        hostile["gate"]["verdict"] = hostile["gate"]["baseline"]["verdict"] = "REGRESSION"
        text = html(hostile, [SitePictures(hostile["sites"][0]["name"], [pair()])])
    asked = (UNFOLDED, "document.documentElement.scrollWidth", OVERFLOW, IMAGES, CONTRAST)
    _, *found = evaluated(tmp_path, text, width, *asked, media=media)
    assert found == [width, [], True, []]  # contrast as WCAG AA asks for


@BROWSER
def test_it_prints(full: str, tmp_path: Path) -> None:
    """Black on white whatever the theme, and what is folded is unfolded."""
    background = "getComputedStyle(document.body).backgroundColor"
    shown = "[...document.querySelectorAll('details:not([open]) th')].every(e => e.checkVisibility())"
    assert evaluated(tmp_path, full, 1280, background, shown, media=PRINT) == ["rgb(255, 255, 255)", True]


# Written beside the other reports


def test_without_the_extra_there_is_a_note_and_no_stale_page(elsewhere: tuple[Path, list[str]]) -> None:
    folder, (*notes, _) = elsewhere
    assert notes == [
        f"no report.html: {missing} is not installed; pip install '.[report]' in a clone of asapc adds "
        "the page" for missing in ("jinja2", "matplotlib")
    ]  # fmt: skip
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["junit.xml", "report.json", "report.md"]


def test_operators_chosen_for_another_device_are_said_to_be(tmp_path: Path) -> None:
    document = page_report.small_report()
    document["environment"]["device"] = "NVIDIA H100"
    told = "chosen by their speeds on cpu, and this was measured on NVIDIA H100"
    for device, expected in (("cpu", True), ("NVIDIA H100", False)):
        document["selection"]["device"] = device
        write_report(tmp_path, page_report.typed(document))
        assert (told in (tmp_path / "report.html").read_text()) is expected
        assert (told in (tmp_path / "report.md").read_text()) is expected
