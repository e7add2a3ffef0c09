"""Sequence parallelism: what one process computes, computed by several that share the tokens."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_text import write_data, write_teacher
from steps import compiled as written
from test_processes import in_processes
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import asapc
from asapc.calibration import distill
from asapc.errors import InputError
from asapc.operators import asap as asap_reference
from asapc.operators import sinkhorn as sinkhorn_reference
from asapc.program import sharded_sites
from asapc.program.code import flat_graph
from asapc.program.sequence import SequenceCode
from asapc.program.shards import Group, Shard, whole

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def in_group(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What work gives in each process of a group."""

    def one() -> Any:
        dist.init_process_group("gloo")
        try:
            return work(Group.of(dist.group.WORLD))
        finally:
            dist.destroy_process_group()

    return in_processes(size, one)


def test_every_token_is_in_one_share_and_shares_are_even() -> None:
    for size, processes in itertools.product(range(11), (1, 2, 4)):
        group = Group(None, 0, processes)
        shares = [group.share(size, rank) for rank in range(processes)]
        tokens = [token for share in shares for token in range(size)[share]]
        lengths = [share.stop - share.start for share in shares]
        assert tokens == list(range(size)) and max(lengths) - min(lengths) <= 1


def problem(n: int, m: int, masked: bool, bias: tuple[int, ...] | None) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(n * 100 + m)
    made: dict[str, Any] = {
        name: torch.randn(3, 3, tokens, 4, generator=draw, dtype=torch.float64) * 2
        for name, tokens in (("q", n), ("k", m), ("v", m))
    }
    made["keep"] = None
    if masked:
        made["keep"] = torch.rand(3, m, generator=draw) > 0.4
        made["keep"][0], made["keep"][1, 1:] = False, False  # nobody; all but one masked, or nobody
    made["bias"] = None
    if bias is not None:
        shape = [full if wanted else 1 for wanted, full in zip(bias, (3, 3, n, m), strict=True)]
        made["bias"] = torch.randn(shape, generator=draw, dtype=torch.float64)
    return made


SETTINGS = ("score_multiplier", "half_steps", "rows_first", "output_factor")
PROBLEMS = [  # of three processes, some have no query
    ((10, 7), True, (0, 1, 1, 1)), ((1, 1), True, (1, 0, 0, 1)), ((3, 9), False, None),
]  # fmt: skip


def sites_agree(group: Group) -> float:
    """The largest difference of a site on shards from its reference in float64, over many settings."""
    worst = 0.0
    for (n, m), masked, bias in PROBLEMS:
        given = problem(n, m, masked, bias)
        cut = {name: given[name] if given[name] is None else Shard.of(given[name], axis, group)
               for name, axis in (("q", 2), ("k", 2), ("v", 2), ("keep", 1))}  # fmt: skip
        cut["bias"] = given["bias"]
        for half_steps, rows_first in ((0, True), (1, False), (4, True), (3, False)):
            settings: tuple[Any, ...] = 0.7, half_steps, rows_first, [1.0, 1.0, 0.0, 0.0]
            by_name = dict(zip(SETTINGS, settings, strict=True))
            expected = sinkhorn_reference.sinkhorn(**given, **by_name)
            found = sharded_sites.sinkhorn(**cut, **by_name)
            worst = max(worst, difference(found, expected))
            points = [given[name] for name in ("q", "k", "keep", "bias")]
            expected = sinkhorn_reference.sinkhorn_attention(*points, *settings)
            found = sharded_sites.sinkhorn(**{**cut, "v": None}, **by_name)
            worst = max(worst, difference(found, expected))
        for side, steps in (("source", 1), ("target", 1), ("target", 2), ("source", 3), ("both", 0)):
            draw = torch.Generator().manual_seed(steps)
            duals: dict[str, Any] = {
                f"{name}_dual": None if side not in (name, "both") else
                torch.randn(3, 3, tokens, generator=draw, dtype=torch.float64)
                for name, tokens in (("source", n), ("target", m))
            }  # fmt: skip
            settings = 0.7, steps, [1.0, 0.0, 0.0, 0.5 if masked else 0.0]
            expected = asap_reference.asap(**given, **duals, **named(asap_reference.asap, settings))
            found = sharded_sites.asap(**cut, **duals, **named(asap_reference.asap, settings))
            worst = max(worst, difference(found, expected))
    return worst


def named(function: Callable[..., Any], last: tuple[Any, ...]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    return dict(zip(names[-len(last) :], last, strict=True))


def difference(found: Any, expected: Tensor) -> float:
    found = whole(found)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if not expected.numel():
        return 0.0
    assert bool(found.isfinite().all() == expected.isfinite().all())
    return float((found - expected).abs().max() / (1 + expected.abs().max()))


def test_sites_are_those_of_one_process() -> None:
    found = in_group(3, sites_agree)
    assert len(found) == 3 and all(worst is not None and worst < 1e-12 for worst in found), found


class Tokens(nn.Module):
    """Much of what models do to tokens, an own class token, softmax attention and poolings among it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 40, 8))
        self.cls, self.norm = nn.Parameter(torch.randn(1, 1, 8)), nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        keep = ids != 0
        x = self.embed(ids) + self.place[:, : ids.shape[1]]
        places = torch.arange(1, ids.shape[1] + 1).expand_as(ids)
        x = x + self.embed(places % 20) + torch.full((len(ids), ids.shape[1], 8), 0.5)
        x = torch.cat((self.cls.expand(len(ids), -1, -1), x), 1)
        keep = torch.cat((torch.ones_like(keep[:, :1]), keep), 1)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [t.reshape(len(ids), -1, 2, 4).transpose(1, 2) for t in (q, k, v)]
        mask = keep[:, None, None]
        fused = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        scores = (heads[0] @ heads[1].transpose(-1, -2)).masked_fill(~mask, -1e9)
        fused = fused + scores.softmax(-1) @ heads[2]
        x = x + fused.permute(0, 2, 1, 3).flatten(2)
        x = x + self.mlp(self.norm(x))
        weights = keep[..., None].float()
        return {
            "class": x[:, 0], "last": x[:, -1], "mean": x.mean(1), "sum": (x * weights).sum(1),
            "masked mean": (x * weights).sum(1) / weights.sum(1),
            "largest": x.amax(1), "least": x.amin(1),
            "spread": x.std(1), "ordered": x.sort(1).values, "running": x.cumsum(1), "tokens": x,
            "any": (x > 2).any(1), "halves": torch.stack(x.split(4, -1)).amax(0), "first": x[:, 1:3],
            "by channel": x.unsqueeze(1).squeeze(1).transpose(1, 2) * 2.0, "norm": x.norm(dim=-1),
            "all": x.sum(), "outer": x @ x.transpose(1, 2), "mixed": x.transpose(1, 2) @ x,
            "every other": x[:, ::2], "together": x.reshape(-1, 8), "repeated": x.repeat(1, 1, 2),
            "probabilities": x.log_softmax(-1), "across": x.softmax(1), "unbound": x.unbind(-1)[0],
        }  # fmt: skip


def rules_agree(group: Group) -> list[str]:
    """Names of the outputs that differ from the module's."""
    model = Tokens().eval()
    ids = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(1))
    tokens = torch.export.Dim("tokens", min=2, max=40)
    exported = torch.export.export(model, (ids,), dynamic_shapes=({1: tokens},), strict=False)
    graph = exported.module(check_guards=False)
    code = SequenceCode(flat_graph(graph), torch.float32, group.handle, [1])
    wrong = []
    for length in (2, 16):
        ids = torch.randint(0, 20, (3, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected = model(ids)
        for (name, wanted), found in zip(expected.items(), code(graph, [ids]), strict=True):
            same = found.dtype == wanted.dtype and found.shape == wanted.shape
            if not same or not torch.allclose(found.double(), wanted.double(), atol=1e-5):
                wrong.append(f"{name} at {length}")
    return wrong


def test_what_models_do_to_tokens() -> None:
    assert in_group(3, rules_agree) == [[]] * 3


TOKENS = 48
# A layer of each dual, and one of an operator that is not shared.
RECIPES: dict[str, dict[str, Any]] = {
    "mixed": {"operator": "asap", "features": ["coarse:4", "norm"], "sites": {
        "layers.2.*": {"operator": "lot"},
        "layers.1.*": {"side": "source", "c_transforms": 3, "features": ["coarse:4", "sliced:2"]}}},
    "lossless": {"operator": "lossless", "drop_attention_maps": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Folders of compiled models, by the name of their recipe."""
    folder = tmp_path_factory.mktemp("sequence")
    teacher = write_teacher(folder / "teacher", TOKENS, n_heads=4, max_iter=2)
    data = write_data(folder / "data.npz", 64)
    made: dict[str, Path] = {}

    def out(name: str) -> Path:
        if name not in made:
            made[name] = written(folder, teacher, data, RECIPES[name], name=name)
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "STEPS", 5)
        yield out


def from_one_process(folder: Path, group: Group) -> float:
    """The largest difference of a model on a group."""
    alone, shared = asapc.load(folder), asapc.load(folder, sequence_group=group.handle)
    worst = 0.0
    for length in (11, 3):
        ids = torch.randint(1, 40, (2, length), generator=torch.Generator().manual_seed(length))
        ids[1, length - length // 3 :] = 0
        with torch.no_grad():
            pairs = zip(pytree.tree_leaves(shared(ids)), pytree.tree_leaves(alone(ids)), strict=True)
        worst = max(worst, *(difference(*pair) for pair in pairs))
    return worst


def test_a_compiled_model_is_that_of_one_process(compiled: Callable[[str], Path]) -> None:
    """Other operators are computed whole, with a warning."""
    folder = compiled("mixed")

    def warned(group: Group) -> float:
        with pytest.warns(UserWarning, match="every process computes these sites whole: .*lot"):
            return from_one_process(folder, group)

    found = in_group(3, warned)
    assert all(one is not None and one <= 1e-5 for one in found), found


class Largest(TorchDispatchMode):
    """The most bytes that a tensor has of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes = max(self.bytes, *(leaf.nbytes for leaf in made if not leaf.is_meta), 0)
        return result


def test_every_process_holds_its_share(compiled: Callable[[str], Path]) -> None:
    """Scores of one row at a time: what is left are activations, keys and values."""
    folder = compiled("lossless")
    ids = torch.randint(1, 40, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def largest(group: Group) -> int:
        sharded_sites.BLOCK_BYTES = 1
        model = asapc.load(folder, sequence_group=group.handle)
        with Largest() as seen:
            model(ids)
        assert group.processes == 1 or from_one_process(folder, group) <= 1e-5
        return seen.bytes

    (alone,) = in_group(1, largest)
    assert alone == 4 * 2 * TOKENS * 16  # activations, all heads
    assert in_group(2, largest) == [alone / 2] * 2


def test_a_model_on_a_group_is_copied_and_not_pickled(compiled: Callable[[str], Path]) -> None:
    folder = compiled("lossless")

    def copied(group: Group) -> bool:
        model = asapc.load(folder, sequence_group=group.handle)
        ids = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(0))
        same = pytree.tree_map(torch.equal, model(ids), copy.deepcopy(model)(ids))
        with pytest.raises(TypeError, match="belongs to its processes"):
            pickle.dumps(model)
        return all(pytree.tree_leaves(same))

    assert in_group(2, copied) == [True, True]
    with pytest.raises(InputError, match="program of the whole model"):
        asapc.load(folder, nn.Linear(2, 2), sequence_group=object())  # no live model
