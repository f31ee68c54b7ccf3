"""README and docs: examples print what they say, links lead somewhere, pictures and references are the code's."""

from __future__ import annotations

import doctest
import json
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.reference import CONFIGURATIONS, PAGES
from envs.calls import CallRow
from raysearch.cli.app import app
from sim.config.catalog import read_model
from sim.config.files import read_config
from sim.config.hardware_file import HardwareFile

CHECKOUT = Path(__file__).resolve().parent.parent
WRITTEN = sorted((CHECKOUT / "docs").rglob("*.md"))
TEXTS = [*WRITTEN, *(CHECKOUT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
SOURCES = (".py", ".toml")
DRAWN = {
    "layer": "-w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron-sp --set against=megatron",
    "recommended_layer": "--model qwen3_235b_a22b --isl 8000 --osl 1000 --layout tep4 --batch 33",
}


@pytest.mark.usefixtures("best_alone")
@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_examples_print_what_they_say(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what they write
    text = page.read_text(encoding="utf-8").replace("\n```", "\n\n")  # what a fence ends is no output
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(examples).failed == 0


def test_the_page_on_fidelity_counts_its_own_tables_of_kernels() -> None:
    """How many figures are within what was asked, and beyond it how often trees that see every column are better."""
    page = (CHECKOUT / "docs/evidence/fidelity.md").read_text(encoding="utf-8")
    ours = _cells(page.split("<!-- kernels -->")[1].split("<!-- end of kernels -->")[0])
    trees = _cells(page.split("**How well could any curve do?**")[1].split("They are behind")[0])
    asked, experts = (7, 7, 7, 7, 10, 10, 10, 7, 5), 6
    beyond = [
        where
        for where, (mean, median, *_) in ours.items()
        if (median if where[1] == experts else mean) > asked[where[1]]
    ]
    compared = [trees[where] for where in beyond if where in trees]
    better = sum(tree < curve for curve, tree in compared)
    counts = f"Of its {len(ours)} figures {len(ours) - len(beyond)} hold. Of the other {len(beyond)}, trees are"
    assert counts in page
    assert f"no better in {len(compared) - better}," in page
    assert f"were not asked in {len(beyond) - len(compared)}. In {better} they are" in page


def _cells(table: str) -> dict[tuple[str, int], list[float]]:
    """The percentages of each cell that has some, by machine and column."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "%" in line]
    return {
        (machine, column): [float(each) for each in re.findall(r"([\d.]+)%", cell)]
        for machine, *cells in rows
        for column, cell in enumerate(cells)
        if cell != "-"
    }


SEARCHED = pytest.mark.slow  # a fleet under traffic takes half a minute
COMMANDS = [
    pytest.param(page.name, command.replace("\\\n", ""), printed, marks=[SEARCHED] * command.startswith("recommend"))
    for page in TEXTS
    for block in re.findall(r"^```\n(\$ raysearch .*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for command, printed in re.findall(r"^\$ raysearch ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    if printed.strip()
]
"""(page, command, what it shows) where a page shows what a command prints, "..." for what it leaves out."""


@pytest.mark.parametrize(("page", "command", "shown"), COMMANDS)
def test_commands_print_what_a_page_shows(page: str, command: str, shown: str) -> None:
    printed = CliRunner().invoke(app, command.split(), catch_exceptions=False).stdout
    parts = [" ".join(part.split()) for part in shown.split("...")]
    assert re.search(".*?".join(map(re.escape, parts)), " ".join(printed.split())), page


def test_the_readme_counts_what_ships_and_has_the_errors_of_the_page_on_fidelity() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    count = {kind: len(listed[kind]) for kind in ("models", "hardware", "searchers")}
    assert f"{count['models']} models, {count['hardware']} machines" in readme
    assert f"four engines and {count['searchers']} searchers" in readme
    assert len(listed["engines"]) == 4
    machines = listed["facts"]["hardware"].values()
    assert sum("measured" in each["efficiencies"] for each in machines) == 12
    assert sum(each["serving"] == "measured" for each in machines) == 8
    assert "Kernels were measured on twelve machines, serving on eight of them" in readme
    fidelity = (CHECKOUT / "docs/evidence/fidelity.md").read_text(encoding="utf-8")
    mean = dict(re.findall(r"^\| (H\d+|B200) SXM \| [\d,]+ \| ([\d.]+)%", fidelity, flags=re.MULTILINE))
    assert f"{mean['H100']} % on H100 (median 5.0 %), {mean['H200']} % on H200 and {mean['B200']} % on B200" in readme


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


@pytest.mark.usefixtures("best_alone")  # what the pages leave out takes most of the time
@pytest.mark.parametrize("page", [pytest.param("README.md", marks=pytest.mark.slow), "docs/tutorials/engineer.md"])
def test_the_recommendation_that_a_page_shows_and_its_export_are_what_is_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model").mkdir()
    (tmp_path / "my_model/config.json").write_text(json.dumps(QWEN3_8B))
    (command,) = re.findall(r"raysearch (recommend .* --out \S+)", text)
    (export,) = re.findall(r"raysearch (export \S+ --to vllm)\b", text)
    begins = r"(?:\S+ on \S+ under|(?:\$ [^\n]*\n)?(?:vllm serve|# The prefill pool))"
    answer, start = re.findall(rf"```\n({begins}.*?)```", text, re.DOTALL)
    printed = CliRunner().invoke(app, [*command.split(), "--set", "top=1"], catch_exceptions=False).stdout
    printed = re.sub(r"\ASo far, .*?; still comparing\n", "", printed, flags=re.DOTALL)
    assert words(printed)[: len(words(answer))] == words(answer)
    exported = CliRunner().invoke(app, export.split(), catch_exceptions=False).stdout
    exported = exported.replace(str(tmp_path.resolve()), "/home/me")
    begun = words(re.sub(r"^\$.*\n", "", start))  # of two pools the README shows the first
    assert words(exported)[: len(begun)] == begun
    assert page == "README.md" or len(words(exported)) == len(begun)


@cache
def reference_page(name: str) -> str:
    """A generated page, made once for all tests."""
    return PAGES[name]()


def words(text: str) -> list[str]:
    """Lines are folded to the terminal's width."""
    return text.split()


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    made = {f"reference/{name}.md" for name in PAGES}
    assert not [link for link in links if not (page.parent / link).exists() and link.removeprefix("../") not in made]


def test_pages_that_sources_name_exist() -> None:
    folders = ("raysearch", "sim", "envs", "tests", "benchmarks", "configs", "examples")
    sources = [*TEXTS, *(path for name in folders for path in (CHECKOUT / name).rglob("*.*") if path.suffix in SOURCES)]
    named = {name for path in sources for name in re.findall(r"docs/[a-z_/]+\.(?:md|py|svg)", path.read_text("utf-8"))}
    assert named
    assert not {name for name in named if not (CHECKOUT / name).exists()}


def test_the_machine_and_the_model_of_the_guides_are_read(tmp_path: Path) -> None:
    for kind in ("gpu", "model"):
        page = (CHECKOUT / "docs" / "guides" / f"add_a_{kind}.md").read_text(encoding="utf-8")
        (tmp_path / f"my_{kind}.toml").write_text(page.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    assert read_config(tmp_path / "my_gpu.toml", HardwareFile).name == "my_gpu"
    assert read_model(tmp_path / "my_model.toml").name == "my_model"


def test_the_reference_has_every_command_key_and_column() -> None:
    commands, configuration, records = map(reference_page, ("commands", "configuration", "records"))
    assert not [each.name for each in app.registered_commands if f"## raysearch {each.name}\n" not in commands]
    keys = {key for schema in CONFIGURATIONS for key in schema.model_fields}
    assert not [key for key in keys if f"| `{key}` |" not in configuration]
    assert not [column for column in CallRow._fields if f"| `{column}` |" not in records]
    assert "### rs.recommend" in reference_page("python")


def test_every_key_of_the_reference_has_a_text() -> None:
    rows = [
        re.split(r"(?<!\\)\|", line) for name in PAGES for line in reference_page(name).split("\n") if line[:3] == "| `"
    ]
    assert len(rows) > 500
    assert not [row[1] for row in rows if not row[3].strip()]


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_of_layers_are_what_the_command_draws(name: str, tmp_path: Path) -> None:
    app(["explain", *DRAWN[name].split(), "--out", str(tmp_path / "drawn.svg")], standalone_mode=False)
    assert (tmp_path / "drawn.svg").read_bytes() == (CHECKOUT / "docs" / "img" / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("name", ["published", "disaggregated", "wide_ep"])
def test_tables_of_published_deployments_are_what_their_benchmarks_print(name: str) -> None:
    page = (CHECKOUT / "docs/evidence/published.md").read_text(encoding="utf-8")
    benchmark = runpy.run_path(str(CHECKOUT / "benchmarks" / f"{name}.py"))
    shown = page.partition(benchmark["_BEGIN"])[2].partition(benchmark["_END"])[0].strip()
    if name == "disaggregated":  # one row of five machines
        first = next(benchmark["rows"](("h200",)))
        assert benchmark["table"]([first]).splitlines()[-1] == shown.splitlines()[-2]
        return
    if name == "wide_ep":
        assert shown == benchmark["table"](list(benchmark["rows"]()))
        return
    every_point = benchmark["read_rows"]()
    assert shown == benchmark["summary"](every_point)
    for entry in ("minimaxm2_5_fp8_h100_vllm_8k1k", "qwen3_5_fp4_mi355x_sglang_8k1k"):  # of 100
        found = [row.cells() for row in benchmark["rows"](benchmark["CONFIGS"] / f"{entry}.toml")]
        assert found == [row.cells() for row in every_point if row.entry == found[0][0]]
