"""Exported commands before the engines' own parsers and checks, where a Python that has an engine is named.

    python -m venv /tmp/engine && /tmp/engine/bin/pip install sglang==0.5.23
    RAYSEARCH_SGLANG_PYTHON=/tmp/engine/bin/python pytest -m slow tests/raysearch/deploy/export/test_parsers.py

    git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM /tmp/lm  # beside a Python that has torch
    PYTHONPATH=/tmp/lm RAYSEARCH_MEGATRON_PYTHON=python pytest -m slow tests/raysearch/deploy/export/test_parsers.py

Dynamo's workers are asked where RAYSEARCH_DYNAMO_VLLM_PYTHON or RAYSEARCH_DYNAMO_SGLANG_PYTHON has the engine of its
image, ai-dynamo and ai-dynamo-runtime. No GPU is needed: SGLang resolves and checks its configuration for --device cuda
from a model's config.json alone, vLLM makes its own for a machine that it is told of. An unpacked wheel on PYTHONPATH
does as well as an installed one.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.formats import exporter
from raysearch.deploy.export.models import repository
from sim.config.catalog import read_versions
from sim.layers.model import Model
from tests.raysearch.deploy.export.test_engine_words import cases
from tests.raysearch.deploy.export.test_engines import served, some_strategies

PARSERS = {
    "vllm": """
import importlib, importlib.abc, importlib.machinery, importlib.util, sys, unittest.mock
import torch._functorch.aot_autograd
class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):  # which no configuration runs
    def find_spec(self, name, path, target=None):
        last, named = name.rpartition(".")[2], ("cumem_allocator", "spinloop", "ssd_chunk_scan")
        if name.startswith("vllm.") and ((last[0] == "_" and "_C" in last) or last in named):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = unittest.mock.MagicMock()
        module.__path__, module.__spec__ = [], spec
        return module
    def exec_module(self, module):
        pass
class Ops:
    def __getattr__(self, name):
        if "support" not in name:
            raise AttributeError(name)
        return lambda *given: True
sys.meta_path.insert(0, Kernels())
for each in ("_C", "_moe_C"):
    setattr(torch.ops, each, Ops())
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability
class Machine(NonNvmlCudaPlatform):  # eight H100 that are not here
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)
    device_count = classmethod(lambda cls: 8)
    is_fully_connected = classmethod(lambda cls, ids: True)
    log_warnings = classmethod(lambda cls: None)
vllm.platforms._current_platform = Machine()
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda inspected: inspected()  # which would look for a GPU of its own
from vllm import __version__ as version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
places = [f"vllm.entrypoints.{each}.cli_args" for each in ("common", "launchers", "openai")]
there = importlib.util.find_spec
place = next(each for each in places if there(each.rpartition(".")[0]) and there(each))
parser = importlib.import_module(place).make_arg_parser(FlexibleArgumentParser())
def check(parsed):
    parsed.model, parsed.skip_tokenizer_init = parsed.model_tag, True
    AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
""",
    "sglang": """
import importlib.abc, importlib.machinery, importlib.util, sys, unittest.mock
class Pictures(importlib.abc.MetaPathFinder, importlib.abc.Loader):  # which no option needs
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = unittest.mock.MagicMock()
        module.__path__, module.__spec__, module.__version__ = [], spec, "0"
        return module
    def exec_module(self, module):
        pass
if not importlib.util.find_spec("torchvision"):
    sys.meta_path.append(Pictures())
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__ as version
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
def check(parsed):
    from sglang.srt.arg_groups.validation_hook import check_server_args
    args = ServerArgs.from_cli_args(parsed)
    args.resolve_once()
    check_server_args(args)
""",
    "megatron": """
import importlib.abc, importlib.machinery, json, os, sys, typing, typing_extensions, unittest.mock
import torch._functorch.aot_autograd  # before there is a triton
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):  # which no option needs
    def find_spec(self, name, path, target=None):
        ours = name.partition(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None
    def create_module(self, spec):
        module = unittest.mock.MagicMock()
        module.__path__, module.__version__ = [], "3.4.0"
        return module
    def exec_module(self, module):
        pass
sys.meta_path.append(Kernels())
torch.cuda.get_device_capability = lambda *given: (9, 0)
torch.cuda.get_device_properties = lambda *given: unittest.mock.Mock(major=9, minor=0)
from megatron.core.package_info import __version__ as version
from megatron.training import arguments
class parser:
    def parse_args(words):
        os.environ |= json.loads(words[0])
        sys.argv = ["serve", *words[1:]]
        return arguments.parse_args()
def check(parsed):
    arguments._print_args = lambda *given: None
    arguments.validate_args(parsed, {})
""",
}
"""What makes `parser` in each engine, and what checks what was parsed."""
_WORKER = """
import argparse, asyncio, inspect
from dynamo.{engine}.args import parse_args
class parser:
    def parse_args(words):
        return argparse.Namespace(words=words)
def check(parsed):
    found = parse_args(parsed.words)
    asyncio.run(found) if inspect.isawaitable(found) else None
"""
PARSERS |= {f"dynamo_{engine}": PARSERS[engine] + _WORKER.format(engine=engine) for engine in ("vllm", "sglang")}
_BESIDE = {"sglang": ("--device", "cuda", "--skip-tokenizer-init")}
_SIZES = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "sglang": ("tp_size", "pp_size"),
    "megatron": ("world_size",),
}
_PARSE = """
import json, sys
print("version:", json.dumps(version))
for words, whole in json.load(sys.stdin):
    parsed = parser.parse_args(words)
    print("parsed:", json.dumps(vars(parsed), default=str))
    if whole:
        check(parsed)
        print("checked:", json.dumps(words))
"""
_CONFIGS = {
    "deepseek-ai/DeepSeek-V3": "deepseek-ai--DeepSeek-V3",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B-FP8",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama--Meta-Llama-3.1-70B",
}
"""Where an optional package has the configuration of weights; files of others would have to be fetched."""


def ran(engine: str, commands: list[tuple[list[str], bool]]) -> dict[str, list[Any]]:
    """What the engine prints of each command, by the first word of a line."""
    python = os.environ.get(f"RAYSEARCH_{engine.upper()}_PYTHON")
    if not python:
        pytest.skip(f"RAYSEARCH_{engine.upper()}_PYTHON names no Python that has {engine}")
    done = subprocess.run(
        [python, "-c", PARSERS[engine] + _PARSE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Any]] = {"version": [], "parsed": [], "checked": []}
    for line in done.stdout.splitlines():
        kind, _, text = line.partition(": ")
        if kind in found:
            found[kind].append(json.loads(text))
    return found


def words_of(engine: str, deployment: Deployment, configs: Path) -> tuple[list[str], bool]:
    """What stands behind the program, and whether all configurations that it names are here."""
    engine, worker = engine.removeprefix("dynamo_"), engine.startswith("dynamo_")
    command = exporter(engine)(deployment).command
    assert command is not None
    words = [word if isinstance(word, str) else f"0{word.suffix}" for word in command.words]
    if engine == "megatron":
        options = words[words.index("-m") + 2 :]
        environment = {"RANK": "0", "WORLD_SIZE": str(deployment.strategy.gpus)} | dict(command.environment)
        return [json.dumps(environment), *options, *_checkpoint(deployment.workload.model)], True
    if worker:
        words = worker_of(engine, deployment)
    start = next(at for at, word in enumerate(words) if word in ("serve", "sglang.launch_server", f"dynamo.{engine}"))
    config = configs / f"{_CONFIGS.get(str(deployment.served_model))}_config.json"
    fetched = any("draft-model" in word or '"draft_model"' in word for word in words)  # whose configuration is not here
    return [*words[start + 1 :], *_BESIDE.get(engine, ())], config.is_file() and not fetched


def worker_of(engine: str, deployment: Deployment) -> list[str]:
    """The command of the worker in Dynamo's manifest."""
    (text,) = exporter("dynamo")(deployment).files.values()
    containers = [part["podTemplate"]["spec"]["containers"][0] for part in yaml.safe_load(text)["spec"]["components"]]
    return next([*each["command"], *each["args"]] for each in containers if f"dynamo.{engine}" in each["command"])


def drawn(engine: str, version: str) -> list[Deployment]:
    """Strategies that the engine's rules allow, drawn over degrees, of models whose configurations are here."""
    if engine == "megatron":
        return []
    return [
        Deployment(workload, strategy, repository(workload), replicas=2)
        for model in ("deepseek_v3", "qwen3_235b_a22b", "llama_3_1_70b")
        for phase in ("serve", "prefill", "decode")
        for workload in [served(model, engine, engine_version=version, gpus=32, phase=phase)]
        for strategy in some_strategies(engine, workload, 6)
        if strategy.gpus <= 8 or strategy.gpus % 8 == 0  # of a node, or of whole ones
    ]


def _checkpoint(model: Model) -> list[str]:
    """The options that a converted checkpoint brings along."""
    group = max(model.groups, key=lambda each: each.experts)
    heads: int = getattr(group.attention, "heads", 1)
    arguments: dict[str, int] = {"num-layers": model.layers, "hidden-size": model.hidden, "num-attention-heads": heads}
    arguments |= {"seq-length": 4096, "max-position-embeddings": 131072, "micro-batch-size": 1}
    if group.feed_forward and model.is_moe:
        arguments |= {"num-experts": group.experts, "moe-router-topk": group.feed_forward.experts_per_token}
    return [word for name, value in arguments.items() for word in (f"--{name}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("engine", PARSERS)
def test_the_engine_s_own_parser_and_checks_take_what_is_exported(engine: str, tmp_path: Path) -> None:
    (version,) = ran(engine, [])["version"]
    if engine == "megatron":  # whose tags say one more than their names
        (version,) = (each for each in read_versions("megatron_core") if each.startswith(version.rpartition(".")[0]))
    package = pytest.importorskip("aiconfigurator_core")
    configs = Path(package.__path__[0]) / "model_configs"
    own = engine.removeprefix("dynamo_")
    deployments = [*cases(own, version), *drawn(own, version)]
    commands = list[tuple[list[str], bool]]()
    for deployment in deployments:
        words, known = words_of(engine, deployment, configs)
        path = str(deployment.served_model)
        if known and engine != "megatron":
            folder = tmp_path / path.replace("/", "--")
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text((configs / f"{_CONFIGS[path]}_config.json").read_text())
            words = [str(folder) if word == path else word for word in words]
        commands.append((words, known))
    found = ran(engine, commands)
    assert len(found["parsed"]) == len(commands)
    assert len(found["checked"]) == sum(whole for _, whole in commands)
    for deployment, parsed in zip(deployments, found["parsed"], strict=True) if engine in _SIZES else ():
        assert math.prod(parsed[size] for size in _SIZES[engine]) == deployment.strategy.gpus
