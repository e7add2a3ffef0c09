"""asapc::kept_keys, is_one, keys_of_empty, some_keys, rows_kept: what masks of numbers hide."""

from __future__ import annotations

from asapc.kernels.library import fakes
from asapc.kernels.library.registration import operator, register_fake
from asapc.operators import masks

register_fake(operator(masks.kept_keys), fakes.kept_keys)
register_fake(operator(masks.is_one), fakes.kept_keys)
register_fake(operator(masks.keys_of_empty), fakes.keys_of_empty)
register_fake(operator(masks.some_keys), fakes.keys_of_empty)
register_fake(operator(masks.rows_kept), fakes.rows_kept)
