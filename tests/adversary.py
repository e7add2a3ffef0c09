"""A standing adversary: attention modules of random conventions, written as user code.

asapc must identify each of them exactly, or refuse it; a wrong acceptance is the one thing that must not
happen. `python tests/adversary.py --count 500` runs as many as asked and prints what became of them.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from asapc.errors import InputError
from asapc.inputs.data import Batch
from asapc.ir import Convention, PlanConvention
from asapc.measure.differences import largest_difference
from asapc.passes.capture import capture
from asapc.passes.lift import lift
from asapc.passes.match import match
from asapc.passes.plan.site import PlanSite
from asapc.passes.regions import Refusal
from asapc.passes.replay import TOLERANCE, replay
from asapc.passes.sinkhorn.probe import attention_of
from asapc.passes.sinkhorn.site import AttentionSite

FORMS = ("potentials", "log_softmax", "scaling", "plan")
SPREADS = (0.25, 1.0, 4.0, 16.0, 64.0)  # of the scores that an accepted convention is held against
SHORT, LONG = (*range(1, 13), 20, 33, 50), (66, 80, 100, 200, 300)  # half-steps; long ones take a minute
HEADS, DIM, LENGTH, KEYS = 2, 4, 9, 7


@dataclass(frozen=True)
class Law:
    """What one layer of an adversary computes.

    form:       dual potentials, repeated log-softmax, scaling vectors, or a plan that is divided.
    constant:   in every division, 0 for none; clamp: it is their least value, otherwise added.
    offset:     what is subtracted before exp: "none", "row" or "matrix" maxima, "softmax" first.
    shares:     marginals 1/N and 1/M instead of 1.
    threshold:  of an early stop, 0 for none; tensor: it is compared as a tensor, not as a number.
    mask:       of keys: "none", "padded" (True hides), "active" (True shows), "low" (a low score added).
    damping:    of every update, 1 for a full one.
    """

    half_steps: int = 5
    rows_first: bool = True
    scale: float = 0.5
    form: str = "log_softmax"
    constant: float = 0.0
    clamp: bool = False
    offset: str = "none"
    shares: bool = False
    threshold: float = 0.0
    tensor: bool = False
    mask: str = "none"
    damping: float = 1.0
    by_head: bool = False
    times: str = "N"

    @property
    def identifiable(self) -> bool:
        """Whether asapc knows such loops of queries and keys; otherwise only a refusal is right, or the
        same loop on scores that are given."""
        return self.damping == 1.0 and not self.by_head

    def attention(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """The layer's map of products q k^T [B, H, N, M].  hidden: [B, M], True on masked keys."""
        s = scores * self.scale
        if self.by_head:
            s = s * torch.linspace(1.0, 1.5, HEADS, dtype=s.dtype)[:, None, None]
        if hidden is not None:
            if self.mask == "low":
                s = s + hidden[:, None, None, :].to(s.dtype) * -1e9
            else:
                s = s.masked_fill(hidden[:, None, None, :], -1e9)
        plan = getattr(self, f"_{self.form}")(s)
        n, m = s.shape[-2:]
        ends_on_rows = self.rows_first == (self.half_steps % 2 == 1)
        unit = (n if ends_on_rows else m) if self.shares or self.form == "potentials" else 1
        return plan * {"N": unit, "1": 1, "M": m}[self.times]

    def _sides(self, s: Tensor) -> list[int]:
        return [-1 if (step % 2 == 0) == self.rows_first else -2 for step in range(self.half_steps)]

    def _potentials(self, s: Tensor) -> Tensor:
        n, m = s.shape[-2:]
        f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
        for dim in self._sides(s):
            m_ij = s + f.unsqueeze(-1) + g.unsqueeze(-2)
            change = -math.log(n if dim == -1 else m) - torch.logsumexp(m_ij, dim)
            if dim == -1:
                f = f + self.damping * change
            else:
                g = g + self.damping * change
                g = torch.where(g > 1e8, 0.0, g)
            if self._ends(change):
                break
        return torch.exp(s + f.unsqueeze(-1) + g.unsqueeze(-2))

    def _log_softmax(self, s: Tensor) -> Tensor:
        for dim in self._sides(s):
            total = s.logsumexp(dim, keepdim=True)
            s = s - self.damping * torch.where(total < -1e8, 0.0, total)
            if self._ends(total):
                break
        return s.exp()

    def _kernel(self, s: Tensor) -> Tensor:
        if self.offset == "row":
            s = s - s.amax(-1, keepdim=True)
        elif self.offset == "matrix":
            s = s - s.amax((-2, -1), keepdim=True)
        return s.exp()

    def _over(self, mass: float, total: Tensor) -> Tensor:
        if self.constant:
            total = total.clamp(min=self.constant) if self.clamp else total + self.constant
        return mass / total

    def _scaling(self, s: Tensor) -> Tensor:
        kernel = self._kernel(s)
        n, m = s.shape[-2:]
        a = torch.ones_like(kernel[..., :1])
        b = torch.ones_like(kernel[..., :1, :]).transpose(-1, -2)
        for dim in self._sides(s):
            if dim == -1:
                new = self._over(1 / n if self.shares else 1.0, kernel @ b)
                change, a = new - a, a ** (1 - self.damping) * new**self.damping
            else:
                new = self._over(1 / m if self.shares else 1.0, kernel.transpose(-1, -2) @ a)
                new = torch.where(new == math.inf, 0.0, new)
                change, b = new - b, b ** (1 - self.damping) * new**self.damping
            if self._ends(change):
                break
        return a * kernel * b.transpose(-1, -2)

    def _plan(self, s: Tensor) -> Tensor:
        n, m = s.shape[-2:]
        sides = self._sides(s)
        plan = self._kernel(s)
        if self.offset == "softmax":
            plan = s.softmax(sides[0])
            if self.shares:
                plan = plan / (n if sides[0] == -1 else m)
            sides = sides[1:]
        for dim in sides:
            total = plan.sum(dim, keepdim=True)
            mass = (1 / n if dim == -1 else 1 / m) if self.shares else 1.0
            factor = self._over(mass, total)
            plan = plan * torch.where(factor == math.inf, 0.0, factor) ** self.damping
            if self._ends(total - mass):
                break
        return plan

    def _ends(self, change: Tensor) -> bool:
        if not self.threshold:
            return False
        residual = change.abs().mean()
        return bool(residual < self.threshold) if self.tensor else residual.item() < self.threshold


class Adversary(nn.Module):
    """One or two layers; of two, both products of scores come first and the later plan is used first."""

    def __init__(self, laws: tuple[Law, ...], crossed: bool, swapped: bool) -> None:
        super().__init__()
        self.laws, self.crossed, self.swapped = laws, crossed, swapped
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in laws)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        other = memory if self.crossed else x
        scores = []
        for q, k, _ in self.layers:
            scores.append(self._heads(q(x)) @ self._heads(k(other)).transpose(-1, -2))
        order = list(range(len(self.laws)))
        outputs = {}
        for index in reversed(order) if self.swapped else order:
            law, value = self.laws[index], self._heads(self.layers[index][2](other))
            hidden = None
            if law.mask != "none" and mask is not None:
                hidden = ~mask if law.mask == "active" else mask
            outputs[index] = law.attention(scores[index], hidden) @ value
        return torch.stack([outputs[index] for index in order]).sum(0).transpose(1, 2).flatten(2)


def inputs(laws: tuple[Law, ...], crossed: bool, seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, memory = (torch.randn(3, n, 8, generator=generator, dtype=dtype) for n in (LENGTH, KEYS))
    masks = {law.mask for law in laws} - {"none"}
    if not masks:
        return x, memory
    length = KEYS if crossed else LENGTH
    hidden = torch.arange(length) >= torch.tensor([[length], [4], [5]])
    return x, memory, ~hidden if masks == {"active"} else hidden


def judge(laws: tuple[Law, ...], crossed: bool, swapped: bool, double: bool, seed: int) -> list[str]:
    """"identified", "identified on its scores" or "refused: why", one for each layer in any order.

    Raises AssertionError on a wrong acceptance.
    """
    torch.manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    model = Adversary(laws, crossed, swapped).to(dtype).eval()
    example = inputs(laws, crossed, seed, dtype)
    try:
        (program,) = capture(model, example, {}).programs
    except InputError as error:
        return [f"refused: {error}"] * len(laws)
    outcomes = match(program)
    sites = [own for own in outcomes if not isinstance(own, Refusal)]
    batches = [Batch(inputs(laws, crossed, seed + i, dtype), {}, None, [0] * 3) for i in range(2)]
    replayed = replay(model, [program], [sites], batches)
    accepted = [site for site in sites if replayed[site.name].worst[1] <= TOLERANCE]
    # Scores are named by the layer whose parameters they are made of, which matching does not look at.
    found: list[str] = [f"refused: {o.reason}" for o in outcomes if isinstance(o, Refusal)]
    found += [f"refused: {replayed[s.name].worst}" for s in sites if s not in accepted]
    for site in accepted:
        if isinstance(site, PlanSite):
            law = laws[_layer_of(site.start.node)]
            if law.damping == 1.0:  # else the start may hold a part of what is damped: the numbers decide
                # The first half-step may be the site's start: its code computes that.
                one_less = replace(law, half_steps=law.half_steps - 1, rows_first=not law.rows_first)
                left_out = site.convention.half_steps < law.half_steps
                _same_loop(one_less if left_out else law, site.convention)
            found.append("identified on its scores")
            continue
        assert isinstance(site, AttentionSite), site
        _hold(laws[_layer_of(site.score.left)], site.convention, crossed)
        found.append("identified")
    if accepted:
        lifted = lift(program, accepted)
        damped = any(law.damping != 1.0 for law in laws)
        for batch, scale in itertools.product(batches, (1, 3) if damped else (1,)):
            args = [x * scale if x.is_floating_point() else x for x in batch.args]
            with torch.no_grad():
                difference = largest_difference(model(*args), lifted.graph(*args))
            assert difference < 1e-3, (laws, difference)
    assert len(found) == len(laws), (found, laws)
    return found


def _layer_of(scores: Node) -> int:
    stack, seen = [scores], set()
    while stack:
        node = stack.pop()
        if node.op == "get_attr" and str(node.target).startswith("layers."):
            return int(str(node.target).split(".")[1])
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    raise AssertionError("scores without weights")


def _same_loop(law: Law, convention: Convention | PlanConvention) -> None:
    first = "row" if law.rows_first else "column"
    assert (convention.half_steps, convention.first_side) == (law.half_steps, first), (convention, law)


def _hold(law: Law, convention: Convention, crossed: bool) -> None:
    """The accepted convention against the user's own code, at scores that no data has shown."""
    assert law.identifiable, f"accepted as {convention}: {law}"
    _same_loop(law, convention)
    generator = torch.Generator().manual_seed(9)
    for n, m in ((LENGTH, KEYS), (12, 5)) if crossed else ((LENGTH, LENGTH), (5, 5)):
        for spread in SPREADS:
            scores = torch.randn(2, HEADS, n, m, generator=generator, dtype=torch.float64)
            scores *= spread / law.scale
            for hidden in (None, torch.arange(m).expand(2, -1) > 2):
                if hidden is not None and law.mask == "none":
                    continue
                theirs = law.attention(scores, hidden)
                if not bool(theirs.isfinite().all()):
                    continue
                keep = None if hidden is None else ~hidden
                mask = "none" if keep is None else convention.mask
                ours = attention_of(replace(convention, mask=mask), scores, keep)
                error = float((ours - theirs).abs().max() / theirs.abs().max())
                assert error < 1e-4, f"{error:.2g} at spread {spread}: accepted as {convention}: {law}"


def random_case(seed: int, longest: int = 300) -> dict[str, Any]:
    """One or two layers of loops of at most `longest` half-steps, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    laws = []
    mask = pick("none", "none", "padded", "active", "low")
    for _ in range(pick(1, 1, 2)):
        form = pick(*FORMS)
        exp = form in ("scaling", "plan")
        constant = pick(0.0, 1e-6, 1e-9, 1e-12, 1e-30) if exp else 0.0
        laws.append(
            Law(
                half_steps=min(pick(*pick(*[SHORT] * 7, LONG)), longest),
                rows_first=pick(True, False),
                scale=pick(0.25, 0.5, 1.0, 2.0),
                form=form,
                constant=constant,
                clamp=pick(True, False),
                offset=pick("none", "row", "matrix", *(["softmax"] if form == "plan" else [])),
                shares=pick(True, False),
                threshold=pick(0.0, 0.0, 0.0, 1e-12, 1e-6, 1e-2),
                tensor=pick(True, False),
                mask=mask,
                damping=pick(1.0, 1.0, 1.0, 1.0, 0.9, 0.5),
                by_head=pick(False, False, False, False, True),
                times=pick("N", "1", "M"),
            )
        )  # fmt: skip
    return {
        "laws": tuple(laws), "crossed": pick(True, False), "swapped": pick(True, False),
        "double": pick(True, False),
    }  # fmt: skip


def main() -> None:
    import argparse
    from collections import Counter

    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    told: Counter[str] = Counter()
    wrong = 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        case = random_case(seed)
        try:
            found = judge(**case, seed=seed)
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {seed}: {error}", flush=True)
            continue
        except Exception as error:
            found = [f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]
            print(seed, found[0], flush=True)
        told["layers"] += len(case["laws"])
        told["of a kind that asapc knows"] += sum(law.identifiable for law in case["laws"])
        told.update(text.split(":")[0] for text in found)
        if arguments.verbose:
            print(seed, found, case, flush=True)
    print(f"{arguments.count} models, {wrong} wrong acceptances")
    for text, number in sorted(told.items()):
        print(f"{number:5d}  {text}")
    sys.exit(1 if wrong or told["failed"] else 0)


if __name__ == "__main__":
    main()
