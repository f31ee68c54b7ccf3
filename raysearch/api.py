"""The Python interface, `import raysearch as rs`: a question and the functions that answer it.

>>> import raysearch as rs
>>> question = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=20)
>>> found = rs.evaluate(question, tp=2, batch=64)
>>> found.feasible, found.strategy.tp
(True, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raysearch.base.arguments import in_python, question_help, typed
from sim.config.question import Question, load_question

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

question = in_python(Question, "question")
"""A question about a deployment; its keyword arguments are the options of the commands."""
question.__doc__ = f"{cleandoc(Question.__doc__ or '')}\n\n{question_help()}"


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
    vocabulary: str | None = None,
) -> EvaluationResult:
    """Evaluates one strategy: speed, memory, violations and a breakdown per op.

    Args:
        question: What is served, on what, within which limits.
        tp: Degree of tensor parallelism; of attention, where it has a mesh of its own.
        batch: Sequences per microbatch of the ep group; in phase serve, requests in flight on all attention ranks.
            None for the best within memory and limits.
        ep: Degree of expert parallelism; tp * dp * cp / ep GPUs share an expert.
        pp: Pipeline stages.
        dims: One number per fused op, or "megatron" or "megatron-sp".
        cp: Context-parallel degree of attention.
        dp: Data-parallel degree of attention; by default ep.
        layout: Instead of tp, ep and dp: "tp8", "tep8", "dep8", "dep8pp2", or as answers print degrees and batch.
        vocabulary: What embedding, LM head and sampling are sharded along, such as "3,1,1"; by default as engines do.

    Returns:
        Its figures, whether or not it is feasible: see `feasible` and `broken`.

    Raises:
        CatalogError, InputError, StrategyError: The question or the strategy is invalid.

    >>> evaluate(question(model="llama_3_1_8b", isl=1000, osl=100), layout="tp2", batch=8).evaluation.gpus
    2
    """
    from raysearch.answers.evaluated import EvaluationResult
    from raysearch.answers.strategy_text import strategy_of
    from sim.replay.goodput import evaluate_in_phase

    workload = load_question(question)
    strategy = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
    return EvaluationResult(question, workload, evaluate_in_phase(workload, strategy))


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
    trace: str | Path | None = None,
    only: Literal["aggregated", "disaggregated"] | None = None,
    replays: int = 60,
    forms: Literal["all", "eagle3", "usual"] = "all",
    without: Literal["pp", "ep", "pp,ep"] | None = None,
    compare_with: Literal["aisimulate"] | None = None,
    progress: bool = False,
) -> RecommendationResult:
    """Recommends a deployment: the exact best over every strategy that the engine supports and every batch.

    Args:
        question: What is served, on what, within which limits; its `gpus` are those available.
        requests_per_s: Load to carry with the fewest GPUs, under random arrivals; None fills all GPUs. With a trace,
            the rate to which its times are scaled.
        concurrency: Concurrent requests, over all replicas, to carry with the fewest GPUs; None fills all.
        price: Price of a GPU per hour.
        top: Strategies in the answer at most.
        cv: Under a load: coefficient of variation of the gaps between arrivals; 1 is Poisson.
        percentile: Under a load: percentile of the latencies that must be within the limits.
        trace: A recorded trace as the load; strategies are made for the question's lengths, or for its mean ones.
        only: Form of deployment to consider; None takes the one that serves more.
        replays: Under random arrivals: strategies to replay at most before stopping the proof that none does better.
        forms: Whether drafts, expert exchanges, redundant experts and overlapped batches are compared, too, for models
            with multi-token prediction; "eagle3": also for those with a public head; "usual": only the engine's
            defaults.
        without: Degrees that are to stay 1: pipelines, expert parallelism.
        compare_with: "aisimulate": also what NVIDIA's AISimulate recommends, in a minute or two.
        requests: Under a load: requests per replay; of 2000 some twenty lie beyond the 99th percentile.
        progress: Whether to report progress on stderr.

    Raises:
        CatalogError, InputError: The question is invalid, or both loads are given.

    >>> best = recommend(question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=15), top=1).strategy
    >>> best.gpus
    1
    """
    from raysearch.answers.recommended import RecommendationResult
    from raysearch.base.progress import telling
    from raysearch.deploy.replay.trace_files import trace_file

    with telling("recommendation") if progress else nullcontext(lambda _: None) as tell:
        found = RecommendationResult.of(
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
            trace=trace_file(trace),
            forms=forms,
            without=without,
            compare_with=compare_with,
            progress=tell,
        )
    _ = found.advice  # asked now, while an error of its is the caller's
    return found


@typed
def optimum(
    question: Question,
    *,
    landscape: bool = True,
    uneven_stages: bool = False,
    replays: int = 200,
    fresh: bool = False,
    progress: bool = False,
) -> OptimumResult:
    """Finds the exact optimum over every strategy of the question's space; in phase traffic by replays.

    Args:
        question: What is served, on what, within which limits, and the space that is searched.
        landscape: Whether the answer also counts the feasible strategies, where possible; done when it is read.
        uneven_stages: Whether the best pipeline with any number of layers per stage is found too.
        replays: In phase traffic: how many strategies to replay at most, to prove that none does better.
        fresh: Whether to search again even if the optimum is in the cache on disk.
        progress: Whether to show progress bars on stderr.

    Returns:
        The best strategy; `compare_spaces()` compares it with other spaces, `write_certificate(path)` writes a proof.

    Raises:
        CatalogError, InputError: The question is invalid.

    >>> asked = question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=15, chunk_tokens=2048)
    >>> optimum(asked).strategy == recommend(asked, top=1).strategy
    True
    """
    from raysearch.answers.optimal import OptimumResult, no_bars
    from raysearch.base.progress import stepping

    bars = stepping if progress else no_bars
    found = OptimumResult(question, load_question(question), landscape, fresh, bars, uneven_stages, replays)
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
    afd: bool = False,
    host_gb: float = 200.0,
    host_gb_per_s: float = 50.0,
    cv: float = 1.0,
    percentile: float = 99.0,
    requests: int = 2000,
    trace: str | Path | None = None,
    progress: bool = False,
) -> PoolsResult:
    """Compares one pool of GPUs with separate pools for prefill and decode: the exact best of each.

    Args:
        question: What is served, on what, within which limits; the phase is serve.
        mix: Kinds of requests, of a question without lengths: (prompt tokens, answer tokens, share) each.
        requests_per_s: Load to carry with the fewest GPUs; None fills all.
        sweep: Several values of isl, gpus, ttft_ms or requests_per_s, by name: a comparison for each combination.
        kv_hidden: Share of the KV cache's transfer that overlaps with prefill, 0 to 1.
        resharded: Also a pool that re-shards its weights between prefill and decode, which no engine can do yet.
        afd: Also a decode pool whose attention and experts have GPUs of their own.
        host_gb: Host memory for KV caches per GPU, in 1e9 bytes, where a pool re-shards.
        host_gb_per_s: A GPU's link to it, per direction.
        cv: Under a load: coefficient of variation of the gaps between arrivals; 1 is Poisson.
        percentile: Under a load: percentile of the latencies that must be within the limits.
        requests: Under a load, of a replay.
        trace: A recorded trace as the load, as of `recommend`.
        progress: Whether to report progress on stderr.

    Raises:
        CatalogError, InputError: The question is invalid.
        ValueError: A mix with invalid lengths or shares.
    """
    from raysearch.answers.compared_pools import PoolsResult
    from raysearch.base.progress import telling
    from raysearch.deploy.replay.trace_files import trace_file
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
            cv=cv,
            percentile=percentile,
            requests=requests,
            trace=trace_file(trace),
            progress=tell,
            afd=afd,
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
    dims: str = "megatron",
    cp: int = 1,
    dp: int | None = None,
    layout: str | None = None,
    vocabulary: str | None = None,
    replicas: int | None = None,
    cv: float = 1.0,
    spread: float = 1.0,
    length_cv: float = 0.0,
    cached: float = 0.0,
    router: str = "least_loaded",
    percentile: float = 99.0,
    requests: int = 2000,
    seeds: int | None = None,
    progress: bool = False,
) -> ReplayResult:
    """Replays traffic on a deployment, event by event: latencies, goodput, and the load at which its limits break.

    Args:
        question: What is served, on what, within which limits; its lengths are those of the requests without a trace.
        path: Instead of a strategy: the folder of a recommendation, of `pools` or a search, a file with a strategy, or
            one with a command that starts a server of vLLM, SGLang or TensorRT-LLM, whose degrees, formats and caps are
            taken.
        alternative: Which of a recommendation; 0 is the best.
        requests_per_s: Arrivals over all replicas; with a trace, the rate to which its times are scaled.
        concurrency: Concurrent requests instead, over all replicas; each is followed by the next once it is answered.
        trace: A recorded trace instead; a question without lengths is about its mean ones.
        tp: Of the strategy, as in `evaluate`.
        batch: Requests that run at once, at most.
        ep: As in `evaluate`.
        pp: Pipeline stages.
        dims: As in `evaluate`.
        cp: As in `evaluate`.
        dp: As in `evaluate`.
        layout: Instead of tp, ep and dp.
        vocabulary: As in `evaluate`.
        replicas: Independent replicas; by default the folder's, else one.
        cv: Coefficient of variation of the gaps between arrivals; 1 is Poisson.
        spread: Lengths are uniform between this share of the question's and the whole.
        length_cv: Instead, lengths are log-normal with this coefficient of variation and the question's as their mean.
        cached: Share of each prompt that is in the prefix cache; of a trace its hashes decide.
        router: "least_loaded", "round_robin" or "prefix".
        percentile: Percentile of the latencies that must be within the limits.
        requests: Requests per run.
        seeds: Runs per figure; by default 5, and 1 of a trace, of which all are the same.
        progress: Whether to report progress on stderr.

    Raises:
        CatalogError, InputError, StrategyError: The question, the strategy or the traffic is invalid.

    >>> asked = question(model="llama_3_1_8b", isl=1000, osl=100, tpot_ms=20, ttft_ms=200)
    >>> found = replay(asked, tp=1, batch=32, requests_per_s=4, requests=300, seeds=2)
    >>> found.feasible, found.report.probability
    (True, 1.0)
    """
    from raysearch.answers.replayed import ReplayResult, TrafficOptions, deployed_in, deployed_strategy
    from raysearch.answers.strategy_text import check_no_strategy, strategy_of
    from raysearch.base.errors import InputError
    from raysearch.base.progress import telling
    from raysearch.deploy.replay.trace_files import with_lengths_of

    traffic = TrafficOptions(requests_per_s, concurrency, trace, cv, spread, length_cv, cached, requests)
    if path is not None:
        check_no_strategy(Path(path), tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
        deployed = deployed_in(Path(path), question, alternative, traffic.recorded)
    elif question is None or (tp is None and layout is None):
        raise InputError("expected path=, or a question with tp= or layout=")
    else:
        question = with_lengths_of(question, traffic.recorded)
        workload = load_question(question)
        strategy = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
        deployed = deployed_strategy(workload, strategy)
    with telling("replaying") if progress else nullcontext(lambda _: None) as tell:
        return ReplayResult.of(
            question,
            deployed,
            traffic,
            replicas=replicas,
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
    trace: str | Path | None = None,
    percentile: float = 99.0,
    requests: int = 1000,
    seeds: int = 10,
    progress: bool = False,
) -> PlacementResult:
    """Places several models on one cluster so that most requests meet their limits under bursty arrivals.

    Args:
        fleet: Name in configs/fleets, or the path of a TOML file.
        gpus: GPUs available, in place of the file's.
        rate: Factor on the request rates of the file.
        cv: Burstiness of all models, in place of the file's; 1 is Poisson.
        trace: Recorded requests of all models, in place of the file's cv, isl and osl; each model has them at its own
            rate, from another place on in each run.
        percentile: Of the latencies that must be within the limits, for the probability that they are.
        requests: Requests per simulated run.
        seeds: Runs per figure.
        progress: Whether to show progress bars on stderr.

    Raises:
        CatalogError: There is no such fleet.
        InputError: The trace cannot be read.
    """
    from raysearch.answers.placed import PlacementResult, no_progress
    from raysearch.base.progress import following

    with following(f"placements of {fleet}") if progress else nullcontext(no_progress) as show:
        return PlacementResult.of(
            fleet,
            gpus=gpus,
            rate=rate,
            cv=cv,
            trace=trace,
            percentile=percentile,
            requests=requests,
            seeds=seeds,
            progress=show,
        )


@typed
def search(
    question: Question,
    searcher: str = "prior",
    *,
    seed: int = 0,
    budget: int | None = None,
    simulator: str | None = None,
    workers: int | None = None,
    timeout_s: float = 600.0,
    retries: int = 1,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    on_failure: Literal["stop", "infeasible"] = "stop",
    out: str | Path | None = None,
    resume: bool = False,
    replay: str | Path | None = None,
    start: str | Path | None = None,
    options: Mapping[str, object] | None = None,
    trust_code: bool = False,
    progress: bool = False,
) -> SearchResult:
    """Runs one searcher, scored against the exact optimum; every evaluation is on disk before the next one begins.

    Args:
        question: What is searched.
        searcher: Name of a searcher, or your own "module:Class".
        seed: Equal seeds give equal calls, bit for bit; with workers, if answers arrive in the same order.
        budget: Strategies to evaluate; 4000, 300 of `prior`, or a heuristic's whole sweep.
        simulator: "module:function" of another black box; None is the built-in one.
        workers: Worker processes; by default as many as the time of a call justifies.
        timeout_s: Timeout of a simulator's call in a worker.
        retries: Retries of a failing call.
        cpus_per_worker: CPUs that Ray reserves for each worker; may be a fraction.
        gpus_per_worker: GPUs likewise.
        on_failure: What to do if a simulator keeps failing on a strategy.
        out: Folder for the results, new or empty; by default results/NAME-UTC TIME.
        resume: Whether to continue the unfinished search in `out`.
        replay: Folder of an identical search, whose workers' answers are taken in the same order.
        start: What to evaluate first: "rule", "optimum", or a folder or file with strategies.
        options: Of the searcher; what is left out takes its file in configs/searchers.
        trust_code: Whether to continue even though code has changed since it was begun.
        progress: Whether to show progress bars on stderr.

    Raises:
        CatalogError, InputError: The question, the searcher or the folder cannot be used.
        RunFailed: Something failed; what was found is kept.
    """
    from raysearch.answers.optimal import no_bars
    from raysearch.answers.searched import SearchResult, no_bar
    from raysearch.base.progress import searching, stepping
    from raysearch.simulators.opening import Patience

    return SearchResult.of(
        question,
        searcher,
        seed=seed,
        budget=budget,
        simulator=simulator,
        workers=workers,
        patience=Patience(timeout_s, retries, cpus_per_worker, gpus_per_worker),
        on_failure=on_failure,
        out=None if out is None else Path(out),
        resume=resume,
        replay=None if replay is None else Path(replay),
        start=None if start is None else str(start),
        options=options,
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
        resume: Whether to continue the unfinished study in `out`.
        trust_code: Whether to continue even though code has changed since it was begun.
        address: Address of a running Ray cluster; by default $RAY_ADDRESS, else a local Ray.
        cpus: CPUs of the local Ray; by default all.
        simulator: In place of the file's.
        workers: In place of the file's.
        on_failure: In place of the file's.

    Returns:
        Its report, as `report` gives it.

    Raises:
        CatalogError, InputError: The study or the folder cannot be used.
        RunFailed: Some runs failed; the others are finished.
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
        folder: Folder of the results.

    Raises:
        InputError: There are no results, or none that can be trusted.
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
    """Writes a strategy as the command, configuration or code that runs it, and lists what the target cannot express.

    Args:
        source: An answer, or the folder of one, or a JSON file with a strategy.
        to: "vllm", "sglang", "trtllm", "megatron", "dynamo", "llm-d", "dtensor", "jax", or one that a package adds.
        question: What is served, if the source does not say.
        alternative: Which of a recommendation: 0 is the best, then its alternatives; of pools, a point.
        serve: Weights: a Hugging Face repository or a path; by default the model's.
        replicas: Independent replicas, for an answer with one strategy.
        ops: Shard only these; by default all.
        longest_request: Longest request to admit, prompt and answer, in tokens; by default twice the question's, within
            the model's context.

    Raises:
        InputError, StrategyError, CatalogError: There is no such strategy or target, or the target cannot run it.

    >>> asked = question(model="llama_3_1_8b", isl=1000, osl=100)
    >>> export(evaluate(asked, layout="tp2", batch=8)).command.split()[:3]
    ['vllm', 'serve', 'meta-llama/Llama-3.1-8B-Instruct']
    """
    from raysearch.answers.exported import ExportResult, deployments_of

    return ExportResult.of(deployments_of(source, question, alternative, serve, replicas), to, ops, longest_request)
