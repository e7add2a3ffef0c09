"""Sliced potentials against closed forms, an independent reference and dual feasibility."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asapc.errors import InputError
from asapc.features import directions
from asapc.features.sliced import cost_offset, predict_dual, sliced_potentials, slices
from asapc.kernels.sliced import _sort
from asapc.kernels.sliced import predict_dual as kernel

E = torch.float64


def reference(q, k, keep, theta, multiplier):
    """Eq. 12 of the paper, token by token, with the quantile found by walking the key ranks."""
    q, k, theta = (np.asarray(x, dtype=np.float64) for x in (q, k, theta))
    batch, heads, n_queries, _ = q.shape
    out = np.zeros((batch, heads, n_queries, len(theta)))
    for index in np.ndindex(batch, heads, len(theta)):
        example, head, slice_ = index
        active = np.ones(k.shape[2], bool) if keep is None else np.asarray(keep[example])
        if not active.any():
            continue
        a = math.sqrt(multiplier) * q[example, head] @ theta[slice_]
        b = np.sort(math.sqrt(multiplier) * k[example, head][active] @ theta[slice_])
        rank = np.argsort(a, kind="stable")
        phi = 0.0
        potential = np.zeros(n_queries)
        for r in range(n_queries):  # r-th smallest query, counted from 0
            if r:
                position = r * len(b) / n_queries  # rank among the active keys, counted from 1
                slope = np.interp(position, np.arange(1, len(b) + 1), b)
                phi += slope * (a[rank[r]] - a[rank[r - 1]])
            potential[rank[r]] = a[rank[r]] ** 2 / 2 - phi
        out[example, head, :, slice_] = potential - potential.mean()
    return torch.from_numpy(out)


def random_case(seed, n_queries, n_keys, dim=3, batch=2, heads=2, ties=False):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, n_queries, dim, generator=generator, dtype=E)
    k = torch.randn(batch, heads, n_keys, dim, generator=generator, dtype=E)
    if ties:
        q, k = q.round(), k.round()
    return q, k


sizes = st.integers(1, 9)
seeds = st.integers(0, 10_000)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, n=sizes, ties=st.booleans())
def test_dual_feasible_and_tight_on_matched_pairs(seed, n, ties):
    """f_i + g_j <= c_ij with g the hard c-transform of f; equality where equal ranks meet."""
    q, k = random_case(seed, n, n, ties=ties)
    theta = slices(4, 3, seed)
    f = sliced_potentials(q, k, None, theta, 0.7)  # [B, H, N, L]
    a = math.sqrt(0.7) * q @ theta.double().T
    b = math.sqrt(0.7) * k @ theta.double().T
    cost = (a[:, :, :, None] - b[:, :, None, :]) ** 2 / 2  # [B, H, N, M, L]
    g = (cost - f[:, :, :, None]).amin(2)
    assert (f[:, :, :, None] + g[:, :, None, :] - cost).max() <= 1e-10
    sorted_a, rank_a = torch.sort(a, dim=2, stable=True)
    sorted_b, rank_b = torch.sort(b, dim=2, stable=True)
    total = f.gather(2, rank_a) + g.gather(2, rank_b)
    torch.testing.assert_close(total, (sorted_a - sorted_b) ** 2 / 2, atol=1e-10, rtol=0)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, n=sizes, m=sizes, masked=st.booleans(), ties=st.booleans())
def test_equals_reference(seed, n, m, masked, ties):
    q, k = random_case(seed, n, m, ties=ties)
    keep = torch.rand(2, m, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    theta = slices(3, 3, seed)
    found = sliced_potentials(q, k, keep, theta, 0.5)
    torch.testing.assert_close(found, reference(q, k, keep, theta, 0.5), atol=1e-11, rtol=1e-11)
    assert found.mean(2).abs().max() < 1e-12


@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=sizes, m=sizes)
def test_permutation_equivariant(seed, n, m):
    """Queries permuted: rows follow. Keys permuted together with their mask: nothing changes."""
    q, k = random_case(seed, n, m, ties=seed % 2 == 0)
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(2, m, generator=generator) < 0.7
    rows, columns = torch.randperm(n, generator=generator), torch.randperm(m, generator=generator)
    theta = slices(3, 3, 1)
    plain = sliced_potentials(q, k, keep, theta, 1.3)
    permuted = sliced_potentials(q[:, :, rows], k[:, :, columns], keep[:, columns], theta, 1.3)
    torch.testing.assert_close(permuted, plain[:, :, rows], atol=1e-12, rtol=1e-12)


def test_all_keys_active_equals_unmasked():
    q, k = random_case(0, 7, 7)
    theta = slices(5, 3, 0)
    keep = torch.ones(2, 7, dtype=torch.bool)
    torch.testing.assert_close(
        sliced_potentials(q, k, keep, theta, 0.5), sliced_potentials(q, k, None, theta, 0.5)
    )


@pytest.mark.parametrize(("n", "m"), [(6, 6), (6, 4), (3, 8)], ids=["square", "wide", "tall"])
def test_masked_keys_are_not_read(n, m):
    q, k = random_case(3, n, m)
    keep = torch.ones(2, m, dtype=torch.bool)
    keep[0, 1] = keep[1, 0] = False
    theta = slices(4, 3, 0)
    clean = sliced_potentials(q, k, keep, theta, 0.5)
    poisoned = torch.where(keep[:, None, :, None], k, torch.nan)
    torch.testing.assert_close(sliced_potentials(q, poisoned, keep, theta, 0.5), clean)


def test_hand_computed_pairs():
    """a = (1, 3, 2), b = (0, 4, 1): phi = 0, 0*(2-1), + 1*(3-2); f = a^2/2 - phi, centred."""
    q = torch.tensor([1.0, 3.0, 2.0], dtype=E).view(1, 1, 3, 1)
    k = torch.tensor([0.0, 4.0, 1.0], dtype=E).view(1, 1, 3, 1)
    f = sliced_potentials(q, k, None, torch.ones(1, 1), 1.0)[0, 0, :, 0]
    expected = torch.tensor([0.5, 3.5, 2.0], dtype=E)
    torch.testing.assert_close(f, expected - expected.mean())


def test_degenerate_inputs_are_finite():
    theta = slices(4, 3, 0)
    q, k = random_case(0, 5, 5)
    one = sliced_potentials(q[:, :, :1], k, None, theta, 0.5)
    assert torch.equal(one, torch.zeros_like(one))
    constant = sliced_potentials(q[:, :, :1].expand(-1, -1, 5, -1), k, None, theta, 0.5)
    assert torch.equal(constant, torch.zeros_like(constant))
    doubled = sliced_potentials(q.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1), None, theta, 0.5)
    assert torch.equal(doubled[:, :, :5], doubled[:, :, 5:])
    keep = torch.tensor([[False] * 5, [True] * 5])
    masked = sliced_potentials(q, k, keep, theta, 0.5)
    assert torch.equal(masked[0], torch.zeros_like(masked[0])) and masked.isfinite().all()
    huge = sliced_potentials(q.float() * 1e12, k.float() * 1e12, keep, theta, 0.5)
    assert huge.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_accumulates_wide(dtype):
    q, k = random_case(1, 33, 20, dim=8)
    q, k = q.to(dtype), k.to(dtype)
    theta = slices(4, 8, 0)
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[0, 11:] = False
    found = sliced_potentials(q, k, keep, theta, 0.3)
    assert found.dtype == torch.float32
    exact = sliced_potentials(q.double(), k.double(), keep, theta, 0.3)
    # 33 additions of terms below 10: a few float32 ulps of 10, whatever the input dtype
    assert (found - exact).abs().max() < 2e-5


@pytest.mark.parametrize("heads", [1, 2], ids=["pooled", "per_head"])
def test_predict_dual_combines_centres_and_shifts(heads):
    q, k = random_case(2, 6, 4)
    keep = torch.tensor([[True, True, False, True], [True, False, False, False]])
    theta = slices(3, 3, 0)
    omega = torch.randn(heads, 3, generator=torch.Generator().manual_seed(0), dtype=E)
    features = sliced_potentials(q, k, keep, theta, 0.5)
    expected = (features * omega[:, None, :]).sum(-1) - 0.25 * (q**2).sum(-1)
    torch.testing.assert_close(predict_dual(q, k, keep, theta, omega, 0.5), expected)
    torch.testing.assert_close(cost_offset(q, 0.5), 0.25 * (q**2).sum(-1))


def test_negative_multiplier_is_the_positive_one_at_minus_q():
    q, k = random_case(2, 6, 6)
    theta = slices(3, 3, 0)
    torch.testing.assert_close(
        sliced_potentials(q, k, None, theta, -0.5), sliced_potentials(-q, k, None, theta, 0.5)
    )


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_gradients(masked):
    q, k = random_case(4, 5, 4, batch=2, heads=1)
    keep = torch.tensor([[True, False, True, True], [False] * 4]) if masked else None
    theta, omega = slices(2, 3, 0), torch.ones(1, 2, dtype=E)
    q.requires_grad_(), k.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k: predict_dual(q, k, keep, theta, omega, 0.5), (q, k)
    )


def test_exports_with_dynamic_batch_and_length():
    class Features(torch.nn.Module):
        def forward(self, q, k, keep):
            return sliced_potentials(q, k, keep, slices(3, 4, 0), 0.5)

    def case(batch, length):
        q = torch.randn(batch, 2, length, 4)
        return q, torch.randn(batch, 2, length, 4), torch.rand(batch, length) < 0.7

    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=3)
    shape = {0: batch, 2: length}
    program = torch.export.export(
        Features(), case(2, 6), dynamic_shapes=(shape, shape, {0: batch, 1: length})
    )
    other = case(3, 9)
    torch.testing.assert_close(program.module()(*other), Features()(*other))


def test_slices_are_unit_seeded_float32():
    theta = slices(16, 5, 7)
    assert theta.dtype == torch.float32 and theta.shape == (16, 5)
    torch.testing.assert_close(theta.norm(dim=-1), torch.ones(16))
    assert torch.equal(theta, slices(16, 5, 7)) and not torch.equal(theta, slices(16, 5, 8))


def test_feature_names():
    assert torch.equal(directions(("sliced:8",), 4, 3), slices(8, 4, 3))
    for bad in [("sliced",), ("sliced:0",), ("sliced:x",), ("gaussian",), (), ("sliced:2",) * 2]:
        with pytest.raises(InputError, match="sliced:"):
            directions(bad, 4, 0)


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    n=sizes,
    m=sizes,
    masked=st.booleans(),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_kernel_equals_the_formula(seed, n, m, masked, ties, dtype):
    q, k = (x.to(dtype) for x in random_case(seed, n, m, ties=ties))
    keep = torch.rand(2, m, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    theta = slices(3, 3, seed)
    omega = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    found = kernel(q, k, keep, theta, omega, 0.5)
    expected = predict_dual(q, k, keep, theta, omega, 0.5)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tile_bytes", [1, 1 << 12, 1 << 30], ids=["single", "some", "one_tile"])
def test_kernel_tiles_views_and_gradients(tile_bytes, monkeypatch):
    monkeypatch.setattr("asapc.kernels.sliced.TILE_BYTES", tile_bytes)
    q, k = (x.float().transpose(1, 2) for x in random_case(0, 2, 2, heads=11, batch=5))
    keep = torch.rand(5, 11, generator=torch.Generator().manual_seed(0)) < 0.6
    theta, omega = slices(4, 3, 0), torch.ones(1, 4)
    expected = predict_dual(q, k, keep, theta, omega, 0.5)
    found = kernel(q.requires_grad_(), k, keep, theta, omega.requires_grad_(), 0.5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not found.requires_grad


def test_kernel_sort_keeps_every_bit():
    """Signed zeros, denormals, neighbours one ulp apart and huge values, 4099 to a row."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(4099, generator=generator)
    row[:3000:3] = row[1:3000:3]
    row[5:4000:7] = torch.nextafter(row[4:4000:7], torch.tensor(9.0))
    row[:6] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])
    values, order = _sort(row[None].clone())
    assert torch.equal(values[0], row.sort().values)
    assert torch.equal(row[order[0]], values[0])
    assert torch.equal(order[0].sort().values, torch.arange(4099))
