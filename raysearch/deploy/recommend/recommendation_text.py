"""An answer in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from raysearch.base.file_io import degrees_text
from raysearch.base.measured_first_tokens import first_token_limit_text, steady_first_token_text
from raysearch.base.priced_heading import priced_text
from raysearch.base.rich_tables import plain_table
from raysearch.deploy.contexts import context_warnings
from raysearch.deploy.recommend.alternatives import gpus_text
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import cost, gain, gpus_at_low_end, stay_of
from raysearch.deploy.recommend.pair_load import PairLoad
from raysearch.deploy.recommend.pool_pairs import Disaggregated, ahead_by, pools_text
from raysearch.deploy.recommend.recommendation import Option, Recommendation
from raysearch.deploy.recommend.recommendation_files import option_figures
from raysearch.deploy.recommend.same_chip import SameChip, where_measured
from raysearch.deploy.replay.replay_text import copies_text, percentile_text, rate_text, replayed_line
from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation
from sim.nearness import near_limits
from sim.precision import slow_precision
from sim.simulate import evaluate
from sim.workload import Workload

_NOTABLE = 1.03
"""Ratio of two times per token above which both are printed. [assumed]"""


def begun_lines(answer: Recommendation) -> Iterator[str]:
    """What is soon found; nothing where that is nothing."""
    if answer.winner is None:
        return
    yield from _context_lines(answer)
    demand, what = answer.demand, answer.strategy_text
    if answer.winner == "aggregated":
        fleet = answer.options[0].fleet
        what = f"{fleet.replicas} x ({what}) on {gpus_text(fleet.gpus)}"
    where = "in the steady state, " if demand.under_traffic else ""
    each = answer.tokens_per_s / demand.gpus
    yield f"So far, {where}over few batches: {what}: {each:,.1f} tokens/s per available GPU; still comparing"


def _context_lines(answer: Recommendation) -> Iterator[str]:
    """A warning about requests that are longer than the model takes."""
    for text in context_warnings(answer.demand.question, answer.demand.asked):
        yield f"Warning: {text}"


def best_blocks(answer: Recommendation) -> Iterator[RenderableType]:
    """What to run, line by line; the form of deployment that serves most first."""
    yield from _context_lines(answer)
    yield priced_text(answer.demand.asked)
    if answer.winner == "disaggregated" and answer.pair:
        yield from _pair_lines(answer.pair)
    if answer.options:
        yield from _aggregated_lines(answer)


def _pair_lines(pair: Disaggregated) -> Iterator[str]:
    """Two pools, line by line."""
    matched, left = pair.matched, pair.gpus_at_hand - pair.matched.gpus
    yield (
        f"Disaggregated: {pools_text(matched)}; {matched.gpus} GPUs"
        + (f", {left} of {pair.gpus_at_hand} idle" if left else "")
    )
    low, high = (bound / matched.gpus for bound in pair.tokens_per_s_interval)
    per_gpu = f"{pair.tokens_per_s_per_gpu:,.1f} tokens/s/GPU [{low:,.1f}, {high:,.1f}]"
    yield f"  {per_gpu}; {pair.tokens_per_s:,.0f} tokens/s in all"
    low_ms, high_ms = (bound_s * 1e3 for bound_s in matched.decode.evaluation.tpot_interval_s)
    over = "the node's links" if matched.same_node else "the network"
    yield (
        f"  {matched.tpot_s * 1e3:.1f} ms per token [{low_ms:.1f}, {high_ms:.1f}]; {matched.ttft_s * 1e3:,.1f} ms "
        f"to the first token, {matched.transfer_s * 1e3:.1f} ms of it for the KV cache over {over}"
    )
    if pair.load:
        yield from (f"  {line}" for line in _pair_load_lines(pair.load))
    else:
        rate = f"{matched.requests_per_s:,.2f} requests/s"
        at_once = f"{pair.at_once:,} requests at once on the fewest GPUs found, " if pair.at_once else ""
        yield f"  {at_once}{rate} in the steady state, without queues under random arrivals"


def _pair_load_lines(load: PairLoad) -> Iterator[str]:
    """Whether two pools carry a load."""
    report, arrivals = load.report, load.report.setup.sent.arrivals_text
    yield (
        f"{rate_text(load.matched.requests_per_s)} {arrivals} need {gpus_text(load.matched.gpus)}, the fewest found, "
        f"to meet the limits at {percentile_text(report.setup.percentile)}; {load.in_steady_state} in the steady state"
    )
    yield replayed_line(report)


def _other_form(answer: Recommendation) -> str:
    """By how much the form that wins is ahead of the other."""
    if not answer.pair:
        return ""
    share = ahead_by(answer.pair, answer.options[0].fleet)
    if answer.pair.load or answer.pair.at_once:
        gpus, words = gpus_text(answer.pair.matched.gpus), pools_text(answer.pair.matched)
        return "" if answer.winner == "disaggregated" else f"  Disaggregated: {gpus} needed, the fewest found: {words}"
    if answer.winner == "disaggregated":
        return f"  {share:+.1%} tokens/s with the pools above"
    return (
        f"  Disaggregated: {pools_text(answer.pair.matched)}: {answer.pair.tokens_per_s:,.0f} tokens/s in all "
        f"({share:+.1%})"
    )


def _aggregated_lines(answer: Recommendation) -> Iterator[RenderableType]:
    """The best replicas of one kind."""
    best = answer.options[0]
    demand, fleet = answer.demand, best.fleet
    figures = option_figures(demand.workload, best.evaluation)
    gpus = f"{fleet.replicas} x {gpus_text(best.evaluation.gpus)}"
    left = f", {fleet.left_over} of {demand.gpus} idle" if fleet.left_over else f", all of {demand.gpus}"
    first = "Aggregated: " if answer.pair else ""
    chunk = demand.workload.chunk_tokens
    how = f"; prompts in chunks of {chunk:,}" if chunk else ""
    yield f"{first}{_space(demand.workload)}{degrees_text(best.evaluation.strategy)}; {gpus}{left}{how}"
    yield (f"  {_ranged(figures, 'tokens_per_s_per_gpu', 'tokens/s/GPU')}; {fleet.tokens_per_s:,.0f} tokens/s in all")
    if figures["tpot_s"]:
        each = _ranged(figures, "tpot_s", "ms per token", 1e3)
        yield f"  {each}; {_ranged(figures, 'tokens_per_s_per_user', 'tokens/s per user')}"
    if figures["ttft_s"]:
        yield f"  {_ranged(figures, 'ttft_s', 'ms to the first token', 1e3)}"
    if demand.under_traffic:
        yield from (f"  {line}" for line in (*_load_lines(demand, best), *_proof_lines(answer)))
    if fleet.requests_per_s is not None:
        at_most = "at most " if demand.under_traffic else ""
        yield f"  {at_most}{fleet.requests_per_s:,.2f} requests/s, {fleet.requests_at_once:,} at once"
    if text := _other_form(answer):
        yield text
    if text := _prompts_elsewhere(demand, best):
        yield f"  {text}"
    if demand.guarded:
        yield f"  {_price_of_confidence(answer)}"
    low = figures["intervals"].get("tokens_per_s_per_gpu")
    if low and not demand.under_traffic and (sure := gpus_at_low_end(demand, best.evaluation, low[0])):
        yield f"  At the low end of the interval {gpus_text(sure)} would carry that load"
    if paid := cost(demand, fleet):
        yield f"  {paid[0]:,.2f} per hour, {paid[1]:,.2f} per million tokens"
    yield f"  Limit: {best.limit}"
    spared = ", except for the time to the first token" if "ttft_s" in figures["intervals"] else ""
    yield f"  Brackets: 90 % intervals{spared}{_because(best.evaluation)}"
    if found := where_measured(demand, best.evaluation):
        yield f"  {_where_measured_text(demand.workload, found)}"
    for what in best.evaluation.extrapolated:
        yield f"  Extrapolated: {what}"
    for near in near_limits(demand.workload, best.evaluation):
        yield f"  Near its limit: {near.message}"
    if "ttft_s" in figures["intervals"]:
        measured = steady_first_token_text(demand.workload, best.evaluation)
        yield (
            "  The range of the time to the first token is [assumed]: it covers the prompt's own steps, not queues"
            + (f"; {measured}" if measured else "")
        )
    if text := first_token_limit_text(demand.workload):
        yield f"  {text}"
    if warning := slow_precision(
        demand.workload,
        best.evaluation.tokens_per_s_per_gpu,
        lambda other, _: evaluate(other, best.evaluation.strategy).tokens_per_s_per_gpu,
    ):
        yield f"  Warning: {warning}"


def _space(workload: Workload) -> str:
    """Whose strategies they are, where it is not the engine's that is charged."""
    rules = engine_rules_of(workload)
    if rules and workload.engine and rules.name == workload.engine.family:
        return ""
    return f"{rules.title} {rules.version}: " if rules else f"Space {workload.space}: "


def rest_blocks(answer: Recommendation) -> Iterator[RenderableType]:
    """Alternatives, what-ifs and the front; where nothing is feasible, the nearest miss."""
    if not answer.options:
        if not answer.pair:
            yield from _context_lines(answer)
            yield from _miss_lines(answer)
        return
    yield _options_table(answer)
    yield from _beside_lines(answer)
    yield _variations_table(answer)
    if answer.front:
        yield _front_table(answer)


def _price_of_confidence(answer: Recommendation) -> str:
    """What the limits cost because they are to hold more often than not."""
    demand, best, even = answer.demand, answer.options[0].evaluation, answer.even
    within = f"Meets the limits with confidence {demand.sure:g}"
    if even is None or even.strategy == best.strategy:
        return within
    more = gain(demand, even, best)
    gained = f"{more:+.1%}" if more else "no more"
    what = f"{degrees_text(even.strategy)}, {even.tokens_per_s_per_gpu:,.1f} tokens/s/GPU ({gained})"
    return f"{within}; at even odds (--set confidence=0.5): {what}"


def _load_lines(demand: Demand, best: Option) -> Iterator[str]:
    """Whether the load is carried as it comes."""
    arrivals = demand.sent.arrivals_text
    limits = f"the limits at {percentile_text(demand.percentile)} with probability {demand.confidence:g}"
    if best.load is None:
        yield f"Warning: no number of replicas on {gpus_text(demand.gpus)} meets {limits} {arrivals}"
        return
    load, report = best.load, best.load.report
    even = f", {load.at_even_odds} at even odds" if load.at_even_odds < load.replicas else ""
    yield (
        f"{rate_text(demand.requests_per_s or 0.0)} {arrivals} need {copies_text(load.replicas)} to meet {limits}; "
        f"{load.in_steady_state} in the steady state{even}"
    )
    if report is not None:
        yield replayed_line(report)


def _proof_lines(answer: Recommendation) -> Iterator[str]:
    """Whether other strategies may carry a load on fewer GPUs."""
    proof, load = answer.proof, answer.options[0].load
    if proof is None or load is None:
        return
    by = "by the steady state" if answer.demand.trace is None else "of other degrees"
    others = f"all candidates {by} are listed"
    if proof.open:
        others = f"{proof.replayed} of {proof.open} other candidates {by} were replayed"
    if proof.least_gpus == answer.options[0].fleet.gpus:
        yield f"No strategy needs fewer GPUs: {others}"
    else:
        yield f"{gpus_text(proof.least_gpus)} or more may be enough: {others} (--set replays)"
    if len(proof.chunks) > 1:
        each = [
            f"{'whole prompts' if chunk is None else f'chunks of {chunk:,}'} {_fewest_text(gpus, first=not at)}"
            for at, (chunk, gpus) in enumerate(proof.chunks.items())
        ]
        yield f"Fewest GPUs by size of chunks: {'; '.join(each)}"


def _fewest_text(gpus: int | None, *, first: bool) -> str:
    return f"{gpus}" if gpus else "not met" if first else "no fewer found"


def _prompts_elsewhere(demand: Demand, best: Option) -> str:
    """Where the time of other requests' prompts shows that the time per token does not count."""
    stay, engine, evaluation = stay_of(demand, best.evaluation, best.fleet), demand.workload.engine, best.evaluation
    if stay is None or engine is None or stay.tpot_one_by_one_s < _NOTABLE * evaluation.tpot_s:
        return ""
    above = ", above the limit" if stay.tpot_one_by_one_s > demand.workload.tpot_limit_s else ""
    return (
        f"The time per token includes {engine.times.prefill_share:.0%} of other requests' prompts, as measured, and "
        f"throughput all of them. The rest delays the first token if requests start at once "
        f"({stay.ttft_at_once_s * 1e3:,.0f} ms), or later tokens if they arrive one by one "
        f"({stay.tpot_one_by_one_s * 1e3:,.1f} ms per token{above})"
    )


def _because(evaluation: Evaluation) -> str:
    return f"; wide, because {evaluation.interval_because}" if evaluation.interval_because else ""


def _where_measured_text(workload: Workload, found: SameChip) -> str:
    """What a machine of the same chip expects whose runs know the model."""
    engine, there = workload.engine.family if workload.engine else "", found.evaluation
    return (
        f"Fitted to measured runs of {workload.model.name} under {engine} on {found.machine} (same chip), this "
        f"strategy is predicted at {there.tokens_per_s_per_gpu:,.1f} tokens/s/GPU and "
        f"{there.tpot_s * 1e3:.1f} ms per token"
    )


def _ranged(figures: dict, name: str, unit: str, scale: float = 1.0) -> str:
    low_high = figures["intervals"].get(name)
    text = f"{figures[name] * scale:,.1f} {unit}"
    return f"{text} [{low_high[0] * scale:,.1f}, {low_high[1] * scale:,.1f}]" if low_high else text


def _options_table(answer: Recommendation) -> Table:
    rows = [
        (
            str(number),
            degrees_text(option.evaluation.strategy),
            f"{option.fleet.replicas} x {option.evaluation.gpus}",
            f"{option.evaluation.tokens_per_s_per_gpu:,.1f}",
            f"{option.evaluation.tpot_s * 1e3:.1f}" if option.evaluation.tpot_s else "-",
            f"{option.evaluation.ttft_s * 1e3:,.0f}" if option.evaluation.ttft_s else "-",
            option.reason,
            option.limit,
        )
        for number, option in enumerate(answer.options, len(answer.ranked) - len(answer.options))
    ]
    columns = ("", "strategy", "GPUs", "tok/s/GPU", "TPOT ms", "TTFT ms", "reason", "limit")
    wrap = ("strategy", "reason", "limit")
    title = "Recommendation and alternatives" if answer.winner == "aggregated" else "Aggregated deployments"
    return plain_table(title, columns, rows, left=2, wrap=wrap)


def _beside_lines(answer: Recommendation) -> Iterator[str]:
    odds = " at even odds" if answer.demand.guarded else ""
    for name, each in answer.beside.items():
        if each is None:
            continue
        best = each.evaluation
        what = f"{best.tokens_per_s_per_gpu:,.1f} tokens/s/GPU ({degrees_text(best.strategy)})"
        yield f"Best of the {name} space{odds}: {what}; the engine's best is {each.reached:.2f} times that"


def _variations_table(answer: Recommendation) -> Table:
    rows = []
    for each in answer.variations:
        found = each.evaluation
        value = "nothing feasible" if found is None else f"{found.tokens_per_s_per_gpu:,.1f}"
        gain = f"{each.gain:+.1%}" if each.gain is not None else "-"
        what = degrees_text(found.strategy) if found else "-"
        broken = f"; {each.broken[0].message}" if each.broken else ""
        rows.append((each.change, value, "-" if each.gpus is None else str(each.gpus), gain, what + broken))
    by = "fewer GPUs" if answer.demand.loaded else "tokens/s of all GPUs"
    columns = ("", "tok/s/GPU", "GPUs", "gain", "strategy")
    return plain_table(f"What if (gain: {by})", columns, rows, wrap=("strategy",))


def _front_table(answer: Recommendation) -> Table:
    rows = [
        (
            f"{point.tokens_per_s_per_user:,.1f}",
            f"{point.evaluation.tokens_per_s_per_gpu:,.1f}",
            str(point.evaluation.gpus),
            degrees_text(point.evaluation.strategy),
        )
        for point in answer.front
    ]
    title = "Throughput against speed per user (batches: powers of two)"
    return plain_table(title, ("tok/s/user", "tok/s/GPU", "GPUs", "strategy"), rows, wrap=("strategy",))


def _miss_lines(answer: Recommendation) -> Iterator[str]:
    demand = answer.demand
    yield priced_text(demand.asked)
    yield f"Nothing is feasible on {gpus_text(demand.gpus)}."
    if answer.miss is None:
        yield "The engine supports no strategy on that many GPUs."
        return
    evaluation = answer.miss.evaluation
    yield (f"Nearest miss: {degrees_text(evaluation.strategy)}, {evaluation.tokens_per_s_per_gpu:,.1f} tokens/s/GPU")
    for violation in evaluation.violations:
        yield f"  {violation.message}"
    if answer.even is not None:
        yield f"  At even odds (--set confidence=0.5) {degrees_text(answer.even.strategy)} meets the limits"
    if answer.miss.gpus_needed is not None:
        yield f"  The load needs {answer.miss.gpus_needed:,} GPUs, {demand.gpus:,} are available"
    for change in answer.miss.would_fit:
        yield f"  It would fit with {change}."
