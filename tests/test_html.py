"""The page: everything on it, nothing but text from outside, and how a real browser shows it."""

import base64
import copy
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import browser
import page_report
import pytest
import torch
from matplotlib.figure import Figure
from page_report import Reader, shown

from asapc.report import html as rendering
from asapc.report import layers, write_report
from asapc.report.pictures import MapPair, SitePictures
from asapc.report.plots import Point, data_uri, draw_bars, draw_maps, draw_masses, draw_pareto, style
from asapc.report.text import json_text

IMAGE = "data:image/svg+xml;base64,"
BROWSER = pytest.mark.skipif(browser.CHROMIUM is None, reason="chromium is not installed")


def html(document: dict[str, Any], pictures: Sequence[SitePictures] = ()) -> str:
    return rendering.html(page_report.typed(document, pictures))


@pytest.fixture(scope="module")
def full() -> str:
    """With pictures of one layer of three."""
    return html(page_report.full_report(), page_report.pictures()[:1])


@pytest.fixture
def report() -> dict[str, Any]:
    """With one layer, without pictures that take their time."""
    document = page_report.full_report()
    document["sites"] = [_plain_site()]
    return document


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Browser]:
    with browser.browser() as opened:
        yield opened


def test_every_part_is_there(full: str) -> None:
    text = shown(full)
    for expected in (
        "Look at layers. 2. mha first.", "REGRESSION", "1 of 5 checks failed.",
        "The attention error of layers.2.mha is 0.0221; it should be at most 0.02.",
        "layers.2.mha makes 42% of the error. Lossless there costs 19% of the speed.",
        "19.8×", "13.7× by lossless kernels alone", "99.90%", "95% interval 99.70% to 100.00%",
        "accuracy 83.80% → 83.70%", "95% interval of the drop -0.10% to 0.30%", "in layers.2.mha",
        "1468 ms", "1000 examples neither fitted nor selected on, times for batches of 32, on cpu",
        "target, 1 c-transform, rows rescaled, coarse:32", "482 → 14.8 ms at 32 × 256",
        "31.2× to 34.9×", "equal",
        "What was tried", "By head", "By length", "Predictions changed, by length",
        "Certificates: 2 holds, 1 vacuous", "kl_variance_bound", ", 256 active keys: error",
        "T=20, row first, column last, scale 0.0884, factor M, key mask", "3 x asap target 1 coarse:16",
        "prediction_agreement 0.9973 < 0.998", "max 0.00500, confident", "baseline 19.6, 2%",
        "softmax attention: rows only", "9f2c9f2c", "examples, calibration 3500",
    ):  # fmt: skip
        assert expected in text
    # The worst layer comes first; all are folded, and a layer's pictures are inside its fold.
    assert _layer_names(full) == ["layers.2.mha", "layers.0.mha", "layers.1.mha"]
    assert '<details class="layer" open' not in full and " open>" not in full
    first = full[full.index('id="layer-2"') : full.index('id="layer-0"')]
    assert first.index("attention error") < first.index("</summary>") < first.index("<img")


@pytest.mark.parametrize("kind", ["full", "minimal"])
def test_it_is_self_contained_and_accessible(full: str, kind: str) -> None:
    text = full if kind == "full" else html(page_report.minimal_report())
    page = Reader(text)
    (policy,) = (
        m["content"] for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
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


def test_the_same_report_is_the_same_bytes(full: str) -> None:
    """In another process, with another hash seed and the user's own matplotlib style."""
    program = (
        "import sys; sys.path.insert(0, 'tests'); import page_report, hashlib, matplotlib;"
        "matplotlib.rcParams.update({'lines.linewidth': 9, 'svg.fonttype': 'path', 'font.size': 30});"
        "from asapc.report.html import html;"
        "report = page_report.typed(page_report.full_report(), page_report.pictures()[:1]);"
        "print(hashlib.sha256(html(report).encode()).hexdigest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert result.stdout.strip() == hashlib.sha256(full.encode()).hexdigest()


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
    text = html(report, [SitePictures(name, [_pair()])])
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


def test_a_trail_that_anyone_may_have_written(report: dict[str, Any]) -> None:
    """selection is copied from a manifest: whatever is in there, the page is rendered."""
    junk: list[Any] = [None, "x", [], {}, -1, math.nan, math.inf, 10**400, True, [[1]], 1e308, 5e-324]
    tried = ("sites", 0, "candidates", 4)
    keys = ("label", "operator", "attention_rel_l2", "alone", "latency_ms", "teacher_ms", "chosen")
    paths: list[tuple[Any, ...]] = [
        ("objective",), ("budget", "attention_rel_l2"), ("shapes",), ("sites", 0), ("rounds", 0), tried,
        *((*tried, key) for key in (*keys, "speedup")), (*tried, "latency_ms", "32x256"),
    ]  # fmt: skip
    report["by_length"] = []
    report["selection"]["sites"] = report["selection"]["sites"][:1]
    for index, path in enumerate(paths):
        broken = copy.deepcopy(report)
        place = broken["selection"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = junk[(7 * index + 3) % len(junk)]
        Reader(html(broken))


def test_every_part_is_optional(report: dict[str, Any]) -> None:
    for part in [key for key in report if key != "format_version"]:
        Reader(html({key: value for key, value in report.items() if key not in (part, "selection")}))


def _plain_site() -> dict[str, Any]:
    """Without plots that take their time and have nothing to do with the test."""
    site: dict[str, Any] = page_report.full_report()["sites"][0]
    return {k: v for k, v in site.items() if k not in ("by_head", "by_length")}


CHECK = {"kind": "limit", "metric": "speedup", "scope": "model", "value": 3.0, "min": 2.0}
ODD = {**CHECK, "value": None, "passed": False, "class": "ANOMALOUS", "message": "was not measured"}
FAST = {"latency_lossless_ms": 75.0, "speedup_lossless": 19.6}
SORTS = {"variants": [{"name": "exact", "accuracy": 0.877, "row_err": 0.0, "prediction_change": 0.12}]}
TRAINED = {"mode": "labels", "epochs": 5, "before": {"accuracy": 0.8}, "after": {"accuracy": 0.9}}
FOLD = '<details class="small-details"'
# Whether of a full report, what is changed in it, what the page then says, and what it does not.
WORDS: dict[str, tuple[bool, dict[str, Any], Sequence[str], Sequence[str]]] = {
    "nothing measured": (False, {}, ("There is nothing to decide on yet.", "no gate file was given"),
                         ("Layers", "ACCEPT")),
    "accepted": (False, {"gate": {"verdict": "ACCEPT", "passed": True, "checks": [CHECK]}},
                 ('class="tone-good"',), ()),
    "worse": (False, {"gate": {"checks": [{**CHECK, "class": "REGRESSION"}]}}, ("REGRESSION",), ()),
    "odd": (False, {"gate": {"verdict": "ANOMALOUS", "passed": False, "checks": [ODD]}},
            ('class="tone-odd"', "was not measured", "not measured</td>"), ()),
    "default limits, which are advice": (True, {"gate": {}}, (
        "Ship it.", "Default limits, no gate file was given: 3 of 3 kept.", 'class="tone-good"',
        "the budget it was compiled with", "attention_rel_l2: {max: 0.02}", "speedup: {min: 1}",
    ), ("ACCEPT", "REGRESSION", "How to get the lossless model")),
    "a default limit that is not kept": (
        True, {"gate": {}, "model": {"prediction_agreement": 0.9}}, ('class="tone-odd"', "not kept"),
        ("ACCEPT",),
    ),
    "a lossless model that is as fast": (True, {"gate": {}, "selection": None, "model": FAST}, (
        "Take the lossless model instead.", "takes 1% longer", "operator: lossless",
        'asapc.load("OUT", stage="lossless")',
        "asapc compile MODEL --calibration CALIB --recipe lossless.yaml",
    ), ()),
    "folded certificates": (True, {}, (f"{FOLD}><summary>Certificates: 2 holds, 1 vacuous",), ()),
    "but not a violated one": (True, {"certificate": False}, (
        f'{FOLD} open><summary><span class="bad">Certificates: 1 holds, 1 violated',
        '<span class="bad">violated</span>',
    ), ()),
    "one length is no plot": (True, {"one length": True}, (), ("by length", "By length")),
    "soft sorts and a refresh": (False, {"soft_to_hard": SORTS, "refresh": TRAINED},
        ("Soft to hard", "12.00%", "87.70%", "Trained after the replacement", "90.00%"), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_what_a_page_says(name: str, report: dict[str, Any]) -> None:
    full, changes, said, unsaid = WORDS[name]
    document = report if full else page_report.minimal_report()
    for key, value in changes.items():
        if key == "certificate":
            document["sites"][0]["certificates"][1]["holds"] = value
        elif key == "one length":
            document["by_length"] = document["by_length"][:1]
        else:
            document[key] = document[key] | value if key == "model" else value
    page = html(document)
    text = shown(page)
    for words in said:
        assert words in page or words in text, words
    assert not [words for words in unsaid if words in text]


def test_what_computes_the_teachers_map_is_not_shown_as_an_approximation() -> None:
    report = page_report.minimal_report()
    kinds = [("lot", "lot", "exact"), ("esp_hard", "esp_soft", "amortised"), ("teacher", "lot", "exact"),
             ("lot", "sinkhorn", "amortised")]  # fmt: skip
    report["sites"] = [
        {"name": str(i), "operator": operator, "convention": {"operator": own}}
        for i, (operator, own, _) in enumerate(kinds)
    ]
    pills = re.findall('<span class="pill ([a-z]+)">([a-z_]+)</span>', html(report))
    assert pills == [(tone, operator) for operator, _, tone in kinds]


def deep_report(count: int, baseline: bool = False) -> dict[str, Any]:
    """So many layers, the worst in the middle of the model: against a baseline, or without a gate."""
    report = page_report.full_report()
    report["sites"], report["selection"]["sites"] = [], report["selection"]["sites"][:1]
    report["gate"] = {"verdict": "REGRESSION", "checks": []} if baseline else {}
    for index in range(count):
        site = copy.deepcopy(_plain_site())
        site |= {"name": f"encoder.blocks.{index}.attention"}
        error = 0.01 + 0.001 * min(index, count - 1 - index)
        site["metrics"]["attention_rel_l2"], site["confidence"] = error, {}
        report["sites"].append(site)
        if baseline:
            worse = -0.002 if index else 0.004
            report["gate"]["checks"].append(
                {"kind": "baseline", "metric": "attention_rel_l2", "scope": site["name"], "value": error,
                 "baseline": error - worse, "worse_by": worse, "allowed": 0.02, "message": "compared",
                 "class": "ACCEPT" if index else "REGRESSION"}
            )  # fmt: skip
    return report


def _layer_names(text: str) -> list[str]:
    return re.findall(r'<details class="layer".*?<h3><bdi>(.*?)</bdi>', text, re.DOTALL)


def test_layers_are_sorted_without_a_script() -> None:
    text = html(deep_report(4, baseline=True))
    for key, expected in (("worst", "1203"), ("model", "0123"), ("change", "0123")):
        assert f'id="by-{key}"' in text
        places = re.findall(rf'id="layer-(\d)" style="[^"]*--{key}: (\d);', text)
        assert "".join(name for name, place in sorted(places, key=lambda x: x[1])) == expected
        if key != "worst":  # they stand in this order
            assert f"section:has(#by-{key}:checked) .layer {{ order: var(--{key}); }}" in text
    assert "<script" not in text and "<fieldset" not in html(deep_report(1))


def test_a_difference_to_the_baseline_has_a_column() -> None:
    report = deep_report(3, baseline=True)
    text = shown(html(report))
    assert "error against the baseline" in text and "+0.00400" in text and "−0.00200" in text
    assert "error against the baseline" not in "".join(Reader(html(deep_report(3))).text)
    report["gate"]["checks"] = report["gate"]["checks"][:2]  # the third was not compared
    assert "not compared" in html(report)


def test_a_long_table_is_folded_unless_something_failed() -> None:
    report = deep_report(20, baseline=True)
    gate = html(report).partition('<section id="gate">')[2]
    assert gate.lstrip().startswith('<h2>Gate</h2>\n<details class="small-details" open>')
    assert gate.index("encoder.blocks.0.attention") < gate.index("encoder.blocks.1.attention")
    report["gate"] = {"verdict": "ACCEPT", "checks": report["gate"]["checks"][1:]}
    gate = html(report).partition('<section id="gate">')[2]
    assert gate.lstrip().startswith('<h2>Gate</h2>\n<details class="small-details"><summary>')


def test_pictures_do_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PICTURED", 2)
    report = deep_report(5)
    report["selection"] = None
    text = html(report, [SitePictures(site["name"], [_pair()]) for site in report["sites"]])
    images = [image["alt"] or "" for image in Reader(text).named("img")]
    assert sum("attention of the teacher" in alt for alt in images) == 2
    assert "drawn for the 2 layers with the largest attention errors; the other 3" in text
    assert text.count("Without pictures: they are drawn") == 3
    kept = text[text.index('id="layer-2"') :]
    assert "<img" in kept[: kept.index("</details>")]  # the worst has its own
    assert len(_layer_names(text)) == 5


def test_a_baseline_alone_is_no_limit() -> None:
    report = deep_report(3, baseline=True)
    report["gate"]["checks"][0]["class"] = report["gate"]["verdict"] = "ACCEPT"
    assert "ACCEPT None of 3 comparisons with the baseline failed. Default limits, no gate file" in shown(
        html(report)
    )
    report["sites"][2]["metrics"]["attention_rel_l2"] = 0.9
    text = html(report)
    assert "Look at encoder. blocks. 2. attention first." in shown(text) and 'class="tone-odd"' in text
    assert 'href="#limits"' in text and 'href="#gate"' in text


def test_values_that_are_not_finite_are_shown_as_such() -> None:
    report = page_report.full_report()
    report["sites"] = report["sites"][:1]
    site = report["sites"][0]
    report["model"]["speedup"] = math.nan
    site["metrics"]["attention_rel_l2"] = site["by_head"]["attention_rel_l2"][2] = math.inf
    site["by_length"][0]["attention_rel_l2"] = None
    text = html(report, [SitePictures("layers.0.mha", [_pair(math.nan)])])
    assert ">inf<" in text and not re.search(r"\bnan\b", shown(text), re.IGNORECASE)
    Reader(html(json.loads(json_text(report))))  # what report.json keeps of it


# Pictures


def _pair(value: float = 0.25) -> MapPair:
    teacher = torch.full((4, 4), 0.25)
    compiled = teacher.clone()
    compiled[0, 0] = value
    sums = torch.ones(4)
    return MapPair(0, 0, 4, teacher, compiled, (sums, compiled.sum(1)), (sums, compiled.sum(0)), 0.1)


def test_a_map_is_the_numbers_it_shows() -> None:
    teacher = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.0, math.nan]])
    pair = MapPair(0, 0, 3, teacher, teacher.flip(0), (teacher.sum(1),) * 2, (teacher.sum(0),) * 2)
    exact, compiled, difference = (axes.images[0] for axes in draw_maps(pair).axes[:3])
    for image, end in ((exact, (0.0, 1.0)), (compiled, (0.0, 1.0)), (difference, (-1.0, 1.0))):
        assert image.get_clim() == pytest.approx(end)
    colors = exact.to_rgba(exact.get_array(), bytes=True)[..., :3].reshape(-1, 3).tolist()
    white, dark, wrong = [255, 255, 255], [10, 28, 66], [255, 0, 200]
    assert colors[0] == colors[4] == white and colors[2] == colors[3] == dark and colors[5] == wrong
    assert colors[1] == pytest.approx([96, 150, 214], abs=1)
    flat = MapPair(0, 0, 3, teacher * 0, teacher * 0, (teacher,) * 2, (teacher,) * 2)
    assert svg(draw_maps, flat)


def svg(draw: Callable[..., Figure], *arguments: Any, **options: Any) -> str:
    """What a picture of the page is; it is well-formed."""
    with style():
        text = base64.b64decode(data_uri(draw(*arguments, **options)).removeprefix(IMAGE)).decode()
    ElementTree.fromstring(text)
    return text


@pytest.mark.parametrize("values", [
    [0.0], [1e-9, 1e300], [None, math.inf, 1.0], [-3e-9], [0.3] * 48,
], ids=["zero", "tiny and huge", "not finite", "negative", "many"])  # fmt: skip
def test_bars_of_any_size(values: list[float | None]) -> None:
    names, fills = [str(i) for i in range(len(values))], ["#000000"] * len(values)
    picture = svg(draw_bars, values, names, "error", fills, line=("mean", 0.1))
    assert "nan" not in picture and "inf" not in picture
    assert ("∞" in picture) == any(v is None or math.isinf(v) for v in values)


@pytest.mark.parametrize("points", [
    [(0.0, 1.0), (0.0, 1.0)], [(1e-4, 1e-6), (1e6, 1e11)], [(0.02, 3.0), (0.02, 3.0)],
], ids=["exact", "far", "equal"])  # fmt: skip
def test_candidates_anywhere(points: list[tuple[float, float]]) -> None:
    candidates = [
        Point("candidate" if error else "lossless", error, time, i == 0)
        for i, (error, time) in enumerate(points)
    ]
    for limit in (None, 0.0, 1e6):
        picture = svg(draw_pareto, candidates, "ms", limit)
        view = [float(number) for number in re.findall(r'<use [^>]*x="([-\d.]+)"', picture)]
        assert all(0 <= x <= 330 for x in view)


def test_masses_of_one_token_and_of_many() -> None:
    for count in (1, 2, 500):
        sums = torch.linspace(0.9, 1.1, count)
        teacher = torch.full((1, 1), 1.0)
        pair = MapPair(0, 0, count, teacher, teacher, (sums, sums), (sums, sums))
        assert len(svg(draw_masses, pair)) < 20_000


# A real browser


@BROWSER
@pytest.mark.parametrize(
    ("kind", "width", "dark"),
    [("full", 390, False), ("full", 1280, True), ("minimal", 1280, False), ("hostile", 390, True)],
)
def test_in_a_browser(
    tab: browser.Browser, full: str, kind: str, width: int, dark: bool, tmp_path: Path
) -> None:
    text = full
    if kind == "minimal":
        text = html(page_report.minimal_report())
    elif kind == "hostile":
        hostile = _renamed(page_report.full_report(), TAGS + "n" * 2000)
        hostile["gate"]["verdict"] = hostile["gate"]["baseline"]["verdict"] = "REGRESSION"
        text = html(hostile, [SitePictures(hostile["sites"][0]["name"], [_pair()])])
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    tab.open(path, width, 844 if width == 390 else 900, dark=dark)
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    picture = tmp_path / f"{kind}-{width}-{'dark' if dark else 'light'}.png"
    tab.screenshot(picture)
    assert picture.stat().st_size > 10_000
    assert tab.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert tab.messages == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]
    # Nothing is cut off: what is wider than the page scrolls inside its own box.
    assert tab.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, p, dd, figcaption, summary')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML)"
    ) == []  # fmt: skip
    assert tab.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


@BROWSER
def test_errors_are_seen_on_a_phone_and_layers_sorted_in_place(
    tab: browser.Browser, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(html(deep_report(5, baseline=True)), encoding="utf-8")
    tab.open(path, 390, 844)
    inside = tab.evaluate(
        "[...document.querySelectorAll('.layer .cell > *')].every(e => {"
        "const b = e.getBoundingClientRect(); return b.left >= 0 && b.right <= innerWidth})"
    )
    assert inside
    assert tab.evaluate(
        "[...document.querySelectorAll('.cell .key')].every(e => e.getBoundingClientRect().height > 10)"
    )
    tops = (
        "[...document.querySelectorAll('.layer')].sort((a, b) => a.getBoundingClientRect().top - "
        "b.getBoundingClientRect().top).map(e => e.id.slice(6)).join('')"
    )
    assert tab.evaluate(tops) == "21304"
    # So is what came of each check: nothing of it scrolls.
    assert tab.evaluate(
        "[...document.querySelectorAll('.stack')]"
        ".every(e => e.scrollWidth <= e.parentElement.clientWidth)"
    )
    tab.evaluate("document.querySelector('#by-model').click()")
    assert tab.evaluate(tops) == "01234"
    # A keyboard reaches every fold, and the focus is seen.
    assert tab.evaluate(
        "(() => { const s = document.querySelector('.layer > summary'); s.focus(); "
        "return document.activeElement === s && s.tabIndex >= 0 })()"
    )
    assert tab.messages == []


@BROWSER
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_aa_asks_for(
    tab: browser.Browser, full: str, dark: bool, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(full, encoding="utf-8")
    tab.open(path, 1280, 900, dark=dark)
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    poor = tab.evaluate(CONTRAST)
    assert poor == []


# Every text against the first background behind it that is not transparent.
CONTRAST = """
(() => {
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


@BROWSER
def test_it_prints(tab: browser.Browser, full: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(full, encoding="utf-8")
    tab.open(path, 1280, 900, dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print")
    # Black on white whatever the theme, and what is folded is unfolded.
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate(
        "[...document.querySelectorAll('details:not([open]) th')].every(e => e.offsetHeight > 0)"
    )  # fmt: skip
    tab.call("Emulation.setEmulatedMedia", media="")
    tab.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


# Written beside the other reports


def test_without_the_extra_there_is_a_note_and_no_stale_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from asapc.report import Report, write_report\n"
        f"report = Report.from_json({page_report.minimal_report()!r}, 'report')\n"
        "for missing in ('jinja2', 'matplotlib'):\n"
        f"    Path({str(page)!r}).write_text('of an earlier report')\n"
        "    sys.modules[missing] = None\n"
        f"    write_report({str(tmp_path)!r}, report, note=print)\n"
        "    del sys.modules[missing]\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        f"no report.html: {missing} is not installed; pip install '.[report]' in a clone of asapc adds "
        "the page" for missing in ("jinja2", "matplotlib")
    ]  # fmt: skip
    names = sorted(path.name for path in tmp_path.iterdir())
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
