"""Replicas under traffic: queueing theory, hand arithmetic, conservation, and the steady state of `evaluate`."""

from dataclasses import replace

import numpy as np
import pytest

import raysearch as rs
from sim.prices.engine import SchedulerPolicy
from sim.replay import replica as replica_module
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.drive import ROUTERS, Replayed, RouterName, as_they_come, by_clients
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.scheduler import Scheduler
from sim.replay.step_prices import RankStep
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload


def _asked(model: str = "llama_3_1_8b", engine: str = "vllm", isl: int = 1000, osl: int = 100) -> Workload:
    return rs.question(model=model, isl=isl, osl=osl, engine=engine, hardware="h100_sxm", gpus=16).load()


def _strategy(workload: Workload, pp: int = 1) -> Strategy:
    return rs.evaluate(rs.question(model=workload.model.name, isl=1000, osl=100), batch=64, tp=1, pp=pp).strategy


@pytest.fixture(scope="module")
def workload() -> Workload:
    return _asked()


@pytest.fixture(scope="module")
def deployed(workload: Workload) -> Deployed:
    return Deployed.of(workload, _strategy(workload))


def _with(deployed: Deployed, most: int = 64, room: float = 1e9, **policy: object) -> Deployed:
    rules = replace(SchedulerPolicy(block_tokens=1), **policy)  # type: ignore[arg-type]
    return replace(deployed, scheduler=Scheduler(rules, most, False), room_tokens=room)


def _sent(times: list[float], prompts: list[int], answers: list[int], **others: object) -> Requests:
    return Requests(np.array(times), np.array(prompts), np.array(answers), **others)  # type: ignore[arg-type]


def _prompt_s(deployed: Deployed, tokens: int) -> float:
    prices = deployed.prices
    return prices.step_s(RankStep(0, 0.0, tokens, tokens * tokens / 2)) + prices.engine_s(0)


def _decode_s(deployed: Deployed, sequences: int, context: float) -> float:
    prices = deployed.prices
    return prices.step_s(RankStep(sequences, sequences * context)) + prices.engine_s(sequences)


# --- by hand ------------------------------------------------------------------------------------------


def test_a_client_whose_request_never_fits_sends_its_next_one_at_once(deployed: Deployed) -> None:
    sent = _sent([0.0] * 5, [5000, 100, 5000, 5000, 100], [4] * 5)
    done = by_clients(_with(deployed, room=1000.0), sent, 1)
    assert np.isnan(done.done_s).tolist() == [True, False, True, True, False]
    assert done.sent_s[1] == 0.0
    assert done.sent_s[2:].tolist() == [done.done_s[1]] * 3
    many = _sent([0.0] * 3000, [5000] * 3000, [4] * 3000)
    assert all(np.isnan(by_clients(_with(deployed, room=1000.0), many, 2, count).done_s).all() for count in (1, 2))


@pytest.mark.parametrize("router", ROUTERS)
def test_clients_of_several_replicas_have_one_request_open_each(deployed: Deployed, router: RouterName) -> None:
    sent = Requests.drawn(np.zeros(200), Lengths(500, 0.5), Lengths(40, 0.5), 0)
    done = by_clients(_with(deployed), sent, 12, 3, router)
    opened, closed = done.sent_s[12:], np.sort(done.done_s)
    assert (done.sent_s[:12] == 0).all()
    assert np.isin(opened, closed).all()
    assert max((done.sent_s <= at).sum() - (closed <= at).sum() for at in opened) == 12
    assert done.replicas == 3
    patient = replace(_with(deployed), patience_s=1e9)  # whose decode steps are not left until somebody asks
    assert done.done_s == pytest.approx(by_clients(patient, sent, 12, 3, router).done_s, rel=1e-12)


def test_clients_shared_out_over_replicas_are_served_as_those_of_one(deployed: Deployed) -> None:
    sent = Requests.drawn(np.zeros(400), Lengths(500), Lengths(40), 0)
    one, two = by_clients(_with(deployed), sent, 8), by_clients(_with(deployed), sent, 16, 2)
    assert two.end_s == pytest.approx(one.end_s / 2, rel=0.05)
    assert two.latency_s.mean() == pytest.approx(one.latency_s.mean(), rel=0.05)


def test_a_lone_request_takes_its_prompt_and_one_step_a_token(deployed: Deployed) -> None:
    done = as_they_come(_with(deployed), _sent([0.5], [1000], [4]))
    prompt_s = _prompt_s(deployed, 1000)
    assert done.ttft_s[0] == pytest.approx(prompt_s)
    steps = [_decode_s(deployed, 1, 1000 + gained) for gained in range(3)]
    assert done.latency_s[0] == pytest.approx(prompt_s + sum(steps))
    assert done.tpot_s[0] == pytest.approx(np.mean(steps))


def test_first_come_first_served(deployed: Deployed) -> None:
    one_by_one = _with(deployed, step_tokens=1000)
    done = as_they_come(one_by_one, _sent([0.0, 0.0, 0.0], [1000] * 3, [1] * 3))
    assert done.first_s == pytest.approx([each * _prompt_s(deployed, 1000) for each in (1, 2, 3)])


def test_a_chunked_prompt_takes_as_many_steps_as_chunks(deployed: Deployed) -> None:
    done = as_they_come(_with(deployed, step_tokens=400, chunks=True), _sent([0.0], [1000], [1]))
    prices, engine_s = deployed.prices, deployed.prices.engine_s(0)
    chunks = [(400, 0), (400, 400), (200, 800)]
    steps = [prices.step_s(RankStep(0, 0.0, new, new * (old + new / 2))) + engine_s for new, old in chunks]
    assert done.first_s[0] == pytest.approx(sum(steps))
    assert len(done.steps) == 3


def test_others_stand_still_where_prompts_go_first_and_go_on_where_steps_mix(deployed: Deployed) -> None:
    sent = _sent([0.0, 0.02], [1000, 1000], [40, 1])
    alone, apart, mixed = (
        as_they_come(_with(deployed, mixes=mixes), each)
        for mixes, each in ((True, _sent([0.0], [1000], [40])), (False, sent), (True, sent))
    )
    longer_s = apart.done_s[0] - alone.done_s[0]
    assert longer_s == pytest.approx(_prompt_s(deployed, 1000))
    assert apart.gap_s.max() == pytest.approx(_prompt_s(deployed, 1000) + apart.gap_s.min(), rel=0.02)
    assert 0 < mixed.done_s[0] - alone.done_s[0] < longer_s  # the step with the prompt gives a token, too


def test_a_replica_whose_last_step_has_begun_still_has_its_request(deployed: Deployed) -> None:
    prompt_s, step_s = _prompt_s(deployed, 1000), _decode_s(deployed, 1, 1000)
    sent = _sent([0.0, prompt_s + step_s / 2], [1000, 1000], [2, 2])
    done = as_they_come(_with(deployed), sent, 2, "least_loaded")
    assert done.ttft_s == pytest.approx([prompt_s, prompt_s])  # the second goes to the other one and waits for no step


def test_a_scheduler_that_looks_every_tenth_step_sees_a_request_then(deployed: Deployed) -> None:
    each = Scheduler(SchedulerPolicy(block_tokens=1, mixes=False), 64, False)
    sent = _sent([0.0, _prompt_s(deployed, 1000) + 2.5 * _decode_s(deployed, 1, 1000)], [1000, 1000], [40, 1])
    at_once, later = (
        as_they_come(replace(_with(deployed), scheduler=replace(each, receive_steps=steps)), sent) for steps in (1, 10)
    )
    steps_s = [_decode_s(deployed, 1, 1000 + gained) for gained in range(10)]
    assert at_once.first_s[1] == pytest.approx(sum(steps_s[:3]) + 2 * _prompt_s(deployed, 1000))
    assert later.first_s[1] == pytest.approx(sum(steps_s) + 2 * _prompt_s(deployed, 1000))
    assert later.first_s[0] == at_once.first_s[0]  # who finds it idle is seen at once


def test_a_prompt_waits_for_those_of_other_ranks_while_all_decode() -> None:
    asked = rs.question(model="gpt_oss_120b", isl=1000, osl=100, engine="trtllm", hardware="h100_sxm", gpus=2)
    found = rs.evaluate(asked, batch=64, layout="dep2")
    plain = Deployed.of(found.workload, found.strategy)
    sent = _sent([0.0, 0.0, 0.4], [1000] * 3, [200, 200, 2])
    on_each = _sent([0.0, 0.0, 0.4, 0.4], [1000] * 4, [200, 200, 2, 2])
    steps = {}
    for most in (0, 5, 50):
        deployed = replace(plain, scheduler=replace(plain.scheduler, balance_steps=most))
        done = as_they_come(deployed, sent)
        steps[most] = done.ttft_s[2] / done.gap_s.min()
        assert as_they_come(deployed, on_each).first_s == pytest.approx(as_they_come(plain, on_each).first_s)
    assert steps[5] - steps[0] == pytest.approx(5, abs=1)
    assert steps[50] - steps[0] == pytest.approx(50, abs=1)


def test_where_all_do_not_fit_the_last_is_computed_anew(deployed: Deployed) -> None:
    room = 2250.0
    done = as_they_come(_with(deployed, room=room), _sent([0.0, 0.0], [1000, 1000], [200, 200]))
    assert done.preempted == 1
    assert not np.isnan(done.done_s).any()
    assert done.steps[:, 4].max() <= room
    assert done.done_s[1] - done.done_s[0] > 50 * _decode_s(deployed, 1, 1000)


def test_what_reserves_its_answers_never_gives_up_room(deployed: Deployed) -> None:
    reserving = replace(_with(deployed, room=2250.0), scheduler=Scheduler(SchedulerPolicy(block_tokens=1), 64, True))
    done = as_they_come(reserving, _sent([0.0, 0.0], [1000, 1000], [200, 200]))
    assert done.preempted == 0
    assert done.first_s[1] > done.done_s[0]


def test_a_request_that_never_fits_is_refused(deployed: Deployed) -> None:
    done = as_they_come(_with(deployed, room=1000.0), _sent([0.0, 0.1], [1000, 500], [10, 10]))
    assert np.isnan(done.done_s).tolist() == [True, False]


def test_a_cached_prefix_is_not_computed_again(deployed: Deployed) -> None:
    blocks = (tuple(range(10)), (*range(5), *range(90, 95)))
    sent = _sent([0.0, 1.0], [1000, 1000], [1, 1], blocks=blocks, block_tokens=100)
    done = as_they_come(_with(deployed), sent)
    assert done.hit_share == 500 / 2000
    prices = deployed.prices
    second_s = prices.step_s(RankStep(0, 0.0, 500, 500 * 750)) + prices.engine_s(0)
    assert done.ttft_s[1] == pytest.approx(second_s)


def test_microbatches_of_a_pipeline_follow_each_other_stage_by_stage(workload: Workload) -> None:
    two_stages = _with(Deployed.of(workload, _strategy(workload, 2)))
    done = as_they_come(two_stages, _sent([0.0, 0.0], [1000, 1000], [1, 1]))
    prices = two_stages.prices
    stage_s = prices.step_s(RankStep(0, 0.0, 1000, 500_000)) / 2 + prices.engine_s(0)
    assert done.first_s == pytest.approx([2 * stage_s, 3 * stage_s])


# --- laws ---------------------------------------------------------------------------------------------


def _poisson(rate_per_s: float, count: int, prompts: Lengths, answers: Lengths, seed: int = 0) -> Requests:
    times_s = draw_arrivals([Stream(rate_per_s)], count / rate_per_s, seed).times_s
    return Requests.drawn(times_s, prompts, answers, seed)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_prompts_one_by_one_wait_as_in_an_m_d_1_queue(deployed: Deployed, load: float) -> None:
    service_s = _prompt_s(deployed, 1000)
    rate = load / service_s
    done = as_they_come(_with(deployed, step_tokens=1000), _poisson(rate, 6000, Lengths(1000), Lengths(1)))
    # DistServe (arXiv 2401.09670), section 3: the first token under Poisson arrivals.
    expected_s = service_s + rate * service_s**2 / (2 * (1 - load))
    assert done.ttft_s.mean() == pytest.approx(expected_s, rel=0.03)
    assert done.busy_s / done.end_s == pytest.approx(load, rel=0.02)  # utilisation law


def test_unequal_prompts_one_by_one_wait_as_in_an_m_g_1_queue(deployed: Deployed) -> None:
    one_by_one = _with(deployed, step_tokens=1, chunks=False)
    sent = _poisson(1.0, 8000, Lengths(2000, least_share=0.05), Lengths(1))
    served_s = np.array([_prompt_s(deployed, tokens) for tokens in sent.prompt_tokens.tolist()])
    rate = 0.6 / served_s.mean()
    done = as_they_come(one_by_one, replace(sent, arrival_s=sent.arrival_s / rate))
    waited_s = (done.ttft_s - served_s).mean()
    # Pollaczek and Khinchine: mean wait = rate * E[S^2] / (2 (1 - load)).
    assert waited_s == pytest.approx(rate * (served_s**2).mean() / (2 * 0.4), rel=0.05)


def test_requests_in_the_system_are_rate_times_latency(deployed: Deployed) -> None:
    done = as_they_come(_with(deployed, most=16), _poisson(10.0, 1500, Lengths(1000), Lengths(50)))
    kept = ((done.steps[:, 1] - done.steps[:, 0]) * (done.steps[:, 2] + done.steps[:, 3])).sum() / done.end_s
    # Little's law; those that come amid a step are counted from the next one on.
    assert kept == pytest.approx(len(done.sent_s) / done.end_s * done.latency_s.mean(), rel=0.05)


def test_more_load_means_later_first_tokens(deployed: Deployed) -> None:
    one = _poisson(8.0, 300, Lengths(1000, cv=0.5), Lengths(100, cv=0.5))
    waits = [as_they_come(deployed, replace(one, arrival_s=one.arrival_s / by)).ttft_s.mean() for by in (1, 1.5, 2)]
    assert waits == sorted(waits)


def test_adding_up_decode_steps_is_as_going_one_by_one(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _poisson(12.0, 300, Lengths(1000, cv=0.5), Lengths(100, cv=0.5))
    at_once = as_they_come(deployed, sent)
    several = vars(replica_module)["_Spell"]
    monkeypatch.setattr(replica_module, "_Spell", lambda _steps, *others: several(1, *others))
    one_by_one = as_they_come(deployed, sent)
    assert at_once.done_s == pytest.approx(one_by_one.done_s, rel=1e-3)
    assert len(at_once.steps) < len(one_by_one.steps) / 3


def test_the_same_seed_gives_the_same_bits(deployed: Deployed) -> None:
    runs = [as_they_come(deployed, _poisson(8.0, 300, Lengths(500, cv=1.0), Lengths(50, cv=1.0))) for _ in range(2)]
    assert (runs[0].done_s == runs[1].done_s).all()


def test_in_turn_two_replicas_are_as_two_with_half_the_requests(deployed: Deployed) -> None:
    sent = _poisson(10.0, 400, Lengths(1000), Lengths(50))
    both = as_they_come(deployed, sent, 2, "round_robin")
    for turn in (0, 1):
        own = Requests(sent.arrival_s[turn::2], sent.prompt_tokens[turn::2], sent.output_tokens[turn::2])
        assert as_they_come(deployed, own).done_s == pytest.approx(both.done_s[turn::2])


def test_the_least_loaded_replica_answers_sooner_than_each_in_turn(deployed: Deployed) -> None:
    sent = _poisson(24.0, 600, Lengths(1000, cv=1.5), Lengths(100, cv=1.5))
    by = {name: as_they_come(deployed, sent, 3, name).latency_s.mean() for name in ("least_loaded", "round_robin")}
    assert by["least_loaded"] < by["round_robin"]


# --- the steady state ---------------------------------------------------------------------------------


def _steady(deployed: Deployed, workload: Workload, clients: int) -> tuple[Replayed, slice]:
    count = 10 * clients
    sent = Requests.drawn(np.zeros(count), Lengths(workload.prompt_tokens), Lengths(workload.output_tokens), 0)
    return by_clients(deployed, sent, clients, staggered=True), slice(3 * clients, -3 * clients)


@pytest.mark.parametrize(
    ("model", "isl", "osl", "batch", "layout"),
    [
        ("llama_3_1_8b", 1000, 200, 48, "tp1"),
        ("qwen3_32b", 4000, 500, 40, "tp2"),
        ("gpt_oss_120b", 2000, 300, 64, "tep2"),
        ("mixtral_8x7b", 500, 300, 32, "tp4"),
    ],
)
def test_clients_that_never_stop_see_what_evaluate_says(
    model: str, isl: int, osl: int, batch: int, layout: str
) -> None:
    asked = rs.question(model=model, isl=isl, osl=osl, engine="vllm", hardware="h100_sxm", gpus=16)
    found = rs.evaluate(asked, batch=batch, layout=layout)
    expected = evaluate(found.workload, found.strategy)
    whole = _with(Deployed.of(found.workload, found.strategy), most=batch)
    done, steady = _steady(whole, found.workload, batch)
    assert np.mean(done.tpot_s[steady]) == pytest.approx(expected.tpot_s, rel=0.01)
    spent_s = done.sent_s[steady][-1] - done.sent_s[steady][0]
    rate = (len(done.sent_s[steady]) - 1) * osl / spent_s / found.strategy.gpus
    assert rate == pytest.approx(expected.tokens_per_s_per_gpu, rel=0.01)


@pytest.mark.parametrize(
    ("model", "isl", "osl", "batch", "degrees"),
    [
        ("llama_3_1_8b", 1000, 200, 24, {"tp": 1, "pp": 2}),
        ("qwen3_32b", 2000, 500, 20, {"tp": 1, "pp": 4}),
        ("gpt_oss_120b", 300, 300, 64, {"tp": 1, "pp": 2}),
    ],
)
def test_a_pipeline_stalls_behind_prompts_as_evaluate_says(
    model: str, isl: int, osl: int, batch: int, degrees: dict[str, int]
) -> None:
    """Answers differ in length, so that prompts come at random; stages always busy would serve 20 to 80 % more."""
    asked = rs.question(model=model, isl=isl, osl=osl, engine="vllm", hardware="h100_sxm", gpus=16)
    found = rs.evaluate(asked, batch=batch, **degrees)
    whole, clients = _with(Deployed.of(found.workload, found.strategy), most=batch), batch * degrees["pp"]
    sent = Requests.drawn(np.zeros(12 * clients), Lengths(isl), Lengths(osl, 0.5), 0)
    done, steady = by_clients(whole, sent, clients, staggered=True), slice(4 * clients, -4 * clients)
    spent_s = done.sent_s[steady][-1] - done.sent_s[steady][0]
    rate = sent.output_tokens[steady].sum() / spent_s / found.strategy.gpus
    assert rate == pytest.approx(found.evaluation.tokens_per_s_per_gpu, rel=0.12)
