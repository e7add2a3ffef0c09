"""--max-memory: sizes as people write them, and a bound that is kept, seen from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_text import write_data, write_teacher

from asapc.errors import InputError
from asapc.memory import (
    SLACK,
    MemoryLimit,
    current,
    forget_peak,
    format_size,
    give_back,
    parse_size,
    peak,
)

MIB = 1 << 20


def test_sizes() -> None:
    sizes = {"2 GB": 2 * 10**9, "1.5g": 3 << 29, "123456": 123456, "1TiB": 1 << 40}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "1 XB", "nan", "0", "9" * 40, "1GiBs", "1.2.3M"):
        with pytest.raises(InputError, match="such as 2GiB"):
            parse_size(text)
    shown = [format_size(x) for x in (12, 2048, 3 << 29, 5 << 40)]
    assert shown == ["12 bytes", "2 KiB", "1.5 GiB", "5 TiB"]


def test_peak_sees_what_was_freed() -> None:
    give_back()  # what earlier tests have freed would be taken again
    forget_peak()
    before = current()
    del_me = torch.zeros(64 * MIB // 4).add_(1.0)
    del del_me
    assert peak() - before > 60 * MIB


class Steps:
    """Takes `each` bytes an example, and `once` whatever the batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: int, once: int = 0) -> None:
        self.sizes: list[int] = []
        self.most = 0
        monkeypatch.setattr(MemoryLimit, "_growth", self.growth)
        self.each, self.once = each, once

    def growth(self, run: Callable[[int], object], size: int) -> int:
        self.sizes.append(size)
        self.most = max(self.most, self.once + size * self.each)
        return self.once + size * self.each


@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize(("each", "once"), [(0, 0), (7 * MIB, 3 * MIB), (40 * MIB, 0)])
def test_the_limit_is_not_passed_by_looking_for_it(
    monkeypatch: pytest.MonkeyPatch, each: int, once: int, most: int
) -> None:
    steps, loading = Steps(monkeypatch, each, once), list[int]()
    limit = MemoryLimit(current() + SLACK + 100 * MIB)
    size = limit.batch_size(loading.append, most, share=0.5)
    assert loading == [1]  # before anything is measured
    room = limit.left * 0.5
    assert 1 <= size <= most
    assert once + size * each <= room and steps.most <= room
    best = most if each == 0 else max(1, min(most, int((room - once) / each)))
    assert size >= best / 2


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="in use before the data"):
        MemoryLimit(current())
    Steps(monkeypatch, 200 * MIB)
    with pytest.raises(InputError, match="a batch of one example"):
        MemoryLimit(current() + SLACK + 100 * MIB).batch_size(lambda n: None, 8)


def test_what_is_kept_is_shared() -> None:
    limit = MemoryLimit(current() + SLACK + 400 * MIB)
    assert limit.kept(4, 1 << 40) == pytest.approx(25 * MIB, rel=0.05)
    assert limit.kept(1, MIB) == MIB


def test_commands_keep_their_limit(tmp_path: Path) -> None:
    """Calibrate, compile and report, seen from outside. A batch of the recipe would take more."""
    write_teacher(tmp_path / "teacher", seq_len=256, n_layers=1, max_iter=3)
    write_data(tmp_path / "data.npz", examples=60, tokens=256)
    (tmp_path / "recipe.yaml").write_text(
        "{batch_size: 128, max_examples: 16, operator: asap, fit: kl, features: [norm]}"
    )
    command = "run teacher --data data.npz -o out --recipe recipe.yaml --fast --max-memory 740MiB"
    code = (
        "import sys; from asapc.cli import main; from asapc.memory import peak\n"
        "assert main(sys.argv[1:]) == 0\nprint(peak())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= 740 * MIB
    batches = re.findall(r"of 740 MiB memory used at most, in batches of (\d+)", done.stderr)
    assert len(batches) == 3 and all(1 <= int(size) < 128 for size in batches)
