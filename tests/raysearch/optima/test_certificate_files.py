"""Certificates of optima as files: written, replayed, and refused where they were altered."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Command


def test_a_certificate_is_replayed_and_an_altered_one_refused(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    path = tmp_path / "best.json"
    written = raysearch("optimum", "-w", tiny_workload, "--set", "landscape=no", "--out", path, "--json")
    told = json.loads(written.stdout)
    proven = json.loads(raysearch("verify", path, "--json").stdout)
    assert proven["tokens_per_s_per_gpu"] == told["tokens_per_s_per_gpu"]
    assert proven["ranges"] == told["certificate"] > 0
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
