"""Acts with the policy for one environment and remembers what came of it, one call at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete
from ray.rllib.core.columns import Columns

from envs.actions import Actions
from envs.archive import AddStatus, EliteArchive
from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.noise import call_rng, gumbel_noise
from raysearch.searchers.ppo.rollout import Rollout


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """What the policy makes of one observation.

    Attributes:
        log_probs: `[H, K]`, as in `MultiCategorical`.
        value: Expected return.
    """

    log_probs: np.ndarray
    value: float

    @property
    def confidence(self) -> float:
        """Smallest over the heads of their largest probability: min over m of the paper's CS_m."""
        return float(np.exp(self.log_probs.max(-1).min()))

    @property
    def entropy(self) -> float:
        """Sum of the heads' entropies, nats."""
        return float(-(np.exp(self.log_probs) * self.log_probs).sum())

    def log_prob(self, action: np.ndarray) -> float:
        """Log-probability of an action `[H]`."""
        return float(self.log_probs[np.arange(len(action)), action].sum())


@dataclass(frozen=True, eq=False)
class Proposal:
    """An action and what led to it.

    Attributes:
        number: Of the call, from 0.
        observation: What was seen `[T, A]`.
        action: What the policy chose `[A]`.
        log_prob: How likely it was to.
        value: Return that was expected.
    """

    number: int
    observation: np.ndarray
    action: np.ndarray
    log_prob: float
    value: float


class EliteActor:
    """Turns observations into actions (`act`) and outcomes into rollouts (`tell`), whoever steps the environment.

    Several actions may be in flight; they are recorded in the order in which they were proposed. Searches may be made
    by several actors: each numbers its calls `stride` apart and hears from time to time what the others found (`news`,
    `hear`). The noise of a call depends on its number alone, so nothing depends on where an actor runs.

    Args:
        config: A `LearnToShardConfig`.
        action_space: Of the environment.

    Attributes:
        sizes: Values of each coordinate of an action, [A].
        module: The policy; whoever changes its weights calls `forget`.
        stride: Actors that share the search.
        next_call: Number of the next call.
        calls: Calls recorded by this actor.
        output: What the policy made of the observation it last acted on, or None.
        claimed: Actions `[A]` that others are about to take, who share the search and know the same.
    """

    module: Any
    stream = 0
    """Of the noise: another one for calls that are not the search's."""
    listens = False
    """Whether it looks at what others called as soon as it hears of it, without an update."""

    def __init__(self, config: Any, action_space: MultiDiscrete) -> None:
        # More threads are slower on matrices this small, and could change the order of sums.
        torch.set_num_threads(1)
        self.config = config
        self.sizes = [int(n) for n in action_space.nvec]
        self._folded = action_space.folded if isinstance(action_space, Actions) else np.asarray
        self.calls = 0
        self.next_call, self.stride = 0, 1
        self.output: Any = None
        self.claimed: list[np.ndarray] = []
        self._archive = EliteArchive(config.elites)
        self._stagnant_calls = 0
        self._in_flight: deque[Proposal] = deque()
        self._recorded: list[tuple[Proposal, float]] = []
        self._observation: np.ndarray | None = None
        self._outputs: dict[bytes, Any] = {}

    def judge(self, observation: np.ndarray, out: dict[str, Any] | None = None) -> Any:
        """The policy's output of `observation` `[T, A]`, by what the module made of it if that is known.

        Elites change seldom and the policy only with an update, so most calls ask for an output that is known already.
        """
        key = observation.tobytes()
        if key not in self._outputs:
            # A copy: torch aligns its memory, and on numpy's BLAS may add up in another order.
            made: Any = out or self.module.forward_inference({Columns.OBS: torch.tensor(observation[None])})
            with torch.inference_mode():
                self._outputs[key] = self.policy_output(made)
        return self._outputs[key]

    def policy_output(self, out: dict[str, Any]) -> PolicyOutput:
        """The output behind what the module made of one observation."""
        policy = self.module.action_dist_cls.from_logits(out[Columns.ACTION_DIST_INPUTS])
        embeddings = out.get(Columns.EMBEDDINGS)
        value = 0.0 if embeddings is None else float(self.module.compute_values({}, embeddings=embeddings))
        return PolicyOutput(policy.log_probs[0].numpy(), value)

    @property
    def stagnant_calls(self) -> int:
        """Calls since there was a new elite, or since the agent began; 0 while there is none."""
        return self._stagnant_calls if self._archive.best else 0

    def start_over(self) -> None:
        """Another agent begins, which inherits the elites."""
        self._stagnant_calls = 0

    def forget(self) -> None:
        """Drops all outputs: the weights have changed."""
        self._outputs.clear()

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Samples an action `[A]` for `observation` `[T, A]`."""
        seen = self.look(observation)
        return self.as_action(self.propose(seen, self.judge(seen)).action)

    def propose(self, seen: np.ndarray, output: Any) -> Proposal:
        """Chooses an action by what the policy made of what was seen; it is in flight from now on."""
        self.output = output
        action = self.choose(call_rng(self.config.search_seed, self.next_call, self.stream))
        proposal = Proposal(self.next_call, seen, action, output.log_prob(action), output.value)
        self.next_call += self.stride
        self._in_flight.append(proposal)
        return proposal

    @property
    def in_flight(self) -> tuple[Proposal, ...]:
        """Calls that were decided and not answered yet, in their order."""
        return tuple(self._in_flight)

    def adopt(self, proposal: Proposal) -> None:
        """Makes a call that another actor has decided, who learns from it, too."""
        self._recorded, self.next_call = [], proposal.number + self.stride
        self._in_flight.append(proposal)

    def foresee(self, output: Any, numbers: range) -> list[np.ndarray]:
        """Actions `[A]` that others, who know the same, take in the calls of these numbers.

        Nobody here looks at what others are about to do, so there is nothing to know.
        """
        return []

    def look(self, observation: np.ndarray) -> np.ndarray:
        """What the policy gets to see of an observation, a new array."""
        return np.array(observation, dtype=np.float32)

    def as_action(self, chosen: np.ndarray) -> np.ndarray:
        """The environment's action for what the policy chose `[A]`, a new array."""
        return chosen.copy()

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """Draws an action `[A]` from the present output."""
        log_probs = self.output.log_probs
        return (log_probs + gumbel_noise(rng, log_probs.shape)).argmax(-1)

    def tell(self, outcome: Outcome, place: int = 0) -> float:
        """Notes what came of an action in flight, by its place among them; that of the oldest is 0.

        Returns:
            What the policy is rewarded with.

        Raises:
            RuntimeError: No action is in flight.
        """
        if not self._in_flight:
            raise RuntimeError("expected an action in flight, got the outcome of one that was never proposed")
        proposal = self._in_flight[place]
        del self._in_flight[place]
        reward = self.note(proposal.number, self.as_action(proposal.action), outcome)
        self._recorded.append((proposal, reward))
        self._observation = self.look(outcome.observation)
        self.calls += 1
        return reward

    def note(self, number: int, action: np.ndarray, outcome: Outcome) -> float:
        """Takes in a call, of this actor or of another one: its number, its action `[A]` and what came of it.

        Returns:
            What the policy is rewarded with.
        """
        self._stagnant_calls += 1
        if outcome.feasible:
            added = self._archive.add(outcome.raw, tuple(self._folded(action).tolist()))
            self._stagnant_calls *= added != AddStatus.ADDED
        return outcome.reward

    @property
    def heads(self) -> int:
        """Choices of an action, A."""
        return len(self.sizes)

    @property
    def env_state(self) -> SavedState:
        """What environments must know of the search: their elites."""
        return {"elites": self._archive.get_state()}

    @property
    def settled(self) -> int:
        """A number before which all calls are known, for `news`, which has all elites in any case."""
        return 0

    def news(self, since: int, *, learned: bool = True) -> SavedState:
        """What another actor, who knows all calls before number `since`, must hear to know what this one knows.

        Args:
            since: Number of a call.
            learned: Whether to include what `learn` made of the calls.
        """
        return {"elites": self._archive.get_state()}

    def hear(self, news: SavedState) -> None:
        """Takes in the `news` of another actor, and forgets how its own last rollout went."""
        self._archive.set_state(news["elites"])
        self._recorded, self._observation = [], None

    @property
    def recorded(self) -> int:
        """Calls recorded since the last `take`."""
        return len(self._recorded)

    def learn(self) -> None:
        """Learns from all calls so far what is not learned by the policy; nothing here."""

    def take(self) -> Rollout:
        """Hands over the recorded calls, at least one, and starts a new rollout."""
        assert self._observation is not None
        self.learn()
        proposals, rewards = zip(*self._recorded, strict=True)
        self._recorded = []
        return Rollout(
            observations=np.stack([*(p.observation for p in proposals), self._observation]),
            actions=np.stack([p.action for p in proposals]),
            log_probs=np.array([p.log_prob for p in proposals], dtype=np.float32),
            rewards=np.array(rewards, dtype=np.float32),
            values=np.array([*(p.value for p in proposals), self.judge(self._observation).value], dtype=np.float32),
        )

    def get_memory(self) -> SavedState:
        """All but the weights that `set_memory` needs to go on as if nothing had happened: plain values and arrays."""
        return {
            "calls": self.calls,
            "next_call": self.next_call,
            "output": asdict(self.output) if self.output else None,
            "in_flight": [asdict(proposal) for proposal in self._in_flight],
            "recorded": [{**asdict(proposal), "reward": reward} for proposal, reward in self._recorded],
            "observation": self._observation,
            "elites": self._archive.get_state(),
            "stagnant_calls": self._stagnant_calls,
        }

    def set_memory(self, memory: SavedState) -> None:
        """Goes back to where `get_memory` was called."""
        self.calls, self.next_call = memory["calls"], memory["next_call"]
        self.output = self.output_class(**memory["output"]) if memory["output"] else None
        self._in_flight = deque(Proposal(**fields) for fields in memory["in_flight"])
        self._recorded = [
            (Proposal(**{name: value for name, value in fields.items() if name != "reward"}), fields["reward"])
            for fields in memory["recorded"]
        ]
        self._observation = memory["observation"]
        self._archive.set_state(memory["elites"])
        self._stagnant_calls = memory.get("stagnant_calls", 0)  # earlier ones did not count
        self.forget()

    output_class: type = PolicyOutput
