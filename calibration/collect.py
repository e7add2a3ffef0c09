"""One site's calibration: activations in, sufficient statistics kept, coefficients out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from asapc.calibration.least_squares import NormalEquations
from asapc.calibration.teacher import legal_closures, target_dual
from asapc.errors import InputError
from asapc.features import directions
from asapc.features.sliced import sliced_potentials
from asapc.formats.calibration import SiteCalibration
from asapc.ir import Convention, SiteTensors

# Score entries per piece of a batch: 8 MB of float64, so that the teacher's loop runs in cache.
_PIECE = 2**20


class SiteStatistics:
    """Streams one site's activations into normal equations.

    name:         the site, for messages.
    closures:     half-steps after the predicted dual; see teacher.legal_closures.
    features:     as in a recipe, ("sliced:32",); directions are drawn from `seed`.
    coefficients: "pooled" shares one vector over the heads, "per_head" fits each head.
    """

    def __init__(
        self,
        name: str,
        convention: Convention,
        *,
        closures: int,
        features: Sequence[str] = ("sliced:32",),
        ridge: float = 1e-3,
        coefficients: Literal["pooled", "per_head"] = "pooled",
        seed: int = 0,
    ) -> None:
        if legal_closures(convention, closures) != closures:
            raise InputError(
                f"{name}: a {convention.last_side}-ending teacher of {convention.half_steps} "
                "half-steps does not allow this number of closures after a predicted source dual",
                got=closures,
                help="lower `closures` in the recipe, or use `operator: sinkhorn` for this site",
            )
        self.name = name
        self.convention = convention
        self.closures = closures
        self.features = tuple(features)
        self.ridge = ridge
        self.coefficients = coefficients
        self.seed = seed
        self.theta: Tensor | None = None
        self.equations: NormalEquations | None = None
        self.examples = 0
        self.fit_seconds = 0.0

    def update(self, tensors: SiteTensors) -> None:
        """Add one batch. Examples without an active key are passed over: nothing attends there.

        Raises InputError if an activation, or the teacher's own dual, is NaN or infinite.
        """
        start = time.perf_counter()
        self._check_finite(tensors)
        batch, heads, num_queries, dim = tensors.q.shape
        if self.theta is None or self.equations is None:
            self.theta = directions(self.features, dim, self.seed)
            groups = heads if self.coefficients == "per_head" else 1
            self.equations = NormalEquations(self.theta.shape[0], groups)
        index = torch.arange(batch, device=tensors.q.device)
        if tensors.keep is not None:
            index = index[tensors.keep.any(-1)]
        size = max(1, _PIECE // max(1, heads * num_queries * tensors.k.shape[2]))
        with torch.no_grad():
            for piece in index.split(size):
                self._add(_select(tensors, piece), self.theta, self.equations)
        self.examples += len(index)
        self.fit_seconds += time.perf_counter() - start

    def finish(self) -> SiteCalibration:
        """Solve. Raises InputError if there are fewer regression rows than coefficients."""
        start = time.perf_counter()
        if self.theta is None or self.equations is None:
            raise InputError(
                f"{self.name}: calibration saw no examples",
                help="pass a data set in which this layer runs",
            )
        try:
            fit = self.equations.solve(self.ridge)
        except InputError as error:
            raise InputError(f"{self.name}: {error.rule}", got=error.got, help=error.help) from None
        return SiteCalibration(
            convention=self.convention,
            closures=self.closures,
            features=self.features,
            theta=self.theta,
            coefficients=fit.coefficients.float(),
            r2=fit.r2,
            condition_number=fit.condition_number,
            examples=self.examples,
            tokens=fit.tokens,
            fit_seconds=self.fit_seconds + time.perf_counter() - start,
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """What has been collected so far, for a file; load_tensors on a new object resumes."""
        counts = {
            "examples": torch.tensor(self.examples),
            "fit_seconds": torch.tensor(self.fit_seconds, dtype=torch.float64),
        }
        if self.theta is None or self.equations is None:
            return counts
        return {**counts, **self.equations.to_tensors(), "theta": self.theta}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of to_tensors. Raises KeyError on missing entries."""
        self.examples = int(tensors["examples"])
        self.fit_seconds = float(tensors["fit_seconds"])
        if "theta" in tensors:
            self.theta = tensors["theta"].clone()
            self.equations = NormalEquations.from_tensors(tensors)

    def _add(self, tensors: SiteTensors, theta: Tensor, equations: NormalEquations) -> None:
        y = target_dual(tensors, self.convention, self.closures)
        if not bool(y.isfinite().all()):
            raise InputError(
                f"{self.name}: the teacher's duals must be finite",
                got="nan or inf",
                help="check the scale of this layer's queries, keys and score bias",
            )
        x = sliced_potentials(
            tensors.q,
            tensors.k,
            tensors.keep,
            theta.to(tensors.q.device),
            self.convention.score_multiplier,
        )
        equations.add(x, y)

    def _check_finite(self, tensors: SiteTensors) -> None:
        k = tensors.k
        if tensors.keep is not None:
            k = k.masked_fill(~tensors.keep[:, None, :, None], 0.0)
        bad = {"queries": ~tensors.q.isfinite(), "keys": ~k.isfinite()}
        if tensors.bias is not None:
            # -inf in a bias is a legal way to forbid a pair.
            bad["score bias"] = tensors.bias.isnan() | tensors.bias.isposinf()
        for what, wrong in bad.items():
            if bool(wrong.any()):
                example = int(wrong.flatten(1).any(1).nonzero()[0])
                raise InputError(
                    f"{self.name}: {what} must be finite",
                    got=f"nan or inf in example {example} of a batch",
                    help="look for broken weights, or inputs unlike the training data",
                )


def _select(tensors: SiteTensors, index: Tensor) -> SiteTensors:
    bias = tensors.bias
    if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
        bias = bias[index]
    keep = None if tensors.keep is None else tensors.keep[index]
    return SiteTensors(tensors.q[index], tensors.k[index], keep, bias)
