"""CPU kernels on hostile input, their worker threads, and how they sit in torch and in a process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.kernels import dispatch, native
from asapc.kernels.dispatch import explained
from asapc.operators import asap as asap_meaning
from asapc.operators import sinkhorn as meaning
from asapc.operators.stabilised import stabilised_sinkhorn

ops = torch.ops.asapc
ATTENTION = [1.0, 1.0, 0.0, 0.0]  # N * P
HALF_STEPS = 7


@pytest.fixture(params=[native.RESIDENT_BYTES, 0], ids=["kept", "streamed"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """K of a head kept, or formed again block by block."""
    monkeypatch.setattr(native, "RESIDENT_BYTES", request.param)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_honest(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, bias: Tensor | None = None,
    score_multiplier: float = 0.3,
) -> Tensor:  # fmt: skip
    """Both operators and both maps: at most twice as wrong as their meaning in the same dtype."""
    f, g = (torch.linspace(-2, 2, t.shape[2]).expand(t.shape[:3]) for t in (q, k))
    loop = (keep, bias, score_multiplier, HALF_STEPS, True, ATTENTION)
    calls: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("sinkhorn", meaning, (q, k, v, *loop)), ("sinkhorn_attention", meaning, (q, k, *loop)),
    ]
    for source, key, c_transforms in ((f, None, 3), (f, None, 1), (None, g, 2), (None, g, 1)):
        tail = (keep, bias, source, key, score_multiplier, c_transforms, ATTENTION)
        calls.append(("asap", asap_meaning, (q, k, v, *tail)))
        if c_transforms > 1:  # one c-transform from g has a kernel for the output alone
            calls.append(("asap_attention", asap_meaning, (q, k, *tail)))
    # A score is itself rounded: by how much of the plan is luck where scores are huge.
    largest = score_multiplier * float((q.double() @ k.double().transpose(-1, -2)).abs().max())
    rounded = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps * largest
    for name, module, inputs in calls:
        reference = getattr(module, name)
        exact = reference(*map(double, inputs))
        rounding = (1e-6 + rounded) * max(1.0, float(exact.abs().max()))
        budget = 2 * float((reference(*inputs) - exact).abs().max()) + rounding
        own = getattr(ops, name)(*inputs)
        assert own.shape == exact.shape and own.dtype == q.dtype
        assert float((own - exact).abs().max()) <= budget, name
    result: Tensor = ops.sinkhorn(q, k, v, *loop)
    return result


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """q, k, v of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("lead", "n"), [  # heads stacked, or one head a tile
    ((2, 3), 260), ((1, 3), 5), ((2, 1), 5), ((1, 1), 260), ((3,), 5), ((), 5),
], ids=str)  # fmt: skip
def test_bias_of_every_broadcastable_shape(lead: tuple[int, ...], n: int) -> None:
    q, k, v = tokens(2, 3, n, 4)
    if n == 5:
        assert_honest(q, k, v, None, torch.randn(*lead, n, n))
    keep = torch.rand(2, n) > 0.3
    assert_honest(q, k, v, keep, torch.randn(*lead, n, n))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("n", [6, 400], ids=["heads stacked", "one head a tile"])
def test_masks_that_leave_one_key_or_none(n: int) -> None:
    """Without an active key an example attends to all alike: what a finite mask such as -1e9 comes to, as
    in the released text classifier."""
    q, k, v = tokens(3, 2, n, 4)
    keep = torch.ones(3, n, dtype=torch.bool)
    keep[1] = False
    keep[2, :-1] = False
    bias = torch.randn(1, 2, n, n)
    for own in (slice(None), slice(1, 2)):
        out = assert_honest(q[own], k[own], v[own], keep[own], bias)
        empty = out[~keep[own].any(-1)]
        torch.testing.assert_close(empty, v[1:2].mean(2, keepdim=True).expand_as(empty))


@pytest.mark.usefixtures("memory")
def test_what_masked_keys_hold_does_not_matter() -> None:
    q, k, v = tokens(2, 2, 9, 4)
    keep = torch.arange(9).expand(2, 9) < 6
    f, g = torch.randn(2, 2, 9), torch.randn(2, 2, 9)

    def outputs() -> list[Tensor]:
        loop = (keep, None, 0.3, HALF_STEPS, True, ATTENTION)
        return [
            ops.sinkhorn(q, k, v, *loop), meaning.sinkhorn(q, k.nan_to_num(posinf=0.0), v, *loop),
            ops.asap(q, k, v, keep, None, f, None, 0.3, 3, ATTENTION),
            *(ops.asap(q, k, v, keep, None, None, g, 0.3, count, ATTENTION) for count in (1, 2)),
        ]  # fmt: skip

    expected = outputs()
    for value in (1e4, math.inf):
        k[:, :, 6:], v[:, :, 6:], g[:, :, 6:] = value, math.nan, -1e4
        torch.testing.assert_close(outputs(), expected)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("n", "spread", "masked"), [
    (7, 1e4, True), (260, 40.0, True), (260, 1e4, False), (7, 40.0, False),
])  # fmt: skip
def test_scores_beyond_the_linear_domain(n: int, spread: float, masked: bool) -> None:
    q, k, v = tokens(2, 2, n, 4)
    keep = torch.rand(2, n) > 0.5 if masked else None
    out = assert_honest(q * spread, k, v, keep)
    assert bool(out.isfinite().all())


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 1, 1, 3), (1, 9, 2, 1), (66, 131, 70, 17)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 20.0, 1e3], ids=["narrow", "wide", "huge"])
def test_sizes_that_fill_no_register(sizes: tuple[int, ...], spread: float) -> None:
    n, m, dim, width = sizes
    draw = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, 2, *own, generator=draw) for own in ((n, dim), (m, dim), (m, width)))
    assert_honest(q * spread, k, v, None, torch.randn(1, 2, n, m, generator=draw))
    assert_honest(*(t.double() for t in (q * spread, k, v)), torch.arange(m).expand(2, m) == m // 2)


@pytest.mark.usefixtures("memory")
def test_pairs_that_are_hidden() -> None:
    """By a bias of -inf, of a whole row and a whole column, too."""
    q, k, v = tokens(2, 2, 19, 4)
    hidden = torch.rand(19, 19, generator=torch.Generator().manual_seed(1)) > 0.7
    hidden[3], hidden[:, 5] = True, True
    out = assert_honest(q, k, v, None, torch.zeros(19, 19).masked_fill(hidden, -math.inf))
    assert not out[:, :, 3].any()


def test_calls_of_several_threads_at_once() -> None:
    q, k, v = tokens(2, 6, 130, 16)
    settings = (None, None, 0.3, HALF_STEPS, True, ATTENTION)
    expected = ops.sinkhorn(q, k, v, *settings)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: ops.sinkhorn(q, k, v, *settings), range(40)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(own, expected) for own in found)


@pytest.mark.usefixtures("memory")
def test_one_wide_head_among_narrow_ones() -> None:
    q, k, v = tokens(2, 3, 12, 4)
    q[1, 2] *= 500
    assert_honest(q, k, v)


@pytest.mark.usefixtures("memory")
def test_output_factor_of_active_keys() -> None:
    q, k, v = tokens(3, 2, 10, 4)
    keep = torch.arange(10) < torch.tensor([[10], [4], [0]])
    settings = (keep, None, 0.3, 4, True, [2.0, 0.0, 0.0, 1.0])
    exact = meaning.sinkhorn(q.double(), k.double(), v.double(), *settings)
    torch.testing.assert_close(ops.sinkhorn(q, k, v, *settings).double(), exact, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("memory")
def test_scores_at_the_edge_of_the_linear_domain() -> None:
    """Every |S| is the largest that exp(S) is taken of directly, with signs that do not cancel."""
    signs = torch.tensor([1.0, -1.0] * 200)
    q = k = (signs * 20**0.5)[None, None, :, None]
    assert_honest(q, k, next(tokens(1, 1, 400, 5)), score_multiplier=0.9999)


@pytest.mark.usefixtures("memory")
def test_slices_of_one_projection() -> None:
    """q, k and v as views of one [B, N, 3 H D] tensor, as models produce them."""
    packed = torch.randn(2, 33, 3, 4, 8)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = assert_honest(q, k, v)
    torch.testing.assert_close(out, assert_honest(*(t.contiguous() for t in (q, k, v))))
    assert_honest(q.flip(2), k[:, :, ::2], v[:, :, ::2])
    assert_honest(q[:, :1].expand(2, 4, 33, 8), k, v)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("n", "m", "active", "lead"), [(300, 300, 4, 1), (1, 300, 300, 3), (64, 3, 3, 1)], ids=str
)
def test_scalings_do_not_drift_where_rows_and_columns_are_unequal(
    n: int, m: int, active: int, lead: int
) -> None:
    """Rows closed to 1 and columns to 1 would grow by N/n a pair of half-steps: 1e45 after 44."""
    (q, _, _), (_, k, v) = tokens(1, lead, n, 4), tokens(1, lead, m, 4)
    keep = None if active == m else (torch.arange(m) < active)[None]
    for half_steps, rows_first in ((44, True), (45, False), (130, True)):
        settings = (keep, None, 0.3, half_steps, rows_first, ATTENTION)
        exact = meaning.sinkhorn(q.double(), k.double(), v.double(), *settings)
        rounding = 2 * (meaning.sinkhorn(q, k, v, *settings) - exact).abs().max() + 1e-6
        assert float((ops.sinkhorn(q, k, v, *settings) - exact).abs().max()) <= float(rounding)


def test_coarse_keys_far_below_the_padded_ones() -> None:
    """Padded keys are zero-filled: where active scores are very negative theirs are far above."""
    generator = torch.Generator().manual_seed(0)
    q = 0.3 * torch.randn(1, 1, 16, 8, generator=generator) + 10
    k = 0.3 * torch.randn(1, 1, 16, 8, generator=generator) - 10
    keep = torch.arange(16)[None] < 12
    settings = ([q[0, :, :4]], torch.ones(1, 1), "coarse:4")
    for half_steps, starts_on_x in ((9, False), (8, True)):
        tail = (8**-0.5, half_steps, starts_on_x)
        own = ops.dual_and_row_mass(q, k, keep, None, *settings, *tail)
        exact = asap_meaning.dual_and_row_mass(q, k, keep, None, *settings, *tail)
        torch.testing.assert_close(own, exact, rtol=1e-5, atol=1e-4)


FORK = """
import os, torch, asapc.kernels.library
from asapc.operators import sinkhorn as meaning
torch.set_num_threads(2)
q, k, v = torch.randn(3, 2, 4, 300, 8).unbind(0)
torch.randn(1 << 20).exp_()  # torch's threads have begun
settings = (None, None, 0.3, 4, True, [1.0, 1.0, 0.0, 0.0])
run = lambda: torch.ops.asapc.sinkhorn(q, k, v, *settings)

def in_a_child(expected):
    child = os.fork()
    if child == 0:
        found = run()
        os._exit(0 if expected is None or torch.equal(found, expected) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

in_a_child(None)
in_a_child(run())
torch.testing.assert_close(run(), meaning.sinkhorn(q, k, v, *settings))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.skipif(bool(native.missing()), reason="torch's own threads do not work after a fork")
def test_a_build_for_an_older_processor_and_a_fork() -> None:
    """As in a data loader's process. The parent's threads are not the child's, whether the engine runs in
    a child first or has run in the parent."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60, env=environment)


@pytest.mark.skipif(sys.platform != "linux", reason="names a library of torch's as Linux has it")
def test_a_build_of_another_version_is_not_called_and_triton_not_imported() -> None:
    """torch itself imports Triton in some builds: only what asapc adds counts."""
    code = (
        "import sys, torch, torch.export, torch._inductor\nbefore = 'triton' in sys.modules\n"
        "import asapc, asapc.pipeline, asapc.operators\nfrom asapc.kernels import native\n"
        "print(native.missing()); sys.exit(not before and 'triton' in sys.modules)"
    )
    other = Path(torch.__file__).parent / "lib" / "libc10.so"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True,
        env={**os.environ, "ASAPC_NATIVE": str(other)},
    )  # fmt: skip
    assert "another version" in done.stdout


@pytest.mark.skipif(bool(native.missing()), reason="the plain operators run")
def test_sizes_that_differ_are_an_error_and_masks_of_one_example_are_everybodys() -> None:
    """The engine reads memory by these sizes."""
    ops = torch.ops.asapc
    q, k, v = (torch.randn(2, 2, n, 3) for n in (4, 5, 5))
    slices, tau = torch.randn(2, 6, 3), torch.ones(2)
    pivots, mass = torch.randn(2, 3, 3), torch.full((2, 3), 1 / 3)

    def sinkhorn(k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
        return ops.sinkhorn(q, k, v, keep, None, 1.0, 4, True, [1.0, 0.0, 0.0, 0.0])

    def lot(k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
        loops = 1.0, 1.0, 3, True, 3, True, [1.0, 0.0, 0.0, 0.0]
        return ops.lot(q, k, v, keep, None, None, pivots, mass, *loops)

    def esp_hard(k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
        return ops.esp_hard(q, k, v, keep, None, slices, tau, False, True, 1.0)

    one = torch.tensor([[True, False, True, True, True]])
    for run in (sinkhorn, lot, esp_hard):
        torch.testing.assert_close(run(k, v, one), run(k, v, one.expand(2, -1)))
        for keys, values in ((k, v[:, :, :3]), (k, v[:1]), (k[:, :1], v[:, :1]), (k[..., :2], v)):
            with pytest.raises((RuntimeError, IndexError)):
                run(keys.contiguous(), values.contiguous())
        with pytest.raises(RuntimeError):
            run(k, v, one[:, :4])


# What `bench --explain` says is what runs


@pytest.mark.skipif(bool(native.missing()), reason="the plain operators run")
@pytest.mark.parametrize(("resident", "spread", "path"), [
    (1 << 24, 1.0, ", linear domain"), (1 << 24, 4.0, ", linear domain in float64"),
    (1 << 10, 1.0, ", streamed, linear domain"), (1 << 10, 100.0, ", streamed, log domain"),
])  # fmt: skip
def test_the_engine_tells_where_it_computed(
    resident: int, spread: float, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x * spread for x in tokens(2, 2, 40, 4))
    monkeypatch.setattr(native, "RESIDENT_BYTES", resident)
    with explained() as choices:
        ops.sinkhorn(q, k, v, None, None, 0.5, 4, True, ATTENTION)
    assert [(c.operator, c.kernel) for c in choices] == [("sinkhorn", f"CPU, {native.described()}{path}")]


@pytest.mark.skipif(bool(native.missing()), reason="the plain operators run")
@pytest.mark.parametrize("half_steps", [2, 4, 7])
@pytest.mark.parametrize("rows_first", [True, False])
def test_hidden_queries_are_no_rows_of_the_engine(half_steps: int, rows_first: bool) -> None:
    """Examples without keys, without queries, with some of both, and with all."""
    q, k, v = tokens(4, 2, 19, 4)
    keep = torch.stack([torch.arange(19) < count for count in (0, 19, 7, 19)])
    shown = torch.stack([torch.arange(19) < count for count in (9, 0, 7, 19)])
    bias = torch.where(shown, 0.0, -math.inf)[:, None, :, None]
    settings = (0.5, half_steps, rows_first, ATTENTION)
    with explained() as choices:
        found = ops.sinkhorn(q, k, v, keep, bias, *settings)
    assert "linear domain" in choices[0].kernel  # a row of -inf alone took 25 times as long
    expected = meaning.sinkhorn(q.double(), k.double(), v.double(), keep, bias.double(), *settings)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(bool(native.missing()), reason="the plain operators run")
@pytest.mark.parametrize("start", ["plain", "row", "softmax"])
def test_a_constant_beside_hidden_tokens_stays_in_the_engine(start: str) -> None:
    q, k, v = tokens(3, 2, 19, 4)
    keep = torch.stack([torch.arange(19) < count for count in (19, 7, 12)])
    bias = torch.where(keep, 0.0, -math.inf)[:, None, :, None]
    for form in ("scaling", "plan"):
        settings = (0.5, 6, True, form, "add", 1e-3, start, False, False, ATTENTION)
        with explained() as choices:
            found = ops.stabilised_sinkhorn(q, k, v, keep, bias, *settings)
        assert "C++ engine" in choices[0].kernel
        wide = (x.double() for x in (q, k, v))
        expected = stabilised_sinkhorn(*wide, keep, bias.double(), *settings)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


MASKS = {
    "window": lambda i, j, h: (i - j).abs() <= 2,
    "blocks": lambda i, j, h: i // 4 == j // 4,
    "scattered": lambda i, j, h: (5 * i + 3 * j + i * j + h) % 7 < 2,
    "causal": lambda i, j, h: (i >= j) & (h >= 0),
    "a row": lambda i, j, h: (i != 1 + h) & (j >= 0),
    "a column": lambda i, j, h: (j != h) & (i >= 0),
    "one pair": lambda i, j, h: (i == 3) & (j == 4),
    "all": lambda i, j, h: i + j < 0,
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("low", [-math.inf, -1e9, -1e4])
@pytest.mark.parametrize("sizes", [(9, 9), (40, 33)])
def test_masked_pairs_are_nothing_to_the_linear_domain(
    sizes: tuple[int, int], low: float, mask: str
) -> None:
    """But where a row or a column has nothing else, -1e9 and -1e4 are scores like others."""
    i, j, h = (torch.arange(size) for size in (*sizes, 2))
    shown = MASKS[mask](i[:, None], j, h[:, None, None]).expand(2, *sizes)
    (q, *_), (k, v, _) = tokens(2, 2, sizes[0], 8), tokens(2, 2, sizes[1], 8, seed=1)
    bias = torch.where(shown, 0.3, low)
    with explained() as choices:
        assert_honest(q, k, v, None, bias)
    if mask in ("window", "blocks") and not native.missing():
        assert not any("log domain" in choice.kernel for choice in choices)
    rules = ("plan", "add", "softmax"), ("scaling", "add", "plain"), ("plan", "clamp", "row")
    for form, kind, start in rules:
        settings = (0.3, HALF_STEPS, True, form, kind, 1e-6, start, False, False, ATTENTION)
        with explained() as choices:
            found = ops.stabilised_sinkhorn(q, k, v, None, bias, *settings)
        exact, rough = (
            stabilised_sinkhorn(*(kind_of(x) for x in (q, k, v)), None, kind_of(bias), *settings)
            for kind_of in (double, lambda x: x)
        )
        assert native.missing() or "C++ engine" in choices[0].kernel
        budget = 2 * float((rough - exact).abs().max()) + 2e-6 * max(1.0, float(exact.abs().max()))
        assert float((found - exact).abs().max()) <= budget, (form, kind, start)


@pytest.mark.parametrize("low", [-math.inf, -1e9])
@pytest.mark.parametrize("rule", [
    ("plan", "add", 1e-8, "plain"), ("plan", "clamp", 1e-20, "row"),
], ids=str)  # fmt: skip
def test_scalings_of_parts_that_do_not_see_each_other_drift_apart(
    rule: tuple[str, str, float, str], low: float
) -> None:
    """With more rows than columns, or fewer, by a factor in each pair of half-steps."""
    q, k, v = tokens(1, 1, 40, 8)
    i = torch.arange(40)
    bias = torch.where((i[:, None] < 30) == (i < 5), 0.0, low)
    for half_steps in range(60, 140):
        settings = (0.3, half_steps, True, *rule, False, False, ATTENTION)
        found = ops.stabilised_sinkhorn(q, k, v, None, bias, *settings)
        exact = stabilised_sinkhorn(*map(double, (q, k, v)), None, bias.double(), *settings)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_a_token_of_no_mass_is_closed_by_its_own_half_step(masked: bool, queries: int) -> None:
    """It takes no part in the first half-step, and its own then forgets where it began."""
    (q, *_), (_, k, v) = tokens(2, 2, queries, 8), tokens(2, 2, 9, 8, seed=1)
    i, j = torch.arange(queries)[:, None], torch.arange(9)
    bias = torch.where((i - j).abs() <= 2, 0.0, -math.inf) if masked else None
    for source, half_steps in ((True, 1), (True, 3), (False, 1), (False, 2)):
        dual = torch.zeros(2, 2, queries if source else 9)
        dual[..., -1] = -math.inf
        settings = (None, bias, dual if source else None, None if source else dual, 0.3, half_steps)
        exact = asap_meaning.asap(*map(double, (q, k, v, *settings)), ATTENTION)
        with explained() as choices:
            found = ops.asap(q, k, v, *settings, ATTENTION).double()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        assert len(choices) == 1


def test_without_the_engine_the_plain_meaning_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASAPC_NATIVE", "0")
    monkeypatch.setattr(native, "missing", native.missing.__wrapped__)
    with explained() as choices:
        ops.sinkhorn(*tokens(2, 2, 40, 4), None, None, 0.5, 4, True, ATTENTION)
    assert [(c.kernel, c.reason) for c in choices] == [("plain PyTorch", "ASAPC_NATIVE=0")]
    assert native.described() == "no C++ engine: ASAPC_NATIVE=0"


@pytest.mark.parametrize("by_engine", [True, False])
@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_one_c_transform_from_the_keys_dual_is_softmax_attention(
    spread: float, by_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of scores of any spread in float32: what leaves the format is nothing beside a row's largest."""
    if by_engine and native.missing() is not None:
        pytest.skip(str(native.missing()))
    if not by_engine:
        monkeypatch.setattr(native, "missing", lambda: "ASAPC_NATIVE=0")
    q, k, v = tokens(2, 3, 37, 8)
    q, dual = q * spread, spread * k[..., 0]
    keep = torch.arange(37) < torch.tensor([37, 5])[:, None]
    for shown in (None, keep):
        settings = (shown, None, None, dual, 0.5, 1, ATTENTION)
        with explained() as choices:
            found = ops.asap(q, k, v, *settings)
        exact = asap_meaning.asap(*map(double, (q, k, v, *settings[:-1])), ATTENTION)
        honest = float((asap_meaning.asap(q, k, v, *settings) - exact).abs().max())
        assert float((found - exact).abs().max()) <= 2 * honest + 1e-6
        kernel = f"CPU, {native.described()}" if by_engine else "scaled_dot_product_attention"
        assert choices[0].kernel == kernel
        assert "softmax attention" in choices[0].reason


def test_other_devices_fall_back_and_say_so() -> None:
    q = torch.randn(1, 2, 8, 4, device="meta")
    with explained() as choices:
        assert dispatch.attention_backend("sinkhorn", q, q, q, None, 4) == "plain"
        assert dispatch.dual_backend("dual", q, q, "norm") == "plain"
        assert dispatch.attention_backend("asap", q, q, q, None, 1, from_key=True) == "softmax"
        assert dispatch.attention_backend("asap", q, q, q, None, 2, from_key=True) == "plain"
    assert all("meta devices" in c.reason for c in choices)
