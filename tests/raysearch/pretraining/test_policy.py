"""The policy: what it reads, that both of its forms agree, and that training makes it choose what truly gains."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from envs import StrategyEnv, StrategySpace
from raysearch.base.errors import InputError
from raysearch.pretraining.array_files import make_files
from raysearch.pretraining.pretrained import POLICY_FILE, PRIOR_FILE, pretrain_policy
from raysearch.pretraining.pretraining_file import PolicySettings, PretrainingFile
from raysearch.pretraining.search_episodes import Searches, TokenLayout
from raysearch.pretraining.search_tables import (
    SearchTable,
    kept_tables,
    made_table,
    read_tables,
    table_files,
    table_workload,
)
from raysearch.searchers.prior.network import SHIPPED_PRIOR
from raysearch.searchers.prior.policy import (
    OF_CALL,
    OF_CANDIDATE,
    OF_WORKLOAD,
    READ,
    SHIPPED_POLICY,
    SHOWN,
    Policy,
    PolicyHeader,
    PolicyTokens,
    read_policy,
    write_policy,
)
from raysearch.searchers.prior.strategy_features import Reals
from raysearch.searchers.registry import make_searcher
from raysearch.testing.stepping import Stepped
from sim.config.catalog import load_workload
from sim.config.files import CatalogError
from sim.simulate import evaluate
from tests.processes import LONGEST_S
from tests.raysearch.forging import WRONG, places, replaced
from tests.raysearch.fuzzing import INPUTS, forged_arrays, tried

SMALL = PretrainingFile(workloads=20, policy=PolicySettings(tables=16, calls=4))
HEADER = PolicyHeader(format="raysearch policy 1", command="", data={}, figures={}, chosen="")


@pytest.fixture(scope="module")
def table() -> SearchTable:
    for index in range(8):
        if (found := made_table(SMALL, SHIPPED_PRIOR, index)).raw.any():
            return found
    raise AssertionError


@pytest.fixture(scope="module")
def searches(table: SearchTable) -> Searches:
    return Searches(SMALL, SHIPPED_PRIOR, [table])


def test_a_tables_answers_are_the_simulators(table: SearchTable) -> None:
    workload = table_workload(SMALL, table.index)
    space = StrategySpace(workload)
    for row in np.linspace(0, len(table.actions) - 1, 12).astype(int):
        found = evaluate(workload, space.decode(table.actions[row]))
        assert found.feasible == (table.excess[row] <= 0)
        np.testing.assert_allclose(table.simulated[row], found.tokens_per_s_per_gpu, rtol=1e-9)
    assert len(np.unique(table.actions, axis=0)) == len(table.actions)


@pytest.mark.slow
def test_a_tight_table_has_a_limit_hardly_above_the_shortest_time_and_its_answers_are_of_that_limit() -> None:
    asked = SMALL.model_copy(update={"policy": SMALL.policy.model_copy(update={"tight_share": 1.0})})
    table = next(found for index in range(8) if (found := made_table(asked, SHIPPED_PRIOR, index)).raw.any())
    workload = table_workload(asked, table.index, table.tpot_slo_s)
    space, best = StrategySpace(workload), table.actions[table.raw.argmax()]
    assert table.tpot_slo_s / 1.7 < evaluate(workload, space.decode(best)).tpot_s <= table.tpot_slo_s
    assert table.tpot_slo_s != table_workload(asked, table.index).tpot_slo_s
    assert 0 < (table.raw > 0).mean() < 0.7


def test_a_search_of_a_table_gains_what_it_was_stated_to_and_calls_nothing_twice(searches: Searches) -> None:
    search = searches.begin(0, np.random.default_rng(0), noise=0.0)
    seen: list[int] = []
    for _ in range(6):
        gains, rows, before = search.gains, search.rows, search.best
        place = int(np.argmax(gains))
        seen.append(int(rows[place]))
        assert search.call(place) == pytest.approx(gains[place])
        assert search.best == pytest.approx(before + gains[place])
    assert len(set(seen)) == 6
    assert 0 < search.best <= 1


def test_tokens_are_unpacked_as_they_were_packed(searches: Searches) -> None:
    search, layout = searches.begin(0, np.random.default_rng(0), noise=0.0), searches.layout
    search.call(0)
    search.call(1)
    tokens = search.tokens
    workload, calls, candidates, made, there = layout.unpacked(layout.packed(tokens)[None])
    np.testing.assert_array_equal(workload[0], tokens.workload)
    np.testing.assert_array_equal(calls[0, :2], tokens.calls)
    np.testing.assert_array_equal(candidates[0, : len(tokens.candidates)], tokens.candidates)
    assert (made.sum(), there.sum()) == (2, len(search.rows))


def random_tokens(layout: TokenLayout, calls: int, candidates: int) -> PolicyTokens:
    rng = np.random.default_rng(0)
    each = rng.normal(size=(calls, layout.own + OF_CALL)), rng.normal(size=(candidates, layout.own + OF_CANDIDATE))
    return PolicyTokens(*(rows.astype(np.float32) for rows in (rng.normal(size=layout.constants + OF_WORKLOAD), *each)))


def test_a_search_prefers_what_the_trained_network_does() -> None:
    torch = pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork

    layout = TokenLayout(constants=5, own=7, calls=6)
    torch.manual_seed(0)
    network = PolicyNetwork(layout, 16, 2)
    torch.nn.init.normal_(network.preference.weight)
    tokens = random_tokens(layout, 3, 9)
    logits, _ = network(torch.from_numpy(layout.packed(tokens))[None])
    found = Policy(HEADER, network.arrays()).preferences(tokens)
    np.testing.assert_allclose(found, logits.detach().numpy()[0, :9], atol=1e-4)
    assert (logits.detach().numpy()[0, 9:] < -1e3).all()  # what is not there is never chosen


def test_the_order_of_candidates_and_of_calls_makes_no_difference() -> None:
    torch = pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork

    layout = TokenLayout(constants=5, own=7, calls=6)
    network = PolicyNetwork(layout, 16, 1)
    torch.nn.init.normal_(network.preference.weight)
    policy, (workload, calls, candidates) = Policy(HEADER, network.arrays()), random_tokens(layout, 4, 9)
    order = np.random.default_rng(1).permutation(9)
    whole = policy.preferences(PolicyTokens(workload, calls, candidates))
    np.testing.assert_allclose(
        policy.preferences(PolicyTokens(workload, calls[::-1], candidates[order])), whole[order], atol=1e-5
    )
    assert np.abs(policy.preferences(PolicyTokens(workload, calls[:2], candidates)) - whole).max() > 1e-4


def test_weights_that_were_taken_do_not_change_with_further_training() -> None:
    torch = pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork

    network = PolicyNetwork(TokenLayout(constants=5, own=7, calls=6), 8, 1)
    taken = network.arrays()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    assert all((array != taken[name]).all() for name, array in network.arrays().items())


def test_imitation_learns_to_choose_what_truly_gains(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork
    from raysearch.pretraining.policy_training import imitated

    layout, rng = TokenLayout(constants=2, own=3, calls=2), np.random.default_rng(0)
    numbers = rng.normal(size=(32, SHOWN, layout.own + OF_CANDIDATE))
    numbers[..., -1] = 0  # expected improvement says nothing
    rows = [random_tokens(layout, 1, SHOWN)._replace(candidates=each) for each in numbers]
    seen = np.stack([layout.packed(each) for each in rows]).astype(np.float16)
    gains = np.stack([each.candidates[:, 0] > 1.5 for each in rows]).astype(np.float16)  # a strategy's first number
    asked = PretrainingFile(workloads=20, policy=PolicySettings(calls=2, steps=40, batch=16, learning_rate=2e-2))
    torch.manual_seed(0)
    network = PolicyNetwork(layout, 16, 1)

    def gained() -> float:
        chosen = network(torch.from_numpy(seen).float())[0].argmax(1).numpy()
        return float(gains[np.arange(len(gains)), chosen].mean())

    before = gained()
    imitated(network, lambda: (seen, gains), asked, tmp_path / "a", lambda *_: None, lambda *_: None)
    assert before < 0.4 < 0.9 < gained()


@pytest.mark.parametrize("content", [b"", pickle.dumps(print)])
def test_damaged_weights_of_an_iteration_are_one_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork
    from raysearch.pretraining.policy_training import reinforced

    network = PolicyNetwork(TokenLayout(constants=5, own=7, calls=4), 8, 1)
    (tmp_path / "policy-0001.safetensors").write_bytes(content)
    yielded = reinforced(network, SMALL, [], SHIPPED_PRIOR, tmp_path, 1, lambda *_: None, lambda *_: None)
    with pytest.raises(InputError, match=r"policy-0001.safetensors is damaged.*delete it"):
        list(yielded)


def test_a_policy_is_read_as_it_was_written_and_another_file_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork

    layout, path = TokenLayout(constants=5, own=7, calls=6), tmp_path / "policy.safetensors"
    arrays = PolicyNetwork(layout, 8, 1).arrays()
    write_policy(path, HEADER, arrays)
    tokens = random_tokens(layout, 2, 3)
    np.testing.assert_array_equal(read_policy(path).preferences(tokens), Policy(HEADER, arrays).preferences(tokens))
    space = StrategySpace(load_workload("qwen3_235b_a22b_16k"))
    with pytest.raises(InputError, match="expected a policy of"):
        make_searcher("prior", space, seed=0, budget=1, policy=str(path))
    del arrays["norm.bias"]
    write_policy(path, HEADER, arrays)
    read_policy.cache_clear()
    with pytest.raises(InputError, match="no policy that `raysearch pretrain` wrote"):
        read_policy(path)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", pickle.dumps(print), b"\xff" * 64])
def test_what_is_no_policy_is_one_error(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "policy.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="no policy that `raysearch pretrain` wrote"):
        read_policy(path)


def test_a_forged_policy_is_read_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from raysearch.pretraining.policy_module import PolicyNetwork

    path, own = tmp_path / "policy.safetensors", PolicyNetwork(TokenLayout(constants=5, own=7, calls=6), 8, 1).arrays()
    header = HEADER.model_dump(mode="json")
    for seed in range(INPUTS):
        rng = random.Random(seed)
        name = rng.choice([*own, "weight7"])
        known = own.get(name, np.zeros(3, np.float32))
        with np.errstate(over="ignore"):
            known = known * np.float32(rng.choice([1, 1, -1e30, np.nan]))
        others = [known[..., :1], known.T, known[None]]
        made = replaced(header, rng.choice(list(places(header))), rng.choice(WRONG)) if seed % 2 else header
        forged_arrays(path, made, {**own, name: rng.choice([known, *others, np.zeros((0, 0))])}, rng)
        read_policy.cache_clear()
        tried(lambda: read_policy(path))


@pytest.mark.parametrize("factor", [0, -1, 1e4, 1e30, np.nan])
def test_a_policy_with_forged_weights_prefers_by_finite_numbers_or_is_refused(tmp_path: Path, factor: float) -> None:
    shipped, path = read_policy(SHIPPED_POLICY), tmp_path / "policy.safetensors"
    sizes = [shipped.arrays[f"{name}.weight"].shape[1] for name in READ]
    rng = np.random.default_rng(0)
    tokens = PolicyTokens(*(rng.normal(size=size) for size in (sizes[0], (3, sizes[1]), (4, sizes[2]))))
    with np.errstate(over="ignore"):
        write_policy(path, HEADER, {name: array * np.float32(factor) for name, array in shipped.arrays.items()})
    read_policy.cache_clear()
    if abs(factor) < 1e5:
        assert np.isfinite(read_policy(path).preferences(tokens)).all()
    else:
        with pytest.raises(InputError, match="no policy that `raysearch pretrain` wrote"):
            read_policy(path)
    cut = {name: array[..., :0] if name == "norm.weight" else array for name, array in shipped.arrays.items()}
    write_policy(path, HEADER, cut)
    read_policy.cache_clear()
    with pytest.raises(InputError, match="no empty arrays"):
        read_policy(path)


@pytest.mark.parametrize(
    ("terms", "policy", "calls"),
    [("simulator", "", 0), ("carried", "", 0), ("carried", str(SHIPPED_POLICY), 5), ("network", "", 5)],
)
def test_a_policy_decides_the_first_calls_where_the_network_expects_or_it_is_named(
    monkeypatch: pytest.MonkeyPatch, terms: str, policy: str, calls: int
) -> None:
    asked: list[int] = []
    inner = Policy.preferences

    def counting(policy: Policy, tokens: PolicyTokens) -> Reals:
        asked.append(len(tokens.calls))
        return inner(policy, tokens)

    read_policy(SHIPPED_POLICY)
    monkeypatch.setattr(Policy, "preferences", counting)
    env = StrategyEnv(load_workload("qwen3_235b_a22b_16k", "l40s"))
    searched = Stepped(env)
    searcher = make_searcher("prior", env.space, seed=0, budget=calls + 2, terms=terms, policy=policy)
    for _ in range(calls + 1):
        searched.advance(searcher)
    assert asked == list(range(calls))


BY_DEFAULT = """
import sys, raysearch as rs
found = rs.search(rs.question(workload=sys.argv[2]), budget=3, out=sys.argv[1])
print(found.summary["searcher"], found.summary["calls"], sorted({"torch", "ray"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_a_search_is_by_the_prior_and_needs_neither_torch_nor_ray(tiny_workload: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", BY_DEFAULT, str(tmp_path / "out"), str(tiny_workload)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.stdout == "prior 3 []\n", done.stderr


@contextmanager
def no_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


CONFIG = """workloads = 20
[distribution]
serve_share = 0.0
extended_share = 0.0
[policy]
tables = 16
calls = 3
searches = 1
width = 8
depth = 1
steps = 4
batch = 8
iterations = 2
calls_per_iteration = 12
"""


@pytest.mark.slow
def test_rllib_trains_a_policy_that_a_search_can_use_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.rllib.algorithms.ppo import PPO
    from ray.rllib.core.learner.learner import Learner
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    from raysearch.pretraining.policy_training import by_policy, judged

    counted = {"training_step": 0, "update": 0, "sample": 0}
    for owner, name in ((PPO, "training_step"), (Learner, "update"), (SingleAgentEnvRunner, "sample")):
        inner = getattr(owner, name)

        def counting(self, *args, _inner=inner, _name=name, **kwargs):
            counted[_name] += 1
            return _inner(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / PRIOR_FILE).write_bytes(SHIPPED_PRIOR.read_bytes())
    header = pretrain_policy(str(tmp_path / "small.toml"), tmp_path, 1, no_bar)
    assert header is not None
    assert all(counted.values()), counted
    assert 0 < header.figures["reinforced 2, call 3"] <= 1
    asked = PretrainingFile.model_validate(tomllib.loads(CONFIG))
    tables = read_tables([tmp_path / "tables-00000.npz"], asked)
    kept = [table for table, is_kept in zip(tables, kept_tables(tables), strict=True) if is_kept]
    written = by_policy(read_policy(tmp_path / POLICY_FILE))
    found = judged(Searches(asked, SHIPPED_PRIOR, kept), written, asked.seed, 3)
    assert found == pytest.approx({n: header.figures[f"{header.chosen}, call {n}"] for n in (1, 3)})
    made = dict(counted)
    assert pretrain_policy(str(tmp_path / "small.toml"), tmp_path, 1, no_bar) == header
    assert counted == made  # nothing was left to do
    (tmp_path / "policy-0002.safetensors").rename(last := tmp_path / "straight")
    pretrain_policy(str(tmp_path / "small.toml"), tmp_path, 1, no_bar)  # as after a stop
    assert (tmp_path / "policy-0002.safetensors").read_bytes() == last.read_bytes()
    space = StrategySpace(load_workload("qwen3_235b_a22b_16k"))
    searcher = make_searcher("prior", space, seed=0, budget=1, policy=str(tmp_path / POLICY_FILE))
    action = searcher.ask(np.zeros((3, 16), np.float32))
    assert action is not None
    space.decode(action)


def test_too_few_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text("workloads = 20\n[policy]\ntables = 3\n")
    with pytest.raises(CatalogError, match="expected 0, or at least 16"):
        pretrain_policy(str(tmp_path / "few.toml"), tmp_path, 1, no_bar)


def test_tables_that_are_damaged_or_of_another_run_are_refused(tmp_path: Path, table: SearchTable) -> None:
    few = SMALL.model_copy(update={"policy": PolicySettings(tables=16, calls=4)})
    files = table_files(few, SHIPPED_PRIOR)._replace(workloads=1)
    paths = make_files(files, tmp_path, 1, lambda *_: None)
    one = SMALL.model_copy(update={"policy": few.policy.model_copy(update={"tables": 1})})
    assert len(read_tables(paths, one)) <= 1
    with pytest.raises(ValueError, match="holds other workloads"):
        read_tables(paths, one.model_copy(update={"seed": 9}))
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        read_tables(paths, one)
