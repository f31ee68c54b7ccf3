"""A cluster of two hosts, each with a network and an sshd of its own: results in one place, whatever befalls a host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raysearch.studies.results import study_frame
from tests.cluster.hosts import CHECKOUT, DASHBOARD, Cluster, Host, link, make_key, missing, start_host, wait_until
from tests.cluster.studies import digests, digests_alone, hosts, write_study

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing())]

Command = Callable[..., "subprocess.CompletedProcess[str]"]
HEAD, WORKER = "10.99.7.1", "10.99.7.2"


@dataclass(frozen=True)
class Pair:
    cluster: Cluster
    unshared: Path  # a folder that the worker has another of


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("cluster")
    unshared = root / "unshared"
    unshared.mkdir()
    key = make_key(root / "key")
    head, worker = start_host(root / "head", HEAD, key), start_host(root / "worker", WORKER, key, hidden=unshared)
    try:
        link(head, worker)
        cluster = Cluster(root, head, [worker])
        done = cluster.ray("up", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: "2 local.cluster.node" in cluster.ray("exec", "ray status").stdout, "the worker joins")
        yield Pair(cluster, unshared)
    finally:
        worker.kill()
        head.kill()


@pytest.fixture(scope="module")
def study(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, each long enough that the other host's process has started before it ends."""
    path = tmp_path_factory.mktemp("study") / "study.toml"
    return write_study(path, tiny_workload, searchers=["annealing"], seeds=[0, 1], budget=60_000, report_every=500)


@pytest.fixture(scope="module")
def expected(study: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests_alone(study, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("form", ["submit", "job submit"])
def test_the_runs_of_a_study_are_on_both_hosts_and_their_results_in_one_place(
    pair: Pair, study: Path, expected: dict[str, str], tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    if form == "submit":
        done = pair.cluster.ray("submit", *command(study, out))
    else:
        done = pair.cluster.job("python", "-m", "raysearch", "study", study, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set().union(*hosts(out).values()) == {HEAD, WORKER}
    assert digests(out) == expected
    assert not list(out.glob(".probe*"))


def command(study: Path, out: Path) -> list[str]:
    """What follows the cluster's file in `ray submit`."""
    return ["raysearch/__main__.py", "--", "study", str(study), "--set", "address=auto", "--out", str(out)]


def test_a_run_searches_a_plugged_in_simulator_on_the_other_host(
    pair: Pair, tiny_workload: Path, tmp_path: Path, raysearch: Command
) -> None:
    short = write_study(tmp_path / "short.toml", tiny_workload, searchers=["annealing"], seeds=[0], budget=200)
    box = ("--simulator", "tests.raysearch.simulators.boxes:hilly", "--set", "workers=1")  # a host has one CPU
    done = pair.cluster.job("python", "-m", "raysearch", "study", short, "--out", tmp_path / "out", *box)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = raysearch("study", short, "--out", tmp_path / "alone", "--set", "cpus=2", *box)
    assert alone.returncode == 0, alone.stderr
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")


UNHURRIED = """
import time
from pathlib import Path

ask = CrossEntropy.ask
CrossEntropy.ask = lambda self, observation: (Path({slow!r}).exists() and time.sleep(0.2), ask(self, observation))[1]
"""


def test_a_study_of_a_searcher_of_one_s_own_is_on_both_hosts_and_resumes(
    pair: Pair, tiny_workload: Path, tmp_path: Path, raysearch: Command
) -> None:
    """Its module is in the folder of the job alone. While `slow` is there runs wait for the other host to start."""
    mine, out, slow = tmp_path / "mine", tmp_path / "out", tmp_path / "slow"
    mine.mkdir()
    slow.touch()
    example = (CHECKOUT / "examples/cross_entropy.py").read_text(encoding="utf-8")
    (mine / "my_searcher.py").write_text(example + UNHURRIED.format(slow=str(slow)), encoding="utf-8")
    name = "my_searcher:CrossEntropy"
    write_study(mine / "study.toml", tiny_workload, searchers=[name], seeds=[0, 1], budget=2000, report_every=10)
    words = ("python", "-m", "raysearch", "study", "study.toml", "--out", out)
    begun = pair.cluster.job(*words, working_dir=mine, options=["--no-wait", "--submission-id=first"])
    assert begun.returncode == 0, begun.stdout + begun.stderr
    try:
        wait_until(lambda: set().union(*hosts(out).values()) == {HEAD, WORKER}, "both hosts have reported")
    finally:
        output = pair.cluster.command("ray", "job", "logs", DASHBOARD, "first").stdout
        pair.cluster.command("ray", "job", "stop", DASHBOARD, "first")
    assert digests(out) == {}, output
    slow.unlink()
    done = pair.cluster.job(*words, "--resume", working_dir=mine)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = raysearch("study", "study.toml", "--out", tmp_path / "alone", "--set", "cpus=2", cwd=mine)
    assert alone.returncode == 0, alone.stderr
    assert digests(out) == digests(tmp_path / "alone")
    assert set(study_frame(out)["searcher"]) == {name}


def test_a_results_folder_that_a_host_does_not_see_is_refused_before_anything_runs(pair: Pair, study: Path) -> None:
    out = pair.unshared / "out"
    refused = pair.cluster.ray("submit", *command(study, out))
    assert refused.returncode != 0
    assert f"error: node {WORKER} cannot use the results folder {out}" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert not out.exists()


def test_a_study_survives_the_loss_of_a_host(pair: Pair, study: Path, expected: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    submitted = pair.cluster.start("ray", "submit", pair.cluster.file, *command(study, out))
    try:
        wait_until(lambda: calls_on(pair.cluster.workers[0], out) > 2000, "a run has reported from the worker")
        pair.cluster.workers[0].kill()
        printed, _ = submitted.communicate(timeout=600)
    finally:
        submitted.kill()
    assert submitted.returncode == 0, printed
    assert sorted(hosts(out).values(), key=len) == [{HEAD}, {HEAD, WORKER}]
    assert digests(out) == expected


def calls_on(host: Host, out: Path) -> int:
    """Calls so far of the run that a host makes; its process is named after it."""
    names = [title.split()[0].removeprefix("ray::") for title in host.processes() if title.startswith("ray::tiny-")]
    rows = [path for name in names for path in out.glob(f"runs/{name}/rows.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in rows)
