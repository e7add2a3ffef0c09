"""docs/recognition.md is true: what compiles there replays, and the rest is refused for that reason."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from asapc.inputs.load import load_teacher
from asapc.pipeline import inspect

PAGE = Path(__file__).parents[1] / "docs" / "recognition.md"
BLOCK = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
(_, FRAME), *SPELLINGS = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
NAMES = [re.findall(r"class (\w+)", block)[0] for _, block in SPELLINGS]


def test_there_are_five_and_five_and_a_way_out_of_each() -> None:
    compiles = [title == "compiles" for title, _ in SPELLINGS]
    assert compiles == [True] * 5 + [False, True] * 5


@pytest.mark.parametrize("title, block", SPELLINGS, ids=NAMES)
def test_what_the_page_says_of_a_spelling(title: str, block: str, tmp_path: Path) -> None:
    (name,) = re.findall(r"class (\w+)", block)
    (tmp_path / "layer.py").write_text(f"{FRAME}\n\n{block}", encoding="utf-8")
    x = np.random.default_rng(0).standard_normal((64, 12, 8)).astype(np.float32)
    x[::2, 9:] = 0  # padding, for the layer that asks
    np.savez(tmp_path / "x.npz", x=x)
    inspection = inspect(load_teacher(f"{tmp_path / 'layer.py'}:{name}"), str(tmp_path / "x.npz"))
    (layer,) = inspection.sites
    if title == "compiles":
        assert layer["status"] == "matched", layer["reason"]
    else:
        assert layer["status"] != "matched" and title.removeprefix("not compiled: ") in layer["reason"]
