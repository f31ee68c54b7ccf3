"""The policy: attention over the workload, all calls so far and candidates, which chooses the next call, in numpy.

Every token is described by its meaning (`raysearch.searchers.prior.strategy_features`), so one policy serves every
model, machine and space. Nothing of it is trained in a search: what it learns of a black box it reads off the calls.

Source: the encoder is that of Vaswani et al., "Attention Is All You Need" (2017), layers normalised first; a learned
acquisition over candidates: Volpp et al., "Meta-Learning Acquisition Functions for Transfer Learning in Bayesian
Optimization" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from raysearch.base.file_io import write_bytes
from raysearch.searchers.prior.black_box_belief import BlackBoxBelief, Posterior
from raysearch.searchers.prior.network import checking, read_arrays
from raysearch.searchers.prior.strategy_features import Reals
from sim.arrays import Ints

SHIPPED_POLICY = Path(__file__).with_name("policy.safetensors")
"""The policy that comes with the package."""
POLICY_FORMAT = "raysearch policy 1"
ATTENTION_HEADS = 4
SHOWN = 48
"""Candidates that it chooses among: by expected improvement, by what is sure, by what is hoped. [assumed]"""
_BY_IMPROVEMENT, _BY_SURE = 24, 12
_MOST_HISTORY = 128
"""[assumed] Calls that it reads, the best and the latest of more."""
OF_WORKLOAD, OF_CANDIDATE, OF_CALL = 4, 9, 6
"""Numbers of a token beside the strategy's: see `tokens_of`."""
READ = ("of_workload", "of_calls", "of_candidates")
"""Layers that read `PolicyTokens`."""


class PolicyTokens(NamedTuple):
    """What the policy reads.

    Attributes:
        workload: `[constants + OF_WORKLOAD]`.
        calls: `[n, inputs - constants + OF_CALL]`, in order.
        candidates: `[m, inputs - constants + OF_CANDIDATE]`.
    """

    workload: Reals
    calls: Reals
    candidates: Reals


def shown(posterior: Posterior) -> Ints:
    """Which of [n] strategies the policy chooses among, `[at most SHOWN]`: see `SHOWN`."""
    able = np.log(np.maximum(posterior.in_time * posterior.kept, 1e-12))
    sure, hoped = posterior.log_tokens + able, posterior.log_tokens + 2 * posterior.time_sd + 0.3 * able
    found: dict[int, None] = {}
    for score, until in (
        (posterior.improvement, _BY_IMPROVEMENT),
        (sure, _BY_IMPROVEMENT + _BY_SURE),
        (hoped, SHOWN),
    ):
        for row in np.argsort(-score, kind="stable")[:SHOWN].tolist():
            if len(found) >= until:
                break
            found.setdefault(row)
    return np.array(list(found), np.int64)


def tokens_of(belief: BlackBoxBelief, inputs: Reals, posterior: Posterior) -> PolicyTokens:
    """Tokens of candidates `[m]` and of all calls.

    Args:
        belief: Whose calls.
        inputs: Of the candidates, `[m, F]`.
        posterior: Of the candidates.
    """
    prior, own = belief.prior, inputs.shape[1] - belief.constants

    def normalised(rows: Reals) -> Reals:
        return np.clip((rows.astype(np.float32) - prior.mean) / prior.scale, -5, 5)

    scaled = normalised(inputs)
    calls = len(belief.answers)
    raw, excess, simulated = np.array(belief.answers).reshape(-1, 3).T
    feasible = raw > 0
    reference = math.log(raw.max()) if feasible.any() else float(posterior.log_tokens.max(initial=0.0))
    gain = np.log(np.maximum(posterior.improvement, 1e-30))
    scales = belief.scales
    workload = [math.log1p(calls) / 3, float(feasible.any()), math.log(scales.machine), math.log(scales.own)]
    of_candidates = [
        np.clip(posterior.log_tokens - reference, -3, 3),
        np.minimum(posterior.time_sd, 2),
        np.clip(posterior.late, -3, 3),
        np.clip(posterior.memory, -3, 3),
        np.minimum(posterior.memory_sd, 2),
        posterior.in_time,
        posterior.kept,
        np.clip((gain - gain.max(initial=-100.0)) / 3, -3, 0),
        np.exp(np.clip(gain - gain.max(initial=-100.0), -50, 0)),
    ]
    of_calls = [
        np.clip(belief.residuals(), -2, 2),
        np.clip(np.log(np.maximum(np.where(feasible, raw, simulated), 1e-12)) - reference, -3, 3),
        feasible.astype(float),
        np.clip(excess, 0, 3),
        np.log1p(np.arange(calls)[::-1]) / 3,
        (raw >= raw.max(initial=0.0)) & feasible,
    ]
    read = _read_calls(raw, excess)
    seen = normalised(np.array(belief.inputs).reshape(-1, inputs.shape[1]))[read, :own]
    return PolicyTokens(
        np.r_[scaled[0, own:], workload].astype(np.float32),
        np.concatenate([seen, np.stack(of_calls, 1)[read]], 1, dtype=np.float32),
        np.concatenate([scaled[:, :own], np.stack(of_candidates, 1)], 1, dtype=np.float32),
    )


def _read_calls(raw: Reals, excess: Reals) -> Ints:
    count = len(raw)
    if count <= _MOST_HISTORY:
        return np.arange(count)
    best = np.argsort(np.where(raw > 0, raw, -excess), kind="stable")[-_MOST_HISTORY // 2 :]
    return np.union1d(best, np.arange(count - _MOST_HISTORY // 2, count))


class PolicyHeader(BaseModel):
    """What a file says of itself.

    Attributes:
        format: Of the file.
        command: That made it.
        data: What it was trained on, the configuration's own words.
        figures: f/f* on tables kept from training, of expected improvement and of the policy as it was trained.
        chosen: Which of these it is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: str
    command: str
    data: dict[str, object]
    figures: dict[str, float]
    chosen: str


@final
@dataclass(frozen=True, eq=False)
class Policy:
    """Trained weights and what their file says.

    Attributes:
        header: See `PolicyHeader`.
        arrays: By name, as `raysearch.pretraining.policy_module.PolicyNetwork` has them.
    """

    header: PolicyHeader
    arrays: Mapping[str, Reals]

    def reads(self, inputs: int, constants: int) -> bool:
        """Whether it reads strategies of so many inputs, so many of which are the workload's."""
        own, given = inputs - constants, (self.arrays[f"{name}.weight"].shape[1] for name in READ)
        return list(given) == [constants + OF_WORKLOAD, own + OF_CALL, own + OF_CANDIDATE]

    def preferences(self, tokens: PolicyTokens) -> Reals:
        """Logits of the candidates `[m]`."""
        rows = (tokens.workload[None], tokens.calls, tokens.candidates)
        found = np.concatenate([self._linear(each, name) for each, name in zip(rows, READ, strict=True)])
        for layer in range(sum(name.endswith("in_proj_weight") for name in self.arrays)):
            found = found + self._attention(self._norm(found, f"layers.{layer}.norm1"), f"layers.{layer}.self_attn")
            hidden = np.maximum(self._linear(self._norm(found, f"layers.{layer}.norm2"), f"layers.{layer}.linear1"), 0)
            found = found + self._linear(hidden, f"layers.{layer}.linear2")
        last = self._norm(found[len(found) - len(tokens.candidates) :], "norm")
        # Expected improvement, which is among a candidate's numbers, is where it begins.
        return self._linear(last, "preference")[:, 0] + self.arrays["trust"][0] * tokens.candidates[:, -1]

    def _linear(self, rows: Reals, name: str) -> Reals:
        return rows @ self.arrays[f"{name}.weight"].T + self.arrays[f"{name}.bias"]

    def _norm(self, rows: Reals, name: str) -> Reals:
        centred = rows - rows.mean(1, keepdims=True)
        # Squares of the largest weights that a file may hold need the longer numbers.
        sd = np.sqrt((centred.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
        return centred / sd * self.arrays[f"{name}.weight"] + self.arrays[f"{name}.bias"]

    def _attention(self, rows: Reals, name: str) -> Reals:
        count, width = rows.shape
        projected = rows @ self.arrays[f"{name}.in_proj_weight"].T + self.arrays[f"{name}.in_proj_bias"]
        query, key, value = projected.reshape(count, 3, ATTENTION_HEADS, -1).transpose(1, 2, 0, 3)
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(width / ATTENTION_HEADS)
        shares = np.exp(scores - scores.max(2, keepdims=True))
        shares /= shares.sum(2, keepdims=True)
        return self._linear((shares @ value).transpose(1, 0, 2).reshape(count, width), f"{name}.out_proj")


def write_policy(path: Path, header: PolicyHeader, arrays: Mapping[str, Reals]) -> None:
    """Writes a policy's file, arrays and text alone."""
    from safetensors.numpy import save

    content = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    write_bytes(path, save(content, {"header": header.model_dump_json()}))


@lru_cache(maxsize=4)
def read_policy(path: Path) -> Policy:
    """A policy from its file.

    Raises:
        InputError: It cannot be read, or is none.
    """
    words, arrays = read_arrays(path, "policy")
    with checking(path, "policy", PolicyHeader):
        header = PolicyHeader.model_validate(words)
        if header.format != POLICY_FORMAT:
            raise ValueError(f"expected {POLICY_FORMAT!r}, got {header.format!r}")
        if not all(array.size for array in arrays.values()):
            raise ValueError("expected no empty arrays")
        policy = Policy(header, arrays)
        sizes = [arrays[f"{name}.weight"].shape[1] for name in READ]
        nothing = PolicyTokens(np.zeros(sizes[0]), np.zeros((1, sizes[1])), np.zeros((2, sizes[2])))
        if policy.preferences(nothing).shape != (2,):
            raise ValueError("expected a preference for each candidate")
    return policy
