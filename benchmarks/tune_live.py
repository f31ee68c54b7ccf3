"""How many measurements `raysearch tune-live` needs on stand-ins for a machine, and others beside it.

    python benchmarks/tune_live.py --data measured/    # measured runs of models that the fit did not see
    python benchmarks/tune_live.py --engines           # one engine's simulator, another engine as truth
    python benchmarks/tune_live.py --data measured/ --fit  # fits `ERROR_CORRELATION` of raysearch.deploy.live.belief

docs/guides/tune_live.md has the figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from envs.space import StrategySpace
from envs.strategy_env import StrategyEnv
from raysearch.deploy.live.belief import ERROR_CORRELATION, Belief, ErrorCorrelation
from raysearch.deploy.live.decide import Measured
from raysearch.deploy.live.deployment_candidates import Candidates, candidates_of
from raysearch.deploy.live.session import Settings, tune
from raysearch.searchers.registry import make_searcher
from raysearch.simulators.measurement import Measurement
from raysearch.testing.stepping import Stepped
from sim.arrays import Floats
from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims
from sim.optimum.spaces import heuristic_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

WITHIN, CONFIDENCE, NOISE = 0.02, 0.9, 0.005
LEAST = 6
"""Configurations of a deployment below which there is little to choose."""
TIGHT = (0.3, 0.5, 0.7, 0.9, 1.0)
"""SLOs: such a share of a deployment's configurations meets it."""


@dataclass(frozen=True)
class Deployment:
    """Measured configurations of one model under one engine at one prompt and output length.

    Attributes:
        candidates: Priced by an engine whose times were fitted to other models.
        measured_s: [n] seconds per output token.
    """

    name: str
    model: str
    candidates: Candidates
    measured_s: Floats

    @property
    def errors(self) -> Floats:
        """[n] log of measured over predicted time."""
        return np.log(self.measured_s) - self.candidates.log_tpot


def measured_deployments(data: Path) -> list[Deployment]:
    """The aggregated serving runs, by deployment; equal configurations count once."""
    from raysearch.fidelity.calibration.engines import held_out_times, stating_their_batch, steps_of
    from raysearch.fidelity.calibration.serving_fit import agg_runs, numbers_of, read_serving_runs
    from sim.config.catalog import load_calibrated, load_machine

    machine, frame = load_machine("h100_sxm", load_calibrated("h100_sxm", None)), read_serving_runs(data)
    assert frame is not None, data
    found = agg_runs(frame)
    runs, measured_s = found.runs, numbers_of(found.rows, "silicon_tpot_ms") / 1e3
    steps, models = steps_of(runs, machine), [run.model.name for run in runs]
    times = held_out_times(runs, steps, measured_s, models, folds=len(set(models)))
    rows: dict[tuple[object, ...], dict[object, int]] = defaultdict(dict)
    for row in np.flatnonzero(steps.priced & stating_their_batch(runs)).tolist():
        run = runs[row]
        key = (run.model.name, run.engine, run.weights, run.prompt_tokens, run.output_tokens)
        rows[key].setdefault((run.strategy, run.replicas), row)
    deployments: list[Deployment] = []
    for key, by_strategy in rows.items():
        own = list(by_strategy.values())
        if len(own) > 1:
            evaluations = tuple(evaluate(runs[row].workload(machine, times[row]), runs[row].strategy) for row in own)
            candidates = Candidates(runs[own[0]].workload(machine, times[own[0]]), evaluations)
            deployments.append(Deployment(" ".join(map(str, key)), str(key[0]), candidates, measured_s[own]))
    return deployments


def fit(deployments: Sequence[Deployment], iterations: int = 6) -> tuple[ErrorCorrelation, float]:
    """(the error_correlation under which the errors of the deployments are most likely, its log evidence)."""
    from scipy.optimize import minimize

    def unpacked(at: Floats) -> ErrorCorrelation:
        shared, terms, near, _ = np.exp(at[:4] - np.logaddexp.reduce(at[:4])).tolist()
        length, scale_sd, scale = np.exp(np.clip(at[4:], -3, 3)).tolist()
        return ErrorCorrelation(shared, terms, near, length, scale_sd, scale)

    def surprise(at: Floats) -> float:
        error_correlation, total = unpacked(at), 0.0
        for each in deployments:
            correlation = error_correlation.correlation(each.candidates.shares, each.candidates.places)
            belief = Belief(each.candidates.stated_sd, correlation, error_correlation, NOISE)
            total -= belief.log_evidence(np.arange(len(each.errors)), each.errors)
        return total + 0.05 * float(at @ at)

    start = [0, 0, 0, -1, 0.7, -0.7, 0]
    found = minimize(surprise, start, method="Powell", options={"maxiter": iterations, "ftol": 1e-3})
    return unpacked(found.x), -float(found.fun)


@dataclass(frozen=True)
class Tried:
    """One way of choosing measurements on one stand-in: how many until within 2 % of the best, and at its end."""

    needed: float
    stopped: float = math.nan
    right: bool = True


def tuned(
    candidates: Candidates, truth: Floats, tpot_s: Floats, seed: int, error_correlation: ErrorCorrelation
) -> Tried:
    """`raysearch tune-live` on a truth of [n] tokens/s/GPU (0 beyond the SLO) and seconds per token."""
    rng = np.random.default_rng(seed)
    rate = np.where(truth > 0, truth, np.exp(candidates.log_rate + candidates.log_tpot) / tpot_s)

    def measure(index: int) -> Measurement:
        blur = math.exp(NOISE * rng.standard_normal())
        return Measurement(float(rate[index]) / blur, float(tpot_s[index]) * blur)

    seen: list[Measured] = []
    needed, final = math.inf, None
    for step in tune(candidates, Settings(WITHIN, CONFIDENCE, NOISE, seed), measure, seen, 60, error_correlation):
        final = step.decision.incumbent
        if not math.isfinite(needed) and final is not None and truth[final] >= (1 - WITHIN) * truth.max():
            needed = len(seen)
    right = final is not None and bool(truth[final] >= (1 - WITHIN) * truth.max())
    return Tried(needed if math.isfinite(needed) else len(truth), len(seen), right)


def in_order(order: Sequence[int], truth: Floats) -> Tried:
    """Measures one after the other; one knows what one has measured, and nothing else."""
    good = truth >= (1 - WITHIN) * truth.max()
    return Tried(1 + next(place for place, index in enumerate(order) if good[index]))


def by_tpe(candidates: Candidates, truth: Floats, seed: int) -> Tried:
    """Optuna's TPE over the degrees and the batch; it gets the nearest configuration that is not measured yet."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    places, left, order = candidates.places, set(range(len(truth))), []
    while left:
        trial = study.ask()
        wish = np.array(
            [trial.suggest_float(str(axis), column.min(), column.max() + 1e-6) for axis, column in enumerate(places.T)]
        )
        index = min(left, key=lambda each: float(((places[each] - wish) ** 2).sum()))
        study.tell(trial, float(truth[index]))
        left.remove(index)
        order.append(index)
    return in_order(order, truth)


def on_measured(data: Path) -> None:
    """Prints the table of the measured runs: a model's error correlation and engine times are those of the others."""
    deployments = measured_deployments(data)
    found: dict[str, list[Tried]] = defaultdict(list)
    for model in sorted({each.model for each in deployments}):
        error_correlation, _ = fit([each for each in deployments if each.model != model], iterations=3)
        for each in [each for each in deployments if each.model == model and len(each.measured_s) >= LEAST]:
            for share in TIGHT:
                compare(each, share, error_correlation, found)
    print_table(f"{len(found['tune-live'])} choices among measured configurations", found)


def compare(each: Deployment, share: float, error_correlation: ErrorCorrelation, found: dict[str, list[Tried]]) -> None:
    """Tries every way on one deployment under an SLO that a share of its configurations meets."""
    limit_s = between(each.measured_s, share)
    candidates = replace(each.candidates, workload=replace(each.candidates.workload, tpot_slo_s=limit_s))
    rate = np.exp(candidates.log_rate - each.errors)
    truth = np.where(each.measured_s <= limit_s, rate, 0.0)
    stated = np.where(candidates.log_tpot <= math.log(limit_s), candidates.log_rate, candidates.log_rate - 1e3)
    rng = np.random.default_rng(0)
    found["tune-live"].append(tuned(candidates, truth, each.measured_s, 0, error_correlation))
    found["simulator's list, in order"].append(in_order(np.argsort(-stated).tolist(), truth))
    shuffled = [in_order(rng.permutation(len(truth)).tolist(), truth).needed for _ in range(100)]
    found["any order"].append(Tried(statistics.mean(shuffled)))
    tpe = [by_tpe(candidates, truth, seed).needed for seed in range(5)]
    found["TPE"].append(Tried(statistics.mean(tpe)))


def between(measured_s: Floats, share: float) -> float:
    """A limit that a share of the values meets, halfway to the next, so that noise does not decide who meets it."""
    ascending = np.sort(measured_s)
    last = max(1, round(share * len(ascending))) - 1
    return float(ascending[last] * (ascending[last + 1] / ascending[last]) ** 0.5) if last + 1 < len(ascending) else 1e9


SERVED = (("qwen3_32b", 8, 30.0), ("llama_3_1_70b", 8, 40.0), ("qwen3_235b_a22b", 16, 40.0), ("minimax_m2_5", 16, 40.0))
"""Model, GPUs and milliseconds per token of the stand-ins between engines; 4,000 tokens in, 500 out."""
BUDGET = 400


def on_engines(searchers: Sequence[str], seeds: int) -> None:
    """Prints the table of the stand-ins between engines: vLLM's simulator, and SGLang's kernels and times as truth."""
    found: dict[str, list[Tried]] = defaultdict(list)
    for model, gpus, tpot_ms in SERVED:
        stated, true = (
            Question(
                model=model,
                isl=4000,
                osl=500,
                engine=engine,
                weights="fp8_block",
                kv_cache="bf16",
                tpot_ms=tpot_ms,
                ttft_ms=0,
                gpus=gpus,
                batches="powers_of_two",
                confidence=0.5,  # a machine's times are what they are
            ).load()
            for engine in ("vllm", "sglang")
        )
        candidates = candidates_of(heuristic_space(stated, sequence_parallel=False))
        answers = [evaluate(true, strategy) for strategy in candidates.strategies]
        truth = np.array([each.tokens_per_s_per_gpu if each.feasible else 0.0 for each in answers])
        tpot_s = np.array([each.tpot_s for each in answers])
        for seed in range(seeds):
            found["tune-live"].append(tuned(candidates, truth, tpot_s, seed, ERROR_CORRELATION))
            found["simulator's list, in order"].append(in_order(range(len(truth)), truth))
            for name in searchers:
                found[name].append(searched(name, true, truth.max(), seed))
    print_table(f"{len(SERVED)} deployments between engines, {seeds} seeds", found)


def searched(name: str, true: Workload, best: float, seed: int) -> Tried:
    """A black-box searcher over the same degrees; repeated calls are not measured again."""
    asked: set[Strategy] = set()

    def ask(workload: Workload, strategy: Strategy) -> Evaluation:
        asked.add(strategy)
        return evaluate(workload, strategy)

    space = StrategySpace(true, fixed_dims=megatron_dims(true.model))
    env = StrategyEnv(true, evaluate=ask, space=space)
    options = {"terms": "carried"} if name == "prior" else {}  # nothing that was measured of the truth
    searcher = make_searcher(name, space, seed=seed, budget=BUDGET, **options)
    stepped = Stepped(env)
    for _ in range(BUDGET):
        if not stepped.advance(searcher):
            break
        if env.best >= (1 - WITHIN) * best:
            return Tried(len(asked))
    return Tried(BUDGET)


def print_table(title: str, found: dict[str, list[Tried]]) -> None:
    """Mean, median, ninth decile and maximum of the measurements needed."""
    print(f"\n{title}\n| | mean | median | 90% | most | stops after | right then |\n|---|---|---|---|---|---|---|")
    mean: Callable[[list[float]], float] = statistics.mean
    for name, tried in found.items():
        needed = np.array([each.needed for each in tried])
        figures = [mean(needed.tolist()), *np.quantile(needed, (0.5, 0.9, 1.0)).tolist()]
        stops = "- | -"
        if not math.isnan(tried[0].stopped):
            stops = f"{mean([each.stopped for each in tried]):.1f} | {mean([float(each.right) for each in tried]):.0%}"
        print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + f" | {stops} |", flush=True)


def main() -> None:
    """Reads the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with endtoend_ttft_tpot.csv")
    parser.add_argument("--fit", action="store_true", help="fit the error_correlation to all of --data, and print it")
    parser.add_argument("--engines", action="store_true", help="the stand-ins between engines")
    parser.add_argument("--searcher", action="append", help="beside it (default: prior, optuna_tpe, ppo, random)")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.fit:
        print(fit(measured_deployments(arguments.data)))
    elif arguments.data:
        on_measured(arguments.data)
    if arguments.engines:
        on_engines(arguments.searcher or ("prior", "optuna_tpe", "ppo", "random"), arguments.seeds)


if __name__ == "__main__":
    main()
