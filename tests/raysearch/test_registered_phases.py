"""A phase that nobody delivers, registered here alone: a pool that embeds prompts and answers none of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raysearch as rs
from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.nearness import idle_slos
from sim.ops.heuristics import megatron_dims
from sim.ops.sizes import Load
from sim.optimum.certificate import certify
from sim.optimum.checker import check
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import joint_space
from sim.prices.engine import BARE
from sim.serving.phases import Batching, Pace, Phase, register_phase, withdraw_phase
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

Command = Callable[..., subprocess.CompletedProcess[str]]


def embedding(workload: Workload, batch: int, dp: int) -> Batching:
    """Steps that compute whole prompts and count one embedding each."""
    load = Load(0, 1, workload.prompt_tokens, batch, workload.prompt_tokens, attention_groups=dp)
    times = workload.engine.times if workload.engine else BARE
    return Batching(None, load, Pace(1.0, 1.0, 1, math.ceil(batch / dp)), times, batch, batch)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_phase(Phase("embed", "a pool that embeds prompts", embedding, decodes=False, prefills=True))
    yield
    withdraw_phase("embed")


# --- nothing below says anything of the phase to the simulator --------------------------------------------


@pytest.fixture(scope="module")
def workload() -> Workload:
    shipped = load_workload("mixtral_8x22b_8k")
    return dataclasses.replace(shipped, phase="embed", prompt_tokens=2000, output_tokens=1, tpot_slo_s=math.inf)


def test_its_figures_are_those_of_prompts_per_second(workload: Workload) -> None:
    strategy = Strategy(4, 2, 2, 8, megatron_dims(workload.model))
    mine = evaluate(workload, strategy)
    prompts = evaluate(dataclasses.replace(workload, phase="prefill"), strategy)
    assert mine.tokens_per_s_per_gpu == pytest.approx(prompts.tokens_per_s_per_gpu / 2000, rel=1e-12)
    assert (mine.tpot_s, mine.ttft_s, mine.memory_bytes) == (0.0, prompts.ttft_s, prompts.memory_bytes)
    assert mine.interval_because == prompts.interval_because


def test_its_optimum_is_that_of_brute_force(workload: Workload) -> None:
    workload = dataclasses.replace(workload, ttft_slo_s=1.0)
    dims = zip(joint_space(workload).choices, ((choice,) for choice in megatron_dims(workload.model)), strict=True)
    table = dict(dims) | {"attention": (0, 1, 2), "attn_norm": (0, 2), "o_proj": (0, 1, 2), "combine": (0, 2)}
    space = dataclasses.replace(
        joint_space(workload), tp=(1, 2, 4), ep=(1, 2, 4), pp=(1, 2), batch=(1, 2, 4, 8), choices=table
    )
    every = evaluate_many(
        workload,
        [
            Strategy(tp, ep, pp, batch, each)
            for tp, ep, pp, batch in itertools.product(space.tp, space.ep, space.pp, space.batch)
            for each in itertools.product(*space.choices.values())
        ],
    )
    best = find_best(space).evaluation
    assert best is not None
    assert 0 < every.feasible.sum() < len(every)
    assert best.tokens_per_s_per_gpu == pytest.approx(every.tokens_per_s_per_gpu[every.feasible].max(), rel=1e-12)
    check(space, certify(space, best))


def test_an_slo_of_tokens_that_it_does_not_make_is_reported(workload: Workload) -> None:
    warnings = idle_slos(dataclasses.replace(workload, tpot_slo_s=0.05))
    assert warnings == ["the SLO of the time per output token limits nothing: phase embed makes no such token"]


def test_it_is_a_phase_of_files(tmp_path: Path, raysearch: Command) -> None:
    text = Path("configs/workloads/mixtral_8x22b_8k.toml").read_text(encoding="utf-8")
    text = text.replace('phase = "decode"', 'phase = "embed"\nprompt_tokens = 2000\noutput_tokens = 1')
    lines = [line for line in text.splitlines() if not line.startswith("context_tokens")]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    answer = json.loads(
        raysearch("evaluate", "-w", str(path), "--tp", "4", "--ep", "2", "--batch", "8", "--json").stdout
    )
    assert answer["phase"] == "embed"
    assert answer["tpot_s"] is None
    assert answer["ttft_s"] > 0


def test_it_is_searched(tmp_path: Path) -> None:
    question = rs.question(model="mistral_7b", phase="embed", isl=2000, osl=1, ttft_ms=2000, gpus=4)
    found = rs.search(question, searcher="random", budget=20, out=tmp_path / "found")
    assert found.strategy is not None
    assert found.fraction_of_optimum is not None
    assert 0 < found.fraction_of_optimum <= 1


def test_it_is_explained(raysearch: Command) -> None:
    asked = ("--model", "mistral_7b", "--phase", "embed", "--isl", "2000", "--osl", "1", "--tp", "2", "--batch", "4")
    done = raysearch("explain", *asked)
    assert done.returncode == 0
    assert "residual_in[t, d] to the next layer" in done.stdout


@pytest.mark.parametrize("command", ["evaluate", "optimum", "recommend"])
def test_it_is_a_phase_of_options_and_is_printed(raysearch: Command, command: str) -> None:
    asked = ("--model", "mistral_7b", "--phase", "embed", "--isl", "2000", "--osl", "1", "--ttft-ms", "2000")
    more = {
        "evaluate": ("--tp", "2", "--batch", "4"),
        "optimum": ("--gpus", "4"),
        "recommend": ("--gpus", "4", "--engine", "vllm"),
    }
    done = raysearch(command, *asked, *more[command])
    assert done.returncode == 0
    assert "ms to the first token" in done.stdout
    assert "per output token" not in done.stdout


def test_an_unknown_phase_names_what_there_is(raysearch: Command) -> None:
    lengths = ("--isl", "9", "--osl", "1", "--batch", "1")
    done = raysearch("evaluate", "--model", "mistral_7b", "--phase", "embeds", *lengths)
    assert done.returncode == 2
    assert "did you mean 'embed'?" in done.stderr


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (Phase("serve", "", embedding, decodes=False, prefills=True), "already"),
        (Phase("idle", "", embedding, decodes=False, prefills=False), "neither decodes nor computes prompts"),
    ],
)
def test_what_cannot_be_is_refused(phase: Phase, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_phase(phase)


def test_a_shipped_phase_stays() -> None:
    with pytest.raises(ValueError, match="expected a phase that was registered, got 'serve'"):
        withdraw_phase("serve")
