"""A request's KV cache on its way from the GPUs that computed its prompt to those that decode it.

The GPUs that share a request send their parts at once, each over its own port, to as many as share it on the other
side; where one side is fewer, its ports are the bottleneck. Between pools of one node the way is the node's links,
else the network, as between pipeline stages (`sim.prices.collectives.stage_send_s`, fitted where measured). The cache
is sent once the prompt is done: nothing is hidden behind computing unless `hidden` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.ops.dims import choices_of, dims_of
from sim.ops.layers import layer_ops
from sim.prices.collectives import stage_send_s
from sim.prices.mesh import MeshGroup
from sim.serving.phases import DECODE
from sim.simulate import evaluate
from sim.strategy import NONE, Strategy
from sim.workload import Workload


def request_cache_bytes(workload: Workload, tokens: int) -> float:
    """KV cache of one request of so many tokens, all layers, as the model's own attention holds it.

    >>> from sim.config.catalog import load_workload
    >>> request_cache_bytes(load_workload("llama_3_1_405b_8k"), 1000) == 126 * 1000 * 2 * 8 * 128
    True
    """
    dims = (NONE,) * len(dims_of(workload))
    alone = replace(workload, phase=DECODE.name, context_tokens=tokens, engine=None)
    return evaluate(alone, Strategy(1, 1, 1, 1, dims)).memory_bytes.kv_cache


def sharers(workload: Workload, strategy: Strategy) -> int:
    """GPUs that hold a part of one request's cache, over all stages.

    Where attention is sharded on heads or not at all, all of a group do (copies send a part each); sharded on requests,
    those that share its context.
    """
    attention = layer_ops(workload.model).op("attention")
    choices = [each["attention"] for each in choices_of(workload, strategy.dims)]
    on_requests = all(attention.label(choice) == "t" for choice in choices)
    return strategy.pp * strategy.cp * (1 if on_requests else strategy.tp)


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two pools.

    Attributes:
        workload: Whose hardware it is.
        same_node: Whether both pools lie in one node.
        cache_bytes: KV cache of a request.
        hidden: Share of the transfer that hides behind the prompt's own computing (sent layer by layer), in [0, 1].
        free: Whether it costs nothing, as where both pools share their memory.
    """

    workload: Workload
    same_node: bool
    cache_bytes: float
    hidden: float = 0.0
    free: bool = False

    def request_s(self, senders: int, receivers: int) -> float:
        """Seconds that a request waits for its cache."""
        return (1 - self.hidden) * self.sending_s(min(senders, receivers))

    def sending_s(self, gpus: int) -> float:
        """Seconds that `gpus` GPUs are busy with the cache of a request: the bound of a pool's rate."""
        if self.free:
            return 0.0
        pair = MeshGroup(2, 2 if self.same_node else 1)
        return stage_send_s(self.workload.hardware, pair, self.cache_bytes / gpus)
