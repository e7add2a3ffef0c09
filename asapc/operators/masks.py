"""Key masks that are added to scores: 0 keeps a key, a very low number hides it.

Published code has -1e9, -10000, -inf or the least number of a dtype; a softmax of exp(-1e4 + s) is 0 in
every precision. Anything between is a bias of the scores, which no mask can stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asapc.errors import InputError

MASKED_BELOW = -1e4  # an additive score up to here removes its key
HIDDEN_SCORE = -1e9  # what most code adds
RULE = "an additive key mask holds 0, or scores so low that they hide a key, as where it was compiled"
RULE_OF_EMPTY = (
    "an additive mask that hides every key of an example holds one number there, which scores are lost "
    "beside, or which leaves them as they are"
)
HELP_OF_EMPTY = "hide keys by -1e4 or by torch.finfo(dtype).min, or leave out examples without keys"
RULE_OF_NONE = "every example has an active key and query: what the layer gives without one is not known"
RULE_OF_BIAS = "a score bias holds numbers beside which scores are not lost, as where it was compiled"
RULE_OF_NUMBERS = "a mask of numbers holds 0 and 1, as where it was compiled"
FINE = 2.0**-10  # of scores in units of epsilon: what -1e4 leaves of them in float32
HELP = "compile with data whose masks hold such numbers: they are then added to the scores as a bias"


def _where_fine(
    x: Tensor, fine: Tensor, rule: str, got: Callable[[], str], help: str | None = None
) -> Tensor:
    """x.  Raises InputError if not all is fine; on a GPU, where nothing waits for a number, it is a
    device-side assertion, and in an ONNX file the runtime is asked for entry 1 of 1."""
    if torch.compiler.is_exporting():
        return x[None].index_select(0, (~fine.all()).long()[None])[0]
    if fine.device.type != "cpu":
        torch._assert_async(fine.all(), rule)
    elif not bool(fine.all()):
        raise InputError(rule, got=got(), help=help)
    return x


def hidden_queries(keep: Tensor) -> Tensor:
    """[B, 1, N, 1], what added to scores hides queries as keep [B, N] hides keys."""
    return torch.where(keep[:, None, :, None], 0.0, -math.inf)


def kept_keys(mask: Tensor, hides: float) -> Tensor:
    """True on the keys that an additive mask keeps, in its shape.  hides: scores up to here hide a key.

    Raises InputError on a number between 0 and `hides`, above 0, or NaN.
    """
    hard = (mask <= hides) | (mask == 0)
    return _where_fine(mask > hides, hard, RULE, lambda: _others(mask[~hard]), HELP)


def _others(numbers: Tensor) -> str:
    return f"{len(numbers)} others, such as {float(numbers[0]):g}"


def keys_of_empty(
    keep: Tensor, mask: Tensor, q: Tensor, k: Tensor, reach: float, is_bias: bool
) -> Tensor:
    """keep [B, M] with every key active in an example without any, unless its scores are lost.

    A number that is added to all scores of an example hides none. Where its last place is larger than
    the scores, it makes them equal: such an example is left without an active key.
    mask: [B or 1, M], added to scores.  q: [B, H, N, D]; k: [B, H, M, D].  reach: last places of the
    number below which products q k are lost.  is_bias: its numbers may differ where they leave scores
    as they are.
    Raises InputError where they do neither.
    """
    empty = ~keep.any(-1)
    on_cpu = mask.device.type == "cpu"
    waits = on_cpu and not torch.compiler.is_exporting()
    if keep.numel() * q.numel() == 0 or (waits and not bool(empty.any())):
        return keep.clone()
    highest = mask.amax(-1)
    exponent = highest.double().abs().log2().floor()  # of its unit in the last place
    unit = torch.where(highest.isfinite(), torch.finfo(q.dtype).eps * 2.0**exponent, math.inf)
    alike = (mask == highest[:, None]).all(-1)
    fine = unit <= FINE
    size = largest_products(q, k, empty) if on_cpu else bound_of_products(q, k)
    lost = alike & ((unit * reach > size) | highest.isneginf()) | highest.isnan()
    clear = ~empty | lost | (fine if is_bias else fine & alike)

    def got() -> str:
        number = float(highest.expand(len(keep))[~clear][0])
        return f"{number:g} beside scores that are neither larger nor smaller than its last place"

    return _where_fine(keep | (empty & fine)[:, None], clear, RULE_OF_EMPTY, got, HELP_OF_EMPTY)


def is_one(mask: Tensor) -> Tensor:
    """True where a mask of zeros and ones is 1, in its shape.

    Raises InputError on another number.
    """
    known = (mask == 1) | (mask == 0)
    return _where_fine(mask == 1, known, RULE_OF_NUMBERS, lambda: _others(mask[~known]))


def some_keys(keep: Tensor) -> Tensor:
    """keep [B, M] of examples that all have an active key.  Raises InputError where one has none."""
    some = keep.any(-1) | (keep.device.type == "cpu" and keep.numel() == 0)
    first = (~some).nonzero
    got = lambda: f"none in example {int(first()[0])} of the batch"  # noqa: E731
    return _where_fine(keep.clone(), some, RULE_OF_NONE, got, HELP_OF_EMPTY)


def rows_kept(bias: Tensor, small: bool) -> Tensor:
    """True on the rows of a bias [*, N or 1, M] that are not all -inf: [*, N or 1, 1].

    small: whether all its numbers must be such that scores are kept beside them.
    Raises InputError where they are not.
    """
    shown = ~all_hidden(bias, -1, keepdim=True)
    if not small:
        return shown
    dtype = torch.float64 if bias.dtype == torch.float64 else torch.float32
    kept = bias.abs() < 2.0 * FINE / torch.finfo(dtype).eps
    got = lambda: f"{float(bias.flatten()[bias.abs().argmax()]):g}"  # noqa: E731
    return _where_fine(shown, kept, RULE_OF_BIAS, got, HELP)


def all_hidden(scores: Tensor, axis: int, keepdim: bool = False) -> Tensor:
    """Where no score along an axis is above -inf, which is so of an axis without scores.

    By the largest: to compare all scores takes ten times as long.
    """
    scores, size = scores.detach(), scores.shape[axis]
    if isinstance(size, int) and size == 0:  # of which there is no largest; a symbolic size is not asked
        return scores.sum(axis, keepdim=keepdim) == 0
    return torch.isneginf(scores.amax(axis, keepdim=keepdim))


def largest_products(q: Tensor, k: Tensor, chosen: Tensor) -> Tensor:
    """The largest |q k| of chosen examples, 0 for others: [B]."""
    some = chosen.nonzero()[:, 0]
    first, second = (x.index_select(0, some).double() for x in (q, k))
    largest = (first @ second.transpose(-1, -2)).abs().flatten(1).amax(-1)
    return largest.new_zeros(q.shape[0]).scatter(0, some, largest)


def bound_of_products(q: Tensor, k: Tensor) -> Tensor:
    """What no |q k| of an example is larger than: [B]."""
    first, second = (x.double().norm(dim=-1).flatten(1).amax(-1) for x in (q, k))
    return first * second
