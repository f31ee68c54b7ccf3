"""TensorRT-LLM's configuration file, beside what a checkout of its source says that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from raysearch.deploy.export import engine_words
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.engine_words import Capability, unread_settings
from raysearch.deploy.export.formats import exporter
from raysearch.deploy.export.trtllm import config
from sim.config.files import configs_root
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Speculation
from tests.raysearch.deploy.export.test_engines import served

ARGUMENTS = """
class Transport(StrEnum):
    DEFAULT = "DEFAULT"
    NIXL = "NIXL"

class Experts(StrictBaseModel):
    backend: Literal["AUTO", "CUTLASS"] = Field(default="AUTO", description="unlike WIDEEP")
    load_balancer: Optional[Union[object, str]] = Field(default=None)

class Drafts(StrictBaseModel):
    max_draft_len: Optional[NonNegativeInt] = None
    speculative_model: Optional[Union[str, Path]] = None
    _fixed: bool = PrivateAttr(False)

class Heads(Drafts):
    decoding_type: Literal["MTP"] = "MTP"

class Small(Drafts):
    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    supported: ClassVar[bool] = True

Guesses: TypeAlias = Annotated[Union[Heads, Small], Field(discriminator="decoding_type")]

class Cache(StrictBaseModel, Mirror):
    free_gpu_memory_fraction: Optional[float] = Field(default=0.9)
    dtype: Literal["auto", "fp8"] = "auto"
    tokens_per_block: PositiveInt = 32

class Graphs(StrictBaseModel):
    enable_padding: bool = False
    max_batch_size: NonNegativeInt = 0

class Transfer(StrictBaseModel):
    backend: Optional[Transport] = None
    max_tokens_in_buffer: Optional[int] = None

class BaseLlmArgs(StrictBaseModel):
    backend: Optional[str] = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    moe_expert_parallel_size: Optional[int] = None
    moe_tensor_parallel_size: Optional[int] = None
    enable_attention_dp: bool = False
    max_batch_size: Optional[int] = 2048
    max_num_tokens: Optional[int] = 8192
    max_seq_len: Optional[int] = None
    enable_chunked_prefill: bool = False
    kv_cache_config: Cache = Field(default_factory=Cache)
    cache_transceiver_config: Optional["Transfer"] = None
    speculative_config: Optional[Guesses] = None

class TorchLlmArgs(BaseLlmArgs):
    moe_config: Experts = Field(default_factory=Experts)
    cuda_graph_config: Optional[Graphs] = None
    disable_overlap_scheduler: bool = False
"""
SERVE = """
@click.command("serve")
@click.option("--config", "--extra_llm_api_options", "options", type=str, default=None)
@click.option("--tp_size", type=int, default=1)
@click.option("--backend", type=click.Choice(["pytorch", "_autodeploy"]))
@click.option("--trust_remote_code", is_flag=True, default=False)
def serve(**given): ...
"""
MODELS = """
@register_auto_model("DeepseekV3ForCausalLM")
@register_auto_model("DeepseekV32ForCausalLM")
class Made: ...
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Capability:
    """What the script reads from a checkout in miniature."""
    top = tmp_path_factory.mktemp("checkout")
    files = {
        "version.py": '__version__ = "1.3.0rc99"\n',
        "llmapi/llm_args.py": ARGUMENTS,
        "commands/serve.py": SERVE,
        "_torch/models/modeling_made.py": MODELS,
    }
    for name, text in files.items():
        path = top / "TensorRT-LLM" / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = configs_root().parent / "benchmarks" / "engine_capabilities.py"
    words = [sys.executable, str(script), str(top / "TensorRT-LLM"), "--to", str(top / "made")]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("trtllm 1.3.0rc99: ")
    found = json.loads((top / "made" / "trtllm-1.3.0rc99.json").read_text())
    return Capability("trtllm", found["version"], found["options"], architectures=frozenset(found["architectures"]))


def test_settings_and_options_are_read_from_the_source(known: Capability) -> None:
    options = known.options
    assert options["moe_config.backend"] == {"type": "choice", "choices": ["AUTO", "CUTLASS"]}
    assert options["cache_transceiver_config.backend"]["choices"] == ["DEFAULT", "NIXL"]
    assert sorted(options["speculative_config.decoding_type"]["choices"]) == ["Draft_Target", "MTP"]
    assert options["kv_cache_config.tokens_per_block"] == {"type": "int"}
    assert options["enable_attention_dp"] == {"type": "bool"}
    assert options["--backend"]["choices"] == ["pytorch", "_autodeploy"]
    assert options["--trust_remote_code"]["type"] == "switch"
    assert options["--tp_size"] == {"type": "int", "default": 1}
    assert not [name for name in options if "supported" in name or "_fixed" in name]
    assert known.architectures == {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"}


def test_what_is_exported_is_compared_with_a_version_that_was_read(
    known: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_words, "read_versions", lambda _: (known.version,))
    monkeypatch.setattr(engine_words, "read_capability", lambda *_: known)
    wide = served("deepseek_v3", engine="trtllm", gpus=16)
    for workload in (
        replace(wide, redundant_experts=32, speculation=Speculation(1, (0.8,), "mtp")),
        served("deepseek_v3", engine="trtllm", gpus=16, phase="prefill"),
    ):
        content = config(Deployment(workload, Strategy(1, 16, 1, 64, megatron_dims(workload.model)), "made"))
        assert unread_settings("trtllm", content) == ([], [])
        content["moe_config"] = {"backend": "WIDEEP", "load_balancer": {"num_slots": 288}, "made_up": 1}
        refused, _ = unread_settings("trtllm", {**content, "max_seq_len": "long", "made_up": True})
        assert set(refused) == {
            f"TensorRT-LLM {known.version}: {text}"
            for text in (
                "max_seq_len is a whole number, not long",
                "moe_config.backend has no choice WIDEEP",
                "it has no option moe_config.made_up",
                "it has no option made_up",
            )
        }


def test_an_export_says_how_many_settings_nothing_was_compared_with() -> None:
    workload = served("llama_3_1_70b", engine="trtllm", gpus=8)
    made = exporter("trtllm")(Deployment(workload, Strategy(4, 1, 1, 16, megatron_dims(workload.model)), "made"))
    (note,) = [each for each in made.notes if "compared" in each]
    assert note.startswith("none of these ")
    assert "benchmarks/engine_capabilities.py" in note
