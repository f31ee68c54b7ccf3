"""How good the best strategy is after 1, 3, 10, ... calls: searchers beside each other, on ground the prior never saw.

    python benchmarks/first_calls.py --out curves.jsonl                        # every case, searcher and seed
    python benchmarks/first_calls.py --out curves.jsonl --cases machines --searchers prior,genetic --seeds 5 --calls 100
    python benchmarks/first_calls.py --out curves.jsonl --table                # the table alone
    python benchmarks/first_calls.py --out curves.jsonl --plot curves.svg      # a picture of it
    python benchmarks/first_calls.py --out docs/evidence/learning.md --plot curves.svg  # of its tables

A case is a workload and a black box that answers for it; those of the group `drawn` are random, on machines out by
factors, and of `left_out` what configs/pretraining/left_out.toml leaves out. f/f* is the true figure of the best
strategy so far over the exact optimum of the black box; before anything is feasible it is 0. Where answers are noisy
the best is, for every searcher, what a search of a black box that declares its noise reports: see
`raysearch.runs.believed`. `prior` expects of every case what the simulator says of a machine that nobody measured
(terms `carried`), "prior:network" what the network says; its header has what that was trained on: none of the workloads
and models here, no machine but the H100, no engine but vLLM. A searcher "NAME:rule" begins with twenty strategies by
rule of thumb, "prior:as_is" does not learn from answers, "prior:policy" lets the shipped policy decide the first five;
in "prior:no_history" that does not read the calls so far, in "prior:no_workload" not the workload's token;
"prior:network+improvement" is the network without it.
`optuna_gp`, `smac`, `botorch`, `vizier` are of `library_peers.py`.
Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from library_peers import PEERS, make_peer

from envs.space import Action, StrategySpace
from envs.strategy_env import StrategyEnv
from raysearch.base.file_io import strategy_dict
from raysearch.optima.named_spaces import optimum_value
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.search_tables import table_workload
from raysearch.searchers.prior.black_box_belief import Answer as Answered
from raysearch.searchers.prior.black_box_belief import BlackBoxBelief
from raysearch.searchers.prior.network import SHIPPED_PRIOR, read_prior
from raysearch.searchers.prior.policy import SHIPPED_POLICY, read_policy, write_policy
from raysearch.searchers.prior.simulated_terms import carried_over
from raysearch.searchers.registry import make_searcher
from raysearch.searchers.rule_of_thumb import rule_of_thumb
from raysearch.searchers.start import StartedSearcher
from raysearch.testing.stepping import Stepped
from sim.config.catalog import load_workload, under_engine
from sim.config.files import config_path, read_config
from sim.config.question import Question
from sim.evaluation import Evaluation, Violation
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

POINTS = (1, 3, 5, 10, 15, 20, 30, 100, 300, 1000)
SHIPPED = ("gpt_moe_1_2t_16k", "gpt_moe_1_2t_32k", "gpt_moe_1_2t_64k", "gpt_moe_1_6t_16k", "gpt_moe_1_6t_32k")
SHIPPED = (*SHIPPED, "gpt_moe_1_6t_64k")
UNSEEN = (
    "qwen3_235b_a22b_16k", "qwen3_235b_a22b_40k_nccl", "mixtral_8x22b_8k", "mixtral_8x22b_32k",
    "mixtral_8x22b_16k_slo20", "mixtral_8x7b_32k_slo15", "llama_3_1_405b_8k", "llama_3_1_405b_32k",
    "gpt_moe_1_8t_12k", "gpt_moe_1_8t_24k_slo30", "gpt_moe_1_2t_256k", "gpt_moe_1_6t_8k",
)  # fmt: skip
MACHINES = (
    "a100_80_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200_nvl72", "gb300_nvl72", "l40s", "rtx_pro_6000_server",
)  # fmt: skip
EXTENDED = ("qwen3_235b_a22b_16k", "gpt_moe_1_2t_16k", "llama_3_1_405b_8k", "mixtral_8x22b_8k")
ON_MACHINES = ("qwen3_235b_a22b_16k", "llama_3_1_405b_8k")
DRAWN = 60
"""Random workloads on machines out by factors, from where those end that the policy was trained on."""
_BF16 = {"weights": "bf16", "activations": "bf16"}
TIGHT = 1.15
"""SLO of a tight workload, over the shortest time per token that any feasible strategy has, about."""
LIST = "simulator's list"
SEARCHERS = ("prior", "prior:policy", "prior:as_is", "prior:rule", LIST, "genetic", "genetic:rule", "optuna_tpe")

OPTIONS: dict[str, dict[str, Any]] = {
    "as_is": {"adapt": False},
    "policy": {"policy": str(SHIPPED_POLICY)},
    "improvement": {"policy": "none"},
    "network": {"terms": "network"},
}
"""Of `prior`."""
UNREAD = {"no_history": "of_calls", "no_workload": "of_workload"}
"""Layers of the policy that read nothing, by option of `prior`."""

Answer = Callable[[Workload, Strategy], Evaluation]


@dataclass(frozen=True)
class Case:
    """A workload and the black box that answers for it.

    Attributes:
        group, name: Of the table, and of the case.
        workload: The one that searchers know.
        noise: Standard deviation of the log of an answer about the truth.
        believed: What the built-in simulator takes for the truth, for the list that it would make.
    """

    group: str
    name: str
    workload: Workload
    noise: float = 0.0
    believed: Workload | None = None


def cases(groups: Sequence[str] = ()) -> Iterator[Case]:
    """Those of some groups, all by default."""
    for group, of_group in GROUPS.items():
        if group in (groups or GROUPS):
            yield from of_group(group)


def _as_they_are(names: Sequence[str], **changed: str) -> Callable[[str], Iterator[Case]]:
    suffix = "".join(f" {value}" for value in changed.values())
    return lambda group: (Case(group, f"{name}{suffix}", load_workload(name, **changed)) for name in names)


def _machines(group: str) -> Iterator[Case]:
    for machine in MACHINES:
        for name in ON_MACHINES:
            workload = load_workload(name, machine, precisions=_BF16 if machine == "a100_80_sxm" else {})
            yield Case(group, f"{name} on {machine}", workload, believed=carried_over(workload))


def _tight_ones(group: str) -> Iterator[Case]:
    for name in ("gpt_moe_1_2t_16k", "gpt_moe_1_6t_32k", *UNSEEN[:5]):
        yield Case(group, f"{name} tight", _tight(load_workload(name)))


def _drawn(group: str) -> Iterator[Case]:
    pretraining = read_config(config_path("pretraining", "default"), PretrainingFile)
    for index in range(pretraining.policy.tables, pretraining.policy.tables + DRAWN):
        workload = table_workload(pretraining, index)
        yield Case(group, workload.name, workload)


def _engines(group: str) -> Iterator[Case]:
    for engine in ("sglang", "trtllm"):
        for name in ON_MACHINES:
            served = load_workload(name, phase="serve", prompt_tokens=4000, output_tokens=500, max_gpus=128)
            yield Case(
                group, f"{name} under {engine}", under_engine(served, engine), believed=under_engine(served, "vllm")
            )


def _noisy_ones(group: str) -> Iterator[Case]:
    for name in (*SHIPPED[:2], *UNSEEN[:2]):
        yield Case(group, f"{name} with noise", load_workload(name), noise=0.05)


def _left_out(group: str) -> Iterator[Case]:
    for model in ("deepseek_v3", "glm_5"):
        question = Question(model=model, isl=16000, osl=500, phase="decode", gpus=256, tpot_ms=50, engine="none")
        yield Case(group, f"{model}, latent attention", question.load())
    yield from _as_they_are(ON_MACHINES, space="extended")(group)


GROUPS: dict[str, Callable[[str], Iterator[Case]]] = {
    "shipped": _as_they_are(SHIPPED),
    "unseen": _as_they_are(UNSEEN),
    "machines": _machines,
    "tight": _tight_ones,
    "extended": _as_they_are(EXTENDED, space="extended"),
    "drawn": _drawn,
    "engines": _engines,
    "noise": _noisy_ones,
    "left_out": _left_out,
}
"""Cases by the name of their group."""


@cache
def _tight(workload: Workload) -> Workload:
    """The workload with the shortest SLO that a search by halves finds something for, times `TIGHT`."""
    low, high = 1e-4, workload.tpot_slo_s
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        asked = replace(workload, tpot_slo_s=middle, config_hash=f"{workload.config_hash}-{middle:.6f}")
        low, high = (low, middle) if optimum_value(asked) else (middle, high)
    slo_s = high * TIGHT
    return replace(workload, tpot_slo_s=slo_s, config_hash=f"{workload.config_hash}-tight-{slo_s:.6f}")


def noisy(noise: float, seed: int) -> Answer:
    """Our simulator, whose every time is out by a factor that the strategy and the seed decide."""

    def answer(workload: Workload, strategy: Strategy) -> Evaluation:
        found = evaluate(workload, strategy)
        rng = np.random.default_rng([seed, zlib.crc32(repr(strategy).encode())])
        factor = float(np.exp(rng.normal(0, noise)))
        tpot_s = found.tpot_s * factor
        others = tuple(each for each in found.violations if each.kind != "tpot")
        late = tpot_s > workload.tpot_limit_s
        violations = (*others, *([Violation("tpot", tpot_s, workload.tpot_limit_s, "late")] if late else []))
        tokens = found.tokens_per_s_per_gpu / factor
        return replace(found, tpot_s=tpot_s, tokens_per_s_per_gpu=tokens, violations=violations)

    return answer


def _listed(case: Case, space: StrategySpace, count: int) -> list[Action]:
    """What the built-in simulator would have one measure, the best first: the feasible strategies it finds."""
    env = StrategyEnv(case.believed or case.workload)
    searcher = make_searcher("prior", env.space, seed=0, budget=count * 3)
    stepped = Stepped(env)
    found: list[tuple[float, Action]] = []
    for _ in range(count * 3):
        stepped.advance(searcher)
        assert stepped.outcome is not None
        assert stepped.action is not None
        with contextlib.suppress(ValueError):  # what another engine does not have
            found.append((stepped.outcome.raw, space.encode(env.space.decode(stepped.action))))
    return [action for _, action in sorted(found, key=lambda each: -each[0])[:count]]


@cache
def policy_without(layer: str) -> Path:
    """The shipped policy with a layer that reads nothing."""
    policy = read_policy(SHIPPED_POLICY)
    unread = {name: np.zeros_like(policy.arrays[name]) for name in (f"{layer}.weight", f"{layer}.bias")}
    path = Path(tempfile.mkdtemp()) / f"{layer}.safetensors"
    write_policy(path, policy.header, {**policy.arrays, **unread})
    return path


def curve(case: Case, searcher: str, seed: int, calls: int, weights: str = "") -> list[float]:
    """f/f* after each of `POINTS` up to `calls`; `weights` are a file of the prior's."""
    optimum = optimum_value(case.workload)
    assert optimum
    env = StrategyEnv(case.workload, evaluate=noisy(case.noise, seed) if case.noise else evaluate)
    name, _, option = searcher.partition(":")
    options: dict[str, Any] = {"terms": "carried", "weights": weights} if name == "prior" else {}
    for each in option.split("+"):
        options |= OPTIONS.get(each, {})
    if option in UNREAD:
        options |= {"policy": str(policy_without(UNREAD[option]))}
    if option == "rule":
        options |= {"start": [strategy_dict(each) for each in rule_of_thumb(env.space)]}
    planned = iter(_listed(case, env.space, calls)) if searcher == LIST else None
    made = None
    if name in PEERS:
        made = make_peer(name, env.space, seed, max(calls, 100))
        if option == "rule":
            made = StartedSearcher(made, [env.space.encode(each) for each in rule_of_thumb(env.space)])
    elif not planned:
        made = make_searcher(name, env.space, seed=seed, budget=max(calls, 100), **options)
    stepped = Stepped(env)
    called, found = list[tuple[Action, Answered]](), list[float]()
    for call in range(1, calls + 1):
        if made:
            stepped.advance(made)
        elif planned and (action := next(planned, None)) is not None:
            stepped.begin(action)
            stepped.take()
        if stepped.outcome and stepped.action is not None:
            of_call = stepped.outcome
            called.append((stepped.action, Answered(of_call.raw, of_call.excess, of_call.simulated)))
        if call in POINTS:
            found.append(min(_reported(case, env.space, called) / optimum, 1.0) if called else 0.0)
    return found


def _reported(case: Case, space: StrategySpace, called: Sequence[tuple[Action, Answered]]) -> float:
    """True tokens/s/GPU of what a search of these calls reports."""
    if not case.noise:
        return max(answer.raw for _, answer in called)
    belief = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space, "carried", noise=case.noise)
    belief.note_all(np.array([action for action, _ in called]), [answer for _, answer in called])
    belief.learn()
    if not (best := belief.believed_best()):
        return 0.0
    truth = evaluate(case.workload, space.decode(called[best[0]][0]))
    # Over a limit by luck of the noise is what a deployment would find out: it counts as it is.
    return truth.tokens_per_s_per_gpu * min(1.0, case.workload.tpot_limit_s / truth.tpot_s)


def main() -> None:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("curves.jsonl"))
    parser.add_argument("--cases", default="", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--searchers", default=",".join(SEARCHERS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--weights", default="", help="file of a prior, by default the one that ships")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    if not (asked.table or asked.plot):
        lines = asked.out.read_text().splitlines() if asked.out.is_file() else []
        done = {(row["case"], row["searcher"], row["seed"], row["calls"]) for row in map(json.loads, lines)}
        wanted = list(cases(asked.cases.split(",") if asked.cases else ()))
        for case in wanted:
            if not optimum_value(case.workload):
                print(f"{case.name}: nothing is feasible")
        wanted = [case for case in wanted if optimum_value(case.workload)]
        for seed in range(asked.seeds):  # all cases first, so that a run that is stopped has a seed of each
            for case in wanted:
                for searcher in asked.searchers.split(","):
                    once = searcher == LIST and not case.noise
                    if (case.name, searcher, seed, asked.calls) in done or (once and seed):
                        continue
                    found = curve(case, searcher, seed, asked.calls, asked.weights)
                    row = {"group": case.group, "case": case.name, "searcher": searcher, "seed": seed}
                    with asked.out.open("a") as file:
                        file.write(json.dumps({**row, "calls": asked.calls, "curve": found}) + "\n")
    text = asked.out.read_text()
    found = tabled(text) if asked.out.suffix == ".md" else grouped([json.loads(line) for line in text.splitlines()])
    plot(found, asked.plot) if asked.plot else print_table(found)


Curves = dict[tuple[str, str], dict[str, list[list[float]]]]
"""Of each group and searcher, the curves of each case's seeds."""


def grouped(rows: list[dict[str, Any]]) -> Curves:
    """The rows of a file."""
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for row in rows:
        curves[row["group"], row["searcher"]][row["case"]].append(row["curve"])
    return curves


def tabled(page: str) -> Curves:
    """Means of a page's tables like those that are printed, of grounds with several searchers.

    Where a table has names in bold, of those rows alone.
    """
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for table in re.split(r"\n\n+", page):
        rows = [[cell.strip() for cell in line.strip(" |").split("|")] for line in table.splitlines()]
        rows = [row for row in rows if len(row) > 3 and re.match(r"\d+ x \d+", row[2])]
        bold = any(row[1].startswith("**") for row in rows)
        for ground, searcher, count, *cells in rows:
            if bold <= searcher.startswith("**"):
                means = [float(cell.split()[0]) for cell in cells if cell]
                for case in range(int(count.split()[0])):
                    curves[ground, searcher.strip("*").removesuffix(" (luckiest)")][str(case)].append(means)
    several = Counter(ground for ground, _ in curves)
    return {key: by_case for key, by_case in curves.items() if several[key[0]] > 1}


def plot(curves: Curves, path: Path) -> None:
    """Means over cases against calls, a panel per group."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group for group, _ in curves))
    searchers = sorted({searcher for _, searcher in curves})
    figure = Figure(figsize=(4 * len(groups), 3.2), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        longest, cases = 0, 0
        for place, searcher in enumerate(searchers):
            if by_case := curves.get((group, searcher)):
                points = min(len(curve) for each in by_case.values() for curve in each)
                means = np.mean([np.mean([curve[:points] for curve in each], axis=0) for each in by_case.values()], 0)
                panel.plot(POINTS[:points], means, marker="o", markersize=3, color=f"C{place}", label=searcher)
                longest, cases = max(longest, points), max(cases, len(by_case))
        panel.set(title=f"{group}, {cases} cases", xscale="log", xlabel="calls", ylim=(0, 1.02))
        panel.set_xticks(POINTS[:longest], map(str, POINTS[:longest]), minor=False)
        panel.minorticks_off()
    by_name = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    figure.legend(by_name.values(), by_name.keys(), fontsize=8, loc="outside right")
    panels[0].set_ylabel("f/f*, mean over cases")
    figure.savefig(path)


def print_table(curves: Curves) -> None:
    """Means over cases of means over seeds, the worst case, and 95 % intervals of the mean by bootstrap over cases."""
    rng = np.random.default_rng(0)
    longest = max(len(curve) for by_case in curves.values() for each in by_case.values() for curve in each)
    print(f"| ground | searcher | cases x seeds | {' | '.join(map(str, POINTS[:longest]))} |")
    print("|---|---|---|" + "---|" * longest)
    for (group, searcher), by_case in sorted(curves.items()):
        points = min(len(curve) for each in by_case.values() for curve in each)
        means = np.array([np.mean([curve[:points] for curve in each], axis=0) for each in by_case.values()])
        drawn = means[rng.integers(len(means), size=(2000, len(means)))].mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
        cells = [
            f"{mean:.3f} [{down:.3f}, {up:.3f}] ({worst:.2f})"
            for mean, down, up, worst in zip(means.mean(0), low, high, means.min(0), strict=True)
        ]
        cells += [""] * (longest - points)
        seeds = f"{len(means)} x {max(map(len, by_case.values()))}"
        print(f"| {group} | {searcher} | {seeds} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
