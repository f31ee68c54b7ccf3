"""A cluster of one host, for real: `ray up` over its own sshd, both ways of submitting a study, `ray down`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import LOOPBACK, OBJECT_STORE_BYTES, Cluster, make_key, missing, start_host, wait_until
from tests.cluster.studies import digests, digests_alone, write_study

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def study(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    return write_study(folder / "study.toml", tiny_workload, searchers=["annealing"], seeds=[0], budget=60)


@pytest.fixture(scope="module")
def expected(study: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests_alone(study, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, subprocess.CompletedProcess[str]]]:
    """A cluster of one host, and what `ray up` said."""
    root = tmp_path_factory.mktemp("cluster")
    host = start_host(root / "head", LOOPBACK, make_key(root / "key"))
    try:
        cluster = Cluster(root, host, cpus=2)
        yield cluster, cluster.ray("up", "--yes")
    finally:
        host.kill()


def test_ray_up_starts_a_head_from_the_shipped_file(up: tuple[Cluster, subprocess.CompletedProcess[str]]) -> None:
    cluster, done = up
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("gcs_server" in process for process in cluster.head.processes())
    assert not (cluster.head.home / "raysearch/.git").exists()
    assert (cluster.head.home / "raysearch/raysearch/__main__.py").is_file()


def test_ray_submit_runs_a_study_on_the_cluster(
    up: tuple[Cluster, subprocess.CompletedProcess[str]], study: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("--", "study", study, "--set", "address=auto", "--out", out, "--json")
    done = up[0].ray("submit", "raysearch/__main__.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"complete": true' in done.stdout
    assert digests(out) == expected


def test_ray_job_submit_runs_a_study_from_the_uploaded_checkout(
    up: tuple[Cluster, subprocess.CompletedProcess[str]], study: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = up[0].job("python", "-m", "raysearch", "study", study, "--out", out, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    assert digests(out) == expected
    tasks = json.loads(up[0].command("python", "-c", LOOK).stdout)["data"]["result"]["result"]
    assert set(expected) <= {task["name"] for task in tasks}  # the dashboard shows the steps of a run by its name


LOOK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8265/api/v0/tasks').read().decode())"


def test_a_results_folder_that_a_node_does_not_see_is_refused_before_anything_runs(
    up: tuple[Cluster, subprocess.CompletedProcess[str]], study: Path, tmp_path: Path
) -> None:
    out = tmp_path / "unshared/out"
    out.parent.mkdir()
    start = f"mount -t tmpfs none {out.parent} && ray start --address={LOOPBACK}:6379 --num-cpus=0"
    joined = up[0].ray("exec", f"unshare --mount sh -c '{start} --object-store-memory={OBJECT_STORE_BYTES}'")
    assert joined.returncode == 0, joined.stdout + joined.stderr
    refused = up[0].ray("submit", "raysearch/__main__.py", "--", "study", study, "--set", "address=auto", "--out", out)
    assert refused.returncode != 0  # as the command's
    output = " ".join(refused.stdout.split())
    assert f"error: node {LOOPBACK} cannot use the results folder {out}: it does not see what the driver put" in output
    assert "Traceback" not in output
    assert not out.exists()


def test_ray_down_leaves_nothing_running(up: tuple[Cluster, subprocess.CompletedProcess[str]]) -> None:
    done = up[0].ray("down", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: all(process.startswith("sshd") for process in up[0].head.processes()), "Ray's processes end")
