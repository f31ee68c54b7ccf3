"""Placements: all of them, the best of them, and when sharing sharded groups is worth it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.deploy.place.attainment import Trials, tried
from raysearch.deploy.place.fleet_file import load_fleet
from raysearch.deploy.place.fleet_traffic import SampledTraffic
from raysearch.deploy.place.model_placement import Cluster, ModelPlacement, Placed, Tenant, all_placements, partitions
from raysearch.deploy.place.placement_search import Found, best_placements, dedicated, replicated, shared
from raysearch.deploy.place.service import GroupShape, Objective, Service
from raysearch.deploy.replay.seed_estimates import over_seeds
from sim.config.files import CatalogError
from sim.replay.arrivals import Stream
from tests.one_pass import stated

ALONE, PIPELINE = GroupShape(1, 1), GroupShape(1, 2)


def cluster(
    models: int, gpus: int, rate: float, cv: float, ttft_s: float, cost: float = 1.0, fixed: float = 0.9
) -> Cluster:
    """Models of one pass and a second on one GPU, and on pipelines of 2 and 4 stages, where they take `cost` as long.

    A model takes the share `fixed` of a GPU, and on more GPUs as much less.
    """

    def service(stages: int) -> Service:
        prompt_s = 1.0 if stages == 1 else cost
        deployed = stated(prompt_s, stages)
        return Service(
            deployed.strategy, deployed, prompt_s, prompt_s / stages, fixed / stages, 0.0, 1.0, stages / prompt_s
        )

    shapes = [GroupShape(1, stages) for stages in (1, 2, 4) if stages <= gpus]
    tenant = Tenant("model", Stream(rate, cv), Objective(1, 1, ttft_s, math.inf))
    return Cluster(
        gpus, (tenant,) * models, {(model, each): service(each.stages) for model in range(models) for each in shapes}
    )


def attained(of: Cluster, placement: ModelPlacement, requests: int = 1000, seeds: int = 2) -> float:
    return float(
        np.mean([tried(of, placement, run).attained for run in SampledTraffic(requests, tuple(range(seeds))).draw(of)])
    )


OWN = (Placed(ALONE, (0,)), Placed(ALONE, (1,)))
SHARED = (Placed(PIPELINE, (0, 1)),)


def test_sharding_over_shared_gpus_wins_under_bursts_and_loose_slos() -> None:
    # AlpaServe, sections 3.2 and 3.3: though the pipeline costs 10 %, a burst has both GPUs.
    of = cluster(2, 2, rate=0.4, cv=4.0, ttft_s=5.0, cost=1.1)
    assert attained(of, SHARED) > attained(of, OWN) + 0.1


def test_it_wins_less_the_less_bursts_there_are() -> None:
    gains = []
    for cv in (0.3, 1.0, 4.0):
        of = cluster(2, 2, rate=0.4, cv=cv, ttft_s=3.0, cost=1.1)
        gains.append(attained(of, SHARED) - attained(of, OWN))
    assert gains == sorted(gains)


@pytest.mark.parametrize(("cv", "ttft_s"), [(4.0, 1.05), (0.2, 1.25)])
def test_it_loses_at_tight_slos_and_without_bursts(cv: float, ttft_s: float) -> None:
    # A SLO shorter than the pipeline's own 1.1 s cannot be met there; regular arrivals hardly ever queue on a GPU.
    of = cluster(2, 2, rate=0.4, cv=cv, ttft_s=ttft_s, cost=1.1)
    assert attained(of, OWN) > attained(of, SHARED)


def test_partitions_are_those_counted_by_hand() -> None:
    shapes = (GroupShape(1, 1), GroupShape(1, 2), GroupShape(2, 1), GroupShape(1, 4))
    found = list(partitions(4, shapes))
    # 1+1+1+1, 1+1+2 in two ways, 2+2 in three, 4.
    assert len(found) == len(set(found)) == 7
    assert all(sum(each.gpus for each in way) == 4 for way in found)


def test_every_placement_comes_once_and_fits() -> None:
    of = cluster(3, 2, 1.0, 1.0, 2.0, fixed=0.6)
    found = list(all_placements(of, of.shapes, 3))
    # Two GPUs alike with none or one of three models each: 4 * 5 / 2. A pipeline with up to three, 0.3 GPUs each: 8.
    assert len(found) == len(set(found)) == 10 + 8
    assert all(of.has_room(placed.shape, placed.models) for placement in found for placed in placement)


@pytest.mark.parametrize(
    ("models", "gpus", "rate", "cv", "ttft_s", "fixed"),
    [
        (2, 2, 0.4, 4.0, 5.0, 0.9),
        (2, 2, 0.4, 1.0, 1.05, 0.9),
        (3, 2, 0.3, 3.0, 4.0, 0.45),
        (3, 3, 0.4, 2.0, 2.0, 0.6),
        (2, 4, 0.8, 4.0, 3.0, 0.9),
    ],
)
def test_the_search_finds_the_best_of_all_placements(
    models: int, gpus: int, rate: float, cv: float, ttft_s: float, fixed: float
) -> None:
    of = cluster(models, gpus, rate, cv, ttft_s, cost=1.1, fixed=fixed)
    traffic = SampledTraffic(80, (0, 1)).draw(of)
    (every,) = best_placements(of, traffic, (), (shared(of),), most_tried=10**6)
    (found,) = best_placements(of, traffic, (), (shared(of),), most_tried=0)
    assert (every.exact, found.exact) == (True, False)

    def share(placement: ModelPlacement) -> float:
        return float(np.mean([tried(of, placement, run).attained for run in traffic]))

    assert share(found.placement) == share(every.placement)


def test_wider_kinds_of_placements_are_never_worse_on_what_the_search_saw() -> None:
    of = cluster(3, 4, 0.5, 3.0, 3.0, fixed=0.45)
    traffic = SampledTraffic(80, (0,)).draw(of)
    kinds = (dedicated(of), replicated(of), shared(of))
    own, copied, best = best_placements(of, traffic, (), kinds)
    assert all(len(placed.models) <= 1 for placed in own.placement)
    assert all(placed.shape.gpus == 1 for placed in copied.placement)
    shares = [tried(of, each.placement, traffic[0]).attained for each in (own, copied, best)]
    assert shares[2] >= max(shares[:2])


def test_what_is_kept_of_groups_apart_and_what_is_given_up_change_no_trial() -> None:
    of = cluster(3, 3, rate=0.5, cv=3.0, ttft_s=2.0, fixed=0.6)
    (arrivals,) = SampledTraffic(80, (0,)).draw(of)
    kept, given_up = Trials(of, arrivals), Trials(of, arrivals)
    for placement in all_placements(of, of.shapes, 3):
        alone = tried(of, placement, arrivals)
        found = kept.of(placement)
        assert found is not None
        assert (found.attained, repr(found.ttft_s)) == (alone.attained, repr(alone.ttft_s))
        assert found.busy.tolist() == alone.busy.tolist()
        assert found.late.tolist() == alone.late.tolist()
        late = int(alone.late.sum())
        assert late == 0 or given_up.of(placement, late - 1) is None
        assert given_up.of(placement, late) is not None


def test_the_search_that_gives_up_ranks_as_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (cluster(3, 4, 0.5, 3.0, 2.5, fixed=0.4), 0),
        (cluster(2, 3, 1.0, 3.0, 3.0), 400),
        (cluster(1, 7, 20.0, 2.0, 3.0, cost=1.1), 400),
    ]

    def found(of: Cluster, most_tried: int) -> list[Found]:
        traffic, final = SampledTraffic(40, (0, 1)).draw(of), SampledTraffic(40, (2, 3)).draw(of)
        return best_placements(of, traffic, final, (dedicated(of), replicated(of), shared(of)), most_tried)

    fast = [found(*case) for case in cases]
    whole = Trials.of
    monkeypatch.setattr(Trials, "of", lambda self, placement, _most=math.inf: whole(self, placement))
    monkeypatch.setattr(Trials, "bound", lambda _self, _placement: (1.0, 0.0))
    slow = [found(*case) for case in cases]
    assert [[each.placement for each in few] for few in fast] == [[each.placement for each in all_] for all_ in slow]
    assert all(each.exact for kinds in fast[1:] for each in kinds)
    assert fast[2][0].tried < 0.7 * slow[2][0].tried


def test_no_placement_exceeds_its_bound(tmp_path: Path) -> None:
    longer = SMALL.replace("osl = 4\n", "osl = 30\ntpot_ms = 8.0\n").replace("= 4.0\nisl", "= 2.0\nisl")
    for of in cluster(3, 3, 3.0, 3.0, 2.0, fixed=0.6), load_fleet(written(tmp_path, longer)).at(20.0, None).cluster:
        (arrivals,) = SampledTraffic(60, (0,)).draw(of)
        trials, near = Trials(of, arrivals), 0.0
        for placement in all_placements(of, of.shapes, 2):
            share, first = trials.bound(placement)
            found = trials.of(placement)
            assert found is not None
            assert share >= found.attained
            assert not -first > found.ttft_s[0]  # NaN where none was served
            near = max(near, found.attained / share if 0 < share < 1 else 0.0)
        assert near > 0.3


def test_nine_of_ten_intervals_hold_what_a_long_run_attains() -> None:
    of = cluster(2, 2, rate=0.4, cv=2.0, ttft_s=3.0)
    truth = attained(of, SHARED, requests=10_000, seeds=1)
    stored = 0
    for repeat in range(20):
        runs = SampledTraffic(100, tuple(range(10 + 5 * repeat, 15 + 5 * repeat))).draw(of)
        estimate = over_seeds([tried(of, SHARED, run).attained for run in runs], 0.0, 1.0)
        stored += (estimate.low or 0.0) <= truth <= (estimate.high or 0.0)
    assert 15 <= stored < 20  # 18 within 2.3 standard deviations of 20 tries


SMALL = """
name = "small"
hardware = "h100_sxm"
gpus = 2

[[models]]
model = "llama_3_1_8b"
name = "chat"
count = 2
requests_per_s = 4.0
cv = 4.0
isl = 2000
osl = 4
ttft_ms = 300.0
"""


def written(folder: Path, text: str = SMALL) -> str:
    path = folder / "fleet.toml"
    path.write_text(text)
    return str(path)


def ask(*words: str, code: int = 0) -> Any:
    shown = CliRunner().invoke(app, ["place", *words], catch_exceptions=False)
    assert shown.exit_code == code, shown.output
    return shown


def test_the_command_tells_places_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, two in (("RATES", (1.0, 2.0)), ("CVS", (1.0, 4.0))):
        monkeypatch.setattr(f"raysearch.deploy.place.fleet_plan.{name}", two)
    path, out = written(tmp_path), tmp_path / "out"
    few = ("--set", "requests=100", "--set", "seeds=2")
    shown = ask(path, *few, "--out", str(out)).stdout
    assert "no other can be better on these runs" in shown
    assert "client round trip is not included; measured:" in " ".join(shown.split())
    record = json.loads((out / "placement.json").read_text())
    assert record.pop("sha256")
    assert [each["kind"] for each in record["alternatives"]] == ["replicated", "dedicated"]
    best = record["best"]
    assert best["exact"]
    assert best["attained"]["low"] <= best["attained"]["value"] <= best["attained"]["high"]
    assert best["attained_if_slower"]["value"] <= best["attained"]["value"]
    assert sum(group["gpus"] for group in best["groups"]) == 2
    assert {model["name"] for model in best["models"]} == {"chat_1", "chat_2"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "curves.csv").read_text().splitlines()) == 1 + 3 * 4


def test_nothing_in_time_is_shown_by_the_exit_code(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL.replace("300.0", "1.0"))
    answer = json.loads(ask(path, "--set", "requests=100", "--set", "seeds=2", "--json", code=3).stdout)
    assert answer["best"]["attained"]["value"] == 0


@pytest.mark.parametrize(
    ("was", "instead", "message"),
    [
        ("requests_per_s", "request_per_s", "did you mean 'requests_per_s'?"),
        ("ttft_ms = 300.0", "", "ttft_ms, tpot_ms or both"),
        ("llama_3_1_8b", "lama_3_1_8b", "did you mean 'llama_3_1_8b'?"),
        ("gpus = 2", 'gpus = 2\nengine = "vlm"', "did you mean 'vllm'?"),
        ("llama_3_1_8b", "llama_3_1_405b", "does not fit on any group"),
        ("osl = 4\n", "", "osl: missing; expected them, or a trace"),
        ("osl = 4\n", 'osl = 4\nengine = "vllm"\n', "engine: of all models: give it above the tables"),
        (
            "osl = 4\n",
            'osl = 4\nphase = "decode"\n',
            "phase: nothing to place models by: models that are placed serve",
        ),
        ("osl = 4\n", 'osl = 4\nspace = "joint"\n', "space: 'joint' is of spaces that no engine has"),
        ("osl = 4\n", 'osl = 4\nweights = "fp9"\n', "models.0: weights: unknown format 'fp9': did you mean 'fp8'?"),
        ("osl = 4\n", "osl = 4\nredundant_experts = 8\n", "redundant_experts: llama_3_1_8b has no experts"),
        ("osl = 4\n", 'trace = "mine.csv"\n', "cv, isl: the trace has them"),
    ],
)
def test_mistakes_in_a_file_are_one_message(tmp_path: Path, was: str, instead: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message.replace("?", r"\?")):
        load_fleet(written(tmp_path, SMALL.replace(was, instead)))


def test_more_gpus_and_less_load_never_lose_requests() -> None:
    of = cluster(2, 2, rate=0.8, cv=3.0, ttft_s=3.0)
    heavy, light = attained(of, SHARED), attained(of.at(rate=0.5), SHARED)
    assert light > heavy
    assert attained(of.slower(1.2), SHARED) < heavy


def test_models_have_a_trace_at_rates_of_their_own_from_other_places_on_in_each_run(tmp_path: Path) -> None:
    rows = [f"2026-01-01 00:00:{second:02d}.000,{1000 + second},{10 + second}" for second in range(40)]
    (tmp_path / "mine.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    text = SMALL.replace("cv = 4.0\nisl = 2000\nosl = 4\n", 'trace = "mine.csv"\n')
    other = (
        '[[models]]\nmodel = "llama_3_1_8b"\nname = "other"\nrequests_per_s = 8.0\nisl = 3000\nosl = 7\nttft_ms = 300.0'
    )
    cluster = load_fleet(written(tmp_path, f"{text}\n{other}")).cluster
    first, second = SampledTraffic(2000, (0, 1)).draw(cluster)
    lengths = first.requests.prompt_tokens
    assert {*lengths[first.models == 2].tolist()} == {3000}
    for model in (0, 1):
        own = first.requests.of_rows(np.flatnonzero(first.models == model))
        assert len(own) == pytest.approx(2000 * 4 / 16, abs=1)  # by its rate, in more than one round
        assert (own.output_tokens - 10 == own.prompt_tokens - 1000).all()
        assert ((np.diff(own.prompt_tokens) == 1) | (np.diff(own.prompt_tokens) == -39)).all()
        assert np.diff(own.arrival_s) == pytest.approx(0.25)
        assert own.prompt_tokens[0] != second.requests.prompt_tokens[second.models == model][0]
    assert lengths[first.models == 0][0] != lengths[first.models == 1][0]


def test_a_trace_takes_the_place_of_burstiness_and_lengths(tmp_path: Path) -> None:
    rows = [
        json.dumps({"timestamp": 50 * at, "input_length": 600, "output_length": 5, "hash_ids": [at, at + 1]})
        for at in range(100)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    few = ("--set", "requests=100", "--set", "seeds=2", "--set", f"trace={tmp_path / 'mine.jsonl'}")
    answer = json.loads(ask(written(tmp_path), *few, "--set", "percentile=90", "--json").stdout)
    assert answer["percentile"] == 90
    assert answer["best"]["probability"] == 1.0
    assert {each["cv"] for each in answer["best"]["models"]} == {None}
    (tmp_path / "mine.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00,9,9")
    with pytest.raises(InputError, match="all come at once"):
        load_fleet(written(tmp_path), trace=tmp_path / "mine.csv")
    with pytest.raises(InputError, match="--set cv=2: only for requests that come at random"):
        ask(written(tmp_path), *few, "--set", "cv=2")
