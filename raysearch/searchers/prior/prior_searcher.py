"""The searcher `prior`: what the simulator or a network expects, corrected by every answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from threadpoolctl import ThreadpoolController

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.base.errors import InputError
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.prior.black_box_belief import Answer, BlackBoxBelief, Posterior
from raysearch.searchers.prior.candidate_pool import CandidatePool, first_pool
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from raysearch.searchers.prior.network import SHIPPED_PRIOR, read_prior
from raysearch.searchers.prior.policy import SHIPPED_POLICY, Policy, read_policy, shown, tokens_of
from raysearch.searchers.prior.simulated_terms import TermSourceName
from sim.arrays import Ints

_KEPT = 800
"""[assumed] Candidates that are kept from call to call."""
_MUTATED, _PARENTS = 96, 12
"""New candidates of a call, and what they are mutated from. [assumed]"""
_DOUBTS = (1.0, 0.25, 1.0, 2.5)
"""[assumed] Multiples of the error that are allowed for, in turn: a call that trusts the expectation finds what
neighbours predict, one that doubts it finds what they do not."""
_TRUSTED = 0.05
"""[assumed] The same before the first answer, which so is of what the simulator expects to be best. On 63 black boxes
kept from training f/f* differs by -0.006 (95 % interval -0.066 to +0.046) after one call, and by nothing after two. A
network is surest of what it overrates."""
_LIKELY = 0.5
"""[assumed] Probability of keeping the limits from which on expected tokens decide while no call has kept them."""
NO_POLICY = "none"
_POLICY_CALLS = 5
"""Calls that a policy decides, then expected improvement does. [fitted] by the network's terms, on 50 black boxes kept
from training: f/f*, mean of the first ten calls, is largest so."""


class PriorOptions(NoOptions):
    """Settings of `prior`.

    Attributes:
        weights: File of a prior that `raysearch pretrain` wrote, its network and how errors go together; empty for the
            one that ships.
        policy: The same of a policy, which decides the first five calls; `none` for expected improvement from the first
            call, empty for the one that ships where the network expects, and for none elsewhere.
        adapt: Whether answers correct what is expected; without, its ranking is tried in order.
        terms: What expects: `simulator`, the built-in one; `carried`, the same as if the machine had never been
            measured, with the H100's efficiencies at its rates; `network`, trained to emulate that.
    """

    weights: Annotated[str, Field(max_length=4096)] = ""
    policy: Annotated[str, Field(max_length=4096)] = ""
    adapt: bool = True
    terms: TermSourceName = "simulator"


@final
class PriorSearcher(Searcher):
    """Expects something of every strategy before its first call, and corrects that by every answer.

    The built-in simulator, or a network that emulates it, expects the time of a step, latencies, memory, and whether a
    choice breaks a limit. What it misses on this black box is learned as two Gaussian processes: one of the time, one
    of the memory. Candidates are drawn over all degrees with choices that were good elsewhere, and mutated from the
    best. The first call is of what is expected to be best. While no call has kept all limits, the next is of what has
    the largest expected tokens/s/GPU within them, among what keeps them more likely than not, or of the likeliest; then
    of the largest expected improvement of their square root. Tokens themselves would bet: on a hundred times as many
    that are in time once in a hundred. Where the network expects, the first five are those that a trained policy
    prefers, which attends to all of them.

    Source: expected improvement: Jones, Schonlau and Welch, "Efficient Global Optimization", 1998; constraints: Gardner
    et al., "Bayesian Optimization with Inequality Constraints", 2014; the policy: `raysearch.searchers.prior.policy`.

    Raises:
        InputError: Prior or policy cannot be read, or the network knows nothing of an op or a choice of the workload.
    """

    name: ClassVar[str] = "prior"
    Options: ClassVar[type[PriorOptions]] = PriorOptions
    usual_budget: ClassVar[int] = 300
    """[assumed] Three times the hundred calls for which it was measured: see docs/evidence/learning.md."""

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: PriorOptions) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        prior = read_prior(Path(options.weights) if options.weights else SHIPPED_PRIOR)
        self.belief = BlackBoxBelief(prior, space, options.terms, adapt=options.adapt)
        if (inputs := self.belief.input_size) != (got := len(prior.mean)):
            raise InputError(
                f"{options.weights or SHIPPED_PRIOR}: expected a prior of {inputs} inputs, got one of {got}; "
                "make a new one with `raysearch pretrain`"
            )
        self._policy = _policy_of(options, inputs, self.belief.constants)
        self._candidates = CandidateStrategies(space, prior.header.pool)
        self._threads = ThreadpoolController()
        self._pending: list[Action] = []
        self._seen: set[int] = set()  # keys of what was called or is in flight
        self._pool = CandidatePool(self.belief, np.zeros((0, len(space.sizes)), np.int64))

    # --- ask and tell --------------------------------------------------------------------------

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """A candidate that was not called yet."""
        with self._threads.limit(limits=1):  # so small, a product of two threads takes ten times the processor's time
            self.belief.learn(self._pending)
            if not len(self._pool.actions):
                self._pool = first_pool(
                    self.belief, self.space, self._candidates, self.rng, self.belief.best_of_meshes()
                )
            action = self._chosen(self._pool.grown(self._around(), self.space))
        self._pending.append(action.copy())
        self._seen.add(self.space.key(action))
        return action.copy()

    def _chosen(self, pool: CandidatePool) -> Action:
        decides = self._policy is not None and len(self.belief.answers) < _POLICY_CALLS
        posterior = pool.posterior(1.0 if decides else self._doubt())
        merit = posterior.improvement
        if self.belief.all_missed and not decides:
            able = posterior.in_time * posterior.kept
            merit = np.where(able >= _LIKELY, 1 + merit, able)
        kept = np.lexsort((-posterior.improvement, -merit))[:_KEPT]
        self._pool, posterior = pool.at(kept), posterior.at(kept)
        rows = self._preferred(posterior) if decides else range(len(kept))
        for row in rows:
            if self.space.key(action := self._pool.actions[row]) not in self._seen:
                return action
        return self.space.sample(self.rng)

    def _preferred(self, posterior: Posterior) -> Ints:
        """Rows of the pool that the policy was shown, what it prefers first."""
        assert self._policy is not None
        fresh = np.array([self.space.key(action) not in self._seen for action in self._pool.actions])
        rows = np.flatnonzero(fresh)
        if not len(rows):
            return rows
        rows = rows[shown(posterior.at(rows))]
        tokens = tokens_of(self.belief, self._pool.features.inputs[rows], posterior.at(rows))
        return rows[np.argsort(-self._policy.preferences(tokens), kind="stable")]

    def _doubt(self) -> float:
        """What standard deviations are multiplied by: while nothing better is found, sure and unsure calls in turn."""
        if not self.belief.answers and self.options.terms != "network":
            return _TRUSTED
        raw = [answer.raw for answer in self.belief.answers]
        stalled = len(raw) - 1 - int(np.argmax(raw)) if any(raw) else 0
        return _DOUBTS[stalled % len(_DOUBTS)]

    def _around(self) -> Action:
        """New candidates: mutations of the best answers and candidates, some elsewhere, and the last call's neighbours.

        Where a call missed a limit by little, what keeps it is a step away.
        """
        merit, called = np.array([answer.raw for answer in self.belief.answers]), self.belief.actions
        good = [called[row] for row in np.argsort(-merit, kind="stable")[:_PARENTS] if merit[row] > 0]
        parents = np.concatenate(
            [np.array(good, np.int64).reshape(-1, len(self.space.sizes)), self._pool.actions[:_PARENTS]]
        )
        found = [self._candidates.mutated(parents, _MUTATED, self.rng)]
        found.append(self._candidates.elsewhere(parents, _MUTATED // 2, self.rng))
        if called:
            found.append(self._candidates.neighbours(called[-1]))
        return np.concatenate(found)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Notes the answer."""
        for place, flying in enumerate(self._pending):
            if np.array_equal(flying, action):
                del self._pending[place]
                break
        self.belief.note(action.copy(), Answer(outcome.raw, outcome.excess, outcome.simulated))
        self._seen.add(self.space.key(action))

    def get_state(self) -> SavedState:
        """All answers, calls in flight, the candidates and the generator."""
        return {
            "rng": self.rng.bit_generator.state,
            **self.belief.get_state(),
            "pending": np.array(self._pending, np.int64).reshape(-1, len(self.space.sizes)),
            "candidates": self._pool.actions.copy(),
            "expected": self._pool.expected,
        }

    def set_state(self, state: SavedState) -> None:
        """Continues with those answers and candidates."""
        self.rng.bit_generator.state = state["rng"]
        self.belief.set_state(state)
        self._pending = [action.copy() for action in state["pending"]]
        self._seen = {self.space.key(action) for action in (*self.belief.actions, *self._pending)}
        self._pool = CandidatePool(self.belief, np.array(state["candidates"], np.int64)).as_it_was(state["expected"])

    def metrics(self) -> dict[str, float]:
        """How far the black box is from what was expected: the chosen scales, and the noise of its answers."""
        machine, own, noise = self.belief.scales
        return {"machine_scale": machine, "own_scale": own, "noise": noise}


def _policy_of(options: PriorOptions, inputs: int, constants: int) -> Policy | None:
    """The policy that decides, if any does. Raises: InputError."""
    usual = "" if options.terms == "network" else NO_POLICY
    if (options.policy or usual) == NO_POLICY or not options.adapt:
        return None
    policy = read_policy(path := Path(options.policy) if options.policy else SHIPPED_POLICY)
    if not policy.reads(inputs, constants):
        raise InputError(f"{path}: expected a policy of {inputs} inputs; make it again with `raysearch pretrain`")
    return policy
