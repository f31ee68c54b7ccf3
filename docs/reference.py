"""The pages under reference/, made from the code whenever the site is built; a hook of mkdocs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import typer
from pydantic import BaseModel

import raysearch
from envs.calls import CallRow
from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.cli.commands.settings import DeclaredSetting, settings_of
from raysearch.deploy.place.fleet_file import FleetFile
from raysearch.runs.records import RunHead, RunSpec, RunSummary, StudyRecord
from raysearch.searchers.registry import searcher_class, searcher_names
from raysearch.studies.study_file import StudyFile
from sim.config.hardware_file import HardwareFile
from sim.config.question import QUESTION_FIELDS, About
from sim.config.schemas import EngineVersionFile, ModelFile, WorkloadFile
from sim.layers.mixers import CompressedAttention, GroupedAttention, Indexer, LatentAttention, LinearMixer
from sim.layers.model import FeedForward, LayerGroup, Published
from sim.prices.hardware import CollectiveModel, ErrorModel, Hardware, Rack
from sim.strategy import Strategy
from sim.workload import DegreeTables, Precisions, Speculation, Workload

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

CONFIGURATIONS = (WorkloadFile, ModelFile, HardwareFile, EngineVersionFile, StudyFile, FleetFile)
RECORDS = (RunHead, RunSummary, StudyRecord)
_BECOMES: Mapping[str, tuple[type, ...]] = {
    "WorkloadFile": (Workload,),
    "ModelFile": (Published,),
    "HardwareFile": (Hardware,),
    "_LayerFile": (GroupedAttention, FeedForward),
    "_GroupFile": (LayerGroup,),
    "_LatentAttention": (LatentAttention,),
    "_CompressedAttention": (CompressedAttention,),
    "_LinearMixer": (LinearMixer,),
    "_Indexer": (Indexer,),
    "_PrecisionsTable": (Precisions,),
    "_DegreesTable": (DegreeTables,),
    "_SpeculationTable": (Speculation,),
    "_Rack": (Rack,),
    "_ExpectedError": (ErrorModel,),
    "_Collectives": (CollectiveModel,),
    "StoredStrategy": (Strategy,),
}
"""What the simulator makes of files' tables, by their schemas' names: the docstrings there say what keys mean."""
_SETTINGS = (
    "Settings are less common options: `--set NAME=VALUE`, as often as needed; `--set NAME` alone switches one on."
)
_MARKUP = str.maketrans({"|": "\\|", "\n": " "})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def commands() -> str:
    """Every command with its options; those of a question, which several share, once."""
    group: Any = typer.main.get_command(app)
    codes = (
        "0 done, 1 something broke, 2 a mistake in what was given, 3 nothing is feasible, 128 + n stopped by signal n"
    )
    blocks = ["# Commands", f"Exit codes: {codes}.", _SETTINGS]
    head, question = ("option", "takes", "meaning", "default"), group.commands["evaluate"].params
    for name, command in sorted(group.commands.items()):
        text, _, examples = inspect.cleandoc(command.help or "").replace("\b", "").partition("Examples:\n")
        blocks += [f"## raysearch {name}", text.strip()]
        if examples:
            blocks.append(f"```\n{inspect.cleandoc(examples)}\n```")
        asks = any(each.name == "model" for each in command.params)
        own = [
            each
            for each in command.params
            if each.name != "assignments" and not (asks and each.name in QUESTION_FIELDS)
        ]
        if asks:
            blocks.append("Takes [the options of a question](#the-options-of-a-question), and")
        settings = settings_of(command.callback).items()
        rows = [_setting(key, each) for key, each in settings if not (asks and key in QUESTION_FIELDS)]
        blocks.append(_table(head, [*(_parameter(each) for each in own), *rows]))
    blocks += [
        "## The options of a question",
        "What is served, on what, within which limits, and what may be searched.",
    ]
    rare = settings_of(group.commands["evaluate"].callback).items()
    rows = [_parameter(each) for each in question if each.name in QUESTION_FIELDS]
    blocks.append(_table(head, [*rows, *(_setting(key, each) for key, each in rare)]))
    return _page(blocks)


def python() -> str:
    """What `import raysearch` offers, and what answers can do."""
    blocks = ["# Python", "`import raysearch as rs` offers what follows."]
    for name in sorted(set(raysearch.__all__) - {"__version__"}):
        blocks += _documented(f"rs.{name}", getattr(raysearch, name))
    blocks.append("## Answers\n\nEvery answer has, besides its own fields:")
    for name, member in sorted(vars(Result).items()):
        if not name.startswith("_"):
            blocks += _documented(f"answer.{name}", member)
    return _page(blocks)


def configuration() -> str:
    """Keys of every kind of configuration file, and the options of searchers."""
    blocks = ["# Configuration files", "TOML, one thing per file; keys that are not listed are refused."]
    for schema in CONFIGURATIONS:
        blocks += _schema(schema, 2)
    blocks += ["## Options of searchers", "In `[options.NAME]` of a study; presets are in `configs/searchers/`."]
    for name in searcher_names():
        if _installed(name) and (options := searcher_class(name).Options).model_fields:
            blocks += [f"### {name}", *_schema(options, 3)[1:]]
    return _page(blocks)


def columns() -> str:
    """Columns of a run's rows and keys of the records beside them."""
    hints, meanings = get_type_hints(CallRow), _attributes(CallRow)
    rows = [(f"`{name}`", f"`{_plain(hint)}`", meanings.get(name, "")) for name, hint in hints.items()]
    blocks = ["# Records", "## Rows", "`rows.parquet` of a finished run; `rows.jsonl`, with digests, of one under way."]
    blocks.append(_table(("column", "type", "meaning"), rows))
    for record in RECORDS:
        blocks += _schema(record, 2)
    blocks += ["## RunSpec", "`spec` of run.json, whose digest study.json has: what makes a run."]
    hints, meanings = get_type_hints(RunSpec), _attributes(RunSpec)
    rows = [(f"`{each.name}`", f"`{_plain(hints[each.name])}`", meanings[each.name]) for each in fields(RunSpec)]
    blocks.append(_table(("key", "type", "meaning"), rows))
    return _page(blocks)


PAGES: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "python": python,
    "configuration": configuration,
    "records": columns,
}


def _page(blocks: list[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.translate(_MARKUP) for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _parameter(parameter: Any) -> tuple[str, ...]:
    names = parameter.name.upper() if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
    kind = parameter.type_descriptor.annotation
    takes = "" if kind is bool else _takes(kind)
    usual = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    default = "required" if parameter.required else "" if usual is None or usual is False else str(usual)
    return f"`{names}`", takes, parameter.help or "", default


def _setting(name: str, setting: DeclaredSetting) -> tuple[str, ...]:
    takes = "" if setting.kind is bool else _takes(setting.kind)
    return f"`--set {name}`", takes, setting.about.help, setting.usual


def _takes(kind: Any) -> str:
    """A type, or the words to choose from."""
    choices = [each.value for each in kind] if inspect.isclass(kind) and issubclass(kind, Enum) else get_args(kind)
    words = [each for each in choices if isinstance(each, str)]
    return " or ".join(f"`{each}`" for each in words) or _plain(kind)


def _documented(name: str, thing: Any) -> list[str]:
    """A heading with the names of the arguments, and the docstring with its sections as lists."""
    if inspect.isclass(thing):
        call = f"{name}(...)"
    elif isinstance(thing, property):
        call = name
    else:
        parameters = [each for each in inspect.signature(thing).parameters.values() if each.name != "self"]
        required = [each.name for each in parameters if each.default is each.empty]
        rest = [f"{each.name}={each.default!r}" for each in parameters if isinstance(each.default, int | str | None)]
        call = f"{name}({', '.join([*required, *rest])})"
    text, *sections = re.split(r"\n(?=[A-Z]\w+:\n)", inspect.cleandoc(thing.__doc__ or ""))
    blocks = [f"### {name}", f"```text\n{call}\n```", _with_example(text)]
    for section in sections:
        title, _, body = section.partition("\n")
        listed = re.sub(r"^(\w[\w, ]*): ", r"- `\1`: ", inspect.cleandoc(body), flags=re.MULTILINE)
        blocks.append(f"**{title.rstrip(':')}**\n\n{_with_example(body if title == 'Returns:' else listed)}")
    return blocks


def _with_example(text: str) -> str:
    prose, prompt, example = inspect.cleandoc(text).partition(">>> ")
    return f"{prose.strip()}\n\n```python\n{prompt}{example.strip()}\n```" if prompt else prose.strip()


def _schema(schema: type[BaseModel], level: int) -> list[str]:
    """A heading, the docstring's first paragraph and a table of keys, then the same for the tables within."""
    whole = schema.model_json_schema()
    blocks = [f"{'#' * level} {schema.__name__}", inspect.cleandoc(schema.__doc__ or "").partition("\n\n")[0]]
    blocks.append(_keys(whole, schema))
    for inner in _inner(schema):
        definition = whole.get("$defs", {}).get(inner.__name__)
        if definition and definition.get("properties"):
            blocks += [f"**{_table_name(inner)}**", _keys(definition, inner)]
    return blocks


def _inner(schema: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The schemas of the tables within, each once."""
    found: dict[type[BaseModel], None] = {}

    def visit(hint: Any) -> None:
        new = inspect.isclass(hint) and issubclass(hint, BaseModel) and hint is not schema and hint not in found
        if new:
            found[hint] = None
        fields = hint.model_fields.values() if new else ()
        for part in (*(field.annotation for field in fields), *getattr(hint, "__args__", ())):
            visit(part)

    for field in schema.model_fields.values():
        visit(field.annotation)
    return iter(found)


def _table_name(schema: type[BaseModel]) -> str:
    words = re.sub(r"(Table|File)$", "", schema.__name__.lstrip("_"))
    return f"Table of {re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', words).lower()}"


def _keys(definition: Mapping[str, Any], schema: type[BaseModel]) -> str:
    meanings = _meanings(schema)
    required = definition.get("required", ())
    rows = [
        (f"`{key}`", _kind(value), meanings.get(key, ""), "required" if key in required else _usual(value))
        for key, value in definition["properties"].items()
    ]
    return _table(("key", "takes", "meaning; what holds without it", "default"), rows)


def _kind(value: Mapping[str, Any]) -> str:
    """A JSON schema in words.

    >>> _kind({"type": "integer", "minimum": 1, "maximum": 64})
    'integer, 1 to 64'
    """
    if options := value.get("anyOf"):
        return " or ".join(dict.fromkeys(_kind(each) for each in options if each.get("type") != "null"))
    if "$ref" in value:
        return "table"
    if "enum" in value or "const" in value:
        return " or ".join(f'"{each}"' for each in value.get("enum", [value.get("const")]))
    kind = value.get("type", "any")
    if kind == "array":
        return f"list of {_kind(value.get('items', {}))}" if "items" in value else "list"
    least, most = value.get("minimum"), value.get("maximum")
    if least is not None and most is not None and most < 1e9:
        return f"{kind}, {least:g} to {most:g}"
    return f"{kind}, at least {least:g}" if least is not None else "table" if kind == "object" else kind


def _usual(value: Mapping[str, Any]) -> str:
    usual = value.get("default")
    return "" if usual in (None, [], {}) or isinstance(usual, dict) else f"`{usual}`"


def _meanings(schema: type[BaseModel]) -> dict[str, str]:
    """What each key means: the words of its schema, else of the question or the type that it becomes, in this order.

    What stands behind a key in the source, most often what holds without it, comes after them.
    """
    asked = {about.key: about.help for about in QUESTION_FIELDS.values()} if schema is WorkloadFile else {}
    becomes: list[type] = []
    if to_si := getattr(schema, "to_si", None):
        becomes.append(get_type_hints(to_si)["return"])
    becomes += [each for base in schema.__mro__ for each in _BECOMES.get(base.__name__, ())]
    texts = {_stem(name): text for each in reversed(becomes) for name, text in _attributes(each).items()}
    own: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        own |= _attributes(base) if issubclass(base, BaseModel) and base is not BaseModel else {}
    comments = _comments(schema)
    found: dict[str, str] = {}
    for key in schema.model_fields:
        text = own.get(key) or asked.get(key) or _asked(schema, key) or texts.get(_stem(key), "")
        found[key] = "; ".join(each for each in (text.rstrip("."), comments.get(key, "")) if each)
    return found


def _asked(schema: type[BaseModel], key: str) -> str:
    """What a key means that is declared as a field of a question, and what holds without it; "" of others."""
    about = next((each for each in schema.model_fields[key].metadata if isinstance(each, About)), None)
    return f"{about.help.rstrip('.')}; {about.usual}" if about else ""


def _stem(name: str) -> str:
    """A key or an attribute without its unit: files have people's units, the simulator SI's.

    >>> _stem("intra_gb_per_s"), _stem("intra_bandwidth_bytes_per_s"), _stem("floor_us"), _stem("heads")
    ('intra_bandwidth', 'intra_bandwidth', 'floor', 'heads')
    """
    rate = re.sub(r"(^|_)(bandwidth_)?(gb|bytes)_per_s$", r"\1bandwidth", name)
    return re.sub(r"_(us|s|ms|gb|bytes)$", "", rate)


def _comments(schema: type[BaseModel]) -> dict[str, str]:
    """What stands behind a key in the source of its class, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= dict(re.findall(r"^    (\w+): .*?  # (.+)$", _source(base), re.MULTILINE))
    return found


def _source(thing: type) -> str:
    """The source of a class; "" of one that was made without any."""
    try:
        return inspect.getsource(thing)
    except OSError:
        return ""


def _attributes(thing: type) -> dict[str, str]:
    """What the section Attributes of a class's own docstring says, by name."""
    _, _, section = inspect.cleandoc(vars(thing).get("__doc__") or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for names, text in entries for name in names.split(", ")}


def _plain(hint: Any) -> str:
    """A type without the packages that its parts come from.

    >>> _plain(int | None), _plain(bool)
    ('int | None', 'bool')
    """
    return hint.__name__ if inspect.isclass(hint) else re.sub(r"\b[a-z_]+\.", "", str(hint))


def _installed(searcher: str) -> bool:
    try:
        searcher_class(searcher)
    except InputError:  # its extra
        return False
    return True
