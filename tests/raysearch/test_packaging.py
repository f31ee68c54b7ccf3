"""The package as others get it: its wheel elsewhere, its versions, its declared dependencies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raysearch import __version__
from tests.processes import LONGEST_S

CHECKOUT = Path(__file__).resolve().parents[2]


EXTRAS = ("search", "rllib", "dev")
"""What `make setup-dev` installs beside the dependencies."""


def pinned() -> dict[str, str]:
    """Exact versions by canonical name."""
    lines = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), "constraints.txt takes exact versions only"
    return {canonicalize_name(name): exact for name, exact in pins}


def declared() -> list[Requirement]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        Requirement(text)
        for text in (
            *project["dependencies"],
            *(text for extra in EXTRAS for text in project["optional-dependencies"][extra]),
        )
    ]


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    pins = pinned()
    for requirement in declared():
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True), requirement


def test_what_is_installed_is_what_is_pinned() -> None:
    for name, exact in pinned().items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue  # needed only to build, or on another Python
        assert installed.split("+")[0] == exact, name


@pytest.mark.parametrize("name", ["sim", "envs"])
def test_a_package_of_the_users_that_hides_one_of_ours_is_one_error_with_its_path(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / "raysearch").write_text("from raysearch.cli.entry import start_command\nstart_command()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)])}
    text = f"raysearch's own package '{name}' is hidden by {tmp_path / name}"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert f"ImportError: {text}" in run("-c", "import raysearch").stderr
    for command in (run(str(tmp_path / "raysearch"), "list"), run("-m", "raysearch", "list")):
        assert command.returncode == 2
        assert command.stderr.startswith(f"error: {text}")
        assert command.stderr.count("\n") == 1


def test_the_version_is_that_of_the_distribution_and_needs_no_installation() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "raysearch/base/version.py"
    command = [sys.executable, "-S", "-c", "import raysearch; print(raysearch.__version__)"]
    version = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    assert version.strip() == __version__


def asked_of_the_index(line: str) -> list[str]:
    """What a line installs by a name that is not ours there: raysearch is a stranger's, raysearch-llm nobody's yet."""
    _, *commands = re.split(r"\b(?:pip3?|pipx|uv)\b[^`]*?\b(?:install|download|add)\b", line)
    words = [word for text in commands for word in re.split(r"[\s'\",;()]+", re.split(r"\s#|`", text)[0])]
    return [word for word in words if re.fullmatch(r"raysearch([-_]llm)?([\[=<>~!@].*)?", word)]


def test_nobody_is_asked_to_install_the_package_of_a_stranger() -> None:
    assert asked_of_the_index("run `pip install 'raysearch[jax]'`") == ["raysearch[jax]"]
    assert asked_of_the_index("Needs pip install --quiet raysearch==0.1.0") == ["raysearch==0.1.0"]
    assert asked_of_the_index("uv add raysearch-llm, then") == ["raysearch-llm"]
    assert not asked_of_the_index("`pip install --editable ~/raysearch` for raysearch")
    assert not asked_of_the_index("pip install -r requirements-aws.txt    # beside raysearch; credentials as for aws")
    kinds = {".py", ".md", ".toml", ".yaml", ".txt", ".cfg", ""}
    own = ("sim", "envs", "raysearch", "configs", "docs", "tests", "benchmarks", "examples")
    files = [path for folder in own for path in (CHECKOUT / folder).rglob("*") if path.suffix in kinds]
    files += [path for path in CHECKOUT.iterdir() if path.suffix in kinds]
    lines = {
        f"{path.relative_to(CHECKOUT)}: {line.strip()}"
        for path in files
        if path.is_file() and path != Path(__file__).resolve()
        for line in path.read_text(encoding="utf-8").splitlines()
        if "raysearch" in line and asked_of_the_index(line)
    }
    assert len(files) > 300
    assert lines == set()


def with_digests(*kinds: str) -> dict[str, str]:
    """Exact versions of what is installed by its digest, by canonical name."""
    text = "".join((CHECKOUT / f"requirements{kind}.txt").read_text(encoding="utf-8") for kind in kinds)
    pins = dict(re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
    assert len(pins) == text.count("==")
    return {canonicalize_name(name): exact for name, exact in pins.items()}


def test_all_but_pytorch_is_installed_by_the_digest_of_the_pinned_version() -> None:
    digests, pins = with_digests("", "-dev"), pinned()
    assert digests == {name: pins[name] for name in digests}
    needed, below = {canonicalize_name(requirement.name) for requirement in declared()}, [*declared()]
    while below:
        for text in requires(below.pop().name) or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name not in needed and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                needed.add(name)
                below.append(requirement)
    assert needed - set(digests) == {"torch"}


def test_what_a_head_on_aws_needs_beside_is_installed_by_its_digest() -> None:
    assert set(with_digests("-aws")) == {"boto3", "botocore", "jmespath", "s3transfer"}


def test_no_package_index_is_named_anywhere() -> None:
    installed = (
        "constraints.txt",
        *(path.name for path in CHECKOUT.glob("requirements*.txt") if "torch" not in path.name),
    )
    for name in ("pyproject.toml", "Makefile", ".ci/run", *installed):
        assert not re.search(r"index-url|find-links|https?://", (CHECKOUT / name).read_text(encoding="utf-8")), name


@pytest.mark.slow
def test_an_installed_wheel_works_as_the_checkout_does(tmp_path: Path, tiny_workload: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path, CHECKOUT], check=True, timeout=LONGEST_S)
    (wheel,) = tmp_path.glob("raysearch_llm-*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    install = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, wheel], check=True, timeout=LONGEST_S)
    # The dependencies of this environment, without its own raysearch: a path entry reads no .pth files of the folder.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name the checkout

    def run(*command: str | Path) -> str:
        pipes = {"capture_output": True, "text": True, "env": elsewhere}
        return subprocess.run(command, check=True, cwd=tmp_path, timeout=600, **pipes).stdout

    where = run(home / "bin" / "python", "-c", "import sim.config.files as c; print(c.__file__, c.configs_root())")
    assert all(Path(path).is_relative_to(home) for path in where.split())
    listed = json.loads(run(home / "bin" / "raysearch", "list", "--json"))
    for kind in ("hardware", "models", "workloads", "studies"):
        assert listed[kind] == sorted(path.stem for path in (CHECKOUT / "configs" / kind).glob("*.toml"))
    evaluated = json.loads(
        run(
            *(home / "bin" / "raysearch", "evaluate", "--workload", "gpt_moe_1_2t_16k", "--dims", "megatron"),
            *("--tp", "8", "--ep", "16", "--pp", "2", "--batch", "512", "--json"),
        )
    )
    assert evaluated["gpus"] == 256
    found = run(home / "bin" / "raysearch", "search", "-w", tiny_workload, "-s", "random", "-b", "5", "--json")
    assert json.loads(found)["calls"] == 5
