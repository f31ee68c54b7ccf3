"""A strategy as an SGLang server's command.

Source: sglang/srt/arg_groups/fields of 0.5.23: `--tp-size` counts the GPUs of a stage, `--attn-dp-size` splits them
into attention groups (`engine_words` has what older versions call it), over which
`--enable-dp-lm-head` has each cut a vocabulary of its own, as `sim.step.vocabulary_layers` charges it,
`--max-running-requests` counts requests of the replica, `--max-prefill-tokens` tokens of an attention group, and
`--chunked-prefill-size` is divided by the attention groups. `--enable-mixed-chunk` puts chunks of prompts into steps
that decode, which are apart without it; it takes chunks, and no speculative decoding (scheduler.py, server_args.py).
"""

from __future__ import annotations

import math

from raysearch.deploy.export.deployment import Deployment, Export, spread_notes
from raysearch.deploy.export.engine_words import capability_of
from raysearch.deploy.export.fitting import fitted
from raysearch.deploy.export.models import draft_repository
from raysearch.deploy.export.render import Command, Flag, Variable
from sim.engines.sglang import SGLANG
from sim.ops.heuristics import megatron_dims
from sim.serving.phases import phase_of, running_sequences
from sim.workload import Speculation

STAGING = "SGLANG_DISAGG_STAGING_BUFFER"
"""Has caches gathered between pools of unequal tensor parallelism. disaggregation/prefill.py refuses it without chunks,
and with pipelines where Mooncake does not send them."""
_USUAL_DISPATCH = 128
"""Tokens of a rank that DeepEP's buffers hold in a step. [published] default of sglang/srt/environ.py."""
_JOINED = "`python -m sglang_router.launch_router --pd-disaggregation --prefill URL ... --decode URL ...`"


def export(deployment: Deployment) -> Export:
    """The command that starts one replica; over several nodes, the same on each."""
    runs = fitted(deployment, SGLANG)
    version, unread = capability_of(runs.deployment.workload, SGLANG.name)
    flags = engine_flags(runs.deployment)
    notes, nodes = [*runs.notes, *unread], _nodes(deployment)
    if phase_of(deployment.workload).mixes and not _mixes(deployment):
        notes.append("SGLang computes these prompts in separate steps; mixed prefill/decode steps were priced")
    if nodes > 1:
        address: Flag = ("--dist-init-addr", Variable("HEAD_ADDRESS", ":50000"))
        flags += [("--nnodes", nodes), ("--node-rank", Variable("NODE_RANK")), address]
        notes.append(f"run it on each of {nodes} nodes, with NODE_RANK 0 to {nodes - 1}")
    pool = phase_of(deployment.workload).pool
    if pool:  # else its own host alone finds it
        flags.append(("--host", "0.0.0.0"))
    own = "--port and --disaggregation-bootstrap-port" if pool == "prefill" else "--port"
    notes += [*spread_notes(deployment, nodes), *deployment.router_notes(_JOINED, own)]
    program = ("python", "-m", "sglang.launch_server", "--model-path", runs.deployment.served_model)
    accepted, lost = version.words(flags)
    command = Command(program, tuple(accepted), environment(runs.deployment))
    return Export(command, {}, (*runs.dropped, *lost), tuple(notes), runs.violations)


def environment(deployment: Deployment) -> dict[str, str]:
    """What its environment must say of unlike stages, NCCL's one algorithm, caches between pools, or large steps."""
    workload, split = deployment.workload, deployment.layer_partition
    variables = ({"SGLANG_PP_LAYER_PARTITION": split} if split else {}) | deployment.nccl_variables
    if deployment.staged:
        variables[STAGING] = "1"  # with buffers as large as it makes them, those of llm-d's guide
    tokens = running_sequences(workload, deployment.strategy.batch, deployment.strategy.attention_dp) * workload.queries
    if _sends_tokens(deployment) and phase_of(workload).decodes and tokens > _USUAL_DISPATCH:
        blocks = math.ceil(tokens / _USUAL_DISPATCH)
        variables["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(blocks * _USUAL_DISPATCH)
    return variables


def _sends_tokens(deployment: Deployment) -> bool:
    """Whether tokens are sent to their experts by DeepEP."""
    workload, strategy = deployment.workload, deployment.strategy
    return workload.model.is_moe and strategy.ep > 1 and workload.expert_exchange == "all_to_all"


def _mixes(deployment: Deployment) -> bool:
    """Whether its steps can carry chunks of prompts beside requests that decode, as phase serve charges them."""
    workload = deployment.workload
    return phase_of(workload).mixes and workload.chunk_tokens is not None and workload.speculation is None


def _nodes(deployment: Deployment) -> int:
    """Fewest nodes that have whole stages each, or whole stages over several of them.

    Source: _calculate_rank_ranges of sglang/srt/entrypoints/engine.py.
    """
    pp, stage = deployment.strategy.pp, deployment.strategy.stage_gpus
    counts = range(deployment.nodes, deployment.strategy.gpus + 1)
    return next(n for n in counts if pp % n == 0 or (n % pp == 0 and stage % (n // pp) == 0))


def engine_flags(deployment: Deployment) -> list[Flag]:
    """All options but those of several nodes."""
    return _parallel_flags(deployment) + _serving_flags(deployment)


def _parallel_flags(deployment: Deployment) -> list[Flag]:
    """Options of the degrees."""
    strategy, workload = deployment.strategy, deployment.workload
    flags: list[Flag] = [("--tp-size", strategy.stage_gpus)]
    if strategy.pp > 1:
        flags.append(("--pp-size", strategy.pp))
    if strategy.attention_dp > 1:
        flags += [("--attn-dp-size", strategy.attention_dp), ("--enable-dp-lm-head", None)]
        if not all(group.is_moe for group in workload.model.groups) and workload.model.is_moe:
            flags.append(("--moe-dense-tp-size", 1))  # else over all GPUs, where blocks of weights may not divide
    if strategy.cp > 1:
        flags.append(("--dcp-size", strategy.cp))
    if workload.model.is_moe and strategy.ep > 1:
        flags.append(("--ep-size", strategy.ep))
        if _sends_tokens(deployment):
            flags.append(("--moe-a2a-backend", "deepep"))
            if workload.deepep_mode != "auto":
                flags.append(("--deepep-mode", workload.deepep_mode))
            if workload.two_batch_overlap:
                flags.append(("--enable-two-batch-overlap", None))
    if strategy.tp > 1 and strategy.dims[0] != megatron_dims(workload.model)[0]:
        flags.append(("--enable-layernorm-sp", None))
    if deployment.by_nccl:
        flags.append(("--disable-custom-all-reduce", None))
    return flags


def _serving_flags(deployment: Deployment) -> list[Flag]:
    """Options of the batch, the memory and the formats."""
    workload, strategy = deployment.workload, deployment.strategy
    whole = deployment.prompt_tokens * strategy.attention_dp if deployment.staged else -1
    chunk = whole if workload.chunk_tokens is None else workload.chunk_tokens * strategy.attention_dp
    flags: list[Flag] = [
        ("--max-running-requests", deployment.rank_requests * strategy.attention_dp),
        # A decode pool has SGLang's own chunks, for what it computes again.
        *([("--chunked-prefill-size", chunk)] if phase_of(workload).prefills else []),
        *([("--enable-mixed-chunk", None)] if _mixes(deployment) else []),
        *([("--max-prefill-tokens", deployment.prompt_tokens)] if deployment.prompt_tokens else []),
        ("--context-length", deployment.longest),
        ("--mem-fraction-static", SGLANG.memory.share),
    ]
    if workload.prompt_wait_steps and strategy.attention_dp > 1 and phase_of(workload).mixes:
        flags += [
            ("--enable-prefill-delayer", None),
            ("--prefill-delayer-max-delay-passes", workload.prompt_wait_steps),
        ]
    if workload.precisions.kv_cache == "fp8":
        flags.append(("--kv-cache-dtype", "fp8_e4m3"))
    if deployment.quantization:
        flags.append(("--quantization", deployment.quantization))
    if workload.redundant_experts:
        flags += [("--enable-eplb", None), ("--ep-num-redundant-experts", workload.redundant_experts)]
    if workload.speculation is not None:
        flags += _speculation_flags(workload.speculation)
    if pool := phase_of(workload).pool:
        flags.append(("--disaggregation-mode", pool))
    return flags


def _speculation_flags(decoding: Speculation) -> list[Flag]:
    """Source: docs/advanced_features/speculative_decoding of the same version; one draft per step, no tree."""
    if decoding.draft is None:
        return [("--speculative-algorithm", "NGRAM"), ("--speculative-num-draft-tokens", decoding.draft_tokens + 1)]
    chain: list[Flag] = [
        ("--speculative-num-steps", decoding.draft_tokens),
        ("--speculative-eagle-topk", 1),
        ("--speculative-num-draft-tokens", decoding.draft_tokens + 1),
    ]
    if decoding.draft == "mtp":
        return [("--speculative-algorithm", "EAGLE"), *chain]
    path: Flag = ("--speculative-draft-model-path", draft_repository(decoding.draft))
    return [("--speculative-algorithm", "EAGLE3" if decoding.eagle3 else "STANDALONE"), path, *chain]
