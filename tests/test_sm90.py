"""What the GPU's loops compile to for sm_90, by the compiler that Triton ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "sm90.py"


def test_loops_are_short_and_spill_nothing(tmp_path: Path) -> None:
    """A half-step that is shifted by an older dual, and one with a maximum; the products with values."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--only", "loop bfloat16 N2048 D64 row", "-o", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "CUOBJDUMP" in done.stderr:
        pytest.skip("Triton ships no cuobjdump here")
    assert done.returncode == 0, done.stdout + done.stderr
    built = json.loads((tmp_path / "sm90.json").read_text())["built"]
    most = {"_half_step": 8.0, "_attend": 8.0}
    assert {own["kernel"] for own in built} == set(most)
    assert all(0 < own["an_entry"] <= most[own["kernel"]] for own in built)
    assert min(own["an_entry"] for own in built if own["kernel"] == "_half_step") <= 6.1
