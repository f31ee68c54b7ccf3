"""Certificates of optima as files: written, replayed, and refused where they were altered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Command


def test_a_certificate_is_replayed_and_an_altered_one_refused(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    path = tmp_path / "best.json"
    written = raysearch("optimum", "-w", tiny_workload, "--set", "landscape=no", "--out", path, "--json")
    answer = json.loads(written.stdout)
    proven = json.loads(raysearch("verify", path, "--json").stdout)
    assert proven["tokens_per_s_per_gpu"] == answer["tokens_per_s_per_gpu"]
    assert proven["ranges"] == answer["certificate"] > 0
    assert "Proven" in raysearch("verify", path).stdout
    whole = json.loads(path.read_text())
    for bent, why in (
        ({**whole, "leaves": whole["leaves"][1:]}, "no leaf has"),
        ({**whole, "tokens_per_s_per_gpu": 1e6}, "claimed to reach"),
        ({**whole, "config_hash": "another"}, "run `raysearch optimum` again"),
        ({**whole, "leaves": "none"}, "is damaged"),
    ):
        path.write_text(json.dumps(bent))
        refused = raysearch("verify", path)
        assert refused.returncode == 1
        assert why in refused.stderr


@pytest.mark.slow
def test_a_certificate_of_declared_choices_is_checked_where_the_user_names_their_file(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_choices.py").write_text(
        "from sim.layers.choices import declare_choice\nfrom sim.ops.layers import DENSE_LAYER\n\n\n"
        'def stripes():\n    norm = DENSE_LAYER.op("ffn_norm")\n'
        '    declare_choice(norm, DENSE_LAYER, "striped tokens", "SS(0,2) -> SS(0,2)")\n'
    )
    declared = 'declared_choices = "own_choices:stripes"\nspace = "extended"\n'
    few = re.sub(r"(?m)^(tp|ep|batch) = \[\d+, (\d+)\]", r"\1 = [\2]", tiny_workload.read_text())
    (tmp_path / "mine.toml").write_text(declared + few)
    found = raysearch(
        "optimum", "-w", "mine.toml", "--set", "landscape=no", "--out", "best.json", "--json", cwd=tmp_path
    )
    refused = raysearch("verify", tmp_path / "best.json")
    assert refused.returncode != 0
    assert "on the command line" in refused.stderr
    proven = raysearch("verify", "best.json", "-w", "mine.toml", "--json", cwd=tmp_path)
    assert json.loads(proven.stdout)["tokens_per_s_per_gpu"] == json.loads(found.stdout)["tokens_per_s_per_gpu"]
    assert "for the certificate" in raysearch("verify", tmp_path, "-w", tiny_workload).stderr
