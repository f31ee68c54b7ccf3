"""The searchers by name. A name costs nothing until its searcher is made: classes are imported on first use.

A user's own is named "module:Class", or by the entry point of the group "raysearch.searchers" that a package declares.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from envs.space import Action, StrategySpace
from envs.strategy_env import brief
from raysearch.base.errors import InputError
from raysearch.base.extras import check_installed
from raysearch.base.file_io import as_strategy
from raysearch.base.foreign import foreign
from raysearch.base.named_code import load_named, note_if_declared
from raysearch.searchers.interface import NoOptions, Searcher
from raysearch.searchers.start import StartedSearcher
from sim.config.files import config_path, list_names, read_config
from sim.config.mistakes import first_error_text
from sim.json_object import JsonFields
from sim.near_names import did_you_mean

START = "start"
"""Option of every searcher: strategies to call first."""
SEARCHERS_GROUP = "raysearch.searchers"
"""Group in which a package's pyproject.toml declares searchers."""


class UnknownName(InputError):
    """No searcher has that name; the message suggests one."""


class OptionsError(InputError):
    """A searcher was given options it does not have, or values it cannot use."""


class _Entry(NamedTuple):
    summary: str
    load: str
    extra: str


_ENTRIES: dict[str, _Entry] = {}


def register(name: str, summary: str, load: str, extra: str = "") -> None:
    """Adds a searcher.

    Args:
        name: What users call it.
        summary: One line for lists.
        load: "package.module:Class", a `Searcher`; imported when first needed.
        extra: What it needs of `raysearch.base.extras`, if anything.

    Raises:
        ValueError: The name is taken, or `load` names no class.
    """
    if name in _ENTRIES:
        raise ValueError(f"searcher {name!r} is registered already, as {_ENTRIES[name].load}: choose another name")
    if load.count(":") != 1:
        raise ValueError(f"searcher {name!r}: expected 'package.module:Class', got {load!r}")
    _ENTRIES[name] = _Entry(summary, load, extra)


def searcher_names() -> tuple[str, ...]:
    """The registered names, in order; not those that packages declare."""
    return tuple(_ENTRIES)


def searcher_summary(name: str) -> str:
    """What the searcher does and which extra it needs, in one line.

    Raises:
        UnknownName: There is none of that name.
    """
    entry = _entry(name)
    return f"{entry.summary}; needs the extra {entry.extra}" if entry.extra else entry.summary


def searcher_class(name: str) -> type[Searcher]:
    """The class behind a name, imported now.

    Args:
        name: A registered one, "module:Class", or an entry point of `SEARCHERS_GROUP`.

    Raises:
        UnknownName: There is none of that name.
        InputError: The extra that it needs is not installed; it cannot be imported, or is no searcher.
    """
    if name not in _ENTRIES:
        return _user_class(name)
    note_if_declared("searcher", name, SEARCHERS_GROUP)
    entry = _ENTRIES[name]
    if entry.extra:  # here, so that a study that names it is refused before its first run
        others = ", ".join(sorted(other for other, found in _ENTRIES.items() if not found.extra))
        check_installed(entry.extra, f"searcher {name!r}", others)
    module, _, attribute = entry.load.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _user_class(name: str) -> type[Searcher]:
    found = load_named("searcher", name, SEARCHERS_GROUP, "module:Class", _ENTRIES, UnknownName)
    with foreign(f"searcher {name!r}: cannot find out what it is", InputError):
        if reason := _unfit(found):
            raise InputError(f"searcher {name!r}: {reason}")
    return found


def _unfit(found: Any) -> str | None:
    """Why something is no searcher that can be made; None if it is one."""
    if not (isinstance(found, type) and issubclass(found, Searcher)):
        return f"expected a class derived from {Searcher.__module__}.Searcher, got {found!r}"
    if lacking := sorted(found.__abstractmethods__):
        return f"{found.__name__} must define {', '.join(lacking)}"
    if not isinstance(getattr(found, "name", None), str):
        return f"{found.__name__} must define a text `name`, from which its random numbers are seeded"
    if not (isinstance(found.Options, type) and issubclass(found.Options, BaseModel)):
        return f"{found.__name__}.Options must be a class derived from {NoOptions.__module__}.NoOptions"
    try:
        inspect.signature(found).bind(None, seed=0, budget=1, options=None)
    except TypeError as error:
        return f"{found.__name__} is made with (space, *, seed, budget, options), which it does not take: {error}"
    return None


def check_options(name: str, options: JsonFields) -> BaseModel:
    """The searcher's own options: the given ones over its preset in configs/searchers/; `START` is every searcher's.

    Raises:
        UnknownName: There is no such searcher.
        OptionsError: An option is unknown or its value is not allowed.
        CatalogError: The preset file is broken.
    """
    schema = searcher_class(name).Options
    preset = read_config(config_path("searchers", name), schema).model_dump() if name in list_names("searchers") else {}
    own = {option: value for option, value in options.items() if option != START}
    try:
        return schema.model_validate({**preset, **own})
    except ValidationError as error:
        raise OptionsError(f"searcher {name!r}: {first_error_text(error, schema)}") from error


def make_searcher(name: str, space: StrategySpace, *, seed: int, budget: int, **options: Any) -> Searcher:
    """A searcher at its first call.

    Args:
        name: See `searcher_names`.
        space: What it chooses from.
        seed: >= 0.
        budget: Calls of the run, >= 1.
        options: Its settings; what is left out takes the value in configs/searchers/. `START` may be among them:
            strategies as JSON writes them, which are called first.

    Raises:
        UnknownName, OptionsError, CatalogError: See `check_options`.
        InputError: The seed or the budget is out of range, or an extra is not installed.

    >>> from sim.config.catalog import load_workload
    >>> space = StrategySpace(load_workload("gpt_moe_1_2t_16k"))
    >>> searcher = make_searcher("annealing", space, seed=0, budget=4000, initial_temperature=30.0)
    >>> searcher.metrics()["temperature"]
    30.0
    """
    if seed < 0:
        raise InputError(f"expected a seed of at least 0, got {seed}")
    if budget < 1:
        raise InputError(f"expected a budget of at least 1 call, got {budget}")
    validated = check_options(name, options)
    searcher = searcher_class(name)(space, seed=seed, budget=budget, options=validated)
    return StartedSearcher(searcher, _actions(space, options[START])) if options.get(START) else searcher


def _actions(space: StrategySpace, strategies: Sequence[JsonFields]) -> list[Action]:
    found: list[Action] = []
    for fields in strategies:
        try:
            found.append(space.encode(as_strategy(fields)))
        except (ValueError, TypeError, LookupError) as error:
            raise OptionsError(f"cannot start with {brief(str(fields))}: {error}") from error
    return found


def run_budget(name: str, space: StrategySpace, budget: int) -> int:
    """Calls of a run without a budget of its own: a searcher that sweeps is let finish, others get `budget`.

    >>> from sim.config.catalog import load_workload
    >>> from sim.ops.heuristics import megatron_dims
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> space = StrategySpace(workload, fixed_dims=megatron_dims(workload.model))
    >>> run_budget("megatron", space, 4000), run_budget("random", space, 4000)
    (5200, 4000)
    """
    return searcher_class(name).sweep_calls(space) or budget


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        raise UnknownName(f"unknown searcher {name!r}: {did_you_mean(name, _ENTRIES)}")
    return _ENTRIES[name]


register("random", "independent uniform samples", "raysearch.searchers.random:RandomSearcher")
register(
    "random_walk",
    "uniform walk over neighbours, one coordinate at a time",
    "raysearch.searchers.random_walk:RandomWalkSearcher",
)
register(
    "annealing",
    "simulated annealing as in the paper: from T = 100 tokens/s/GPU on a cosine",
    "raysearch.searchers.annealing:AnnealingSearcher",
)
register(
    "coordinate",
    "coordinate ascent, restarted at random from every local optimum",
    "raysearch.searchers.coordinate:CoordinateSearcher",
)
register(
    "megatron",
    "Megatron-LM's sharding with every combination of degrees and batch",
    "raysearch.searchers.megatron:MegatronSearcher",
)
register(
    "megatron_sp",
    "Megatron-LM's sharding with sequence parallelism, every combination of degrees and batch",
    "raysearch.searchers.megatron:MegatronSPSearcher",
)
register(
    "annealing_tuned",
    "simulated annealing on the logarithm of throughput, infeasible calls graded, tuned",
    "raysearch.searchers.annealing:TunedAnnealingSearcher",
)
register(
    "mcmc",
    "Metropolis-Hastings over strategies, as FlexFlow searches",
    "raysearch.searchers.mcmc:MCMCSearcher",
)
register(
    "genetic",
    "genetic algorithm of pymoo: tournament, uniform crossover, mutation",
    "raysearch.searchers.genetic:GeneticSearcher",
    extra="pymoo",
)
register(
    "ant_colony",
    "max-min ant system: pheromone on every value of every choice",
    "raysearch.searchers.ant_colony:AntColonySearcher",
)
register(
    "prior",
    "a network and a policy trained on other workloads, corrected by every answer",
    "raysearch.searchers.prior.prior_searcher:PriorSearcher",
)
register(
    "optuna_tpe",
    "Optuna's tree-structured Parzen estimator, multivariate",
    "raysearch.searchers.optuna_samplers:OptunaTPESearcher",
    extra="search",
)
register(
    "optuna_cmaes",
    "Optuna's CMA-ES, restarted",
    "raysearch.searchers.optuna_samplers:OptunaCmaEsSearcher",
    extra="search",
)
register(
    "nevergrad",
    "one of Nevergrad's optimisers for discrete spaces",
    "raysearch.searchers.nevergrad_portfolio:NevergradSearcher",
    extra="nevergrad",
)
register(
    "ppo_paper",
    "Learning to Shard: PPO with attention over the elites, the paper's settings",
    "raysearch.searchers.ppo.ppo_searcher:PPOSearcher",
    extra="rllib",
)
register(
    "ppo",
    "PPO with attention that copies from the elites, and a critic of strategies: this project's own",
    "raysearch.searchers.ppo.ppo_searcher:CopyPPOSearcher",
    extra="rllib",
)
register(
    "sb3_ppo",
    "Learning to Shard's agent on Stable-Baselines3",
    "raysearch.searchers.sb3_ppo:SB3PPOSearcher",
    extra="sb3",
)
