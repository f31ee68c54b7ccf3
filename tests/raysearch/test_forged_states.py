"""States that a command goes on from, or believes: forged with digests that are right, they are understood or refused.

As in `test_readers.py`, of what is kept beside results: checkpoints, measurements, compacted rows, kept optima and
answers, certificates, and what black boxes say.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from envs.chain import NO_ROWS_DIGEST, chained_line
from envs.rows import file_digest
from raysearch.base.file_io import read_record
from raysearch.deploy.live.benchmark import checked_benchmark
from raysearch.deploy.live.decide import Measured
from raysearch.deploy.live.deployment_candidates import Candidates, candidates_of
from raysearch.deploy.live.session import HEAD_FILE, Folder, Head, Settings, tune, verify_tuning
from raysearch.deploy.live.session import ROWS_FILE as MEASUREMENTS_FILE
from raysearch.optima.certificate_files import _File, check_certificate, write_certificate
from raysearch.optima.named_spaces import best_of_space
from raysearch.optima.optimum_cache import CACHE_VARIABLE, cache_dir, find_cached_optimum
from raysearch.runs.checkpoint import load_checkpoint, write_checkpoint
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.simulators.cache import AnswerCache
from raysearch.simulators.measurement import Measurement
from raysearch.studies.results import check_resumable, checked_head, verify
from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.optimum.spaces import heuristic_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.raysearch.forging import WRONG, encoded, forge, instance, places, replaced, resealed
from tests.raysearch.fuzzing import LONG, forged, inputs, look_at, now_and_then, runs, tried
from tests.raysearch.fuzzing import within_memory as within_memory

LIGHT = ["annealing", "mcmc", "genetic", "coordinate", "ant_colony", "prior"]
HEAVY = ["optuna_tpe", "optuna_cmaes", "nevergrad", "ppo", "ppo_paper", "sb3_ppo"]
SEARCHERS = [*LIGHT, *(HEAVY if LONG > 10 else [])]


def altered(state: Any, rng: random.Random) -> Any:
    """A state with one of its values replaced; arrays by others, and by what is none."""
    where = [at for at in places(state) if at[0] not in ("spec", "config_hash")]
    at = rng.choice(where)
    inside = state
    for key in at:
        inside = inside[key]
    arrays = [np.zeros(0), np.full((2, 3), np.nan), np.arange(5), np.ones((1, 1, 1), bool)]
    own = [-inside, inside * 0 + np.inf, inside[:1]] if isinstance(inside, np.ndarray) and inside.ndim else []
    return replaced(state, at, rng.choice([*WRONG[:-2], *arrays, *own, *own]))


@pytest.fixture(scope="module", params=SEARCHERS)
def begun(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run of each kind of searcher, under way."""
    out = tmp_path_factory.mktemp("begun") / "out"
    run = SearchRun(RunSpec(str(tiny_workload), request.param, seed=0, budget=60), out)
    run.advance(30)
    run.save()
    run.close()
    return out


def test_a_forged_checkpoint_is_gone_on_from_or_refused(begun: Path, tmp_path: Path) -> None:
    head = checked_head(begun)
    state = load_checkpoint(begun)
    for seed in range(runs(4)):
        rng = random.Random(seed)
        out = Path(shutil.copytree(begun, tmp_path / "out", dirs_exist_ok=True))
        with contextlib.suppress(TypeError):  # what no checkpoint can hold
            write_checkpoint(out, altered(state, rng))
        tried(lambda out=out: check_resumable(out, head))

        def gone_on(out: Path = out) -> None:
            with contextlib.closing(SearchRun(RunSpec(**head["spec"]), out, resume=True)) as run:
                run.advance(3)

        tried(gone_on)


@pytest.fixture(scope="module")
def finished(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    run = SearchRun(RunSpec(str(tiny_workload), "random", seed=0, budget=6), out, optimum=1000.0)
    run.advance(6)
    run.finish()
    return out


def test_forged_rows_of_a_finished_run_are_understood_or_refused(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    table = parquet.read_table(out / "rows.parquet")
    for seed in range(runs(6)):
        rng = random.Random(seed)
        columns = {name: table.column(name) for name in table.column_names}
        name = rng.choice(table.column_names)
        values = columns[name].to_pylist()
        values[rng.randrange(len(values))] = rng.choice([*WRONG, -values[0] if isinstance(values[0], float) else "2,1"])
        with contextlib.suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
            columns[name] = pa.array(values, rng.choice([table.schema.field(name).type, None]))
        parquet.write_table(pa.table(columns), out / "rows.parquet")
        forge(out / "summary.json", ("rows_sha256",), file_digest(out / "rows.parquet"))
        look_at(out)


def test_rows_that_unfold_to_more_than_they_are_do_not_fill_the_memory(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    table = parquet.read_table(out / "rows.parquet")
    many, dims = 20_000, table.schema.get_field_index("dims")
    long = pa.DictionaryArray.from_arrays(pa.array([0] * many, pa.int32()), pa.array(["0," * 500_000]))
    forged_table = table.take(pa.array([0] * many)).set_column(dims, "dims", long)
    forged_table = forged_table.set_column(1, "call", pa.array(range(1, many + 1)))
    parquet.write_table(forged_table, out / "rows.parquet", store_schema=False)  # 20 GB in 170 kB
    for name, at in (("summary.json", ("calls",)), ("summary.json", ("budget",)), ("run.json", ("spec", "budget"))):
        forge(out / name, at, many)
    forge(out / "summary.json", ("rows_sha256",), file_digest(out / "rows.parquet"))
    assert "unfold to more" in str(verify(out).damaged)


@pytest.fixture(scope="module")
def candidates(tiny_workload: Path) -> Candidates:
    return candidates_of(heuristic_space(load_workload(str(tiny_workload)), sequence_parallel=False))


def test_forged_measurements_are_gone_on_from_or_refused(candidates: Candidates, tmp_path: Path) -> None:
    settings = Settings()
    folder = Folder(tmp_path, candidates, settings)
    folder.begin()
    for number in range(3):
        folder.keep(number, Measurement(100.0 - number, 0.01))
    lines = [json.loads(line) for line in (tmp_path / MEASUREMENTS_FILE).read_text().splitlines()]
    head = json.loads((tmp_path / HEAD_FILE).read_text())
    for seed in range(inputs(16)):
        rng, digest, text = random.Random(seed), NO_ROWS_DIGEST, b""
        broken = rng.randrange(len(lines))
        for number, line in enumerate(lines):
            row = {key: value for key, value in line.items() if key not in ("config_hash", "digest")}
            if number == broken:
                row = replaced(row, rng.choice(list(places(row))), rng.choice(WRONG))
            start = json.dumps({"config_hash": head["config_hash"]})[:-1].encode()
            made, digest = chained_line(start, json.dumps(row)[1:-1].encode(), digest)
            text += made
        (tmp_path / MEASUREMENTS_FILE).write_bytes(text)
        (tmp_path / HEAD_FILE).write_bytes(encoded(head if rng.random() < 0.8 else forged(head, Head, rng), rng))
        tried(lambda: verify_tuning(tmp_path))
        seen: list[Measured] = []
        tried(lambda seen=seen: seen.extend(Folder(tmp_path, candidates, settings).resume()))
        if seen and now_and_then(rng):
            tried(lambda seen=seen: list(tune(candidates, settings, _same, seen, 4)))


def _same(_: int) -> Measurement:
    return Measurement(100.0, 0.01)


def test_a_forged_optimum_is_not_believed(tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    workload = load_workload(str(tiny_workload))
    for find in (find_cached_optimum, lambda of: best_of_space(of, "vllm")):
        shutil.rmtree(tmp_path)
        found = find(workload)
        (kept,) = cache_dir().glob("*.json")
        whole = json.loads(kept.read_text())
        for seed in range(runs(4)):
            rng = random.Random(seed)
            made = replaced(whole, rng.choice([at for at in places(whole) if at != ("sha256",)]), rng.choice(WRONG))
            kept.write_bytes(encoded(resealed(made), rng))
            again = find(workload)
            best = found.tokens_per_s_per_gpu
            assert again.tokens_per_s_per_gpu == best
            assert evaluate(workload, again.strategy).tokens_per_s_per_gpu == best  # as good a one is an optimum, too


def test_a_forged_cache_of_answers_is_asked_anew_or_believed(tiny_workload: Path, tmp_path: Path) -> None:
    workload, strategy = load_workload(str(tiny_workload)), Strategy(2, 4, 1, 256, (0,) * 12)
    path = tmp_path / "answers.sqlite"
    with contextlib.closing(AnswerCache(path, workload)) as answers:
        answers.keep(evaluate(workload, strategy))
        with contextlib.closing(sqlite3.connect(path)) as database:
            ((kept,),) = database.execute("SELECT answer FROM answers").fetchall()
        whole = json.loads(kept.partition(" ")[2])
        for seed in range(inputs(8)):
            rng = random.Random(seed)
            content = encoded(replaced(whole, rng.choice(list(places(whole))), rng.choice(WRONG)), rng)
            text = content.decode(errors="replace")
            answer = rng.choice([f"{answers._seal(strategy, text)} {text}", text, None, 3, content])
            with contextlib.closing(sqlite3.connect(path)) as database, database:
                database.execute("UPDATE answers SET answer = ?", (answer,))
            believed = answers.read(strategy)
            assert believed is None or believed.strategy == strategy


def test_a_forged_certificate_proves_nothing_or_what_it_says(tiny_workload: Path, tmp_path: Path) -> None:
    workload, path = load_workload(str(tiny_workload)), tmp_path / "proof.json"
    write_certificate(path, Question(workload=str(tiny_workload)), workload, None)
    whole = json.loads(path.read_text())
    whole["leaves"] = whole["leaves"][:20]
    for seed in range(inputs(4)):
        rng = random.Random(seed)
        made = instance(_File, rng) if rng.random() < 0.3 else whole
        if isinstance(made, dict) and made:
            made = replaced(made, rng.choice(list(places(made))), rng.choice(WRONG))
        path.write_bytes(encoded(made, rng))
        tried(lambda: read_record(path, _File, sealed=False))
        if now_and_then(rng):
            tried(lambda: check_certificate(path))


def test_what_a_benchmark_says_is_a_measurement_or_refused(tiny_workload: Path) -> None:
    workload, strategy = load_workload(str(tiny_workload)), Strategy(2, 4, 1, 256, (0,) * 12)
    for seed in range(inputs()):
        rng = random.Random(seed)
        output = asdict(Measurement(100.0, 0.01)) | {rng.choice([*_FIELDS, "unknown"]): rng.choice(WRONG)}
        tried(
            lambda output=output, rng=rng: checked_benchmark(
                rng.choice([output, rng.choice(WRONG)]), workload, strategy
            )
        )


_FIELDS = tuple(each.name for each in fields(Measurement))


@pytest.mark.parametrize("forgery", [{"position": "x"}, {"raw": None}, {"told": []}], ids=lambda each: "".join(each))
def test_a_run_whose_searcher_stumbles_over_its_state_is_made_again(
    tiny_workload: Path, tmp_path: Path, forgery: dict[str, Any]
) -> None:
    digests = []
    for forged_at in (None, 30):
        out = tmp_path / str(forged_at)
        run = SearchRun(spec := RunSpec(str(tiny_workload), "annealing", seed=0, budget=60), out)
        run.advance(30)
        run.save()
        if forged_at:
            run.close()
            state = load_checkpoint(out)
            assert state
            write_checkpoint(out, {**state, "searcher": {**state["searcher"], **forgery}})
            run = SearchRun(spec, out, resume=True)
        run.advance(60)
        assert run.done
        digests.append(run.finish()["digest"])
    assert digests[0] == digests[1]
