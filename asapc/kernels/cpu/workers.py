"""Worker threads for CPU kernels: each computes serially on tiles that fit its core's cache."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import torch


def each_worker(work: Callable[[int], None], starts: Sequence[int], serially: bool = False) -> None:
    """Call work(start) for each, without gradients, on as many threads as torch would use here.

    A worker takes the next start when it is done: a core that is busy elsewhere gets fewer.
    serially: a single start goes to a worker, too. Its operators are so short that threads would wait for
    each other longer than they compute, the more so on busy cores.
    """
    threads, waiting = torch.get_num_threads(), deque(starts)
    inference = torch.is_inference_mode_enabled()

    def taken() -> Iterator[int]:
        with suppress(IndexError):
            while True:
                yield waiting.popleft()

    def run(_worker: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both are per thread
            for start in taken():
                work(start)

    count = min(threads, len(starts))
    if count < 1 or (count == 1 and not (serially and threads > 1)):
        run(0)
    else:
        list(_workers(os.getpid(), threads).map(run, range(count)))


@cache
def _workers(process: int, count: int) -> ThreadPoolExecutor:
    """`count` threads whose torch operators run serially; one pool per process, fork or not.

    Torch keeps the thread count per thread, but setting it also moves the default that later
    threads start from: the caller's own count is set again once every worker has its own.
    """
    ready = threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread resets its count to the default
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="asapc", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(count)
    return pool
