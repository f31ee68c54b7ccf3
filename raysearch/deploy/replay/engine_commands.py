"""Commands that start a server of vLLM, SGLang or TensorRT-LLM, read for what a replay needs: degrees, formats, caps.

Degrees and options mean what the engines' exporters state of them (`raysearch.deploy.export`). What is not given is as
the engine ships it. Other options are left alone and named, since they may change what is measured.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raysearch.base.errors import InputError
from sim.config.catalog import read_model
from sim.config.files import config_path, list_names
from sim.config.question import Question
from sim.config.reading import Unreadable, read_bytes
from sim.ops.dims import spread_choices
from sim.ops.heuristics import megatron_dims
from sim.replay.replica import Deployed
from sim.strategy import Strategy
from sim.strategy_checks import check_strategy
from sim.workload import Workload

_LONGEST = 1_000_000
_VLLM = {
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--pipeline-parallel-size": "pp",
    "-pp": "pp",
    "--data-parallel-size": "dp",
    "-dp": "dp",
    "--decode-context-parallel-size": "cp",
    "-dcp": "cp",
    "--enable-expert-parallel": "experts",
    "-ep": "experts",
    "--max-num-seqs": "running",
    "--max-num-batched-tokens": "step_tokens",
    "--kv-cache-dtype": "kv_cache",
    "--quantization": "quantization",
    "-q": "quantization",
    "--model": "model",
}
_SGLANG = {
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--tp": "tp",
    "--pp-size": "pp",
    "--pipeline-parallel-size": "pp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--dp": "dp",
    "--enable-dp-attention": "shares",
    "--attn-dp-size": "attention_dp",
    "--dcp-size": "cp",
    "--ep-size": "ep",
    "--expert-parallel-size": "ep",
    "--ep": "ep",
    "--max-running-requests": "running",
    "--chunked-prefill-size": "chunk",
    "--max-prefill-tokens": "step_tokens",
    "--kv-cache-dtype": "kv_cache",
    "--quantization": "quantization",
    "--model-path": "model",
    "--model": "model",
}
_TRTLLM = {
    "--tp_size": "tp",
    "--tensor_parallel_size": "tp",
    "--pp_size": "pp",
    "--pipeline_parallel_size": "pp",
    "--cp_size": "cp",
    "--context_parallel_size": "cp",
    "--ep_size": "ep",
    "--moe_expert_parallel_size": "ep",
    "--enable_attention_dp": "shares",
    "--max_batch_size": "running",
    "--max_num_tokens": "step_tokens",
    "--enable_chunked_prefill": "cut",
    "--kv_cache_dtype": "kv_cache",
    "--config": "config",
    "--extra_llm_api_options": "config",
    "--model": "model",
}
"""Of the command, and without the dashes of the file that it names, whose keys replace those of the command."""
_STARTS = {
    "vllm": re.compile(r"\bvllm(\s+serve\b|\.entrypoints\.\S+)"),
    "sglang": re.compile(r"\bsglang(\s+serve\b|\.launch_server\b)"),
    "trtllm": re.compile(r"\btrtllm-serve(?!\s+(disaggregated|embeddings|rerank|mm_embedding_serve)\b)(\s+serve\b)?"),
}
_WORDS = {"vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM}
_SWITCHES = {"experts", "shares", "cut"}
_TEXTS = {"kv_cache", "quantization", "model", "config"}
_PREFILL_TOKENS = 16_384
"""[published] SGLang's --max-prefill-tokens where it is not given: sglang/srt/arg_groups of 0.5.23."""


@dataclass(frozen=True)
class EngineCommand:
    """A command that starts a server.

    Attributes:
        engine: Whose.
        words: What it says, by names of this module; numbers are at least 1, but for SGLang's chunk.
        unread: Options that say nothing to a replay, or nothing that it knows.
    """

    engine: str
    words: Mapping[str, str]
    unread: tuple[str, ...]

    def number(self, name: str, default: int = 1) -> int:
        """A number of the command."""
        return int(self.words.get(name, default))

    def asked(self, question: Question) -> Question:
        """The question with the engine, the model and the formats that the command has, where it names none.

        Raises:
            InputError: Nobody says which model it is, or the question is about another engine.
        """
        if question.engine not in (None, self.engine):
            raise InputError(f"--engine={question.engine}: the command starts {self.engine}: leave --engine out")
        model, weights = question.model, question.weights
        if model is None and question.workload is None:
            name = self.words.get("model", "")
            model, stored = _shipped(name)
            weights = weights or stored
        cached = "fp8" if self.words.get("kv_cache", "auto").startswith("fp8") else None
        return replace(question, model=model, weights=weights, engine=self.engine, kv_cache=question.kv_cache or cached)

    def strategy(self, workload: Workload) -> tuple[Strategy, int]:
        """(a replica, how many of them) under a workload.

        Raises:
            StrategyError: No such strategy exists.
        """
        tp, pp, cp, dp, moe = (*(self.number(each) for each in ("tp", "pp", "cp", "dp")), workload.model.is_moe)
        if self.engine == "vllm":  # of attention; a dense model's ranks are replicas
            ranks, copies = (dp, 1) if moe else (1, dp)
            tp, ep = tp // cp, tp * dp if moe and "experts" in self.words else 1
        elif self.engine == "trtllm":
            ranks, copies = tp if "shares" in self.words else 1, 1
            tp, ep = tp // ranks, self.number("ep")
        else:
            shares = "shares" in self.words
            ranks = self.number("attention_dp", dp if shares else 1)
            copies = 1 if shares else dp
            tp, ep = tp // ranks // cp, self.number("ep")
        most = workload.engine.memory.max_sequences * ranks if workload.engine else 1
        running = self.number("running", int(min(most, 10**6)))
        batch = -(-running // pp) * (1 if self.engine == "sglang" else ranks)
        dims = spread_choices(workload, megatron_dims(workload.model))
        found = Strategy(tp, ep, pp, batch, dims, cp, None if (cp, ranks) == (1, ep) else ranks)
        check_strategy(workload, found)
        return found, copies

    def deployed(self, workload: Workload, strategy: Strategy) -> Deployed:
        """A replica whose scheduler has the caps of the command."""
        shipped = Deployed.of(workload, strategy, as_shipped=True)
        policy = shipped.scheduler.policy
        if self.engine != "sglang":
            cut = policy.chunks or "cut" in self.words
            policy = replace(policy, step_tokens=self.number("step_tokens", policy.step_tokens), chunks=cut)
        elif self.number("chunk") < 0:
            tokens = self.number("step_tokens", _PREFILL_TOKENS)
            policy = replace(policy, step_tokens=tokens, chunks=False, shared_by_ranks=False)
        elif "chunk" in self.words:
            tokens = max(1, self.number("chunk") // strategy.attention_dp)
            policy = replace(policy, step_tokens=tokens, shared_by_ranks=False)
        return replace(shipped, scheduler=replace(shipped.scheduler, policy=policy))


def engine_command(path: Path) -> EngineCommand | None:
    """The command that a file has; None where the path is a folder, or the file JSON.

    Raises:
        InputError: It has none or several, or a value that is none.
    """
    if not path.is_file():
        return None
    try:
        text = read_bytes(path, _LONGEST).decode()
    except (OSError, Unreadable, UnicodeDecodeError):
        return None
    started = [(found.start(), engine, found.end()) for engine, way in _STARTS.items() for found in way.finditer(text)]
    if text.lstrip().startswith(("{", "[")):
        return None
    if not started:
        raise InputError(
            f"{path}: expected a JSON file that raysearch wrote, or a command that starts a server: vllm serve, "
            "python -m sglang.launch_server, or trtllm-serve"
        )
    if len(started) > 1:
        raise InputError(
            f"{path}: has {len(started)} commands that start a server: two pools are replayed from a folder"
        )
    ((_, engine, end),) = started
    try:
        words = shlex.split(text[end:].replace("\\\n", " ").split("\n")[0], comments=True)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    stated, unread = _stated(path, engine, _options(engine, words))
    if "config" in stated:
        file = path.parent / stated["config"]
        further, beside = _stated(file, engine, _configured(file))
        stated, unread = stated | further, unread + beside
    on = {name: value for name, value in stated.items() if name not in _SWITCHES or value.lower() != "false"}
    return EngineCommand(engine, on, tuple(unread))


def _stated(path: Path, engine: str, options: Iterator[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """What options say, by names of this module, and those that say nothing to a replay."""
    stated, unread = dict[str, str](), list[str]()
    for option, value in options:
        name = _WORDS[engine].get(option)
        if name is None:
            unread.append(option)
        elif name not in _TEXTS | _SWITCHES and not re.fullmatch(r"[1-9]\d{0,11}|-1", value):
            raise InputError(f"{path}: {option}: expected a number, got {value!r}")
        else:
            stated[name] = value
    return stated, unread


def _configured(path: Path) -> Iterator[tuple[str, str]]:
    """Keys of TensorRT-LLM's file, as options of its command."""
    import yaml

    try:
        content = yaml.safe_load(read_bytes(path, _LONGEST))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (Unreadable, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: expected YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected keys with values")
    for key, value in content.items():
        if key == "kv_cache_config" and isinstance(value, dict) and "dtype" in value:
            yield "--kv_cache_dtype", str(value["dtype"])
        else:
            yield f"--{key}", str(value)


def _options(engine: str, words: list[str]) -> Iterator[tuple[str, str]]:
    """Options with their values; the served model of `vllm serve` is one of them."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        option, given, value = word.partition("=")
        if engine == "trtllm" and option.startswith("--"):
            option = f"--{option[2:].replace('-', '_')}"
        if not option.startswith("-"):
            if engine != "sglang":
                yield "--model", word
            continue
        switch = _WORDS[engine].get(option) in _SWITCHES
        if not given and not switch and at < len(words) and not re.match(r"-[^\d]", words[at]):
            value, at = words[at], at + 1
        yield option, value


def _shipped(name: str) -> tuple[str, str]:
    """(the shipped model whose weights a repository has, their format). Raises: InputError: None has it."""
    for model in list_names("models"):
        published = read_model(config_path("models", model)).repositories
        for weights, repository in published.model_dump(exclude_none=True).items():
            if repository.lower() == name.lower():
                return model, weights
    raise InputError(f"{name or 'the model'} is not among the shipped models' repositories: name the model by --model")
