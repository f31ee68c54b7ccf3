"""Settings of measured servers that decide when a request has its first token, and that no column states.

[published] SemiAnalysisAI/InferenceX, benchmarks/ and benchmarks/single_node (November 2025 to April 2026): chunks of
SGLang (--chunked-prefill-size) and how often it looks for new requests while it decodes (--scheduler-recv-interval,
every step by default), --max_num_tokens of TensorRT-LLM, max-num-batched-tokens of vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sim.replay.replica import Deployed
from sim.strategy import Strategy
from sim.workload import Workload


class ServerSettings(NamedTuple):
    """A server's settings that decide when requests have their first token.

    Attributes:
        step_tokens: Most tokens of a step; None for the engine's default.
        receive_steps: Decode steps after which it looks for new requests.
    """

    step_tokens: int | None = None
    receive_steps: int = 1

    def deployed(self, workload: Workload, strategy: Strategy) -> Deployed:
        """A replica of such a server."""
        shipped = Deployed.of(workload, strategy, as_shipped=True)
        policy, ranks = shipped.scheduler.policy, strategy.attention_dp
        if self.step_tokens is not None:
            tokens = self.step_tokens // ranks if policy.shared_by_ranks else self.step_tokens
            policy = replace(policy, step_tokens=max(1, tokens))
        return replace(shipped, scheduler=replace(shipped.scheduler, policy=policy, receive_steps=self.receive_steps))


AS_SHIPPED = ServerSettings()
_OFTEN, _SELDOM, _MANY_CLIENTS = 10, 30, 16
_BLACKWELL = ("b200", "b300", "gb200", "gb300")


def published_settings(
    backend: str,
    machine: str,
    model: str,
    *,
    four_bits: bool,
    draft_tokens: int,
    gpus: int,
    prompt_tokens: int,
    clients: int,
    requests_per_rank: int,
    newest: bool,
) -> ServerSettings:
    """Those of a run of InferenceX on one node.

    Args:
        backend: The engine.
        machine: As its rows name it, such as "b200_sxm".
        model: By its file.
        four_bits: Whether its weights, or its experts', are in a format of four bits.
        draft_tokens: Drafted per step.
        gpus: Of the server.
        prompt_tokens: As stated.
        clients: Requests that they keep open.
        requests_per_rank: The same of each attention rank.
        newest: Whether it is of the newest generation of the engine.

    >>> from functools import partial
    >>> of = partial(published_settings, four_bits=True, gpus=8, prompt_tokens=1024, requests_per_rank=64, clients=64)
    >>> of("sglang", "b200_sxm", "deepseek_v3", draft_tokens=0, newest=True)
    ServerSettings(step_tokens=16384, receive_steps=30)
    >>> of("trtllm", "b200_sxm", "deepseek_v3", draft_tokens=3, newest=True)  # room for one prompt
    ServerSettings(step_tokens=1344, receive_steps=1)
    """
    name = machine.partition("_")[0]
    if backend == "trtllm":
        if model != "deepseek_v3":
            return ServerSettings(20_000 if model == "gpt_oss_120b" else None)
        decoding = (1 + draft_tokens) * requests_per_rank if draft_tokens else clients
        tokens = (decoding + prompt_tokens + 64 + 63) // 64 * 64
        return ServerSettings(max(8192, tokens) if newest and not draft_tokens else tokens)
    if backend == "vllm":
        return ServerSettings(8192 if model == "gpt_oss_120b" else None)
    blackwell = name in _BLACKWELL
    seldom = _SELDOM if clients >= _MANY_CLIENTS else _OFTEN
    if model == "deepseek_v3":
        if name.startswith("mi"):
            return ServerSettings(196_608 if name == "mi355x" else 131_072)
        if not blackwell:
            return ServerSettings(32_768)
        return ServerSettings(16_384 if four_bits or draft_tokens else 32_768 if gpus >= 8 else 8192, seldom)
    if model == "qwen3_5_397b_a17b":
        chunk = 32_768 if name == "b200" else 16_384
        return ServerSettings(chunk, (_OFTEN if name == "b300" else seldom) if blackwell else 1)
    return ServerSettings(32_768 if blackwell and model == "glm_5" else None)
