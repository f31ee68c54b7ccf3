"""That a study's agents are RLlib's: its methods are counted in the processes of the study's trials."""

import contextlib
from collections import Counter
from pathlib import Path

import pytest

from raysearch.runs.run import SearchRun
from raysearch.studies.results import read_study_runs
from raysearch.studies.study_display import Displays, StudyBars
from raysearch.studies.study_file import StudyFile, check_study
from raysearch.studies.tuning import run_study

COUNTING = """
import importlib.util, os, sys


class Counting:
    def find_spec(self, name, path, target=None):
        if name != "raysearch.searchers.ppo.algorithm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
            from ray.rllib.core.learner.learner import Learner

            count(module.LearnToShard, "training_step")
            count(module.SearchEnvRunner, "sample")
            count(Learner, "update")
            count(PPOTorchLearner, "compute_loss_for_module")

        spec.loader.exec_module = loaded
        return spec


def count(owner, name):
    method = getattr(owner, name)

    def counted(self, *arguments, **named):
        with open(os.environ["COUNTED"], "a") as file:
            print(type(self).__name__, name, file=file)
        return method(self, *arguments, **named)

    setattr(owner, name, counted)


sys.meta_path.insert(0, Counting())
"""


@pytest.mark.slow
def test_runs_of_a_study_are_training_steps_samples_and_updates_of_rllib(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hooks"))  # before Ray starts: trials inherit it
    monkeypatch.setenv("COUNTED", str(counted := tmp_path / "counted"))
    planned = {"name": "engine", "workloads": ["gpt_moe_1_2t_16k"], "searchers": ["ppo_paper", "ppo"]}
    study = check_study(StudyFile(**planned, seeds=[0], budget=48))
    (out := tmp_path / "study").mkdir()
    with StudyBars("engine", study.specs(), {}) as bars:
        run_study(study, dict.fromkeys(study.workloads), out, display=Displays(bars), cpus=1)  # one process for both
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = {run["run_id"]: run for run in read_study_runs(out)}
    assert [run["calls"] for run in made.values()] == [48, 48]
    for run_id, spec in study.specs().items():
        with contextlib.closing(SearchRun(spec, tmp_path / run_id)) as alone:
            alone.advance(48)
            assert made[run_id]["digest"] == alone.summary()["digest"]
        logged = EventAccumulator(str(out / "tune" / run_id)).Reload()
        for name in ("calls", "best", "unique_calls", "feasible_calls", "chunk", "chunk_best", "chunk_done"):
            final = logged.Scalars(f"ray/tune/{name}")[-1]
            assert (final.step, final.value) == (48, pytest.approx(alone.metrics()[name], rel=1e-6))
    counts = Counter(counted.read_text().splitlines())
    assert counts["LearnToShard training_step"] > 0
    assert counts["CopyLearnToShard training_step"] > 0
    assert counts["SearchEnvRunner sample"] >= 48 / 2 + 48 / 16
    assert counts["EliteLearner update"] == 48 / 2
    assert counts["EliteLearner compute_loss_for_module"] == 2 * 48 / 2
    assert counts["CopyLearner update"] == 48 / 16
    assert counts["CopyLearner compute_loss_for_module"] == 2 * 48 / 16
