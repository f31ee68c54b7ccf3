"""What is exported, and what an export is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raysearch.base.errors import InputError
from raysearch.deploy.contexts import longest_context
from raysearch.deploy.export.render import Command, Variable, shell_text
from sim.prices.hardware import NCCL_ALGORITHMS
from sim.serving.phases import charged_prompt_tokens, phase_of, running_sequences, step_tokens
from sim.step.pipeline import layers_of_stages
from sim.strategy import Strategy
from sim.workload import Workload

COMMAND_FILE = "start.sh"
ROOM = 2
"""Times the stated lengths that a request may have, as far as the model goes: those of users differ. [assumed]"""


@dataclass(frozen=True)
class Deployment:
    """A strategy that is to be run.

    Attributes:
        workload: What it serves, on what.
        strategy: Of one replica.
        served_model: Hugging Face repository or path of the weights; a variable where somebody must make them first.
        replicas: Copies that share nothing.
        quantization: How the engine quantises these weights when it starts, in its own word; None leaves them.
        longest_request: Tokens of the longest request, prompt and answer; 0 leaves room for twice the usual.
        staged: Whether SGLang gathers caches in a buffer on their way to the other pool.
        named: Whether somebody named the strategy itself, so that none may run in its place.
        sender_stages: Of a decode pool, pipeline stages of the prefill pool that sends it caches.

    Raises:
        InputError: Weights that no command line can name, or no copies.
    """

    workload: Workload
    strategy: Strategy
    served_model: str | Variable
    replicas: int = 1
    quantization: str | None = None
    longest_request: int = 0
    staged: bool = False
    named: bool = False
    sender_stages: int = 1

    def __post_init__(self) -> None:
        check_weights(str(self.served_model))
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 1:
            raise InputError(f"expected replicas to be a whole number of at least 1, got {self.replicas!r}")

    @property
    def nodes(self) -> int:
        """Nodes of one replica, as engines count them: hosts."""
        return math.ceil(self.strategy.gpus / self.workload.hardware.host_gpus)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one replica on each of its nodes, which are filled alike."""
        return math.ceil(self.strategy.gpus / self.nodes)

    @property
    def domain_notes(self) -> list[str]:
        """Where its nodes must lie, if fast links join several hosts."""
        hardware = self.workload.hardware
        if self.nodes == 1 or hardware.host_gpus == hardware.node_gpus:
            return []
        domain = f"of the {hardware.node_gpus} GPUs that NVLink joins, nodes of {hardware.host_gpus}"
        if self.strategy.gpus <= hardware.node_gpus:
            return [f"its {self.nodes} nodes must be {domain}, as priced"]
        return [f"priced as one domain {domain}, filled one after another: place its {self.nodes} nodes so"]

    def router_notes(self, joined: str = "", own: str = "--port") -> list[str]:
        """What to do with several replicas, and what joins a pool with the other one, if anything does.

        Args:
            joined: What joins two pools; "" where nothing does.
            own: What each of several replicas on a host must have for itself, beside its GPUs.
        """
        apart = phase_of(self.workload).pool if joined else None
        where = f"in the {apart} pool" if apart else "behind a router"
        gpus, host = self.strategy.gpus, self.workload.hardware.host_gpus
        copies = f"start {self.replicas} of these {where}, each on {gpus} GPU{'s' * (gpus > 1)}"
        if 2 * gpus <= host:
            copies += f"; those on one host need GPUs ({self._visible}) and {own} of their own"
        return [
            *([copies] if self.replicas > 1 else []),
            *([f"prefill and decode pools meet by {joined}"] if apart else []),
        ]

    @property
    def _visible(self) -> str:
        """The variable that says which of a host's GPUs a process sees."""
        return "HIP_VISIBLE_DEVICES" if self.workload.hardware.vendor == "amd" else "CUDA_VISIBLE_DEVICES"

    @property
    def layer_partition(self) -> str:
        """Layers of each pipeline stage, as "16,15,15,15", where they are not as many in all; else ""."""
        layers = layers_of_stages(self.workload, self.strategy.pp)
        return ",".join(map(str, layers)) if len(set(layers)) > 1 else ""

    @property
    def by_nccl(self) -> bool:
        """Whether all-reduces shall be NCCL's, not the engine's own."""
        return self.workload.hardware.collectives.all_reduce in ("nccl", *NCCL_ALGORITHMS)

    @property
    def nccl_variables(self) -> dict[str, str]:
        """What the environment must say where NCCL shall use one algorithm for its all-reduces, from NCCL 2.24 on."""
        asked = self.workload.hardware.collectives.all_reduce
        return {"NCCL_ALGO": f"allreduce:{asked}"} if asked in NCCL_ALGORITHMS else {}

    @property
    def rank_requests(self) -> int:
        """Requests that run at once on an attention rank, those of all pipeline stages' microbatches together."""
        return running_sequences(self.workload, self.strategy.batch, self.strategy.attention_dp) * self.strategy.pp

    @property
    def longest(self) -> int:
        """Tokens of the longest request that is let in, prompt and answer: as stated, or with room beside the usual."""
        if self.longest_request:
            return self.stated_longest
        most = longest_context(self.workload.model, Path(str(self.served_model))) or 0
        return max(self.usual_request, min(ROOM * self.usual_request, most))

    @property
    def stated_longest(self) -> int:
        """Tokens of the longest request that is known to come."""
        return max(self.usual_request, self.longest_request)

    @property
    def usual_request(self) -> int:
        """Tokens of a request as it was priced, prompt and answer."""
        return max(self.workload.prompt_tokens + self.workload.output_tokens, self.workload.context_tokens)

    @property
    def step_tokens(self) -> int:
        """Tokens that a step of an attention rank must have room for: prompts or a chunk beside running requests."""
        return step_tokens(self.workload, self.strategy.batch, self.strategy.attention_dp, self.strategy.pp)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts in a step of an attention rank, as they were charged."""
        return charged_prompt_tokens(self.workload, self.strategy.batch, self.strategy.attention_dp)


def spread_notes(deployment: Deployment, nodes: int) -> list[str]:
    """What differs from what was charged where a replica's GPUs lie evenly on nodes that they do not fill."""
    hardware, all_gpus = deployment.workload.hardware, deployment.strategy.gpus
    gpus, domain = math.ceil(all_gpus / nodes), deployment.domain_notes
    if nodes == 1 or gpus == hardware.host_gpus or (domain and all_gpus <= hardware.node_gpus):
        return domain
    spread = f"it takes {gpus} of the {hardware.host_gpus} GPUs of each node; priced as nodes filled one after another"
    return [*domain, spread]


def check_even(count: int, of: str, nodes: int) -> None:
    """Whether nodes can be all alike.

    Raises:
        ValueError: They cannot.
    """
    if count % nodes:
        raise ValueError(f"{count} {of} cannot be divided evenly among {nodes} nodes")


def check_weights(path: str) -> str:
    """The same repository or path of weights, if it can be an argument of a command.

    Raises:
        InputError: It cannot, or an engine would take it for an option.
    """
    if not path.strip():
        raise InputError(
            "the name of weights is empty: expected a Hugging Face repository or a path (--set serve=PATH)"
        )
    if path.startswith("-"):
        raise InputError(
            f"weights {path!r} look like an option to engines: write ./{path}, or the whole path (--set serve=PATH)"
        )
    if "\0" in path or path.encode(errors="ignore").decode() != path:
        raise InputError(f"the name of weights {path!r} is no text: rename them (--set serve=PATH)")
    return path


class NamedRefused(ValueError):
    """A strategy that somebody named is none of its engine's, or a pool's one has none like it there.

    Attributes:
        refused: Why, each text naming its rule.
    """

    def __init__(self, refused: Sequence[str]) -> None:
        super().__init__(refused[0])
        self.refused = tuple(refused)


@dataclass(frozen=True)
class Export:
    """A deployment in a target's words.

    Attributes:
        command: What starts it; None where files are applied by something else.
        files: By name, text each.
        dropped: What the target cannot express, and what that costs by the simulator.
        notes: What its user must know.
        violations: Limits that it breaks where it runs, by the simulator.
    """

    command: Command | None
    files: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()

    @property
    def command_text(self) -> str:
        """The command as one would type it; "" without one."""
        return shell_text(self.command) if self.command else ""

    @property
    def all_files(self) -> dict[str, str]:
        """Its files, and its command as a script."""
        return {**self.files, **({COMMAND_FILE: f"#!/bin/sh\n{self.command_text}\n"} if self.command else {})}
