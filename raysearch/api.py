"""The Python interface, which `import raysearch as rs` offers: a question, and what is asked of it.

>>> import raysearch as rs
>>> question = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=20)
>>> found = rs.evaluate(question, tp=2, batch=64)
>>> found.feasible, found.strategy.tp
(True, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raysearch.base.arguments import typed
from sim.config.question import Question

if TYPE_CHECKING:
    from raysearch.answers.compared_pools import PoolsResult
    from raysearch.answers.evaluated import EvaluationResult
    from raysearch.answers.exported import ExportResult
    from raysearch.answers.optimal import OptimumResult
    from raysearch.answers.placed import PlacementResult
    from raysearch.answers.recommended import RecommendationResult
    from raysearch.answers.replayed import ReplayResult
    from raysearch.answers.reported import ReportResult
    from raysearch.answers.searched import SearchResult

__all__ = [
    "evaluate",
    "export",
    "optimum",
    "place",
    "pools",
    "question",
    "recommend",
    "replay",
    "report",
    "search",
    "study",
]

question = Question
"""A question about a deployment, by keyword arguments: those that the commands' options name."""


@typed
def evaluate(
    question: Question,
    *,
    tp: int | None = None,
    batch: int | None = None,
    ep: int | None = None,
    pp: int = 1,
    dims: str = "megatron",
    cp: int = 1,
    dp: int | None = None,
    layout: str | None = None,
) -> EvaluationResult:
    """Evaluates one strategy: speed, memory, violations and a breakdown per op.

    Args:
        question: What is served, on what, within which limits.
        tp: Degree of tensor parallelism; of attention, where it has a mesh of its own.
        batch: Sequences of one microbatch over the ep group; in phase serve requests in flight on all attention ranks.
            None for that which serves best within memory and limits.
        ep: Degree of expert parallelism; tp * dp * cp / ep GPUs share an expert.
        pp: Pipeline stages.
        dims: One number per fused op, or "megatron" or "megatron-sp".
        cp: GPUs over which attention cuts the context.
        dp: GPUs over which attention cuts the requests; as ep if not given.
        layout: Instead of tp, ep and dp: "tp8", "tep8" or "dep8".

    Returns:
        Its figures, whether or not it can be run: see `feasible` and `broken`.

    Raises:
        CatalogError, InputError, StrategyError: The question or the strategy means nothing.

    >>> evaluate(question(model="llama_3_1_8b", isl=1000, osl=100), layout="tp2", batch=8).evaluation.gpus
    2
    """
    from raysearch.answers.evaluated import EvaluationResult
    from raysearch.answers.strategy_text import strategy_of
    from sim.simulate import evaluate as simulate

    workload = question.load()
    strategy = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, layout)
    return EvaluationResult(question, workload, simulate(workload, strategy))


@typed
def recommend(
    question: Question,
    *,
    requests_per_s: float | None = None,
    concurrency: int | None = None,
    price: float | None = None,
    top: int = 5,
    cv: float = 1.0,
    percentile: float = 99.0,
    requests: int = 2000,
    only: Literal["aggregated", "disaggregated"] | None = None,
    replays: int = 40,
    progress: bool = False,
) -> RecommendationResult:
    """Recommends a deployment, exactly: every strategy of the engine and every batch are accounted for.

    Args:
        question: What is served, on what, within which limits; its `gpus` are those at hand.
        requests_per_s: Load to carry with the fewest GPUs, replayed with requests that come at random; None fills all.
        concurrency: Requests at once to carry with the fewest GPUs; None fills all.
        price: Of a GPU and hour.
        top: Most strategies in the answer.
        cv: How bursty requests come under a load; 1 is Poisson.
        percentile: Of the latencies that the limits are about under a load.
        only: The one form of deployment to look at; None takes the one that serves more.
        replays: Under a load, most strategies to replay beside the listed ones, to prove that none takes fewer GPUs.
        requests: Of a replay under a load; of 2000 some twenty lie beyond the 99th percentile.
        progress: Whether to say on stderr what is being worked out.

    Raises:
        CatalogError, InputError: The question means nothing, or both loads are given.

    >>> best = recommend(question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=15), top=1).strategy
    >>> best.gpus
    1
    """
    from raysearch.answers.recommended import RecommendationResult
    from raysearch.base.progress import telling

    with telling("recommendation") if progress else nullcontext(lambda _: None) as tell:
        return RecommendationResult.of(
            question,
            requests_per_s=requests_per_s,
            concurrency=concurrency,
            price=price,
            top=top,
            cv=cv,
            percentile=percentile,
            requests=requests,
            only=only,
            replays=replays,
            progress=tell,
        )


@typed
def optimum(
    question: Question, *, landscape: bool = True, fresh: bool = False, progress: bool = False
) -> OptimumResult:
    """Finds the exact optimum over every strategy of the question's space.

    Args:
        question: What is served, on what, within which limits, and the space that is searched.
        landscape: Whether the answer counts the feasible strategies too, where they can be added up; done when read.
        fresh: Whether to search again even if the optimum is in the cache on disk.
        progress: Whether to show bars on stderr.

    Returns:
        The best strategy; `compare_spaces()` sets other spaces beside it, `write_certificate(path)` writes a proof.

    Raises:
        CatalogError, InputError: The question means nothing.

    >>> asked = question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=15, chunk_tokens=2048)
    >>> optimum(asked).strategy == recommend(asked, top=1).strategy
    True
    """
    from raysearch.answers.optimal import OptimumResult, no_bars
    from raysearch.base.progress import stepping

    found = OptimumResult(question, question.load(), landscape, fresh, stepping if progress else no_bars)
    assert found.searched is not None  # works it out now
    return found


@typed
def pools(
    question: Question,
    *,
    mix: Sequence[tuple[int, int, float]] | None = None,
    requests_per_s: float | None = None,
    sweep: Mapping[str, Sequence[float]] | None = None,
    kv_hidden: float = 0.0,
    resharded: bool = False,
    host_gb: float = 200.0,
    host_gb_per_s: float = 50.0,
    progress: bool = False,
) -> PoolsResult:
    """Compares one pool of GPUs with prefill and decode on pools of their own: the exact best of each.

    Args:
        question: What is served, on what, within which limits; the phase is serve.
        mix: Requests of several lengths in place of the question's: (prompt tokens, answer tokens, share) each.
        requests_per_s: Load to carry with the fewest GPUs; None fills all.
        sweep: Several values of isl, gpus, ttft_ms or requests_per_s, by name: a comparison for each combination.
        kv_hidden: Share of the cache's transfer that hides behind computing the prompt, 0 to 1.
        resharded: Also a pool that moves its weights between prompts and answers, which no engine can yet.
        host_gb: Memory of the hosts for KV caches, per GPU, in 1e9 bytes, where a pool re-shards.
        host_gb_per_s: A GPU's link to it, per direction.
        progress: Whether to say on stderr what is being worked out.

    Raises:
        CatalogError, InputError: The question means nothing.
        ValueError: A mix of lengths or shares that are none.
    """
    from raysearch.answers.compared_pools import PoolsResult
    from raysearch.base.progress import telling
    from sim.pools.resharding import Host

    host = Host(host_gb * 1e9, host_gb_per_s * 1e9) if resharded else None
    with telling("pools") if progress else nullcontext(lambda _: None) as tell:
        return PoolsResult.of(
            question,
            mix=mix,
            requests_per_s=requests_per_s,
            sweep=sweep,
            kv_hidden=kv_hidden,
            host=host,
            progress=tell,
        )


@typed
def replay(
    question: Question | None = None,
    *,
    path: str | Path | None = None,
    alternative: int = 0,
    requests_per_s: float | None = None,
    concurrency: int | None = None,
    trace: str | Path | None = None,
    tp: int | None = None,
    batch: int | None = None,
    ep: int | None = None,
    pp: int = 1,
    dp: int | None = None,
    layout: str | None = None,
    replicas: int | None = None,
    cv: float = 1.0,
    spread: float = 1.0,
    cached: float = 0.0,
    router: str = "least_loaded",
    percentile: float = 99.0,
    requests: int = 2000,
    seeds: int = 5,
    progress: bool = False,
) -> ReplayResult:
    """Replays traffic on a deployment, event by event: latencies, goodput, and the load at which its limits break.

    Args:
        question: What is served, on what, within which limits; its lengths are those sent where no trace is.
        path: Instead of a strategy: the folder of a recommendation or a search, or a file with a strategy.
        alternative: Of a recommendation: 0 is the best.
        requests_per_s: That arrive on all replicas; with a trace, to which its times are stretched.
        concurrency: Clients of a replica instead, who send when they are answered.
        trace: A recorded trace instead.
        tp: Of the strategy, as of `evaluate`.
        batch: The most requests that run at once.
        ep: As of `evaluate`.
        pp: Pipeline stages.
        dp: As of `evaluate`.
        layout: Instead of tp, ep and dp.
        replicas: Copies that share nothing; the folder's, else one.
        cv: How bursty arrivals are; 1 is Poisson.
        spread: Lengths lie evenly between this share of the question's and these.
        cached: Share of each prompt that is in the prefix cache; of a trace with hashes these decide.
        router: "least_loaded", "round_robin" or "prefix".
        percentile: Of the latencies that the limits are about.
        requests: Of a run.
        seeds: Runs behind each figure.
        progress: Whether to say on stderr what is being worked out.

    Raises:
        CatalogError, InputError, StrategyError: The question, the strategy or what is sent means nothing.

    >>> asked = question(model="llama_3_1_8b", isl=1000, osl=100, tpot_ms=20, ttft_ms=200)
    >>> found = replay(asked, tp=1, batch=32, requests_per_s=4, requests=300, seeds=2)
    >>> found.feasible, found.report.probability
    (True, 1.0)
    """
    from raysearch.answers.replayed import ReplayResult, TrafficOptions, deployed_in
    from raysearch.answers.strategy_text import strategy_of
    from raysearch.base.errors import InputError
    from raysearch.base.progress import telling

    if path is not None:
        workload, strategy, copies = deployed_in(Path(path), question, alternative)
    elif question is None or (tp is None and layout is None):
        raise InputError("expected a path, or a question with a strategy: tp or layout")
    else:
        workload, copies = question.load(), 1
        strategy = strategy_of(workload, tp, ep, pp, batch, "megatron", 1, dp, layout)
    with telling("replaying") if progress else nullcontext(lambda _: None) as tell:
        return ReplayResult.of(
            question,
            (workload, strategy, replicas or copies),
            TrafficOptions(requests_per_s, concurrency, trace, cv, spread, cached, requests),
            router=router,
            percentile=percentile,
            seeds=seeds,
            progress=tell,
        )


@typed
def place(
    fleet: str | Path,
    *,
    gpus: int | None = None,
    rate: float = 1.0,
    cv: float | None = None,
    requests: int = 1000,
    seeds: int = 10,
    progress: bool = False,
) -> PlacementResult:
    """Places several models on one cluster so that most requests are in time, though they come in bursts.

    Args:
        fleet: Name in configs/fleets, or the path of a TOML file.
        gpus: At hand, in place of the file's.
        rate: Times the requests per second of the file.
        cv: Burstiness of all models, in place of the file's; 1 is Poisson.
        requests: Of a simulated run.
        seeds: Runs behind each figure.
        progress: Whether to show bars on stderr.

    Raises:
        CatalogError: There is no such fleet.
    """
    from raysearch.answers.placed import PlacementResult, no_progress
    from raysearch.base.progress import following

    with following(f"placements of {fleet}") if progress else nullcontext(no_progress) as show:
        return PlacementResult.of(fleet, gpus=gpus, rate=rate, cv=cv, requests=requests, seeds=seeds, progress=show)


@typed
def search(
    question: Question,
    searcher: str,
    *,
    seed: int = 0,
    budget: int | None = None,
    simulator: str | None = None,
    workers: int | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    on_failure: Literal["stop", "infeasible"] = "stop",
    out: str | Path | None = None,
    resume: bool = False,
    replay: str | Path | None = None,
    start: str | Path | None = None,
    trust_code: bool = False,
    progress: bool = False,
) -> SearchResult:
    """Runs one searcher, scored against the exact optimum; every call is on disk before the next one begins.

    Args:
        question: What is searched.
        searcher: Name of a searcher, or "module:Class" of your own.
        seed: Equal seeds give equal calls, bit for bit; with workers where answers arrive in the same order.
        budget: Strategies to evaluate; 4000, or a heuristic's whole sweep.
        simulator: "module:function" of another black box; None is our own.
        workers: Processes that evaluate; by default as many as a slow simulator is worth.
        timeout_s: Longest call of a simulator in a worker.
        retries: How often a failing call is tried again.
        cpus_per_worker: CPUs that Ray reserves for each worker; a share of one will do.
        gpus_per_worker: GPUs likewise.
        on_failure: What becomes of a strategy on which a simulator fails for good.
        out: Folder for the results, new or empty; by default results/NAME-UTC TIME.
        resume: Whether to go on with the unfinished search in `out`.
        replay: Folder of an equal search: answers of workers are taken in as they arrived there.
        start: What to call first: "rule", "optimum", or a folder or file with strategies.
        trust_code: Whether to go on with other code than it was begun with.
        progress: Whether to show bars on stderr.

    Raises:
        CatalogError, InputError: The question, the searcher or the folder cannot be used.
        RunFailed: Something broke; what was found is kept.
    """
    from raysearch.answers.optimal import no_bars
    from raysearch.answers.searched import SearchResult, no_bar
    from raysearch.base.progress import searching, stepping
    from raysearch.simulators.opening import Patience

    usual = Patience()
    patience = Patience(
        usual.timeout_s if timeout_s is None else timeout_s,
        usual.retries if retries is None else retries,
        cpus_per_worker,
        gpus_per_worker,
    )
    return SearchResult.of(
        question,
        searcher,
        seed=seed,
        budget=budget,
        simulator=simulator,
        workers=workers,
        patience=patience,
        on_failure=on_failure,
        out=None if out is None else Path(out),
        resume=resume,
        replay=None if replay is None else Path(replay),
        start=None if start is None else str(start),
        trust_code=trust_code,
        bars=stepping if progress else no_bars,
        bar=searching if progress else no_bar,
    )


@typed
def study(
    file: str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    address: str | None = None,
    cpus: int | None = None,
    simulator: str | None = None,
    workers: int | None = None,
    on_failure: Literal["stop", "infeasible"] | None = None,
) -> ReportResult:
    """Runs a study on Ray Tune: every searcher on every workload with every seed, in parallel.

    Args:
        file: Path of a study's TOML file, or a name in configs/studies.
        out: Folder for the results, new or empty; on a cluster one that all nodes share.
        resume: Whether to go on with the unfinished study in `out`.
        trust_code: Whether to go on with other code than it was begun with.
        address: Of a running Ray cluster; by default $RAY_ADDRESS, or a Ray of its own.
        cpus: Of that own Ray; by default all.
        simulator: In place of the file's.
        workers: In place of the file's.
        on_failure: In place of the file's.

    Returns:
        What its folder says, as `report` of it does.

    Raises:
        CatalogError, InputError: The study or the folder cannot be used.
        RunFailed: Some runs broke down; the others are finished.
    """
    from raysearch.answers.studied import run_study_file

    folder = None if out is None else Path(out)
    return run_study_file(
        file,
        out=folder,
        resume=resume,
        trust_code=trust_code,
        address=address,
        cpus=cpus,
        simulator=simulator,
        workers=workers,
        on_failure=on_failure,
    )


@typed
def report(folder: str | Path) -> ReportResult:
    """Reads a folder of a study or of a search, finished or not: scores, statistics over seeds, the best strategies.

    Args:
        folder: Of the results.

    Raises:
        InputError: It holds none, or none that can be trusted.
    """
    from raysearch.answers.reported import ReportResult

    return ReportResult.of(folder)


@typed
def export(
    source: str | Path | RecommendationResult | OptimumResult | EvaluationResult | SearchResult | PoolsResult,
    to: str = "vllm",
    *,
    question: Question | None = None,
    alternative: int = 0,
    serve: str | None = None,
    replicas: int = 1,
    ops: Sequence[str] | None = None,
    longest_request: int | None = None,
) -> ExportResult:
    """Writes a strategy as the command, configuration or code that runs it, and says what that leaves out.

    Args:
        source: An answer, or the folder of one, or a JSON file with a strategy.
        to: "vllm", "sglang", "trtllm", "megatron", "dynamo", "llm-d", "dtensor", "jax", or one that a package adds.
        question: What is served, where the source does not say.
        alternative: Of a recommendation: 0 is the best, then its alternatives; of pools a point.
        serve: Weights, a Hugging Face repository or a path; by default the model's.
        replicas: Copies that share nothing, of an answer that is one strategy.
        ops: Shard only these; by default all.
        longest_request: Tokens that a server lets in, prompt and answer; by default twice the usual, as far as the
            model goes.

    Raises:
        InputError, StrategyError, CatalogError: There is no such strategy or target, or the target cannot run it.

    >>> asked = question(model="llama_3_1_8b", isl=1000, osl=100)
    >>> export(evaluate(asked, layout="tp2", batch=8)).command.split()[:3]
    ['vllm', 'serve', 'meta-llama/Llama-3.1-8B-Instruct']
    """
    from raysearch.answers.exported import ExportResult, deployments_of

    return ExportResult.of(deployments_of(source, question, alternative, serve, replicas), to, ops, longest_request)
