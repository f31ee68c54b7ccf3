"""Every reader of records and configurations, given what its schema describes and what it does not.

A few hundred inputs in the default run, as many as are wanted by `make fuzz`. What somebody else's file says is either
understood or refused in one line: no traceback, no hang, and no more than 500 MB.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.calls import CallRow
from envs.chain import NO_ROWS_DIGEST
from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import read_record
from raysearch.cli.app import app
from raysearch.cli.commands.settings import settings_of
from raysearch.cli.commands.verify import verify_results
from raysearch.deploy.export.source import RECOMMENDATION_FILE, TUNED_FILE, read_deployments, verified_answers
from raysearch.deploy.export.stored import Exportable
from raysearch.deploy.live.session import Head, verify_tuning
from raysearch.deploy.place.fleet_file import FleetFile
from raysearch.deploy.place.fleet_plan_text import PLACEMENT_FILE
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.processes.claim import CLAIM_FILE, in_use
from raysearch.reports.study_report import read_report
from raysearch.runs.records import HEAD_FILE, STUDY_FILE, RunHead, RunSummary, StudyRecord
from raysearch.runs.run import SearchRun
from raysearch.studies.journal import JOURNAL_FILE, last_events
from raysearch.studies.results import run_rows, verify
from raysearch.studies.study_file import StudyFile, check_study, load_study, run_dir, write_study
from raysearch.studies.study_status import read_status
from sim.config.calibration_file import CalibrationFile
from sim.config.catalog import load_calibration, load_hardware, load_model, load_workload
from sim.config.files import configs_root, read_config
from sim.config.hardware_file import HardwareFile
from sim.config.question import QUESTION_FIELDS, Question
from sim.config.schemas import EngineVersionFile, ModelFile, WorkloadFile
from tests.raysearch.forging import WRONG, encoded, instance, places, replaced
from tests.raysearch.fuzzing import INPUTS, forged, look_at, now_and_then, tried
from tests.raysearch.fuzzing import within_memory as within_memory

POOL = {"strategy": {"tp": 4, "ep": 1, "pp": 1, "batch": 8, "dims": [2] * 10}, "replicas": 2}
QUESTION = {"model": "llama_3_1_70b", "isl": 800, "osl": 50, "gpus": 8, "phase": "serve", "engine": "vllm"}
ANSWER = {"form": 1, "question": QUESTION, "best": POOL, "alternatives": [POOL], "feasible": True}
POOLS = {
    "question": QUESTION,
    "points": [
        {
            "kinds": [{"prompt_tokens": 800, "output_tokens": 50, "share": 1.0}],
            "ways": {
                "aggregated": {"replicas": 2, "chunk_tokens": None, "pool": POOL},
                "disaggregated": {"prefill": POOL, "decode": POOL},
            },
            "winner": "disaggregated",
        }
    ],
}


@pytest.fixture(scope="module")
def study(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of which one run is finished and one is under way."""
    file = StudyFile(name="s", workloads=(str(tiny_workload),), searchers=("random", "annealing"), seeds=(0,), budget=6)
    checked, out = check_study(file), tmp_path_factory.mktemp("study") / "out"
    write_study(checked, dict.fromkeys(checked.workloads, 1000.0), out)
    for run_id, spec in checked.specs().items():
        run = SearchRun(spec, run_dir(out, run_id), optimum=1000.0)
        run.advance(6 if spec.searcher == "random" else 4)
        run.finish() if run.done else (run.save(), run.close())
    return out


RECORDS = [
    ("study.json", StudyRecord),
    ("runs/tiny-random-s0/run.json", RunHead),
    ("runs/tiny-random-s0/summary.json", RunSummary),
    ("runs/tiny-annealing-s0/run.json", RunHead),
]


@pytest.mark.parametrize(("name", "schema"), RECORDS, ids=[name for name, _ in RECORDS])
def test_a_forged_record_is_understood_or_refused(study: Path, tmp_path: Path, name: str, schema: Any) -> None:
    out = Path(shutil.copytree(study, tmp_path / "out"))
    whole = json.loads((out / name).read_text())
    for seed in range(INPUTS):
        rng = random.Random(f"{name} {seed}")
        (out / name).write_bytes(encoded(forged(whole, schema, rng), rng))
        tried(lambda: read_record(out / name, schema))
        if now_and_then(rng):
            look_at(out)


def test_forged_rows_that_follow_from_each_other_are_understood_or_refused(study: Path, tmp_path: Path) -> None:
    from envs.calls import run_head
    from envs.chain import chained_line

    out = Path(shutil.copytree(study, tmp_path / "out"))
    run = out / "runs/tiny-annealing-s0"
    rows = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    (run / "checkpoint.bin").unlink()
    for seed in range(INPUTS):
        rng, digest, text = random.Random(seed), NO_ROWS_DIGEST, b""
        broken = rng.randrange(len(rows))
        for number, row in enumerate(rows):
            fields = {key: value for key, value in row.items() if key not in ("run_id", "digest")}
            if number == broken:
                key = rng.choice(CallRow._fields[2:])
                fields[key] = rng.choice([*WRONG, 10**18, "2,1", "0;cp=0;dp=1", ";", float("nan")])
            line, digest = chained_line(run_head(row["run_id"]), json.dumps(fields)[1:-1].encode(), digest)
            text += line
        (run / "rows.jsonl").write_bytes(text)
        tried(lambda: run_rows(run))
        if now_and_then(rng):
            look_at(out)


ANSWERS = {RECOMMENDATION_FILE: ANSWER, TUNED_FILE: ANSWER, "pools.json": POOLS, "best.json": POOL}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_forged_answer_is_exported_or_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for seed in range(INPUTS):
        rng = random.Random(f"{name} {seed}")
        path.write_bytes(encoded(forged(ANSWERS[name], Exportable, rng), rng))
        source, number = rng.choice([path, tmp_path]), rng.choice([0, 0, 1])
        tried(lambda source=source, number=number: read_deployments(source, None, number, None))
        tried(lambda: verified_answers(tmp_path))


def test_what_only_informs_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    events = {"at": "2026-01-01T00:00:00.000+00:00", "event": "started", "run": "a"}
    claim = {"host": "h", "process": 1, "machine": "m", "claim": "0"}
    for seed in range(INPUTS):
        rng = random.Random(seed)
        for name, whole in (
            (JOURNAL_FILE, events),
            (CLAIM_FILE, claim),
            (PLACEMENT_FILE, claim),
            ("tune_live.json", claim),
        ):
            lines = [encoded(forged(whole, Head, rng), rng) for _ in range(rng.choice([1, 3]))]
            (tmp_path / name).write_bytes(b"\n".join(lines))
        last_events(tmp_path)
        in_use(tmp_path)
        tried(lambda: verified_answers(tmp_path))
        tried(lambda: verify_tuning(tmp_path))


def as_toml(value: Any, path: tuple[str, ...] = ()) -> str:
    """Plain data as TOML; what that has no word for is left out."""
    plain = {key: each for key, each in value.items() if not isinstance(each, dict) and each is not None}
    text = f"[{'.'.join(json.dumps(part) for part in path)}]\n" if path else ""
    text += "".join(f"{json.dumps(key)} = {json.dumps(each)}\n" for key, each in plain.items())
    return text + "".join(as_toml(each, (*path, key)) for key, each in value.items() if isinstance(each, dict))


CONFIGURATIONS: list[tuple[Any, Callable[[Path], object]]] = [
    (WorkloadFile, load_workload),
    (ModelFile, load_model),
    (HardwareFile, load_hardware),
    (StudyFile, load_study),
    (FleetFile, lambda path: read_config(path, FleetFile)),
    (PretrainingFile, lambda path: read_config(path, PretrainingFile)),
    (EngineVersionFile, lambda path: Question(**QUESTION | {"engine_version": str(path)}).load()),
]


@pytest.mark.parametrize(("schema", "read"), CONFIGURATIONS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_forged_configuration_is_understood_or_refused(
    tmp_path: Path, schema: Any, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "mine.toml"
    for seed in range(INPUTS):
        rng = random.Random(f"{schema.__name__} {seed}")
        made = instance(schema, rng)
        if schema is EngineVersionFile and isinstance(made, dict) and rng.random() < 0.9:
            made["engine"] = "vllm"  # or nothing else of it is looked at
        text = as_toml(made) if isinstance(made, dict) else str(made)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        tried(lambda: read(path))


def test_a_forged_calibration_is_understood_or_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "mine.json", json.loads((configs_root() / "calibration" / "h100_sxm.json").read_text())
    whole["series"] = dict(list(whole["series"].items())[:2])
    where = [at for at in places(whole) if len(at) < 4]
    for seed in range(INPUTS):
        rng = random.Random(seed)
        made = (
            instance(CalibrationFile, rng)
            if rng.random() < 0.3
            else replaced(whole, rng.choice(where), rng.choice(WRONG))
        )
        path.write_bytes(encoded(made, rng))
        tried(lambda: load_calibration(str(path)))


SETTINGS = [
    (command.name, name, setting)
    for command in app.registered_commands
    for name, setting in settings_of(command.callback).items()
]


def test_a_forged_setting_is_understood_or_refused() -> None:
    assert len(SETTINGS) > 40
    texts = [*map(str, WRONG), "8", "2,1", "nan", "inf", "1e999", "9" * 5000, "yes", "1%", "a=b"]
    for seed in range(INPUTS):
        rng = random.Random(seed)
        command, name, setting = rng.choice(SETTINGS)
        try:
            value = setting.value(name, rng.choice(texts), bare=rng.random() < 0.1)
        except InputError as refusal:
            assert str(refusal).startswith(f"--set {name}: "), command  # noqa: PT017
        else:
            bounded = isinstance(value, int | float) and setting.about.least is not None
            assert not bounded or value >= setting.about.least


def test_a_forged_question_is_understood_or_refused() -> None:
    for seed in range(INPUTS):
        rng = random.Random(seed)
        changed = {name: rng.choice(WRONG) for name in rng.sample(list(QUESTION_FIELDS), rng.choice([1, 1, 2]))}
        tried(lambda changed=changed: Question.of_record(QUESTION | changed).load())


OTHERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}
ROWS = (
    "runs/tiny-annealing-s0/rows.jsonl",
    "runs/tiny-random-s0/rows.parquet",
    "runs/tiny-annealing-s0/checkpoint.bin",
)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_no_file_is_refused_by_every_reader(
    study: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    names = [*(name for name, _ in RECORDS), *ROWS]
    for name in names if make in (OTHERS["pipe"], OTHERS["device"]) else names[::3]:  # the two never end
        out = Path(shutil.copytree(study, tmp_path / name.replace("/", "-")))
        (out / name).unlink()
        make(out / name)
        look_at(out)
    for name in (RECOMMENDATION_FILE, "mine.toml", "config.json"):
        make(tmp_path / name)
        tried(lambda name=name: read_deployments(tmp_path / name, None, 0, None))
        tried(lambda name=name: load_workload(str(tmp_path / name)))
        tried(lambda name=name: load_model(str(tmp_path / name)))


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", [STUDY_FILE, HEAD_FILE, RECOMMENDATION_FILE, "pools.json", TUNED_FILE, PLACEMENT_FILE])
def test_a_folder_whose_record_is_no_file_is_called_damaged_and_not_empty(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path / name)
    results = name in (STUDY_FILE, HEAD_FILE)
    looks: list[Callable[[], object]] = [lambda: verify_results(tmp_path)]
    if name != PLACEMENT_FILE:
        looks.append(lambda: read_deployments(tmp_path, None, 0, None))
    looks += [lambda look=look: look(tmp_path) for look in (read_status, read_report) if results]
    for look in looks:
        with pytest.raises((InputError, RunFailed), match=rf"{name} .*is damaged|is damaged: {name} is") as refusal:
            look()
        assert "no regular file" in str(refusal.value)


def test_a_file_of_gigabytes_is_not_taken_into_memory(study: Path, tmp_path: Path) -> None:
    for name in (*(name for name, _ in RECORDS), *ROWS):
        out = Path(shutil.copytree(study, tmp_path / name.replace("/", "-")))
        os.truncate(out / name, 3 * 10**9)  # takes no room on disk
        look_at(out)
    (tmp_path / "best.json").touch()
    os.truncate(tmp_path / "best.json", 3 * 10**9)
    with pytest.raises(InputError, match="too long"):
        read_deployments(tmp_path / "best.json", None, 0, None)


def test_a_whole_study_is_as_it_was_written(study: Path) -> None:
    assert verify(study).damaged == {}
