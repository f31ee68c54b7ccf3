"""The options of each version of an engine, read from its own sources: configs/engines/capabilities/*.json.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23 ai-dynamo==1.6.1 -d wheels
    git clone --bare https://github.com/NVIDIA/Megatron-LM wheels/Megatron-LM.git
    git clone --depth 1 --filter=blob:none --sparse --branch v1.3.0rc29 https://github.com/NVIDIA/TensorRT-LLM
    git -C TensorRT-LLM sparse-checkout set tensorrt_llm/llmapi tensorrt_llm/commands tensorrt_llm/_torch/models
    python benchmarks/engine_capabilities.py wheels/*.whl wheels/Megatron-LM.git@core_v0.19.0 TensorRT-LLM

Nothing of a wheel, or of TensorRT-LLM's checkout, is run: options, their types, choices and defaults, the keys of
options that are JSON, environment variables and model classes are read from its syntax trees. Megatron-LM makes most
options from dataclasses when it starts, so its parser is built, which takes PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "engines" / "capabilities"
Option = dict[str, Any]
Sources = Mapping[str, ast.Module]


class Wheel:
    """The Python files of a wheel that are asked for, as syntax trees."""

    def __init__(self, path: Path) -> None:
        self.name, self.version = path.name.split("-")[:2]
        self._zip = zipfile.ZipFile(path)

    def trees(self, *patterns: str) -> dict[str, ast.Module]:
        """Files whose whole name matches one of the patterns."""
        wanted = re.compile("|".join(patterns))
        names = [name for name in self._zip.namelist() if wanted.fullmatch(name)]
        return {name: ast.parse(self._zip.read(name)) for name in names}

    def metadata(self) -> str:
        """The text of its METADATA."""
        return next(self._zip.read(name).decode() for name in self._zip.namelist() if name.endswith("/METADATA"))


class Checkout:
    """The Python files of a source checkout that are asked for, as syntax trees."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def trees(self, *patterns: str) -> dict[str, ast.Module]:
        """As `Wheel.trees`, of names beneath `tensorrt_llm`."""
        wanted = re.compile("|".join(patterns))
        files = {path.relative_to(self._path).as_posix(): path for path in self._path.glob("tensorrt_llm/**/*.py")}
        return {name: ast.parse(path.read_bytes()) for name, path in files.items() if wanted.fullmatch(name)}


def literal(node: ast.expr | None) -> Any:
    """A constant's value; None where it is made by code."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError):
        return None


def assigned(trees: Sources) -> dict[str, ast.expr]:
    """What module-level names stand for."""
    return {
        target.id: node.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def classes(trees: Sources) -> dict[str, ast.ClassDef]:
    """Classes by name."""
    return {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def fields_of(found: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> dict[str, ast.AnnAssign]:
    """Annotated fields of a class and of what it inherits."""
    own = {
        node.target.id: node
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    bases = [known[base.id] for base in found.bases if isinstance(base, ast.Name) and base.id in known]
    return {name: node for base in bases for name, node in fields_of(base, known).items()} | own


def strings(node: ast.expr, names: Mapping[str, ast.expr]) -> list[str]:
    """Texts of a list or a Literal, through the names that they are made of."""
    found: list[str] = []
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.append(each.value)
        elif isinstance(each, ast.Name) and each.id in names and names[each.id] is not node:
            found += strings(names[each.id], names)
    return list(dict.fromkeys(found))


def words_of(node: ast.expr, names: Mapping[str, ast.expr]) -> set[str]:
    """Names in an annotation, through aliases that are no Literal."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {deep for name in found if name in names and _is_literal(names[name]) for deep in {"Literal"}}


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"


def _kept(option: Option) -> Option:
    return {name: value for name, value in option.items() if value not in (None, [], "")}


def of_annotation(node: ast.expr, names: Mapping[str, ast.expr], known: Mapping[str, ast.ClassDef]) -> Option:
    """Type and choices of an option that a dataclass's field is."""
    words = words_of(node, names)
    if "Literal" in words and "str" not in words:
        return {"type": "choice", "choices": strings(node, names)}
    if "bool" in words:
        return {"type": "switch"}
    if "dict" in words or any(word in known and word.endswith("Config") for word in words):
        return {"type": "json"}
    return {"type": next((each for each in ("int", "float") if each in words and "str" not in words), "str")}


def of_vllm(wheel: Wheel) -> dict[str, Any]:
    """vLLM: EngineArgs.add_cli_args with its dataclasses, and the server's own options."""
    configs = wheel.trees(r"vllm/config/\w+\.py", r"vllm/platforms/interface\.py")
    engine = wheel.trees(r"vllm/engine/arg_utils\.py")
    server = wheel.trees(r"vllm/entrypoints/\w+/cli_args\.py", r"vllm/entrypoints/cli/serve\.py")
    names, known = assigned({**configs, **engine}), classes({**configs, **server})
    options: dict[str, Option] = {}
    for tree in (*engine.values(), *server.values()):
        groups = dict(_kwargs_of(tree))
        for flags, call in _added(tree):
            option = _kept(_plain(call, names))
            spread = (keyword.value for keyword in call.keywords if keyword.arg is None)
            for node in (each for value in spread for each in ast.walk(value)):
                if isinstance(node, ast.Subscript):  # **parallel_kwargs["nnodes"]
                    group, field = ast.unparse(node.value), literal(node.slice)
                    declared = fields_of(known[groups[group]], known).get(field) if group in groups else None
                    if declared is not None:
                        option = of_annotation(declared.annotation, names, known) | option
                        option = _kept({**option, "default": literal(declared.value)})
            options |= dict.fromkeys(flags, option)
    for front in ("BaseFrontendArgs", "FrontendArgs"):
        for name, node in fields_of(known[front], known).items() if front in known else ():
            options[_flag(name)] = of_annotation(node.annotation, names, known)
    keys = {
        "--kv-transfer-config": sorted(fields_of(known["KVTransferConfig"], known)),
        "--eplb-config": sorted(fields_of(known["EPLBConfig"], known)),
        "--speculative-config": sorted(fields_of(known["SpeculativeConfig"], known)),
    }
    registry = wheel.trees(r"vllm/model_executor/models/registry\.py")
    architectures = {
        literal(key)
        for name, value in assigned(registry).items()
        if name.endswith("_MODELS") and isinstance(value, ast.Dict)
        for key in value.keys
        if key is not None
    }
    environment = {
        literal(key)
        for tree in wheel.trees(r"vllm/envs\.py").values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if key is not None
    }
    methods, cache = (strings(names[name], names) for name in ("SpeculativeMethod", "CacheDType"))
    options["--kv-cache-dtype"] = {"type": "choice", "choices": cache}  # a plug-in may add others
    formats = assigned(wheel.trees(r"vllm/model_executor/layers/quantization/__init__\.py"))
    options["--quantization"] = {"type": "choice", "choices": strings(formats["QuantizationMethods"], formats)}
    return {
        "source": "vllm/engine/arg_utils.py, vllm/config, vllm/entrypoints, vllm/envs.py, models/registry.py",
        "options": options,
        "keys": keys,
        "speculative_methods": methods,
        "environment": sorted(each for each in environment if isinstance(each, str) and each.startswith("VLLM_")),
        "architectures": sorted(each for each in architectures if isinstance(each, str)),
    }


def _kwargs_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Which class each of `x_kwargs = get_kwargs(Class)` is made from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            if ast.unparse(call.func).endswith("get_kwargs") and call.args:
                yield ast.unparse(node.targets[0]), ast.unparse(call.args[0])


def _added(tree: ast.Module) -> Iterator[tuple[list[str], ast.Call]]:
    """Calls of add_argument and of helpers like it, with the options that they add."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or "argument" not in ast.unparse(node.func):
            continue
        named = [keyword.value for keyword in node.keywords if keyword.arg in ("flag_name", "alias", "obsolete_flag")]
        flags = [literal(each) for each in (*node.args, *named)]
        found = [flag for flag in flags if isinstance(flag, str) and flag.startswith("--")]
        if found:
            if "bool" in ast.unparse(node.func):
                found += [f"--no-{flag[2:]}" for flag in found]
            yield found, node


def _plain(call: ast.Call, names: Mapping[str, ast.expr]) -> Option:
    """Type, choices and default as the keywords of add_argument state them."""
    stated = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    action, kind = literal(stated.get("action")), stated.get("type", stated.get("arg_type"))
    choices = strings(stated["choices"], names) if "choices" in stated else []
    switch = (isinstance(action, str) and action.startswith("store_")) or "BooleanOptional" in ast.unparse(
        stated.get("action", ast.Constant(""))
    )
    typed = "switch" if switch or "bool" in ast.unparse(call.func) else "choice" if choices else None
    named = ast.unparse(kind) if kind is not None else None
    if not stated:
        return {}
    typed = typed or (named if named in ("int", "float") else "str")
    old = "eprecated" in ast.unparse(call.func) or "eprecated" in ast.unparse(stated.get("action", call.func))
    return {"type": typed, "choices": choices, "default": literal(stated.get("default")), "deprecated": old or None}


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def of_sglang(wheel: Wheel) -> dict[str, Any]:
    """SGLang: fields of ServerArgs, wherever a version declares them."""
    trees = wheel.trees(r"sglang/srt/arg_groups/fields/\w+\.py", r"sglang/srt/server_args\.py")
    names = assigned({**wheel.trees(r"sglang/srt/arg_groups/choices\.py"), **trees})
    options: dict[str, Option] = {}
    for found in classes(trees).values():
        for name, node in fields_of(found, {}).items():
            options |= _of_field(name, node, names)
    for tree in trees.values():
        for flags, call in _added(tree):
            options |= {flag: _kept(_plain(call, names)) for flag in flags}
    environment = {
        node.targets[0].id: literal(node.value.args[0])
        if isinstance(node.value, ast.Call) and node.value.args
        else None
        for tree in wheel.trees(r"sglang/srt/environ\.py").values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.startswith("SGLANG_")
    }
    named = re.compile("PARTITION|DISPATCH_TOKENS|DISAGG|STAGING")
    variables = _mentioned(wheel, r"sglang/srt/(distributed|managers|disaggregation|model_executor)/\w+\.py", "SGLANG_")
    architectures = {
        each.id
        for tree in wheel.trees(r"sglang/srt/models/\w+\.py").values()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
        for each in ast.walk(node.value)
        if isinstance(each, ast.Name)
    }
    return {
        "source": "sglang/srt/arg_groups/fields, sglang/srt/server_args.py, sglang/srt/environ.py, sglang/srt/models",
        "options": options,
        "environment": sorted({each for each in (*environment, *variables) if named.search(each)}),
        "environment_defaults": {
            name: value for name, value in sorted(environment.items()) if "DISPATCH_TOKENS" in name
        },
        "architectures": sorted(architectures),
    }


def _mentioned(wheel: Wheel, pattern: str, prefix: str) -> set[str]:
    """Names of environment variables in texts of some files."""
    constants = (
        node for tree in wheel.trees(pattern).values() for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    return {
        node.value
        for node in constants
        if isinstance(node.value, str) and re.fullmatch(prefix + r"[A-Z0-9_]+", node.value)
    }


def _of_field(name: str, node: ast.AnnAssign, names: Mapping[str, ast.expr]) -> dict[str, Option]:
    """Options of a field `name: A[type, Arg(...)] = default`."""
    if not isinstance(node.annotation, ast.Subscript) or ast.unparse(node.annotation.value) not in ("A", "Annotated"):
        return {}
    parts = node.annotation.slice.elts if isinstance(node.annotation.slice, ast.Tuple) else [node.annotation.slice]
    calls = [part for part in parts[1:] if isinstance(part, ast.Call)]
    stated = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    if literal(stated.get("no_cli")) or any(ast.unparse(call.func) == "Derived" for call in calls):
        return {}
    words = {each.id for each in ast.walk(parts[0]) if isinstance(each, ast.Name)}
    listed = strings(parts[0], names) if "Literal" in words else []
    choices = strings(stated["choices"], names) if "choices" in stated else listed
    plain = "bool" in words and "action" not in stated
    kind = (
        "choice"
        if choices
        else "switch"
        if plain
        else next((each for each in ("int", "float") if each in words), "str")
    )
    option = _kept({"type": kind, "choices": choices, "default": literal(node.value)})
    aliases = literal(stated.get("aliases")) or []
    return dict.fromkeys((literal(stated.get("cli_name")) or _flag(name), *aliases), option)


def of_dynamo(wheel: Wheel) -> dict[str, Any]:
    """Dynamo: what its workers take beside their engine's options, and the engines that its images have."""
    own = {}
    for engine in ("vllm", "sglang", "trtllm"):
        patterns = rf"dynamo/{engine}/(backend_)?args\.py", r"dynamo/common/configuration/groups/\w+\.py"
        trees = wheel.trees(*patterns)
        names = assigned(trees) | {
            "DisaggregationMode": ast.List(
                [ast.Constant(each) for each in ("agg", "prefill", "decode", "encode")], ast.Load()
            )
        }
        options: dict[str, Option] = {}
        for tree in trees.values():
            for flags, call in _added(tree):
                options |= {flag: _kept(_plain(call, names)) for flag in flags}
        own[engine] = options
    pins = dict(re.findall(r"Requires-Dist: (vllm|sglang|tensorrt-llm)(?:\[[^]]*\])?==(\S+?);", wheel.metadata()))
    pins = {name.replace("tensorrt-llm", "trtllm"): version for name, version in pins.items()}
    return {
        "source": "dynamo/{vllm,sglang,trtllm}/{args,backend_args}.py, dynamo/common/configuration, METADATA",
        "pins": pins,
        "options_of": own,
    }


_MEGATRON = """
import argparse, enum, importlib.abc, importlib.machinery, json, sys, typing, typing_extensions, unittest.mock
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
parsers = []
made = argparse.ArgumentParser.__init__
def noted(self, *given, **named):
    made(self, *given, **named)
    parsers.append(self)
argparse.ArgumentParser.__init__ = noted
from megatron.training.arguments import parse_args
sys.argv = ["serve"]
parse_args(ignore_unknown_args=True)
def shown(value):
    return value if isinstance(value, (str, int, float, bool, type(None))) else None
options = {}
for action in parsers[0]._actions:
    for flag in action.option_strings:
        if flag.startswith("--"):
            kind = "switch" if action.nargs == 0 else action.type.__name__ if action.type in (int, float) else "str"
            choices = [each.name if isinstance(each, enum.Enum) else each for each in action.choices or []]
            kind = "choice" if choices else kind
            options[flag] = {"type": kind, "choices": choices, "default": shown(action.default)}
print("options:", json.dumps(options))
"""


def of_megatron(repository: Path, tag: str) -> dict[str, Any]:
    """Megatron-LM at a tag: its parser, built by this Python, and whether it has the inference server."""
    archived = subprocess.run(
        ["git", "-C", repository, "archive", tag, "megatron", "examples", "tools"], capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
            archive.extractall(folder, filter="data")
        ran = subprocess.run([sys.executable, "-c", _MEGATRON], cwd=folder, capture_output=True, text=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("options: ")]
        if not lines:
            raise SystemExit(f"Megatron-LM {tag}: {ran.stderr[-2000:]}")
        servers = [path.relative_to(folder).as_posix() for path in Path(folder).glob("**/*_server.py")]
    options = {flag: _kept(option) for flag, option in json.loads(lines[0].removeprefix("options: ")).items()}
    return {
        "source": "the parser that megatron/training/arguments.py builds",
        "options": options,
        "servers": sorted(each for each in servers if not each.startswith("megatron/")),
    }


_DEEPEST = 4
"""Levels of a configuration file that are read."""


def of_trtllm(checkout: Checkout) -> dict[str, Any]:
    """TensorRT-LLM: settings of the file that trtllm-serve reads, as "moe_config.backend", and its own options."""
    trees = checkout.trees(r"tensorrt_llm/llmapi/\w+\.py")
    aliases = (node for tree in trees.values() for node in tree.body if isinstance(node, ast.AnnAssign))
    names = assigned(trees) | {
        each.target.id: each.value for each in aliases if isinstance(each.target, ast.Name) and each.value is not None
    }
    known = classes(trees)
    names |= dict.fromkeys(known, ast.Constant(None))
    options = dict(_settings(known["TorchLlmArgs"], names, known))
    serve = checkout.trees(r"tensorrt_llm/commands/serve\.py")
    for tree in serve.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.option":
                flags = [flag for each in node.args for flag in str(literal(each) or "").split("/")]
                options |= {flag: _clicked(node) for flag in flags if flag.startswith("--")}
    registered = {
        literal(call.args[0])
        for tree in checkout.trees(r"tensorrt_llm/_torch/models/modeling_\w+\.py").values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_auto_model" and call.args
    }
    (version,) = checkout.trees(r"tensorrt_llm/version\.py").values()
    return {
        "version": literal(assigned({"": version})["__version__"]),
        "source": "tensorrt_llm/llmapi, tensorrt_llm/commands/serve.py, tensorrt_llm/_torch/models",
        "options": options,
        "architectures": sorted(each for each in registered if isinstance(each, str)),
    }


def _settings(
    found: ast.ClassDef, names: Mapping[str, ast.expr], known: Mapping[str, ast.ClassDef], under: str = ""
) -> Iterator[tuple[str, Option]]:
    """Fields of a configuration, and of those in it, of a union those of all."""
    for name, node in fields_of(found, known).items():
        if name.startswith("_") or "ClassVar" in words_of(node.annotation, names):
            continue
        inner = [known[word] for word in sorted(_all_words(node.annotation, names)) if word in known]
        deeper = [each for each in inner if each is not found and not _enumerated(each)]
        path = f"{under}{name}"
        if not deeper or path.count(".") >= _DEEPEST:
            yield path, _setting(node, names, inner)
            continue
        yield path, {"type": "json"}
        options: dict[str, Option] = {}
        for each in deeper:
            for own, option in _settings(each, names, known, f"{path}."):
                before = options.get(own, {})
                both = [*before.get("choices", []), *option.get("choices", [])]
                options[own] = {**option, "choices": list(dict.fromkeys(both))} if both else before or option
        yield from options.items()


def _setting(node: ast.AnnAssign, names: Mapping[str, ast.expr], inner: list[ast.ClassDef]) -> Option:
    words = _all_words(node.annotation, names)
    choices = strings(node.annotation, names) if "Literal" in words and not words & {"str", "int"} else []
    choices += [str(literal(each.value)) for own in inner for each in own.body if isinstance(each, ast.Assign)]
    whole = {"int", "PositiveInt", "NonNegativeInt", "StrictInt"}
    kinds = (("bool", {"bool"}), ("int", whole), ("float", {"float", "NonNegativeFloat"}))
    one = not words & {"str", "object", "Any", "List", "list", "Dict", "dict", "Tuple", "tuple"}
    kind = "choice" if choices else next((kind for kind, own in kinds if words & own and one), "str")
    kind = "str" if {"int", "bool"} <= words or (words & {"float"} and words & whole) else kind
    return _kept({"type": kind, "choices": choices})


def _all_words(node: ast.expr, names: Mapping[str, ast.expr]) -> set[str]:
    """Names in an annotation, in quotes too, and in what they are aliases of."""
    found: set[str] = set()
    for each in ast.walk(node):
        quoted = isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value in names
        word = str(each.value) if quoted else each.id if isinstance(each, ast.Name) else None
        if word and word not in found:
            found |= {word} | (_all_words(names[word], names) if word in names else set())
    return found


def _enumerated(found: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in found.bases)


def _clicked(call: ast.Call) -> Option:
    """Type of an option of click's."""
    stated = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    kind = ast.unparse(stated["type"]) if "type" in stated else "str"
    choices = strings(stated["type"], {}) if "Choice" in kind else []
    switch = literal(stated.get("is_flag")) or any("/" in str(literal(each)) for each in call.args)
    typed = "switch" if switch else "choice" if choices else kind if kind in ("int", "float") else "str"
    return _kept({"type": typed, "choices": choices, "default": literal(stated.get("default"))})


READERS: dict[str, tuple[str, Callable[[Wheel], dict[str, Any]]]] = {
    "vllm": ("vllm", of_vllm),
    "sglang": ("sglang", of_sglang),
    "ai_dynamo": ("dynamo", of_dynamo),
}


def text_of(content: Mapping[str, Any]) -> str:
    """JSON with an option, or a list, per line."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            inner = (f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(value.items()))
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Writes a file for each wheel and each tag that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sources", nargs="+", help="WHEEL, REPOSITORY.git@TAG of Megatron-LM, or checkout of TensorRT-LLM"
    )
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder of the files (configs/engines/capabilities)")
    given = parser.parse_args()
    for source in given.sources:
        path, _, tag = source.partition("@")
        if tag:
            engine, version, found = "megatron_core", tag.removeprefix("core_v"), of_megatron(Path(path), tag)
        elif Path(path).is_dir():
            found = of_trtllm(Checkout(Path(path)))
            engine, version = "trtllm", found["version"]
        else:
            wheel = Wheel(Path(path))
            engine, read = READERS[wheel.name]
            version, found = wheel.version, read(wheel)
        given.to.mkdir(parents=True, exist_ok=True)
        (given.to / f"{engine}-{version}.json").write_text(text_of({"engine": engine, "version": version, **found}))
        print(f"{engine} {version}: {len(found.get('options', found.get('options_of', ())))} options")


if __name__ == "__main__":
    main()
