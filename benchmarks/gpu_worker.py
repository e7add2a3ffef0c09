"""A pytest plugin for kernels on a GPU: `-p gpu_worker`, with pytest-xdist.

An error of a kernel sticks to its process: every later call there fails. A worker that has met one ends,
and xdist puts another in its place. Failures are printed as they come, for a run that may be cut off.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

LONGEST = 3000  # characters of a failure
WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and not WORKER:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-LONGEST:]}", file=sys.__stderr__)
        sys.__stderr__.flush()  # type: ignore[union-attr]


def pytest_runtest_logfinish() -> None:
    if not WORKER or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)
