import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest

from envs import (
    COMPACT_FILE,
    ROWS_FILE,
    BudgetExhausted,
    CallGate,
    CallRow,
    DamagedRows,
    RowWriter,
    SimulatorFailure,
    StrategyEnv,
    StrategySpace,
    compact,
    read_rows,
)
from envs.calls import run_head
from envs.chain import NO_ROWS_DIGEST, Seal, chained_line
from envs.frames import bodies
from envs.rows import whole_rows
from raysearch.testing.landscapes import MOE, barren, evaluation, hilly
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.envs.fakes import by_batch

WORKLOAD = load_workload(MOE)
SPACE = StrategySpace(WORKLOAD)


NewGate = Callable[..., CallGate]


@pytest.fixture
def new_gate() -> Iterator[NewGate]:
    """Makes gates, and closes their rows after the test."""
    with contextlib.ExitStack() as stack:

        def make(folder: Path, *, budget: int = 10, simulator=hilly, rows: RowWriter | None = None) -> CallGate:
            folder.mkdir(exist_ok=True)
            rows = stack.enter_context(contextlib.closing(rows or RowWriter(folder / ROWS_FILE)))
            return CallGate(StrategyEnv(WORKLOAD, evaluate=simulator), budget, rows, run_id="run-1")

        yield make


def actions(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [SPACE.sample(rng) for _ in range(count)]


def action_of(**degrees: int) -> np.ndarray:
    ones = Strategy(tp=1, ep=1, pp=1, batch=1, dims=(0,) * 12)
    return SPACE.encode(replace(ones, **degrees))


def call(gate: CallGate, **degrees: int) -> None:
    gate.step(action_of(**degrees))


# --- the budget -----------------------------------------------------------------------------------


def test_exactly_the_budget_goes_through(new_gate: NewGate, tmp_path: Path) -> None:
    simulated = []

    def counting(workload: Workload, strategy: Strategy) -> Evaluation:
        simulated.append(strategy)
        return hilly(workload, strategy)

    gate = new_gate(tmp_path, budget=5, simulator=counting)
    for action in actions(5):
        gate.step(action)
    assert (gate.calls, gate.calls_left) == (5, 0)
    for action in actions(3, seed=1):
        with pytest.raises(BudgetExhausted, match=r"'run-1' has spent its budget of 5 calls"):
            gate.step(action)
    assert (gate.calls, len(simulated), len(read_rows(tmp_path))) == (5, 5, 5)


def test_valid_invalid_and_repeated_calls_are_all_charged_and_written(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, simulator=by_batch({1: 40.0, 2: 80.0}))
    for batch in (1, 1, 2, 4, 4, 4):
        call(gate, batch=batch)
    assert (gate.calls, gate.unique_calls, gate.feasible_calls) == (6, 3, 3)
    rows = read_rows(tmp_path)
    assert list(rows["call"]) == [1, 2, 3, 4, 5, 6]
    assert list(rows["feasible"]) == [True, True, True, False, False, False]
    assert list(rows["best_so_far"]) == [40.0, 40.0, 80.0, 80.0, 80.0, 80.0]
    assert list(rows["violations"]) == ["", "", "", "hbm", "hbm", "hbm"]


def test_a_failing_call_is_neither_charged_nor_written(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, simulator=lambda workload, strategy: evaluation(strategy, math.nan))
    with pytest.raises(SimulatorFailure):
        call(gate)
    assert (gate.calls, gate.unique_calls, len(read_rows(tmp_path))) == (0, 0, 0)


def test_reset_clears_the_elites_but_no_count(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, budget=2, simulator=by_batch({1: 40.0, 2: 20.0}))
    call(gate, batch=1)
    gate.reset()
    call(gate, batch=2)
    assert (gate.calls_left, gate.best_raw) == (0, 40.0)
    assert list(read_rows(tmp_path)["best_so_far"]) == [40.0, 40.0]


def test_a_budget_below_one_is_refused(new_gate: NewGate, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 call, got 0"):
        new_gate(tmp_path, budget=0)


# --- what is kept ---------------------------------------------------------------------------------


def test_the_best_is_the_first_strategy_that_reached_the_highest_feasible_throughput(
    new_gate: NewGate, tmp_path: Path
) -> None:
    gate = new_gate(tmp_path, simulator=by_batch({1: 40.0, 2: 80.0, 4: 80.0}))
    assert (gate.best_raw, gate.best_strategy, gate.best_evaluation) == (0.0, None, None)
    for batch in (8, 1, 2, 4):
        call(gate, batch=batch)
    assert gate.best_raw == 80.0
    assert gate.best_strategy is not None
    assert gate.best_strategy.batch == 2
    assert gate.best_evaluation == evaluation(gate.best_strategy, 80.0)


def test_a_run_without_anything_feasible_has_no_best(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, simulator=barren)
    call(gate)
    assert (gate.best_raw, gate.best_strategy, gate.feasible_calls) == (0.0, None, 0)


def test_a_row_holds_the_strategy_and_what_the_real_simulator_stated(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, simulator=evaluate, budget=15)
    for action in actions(15):
        _, reward, *_, info = gate.step(action)
        row = read_rows(tmp_path).iloc[-1]
        expected = evaluate(WORKLOAD, SPACE.decode(action))
        strategy = Strategy(row.tp, row.ep, row.pp, row.batch, tuple(map(int, row.dims.split(","))))
        assert strategy == expected.strategy
        assert row.tokens_per_s_per_gpu == expected.tokens_per_s_per_gpu
        assert row.tpot_s == expected.tpot_s
        assert row.memory_bytes == expected.memory_bytes.total
        assert row.feasible == expected.feasible
        assert row.violations == ";".join(violation.kind for violation in expected.violations)
        assert (row.run_id, row.reward, row.best_so_far) == ("run-1", reward, info["best"])


def test_numpy_scalars_of_a_plugged_in_simulator_make_the_same_rows(new_gate: NewGate, tmp_path: Path) -> None:
    def with_numpy(workload: Workload, strategy: Strategy) -> Evaluation:
        result = hilly(workload, strategy)
        return replace(result, tokens_per_s_per_gpu=np.float64(result.tokens_per_s_per_gpu), tpot_s=np.float64(0.01))

    digests = set()
    for name, simulator in [("ours", hilly), ("theirs", with_numpy)]:
        gate = new_gate(tmp_path / name, simulator=simulator)
        for action in actions(10):
            gate.step(action)
        digests.add(gate.digest)
    assert len(digests) == 1
    assert (tmp_path / "ours" / ROWS_FILE).read_bytes() == (tmp_path / "theirs" / ROWS_FILE).read_bytes()


# --- the digest -----------------------------------------------------------------------------------


def digest_of(new_gate: NewGate, folder: Path, calls: list[np.ndarray], simulator=hilly) -> str:
    gate = new_gate(folder, budget=len(calls), simulator=simulator)
    for action in calls:
        gate.step(action)
    return gate.digest


def test_the_digest_tells_runs_apart_by_action_order_and_result(new_gate: NewGate, tmp_path: Path) -> None:
    calls = actions(5)
    same = [digest_of(new_gate, tmp_path / name, calls) for name in ("a", "b")]
    others = [
        digest_of(new_gate, tmp_path / "c", calls[::-1]),
        digest_of(new_gate, tmp_path / "d", calls[:4]),
        digest_of(new_gate, tmp_path / "e", calls, barren),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 4


def test_the_digest_never_reads_as_a_number(new_gate: NewGate, tmp_path: Path) -> None:
    assert new_gate(tmp_path).digest.startswith("sha256-")


# --- save and restore -----------------------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_restored_gate_goes_on_as_the_one_that_was_saved(new_gate: NewGate, tmp_path: Path, done: int) -> None:
    calls = actions(6) + actions(4)  # with repeats across the cut
    whole = new_gate(tmp_path / "whole", simulator=evaluate)
    for action in calls[:done]:
        whole.step(action)
    state = json.loads(json.dumps(whole.get_state()))
    for action in calls[done:]:
        whole.step(action)

    (tmp_path / "cut").mkdir()
    rows_file = tmp_path / "cut" / ROWS_FILE
    rows_file.write_bytes((tmp_path / "whole" / ROWS_FILE).read_bytes())
    cut = new_gate(tmp_path / "cut", simulator=evaluate, rows=RowWriter.resume(rows_file, state["calls"]))
    cut.set_state(state)
    assert (cut.calls, cut.best_strategy is None) == (done, state["best_action"] is None)
    for action in calls[done:]:
        cut.step(action)

    assert cut.get_state() == whole.get_state()
    assert cut.digest == whole.digest
    assert cut.best_strategy == whole.best_strategy
    assert cut.best_evaluation == whole.best_evaluation
    assert rows_file.read_bytes() == (tmp_path / "whole" / ROWS_FILE).read_bytes()


def test_a_restored_gate_can_say_what_the_best_was_without_a_call(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, simulator=by_batch({1: 40.0}))
    call(gate, batch=1)
    restored = new_gate(tmp_path, simulator=by_batch({1: 40.0}), rows=RowWriter.resume(tmp_path / ROWS_FILE, 1))
    restored.set_state(gate.get_state())
    assert restored.best_evaluation == gate.best_evaluation
    assert restored.calls == 1


def test_a_restored_gate_keeps_to_the_budget(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path, budget=3)
    for action in actions(3):
        gate.step(action)
    restored = new_gate(tmp_path, budget=3, rows=RowWriter.resume(tmp_path / ROWS_FILE, 3))
    restored.set_state(gate.get_state())
    with pytest.raises(BudgetExhausted):
        restored.step(actions(1)[0])
    smaller = new_gate(tmp_path, budget=2, rows=RowWriter.resume(tmp_path / ROWS_FILE, 3))
    with pytest.raises(ValueError, match="made 3 calls, more than the budget of 2"):
        smaller.set_state(gate.get_state())


# --- rows on disk ---------------------------------------------------------------------------------


def row(call: int) -> CallRow:
    return CallRow("r", call, call, 1, 2, 3, 4, "0,1,2", 1 / 3, 0.1, 1e10, False, "hbm;tpot", -10.0, 0.1 + 0.2)


def written(folder: Path, count: int) -> Path:
    path = folder / ROWS_FILE
    with contextlib.closing(RowWriter(path)) as writer:
        for number in range(1, count + 1):
            writer.write(row(number))
    return path


def test_rows_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    with contextlib.closing(RowWriter(tmp_path / ROWS_FILE)) as writer:
        for number in range(1, 4):
            writer.write(row(number))
            assert len(read_rows(tmp_path)) == number


def test_half_a_last_line_is_not_a_row(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for kept in (*range(len(whole) - last, len(whole), 9), len(whole) - 1):
        path.write_bytes(whole[:kept])
        assert len(read_rows(tmp_path)) == 2


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("tail", [b"", b'{"run_id": "r", "ca'])
def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path, calls: int, tail: bytes) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with contextlib.closing(RowWriter.resume(path, calls)) as writer:
        for number in range(calls + 1, 4):
            writer.write(row(number))
    assert path.read_bytes() == whole


def test_resuming_a_compacted_run_brings_its_rows_back(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    compact(path, tmp_path / COMPACT_FILE)
    with contextlib.closing(RowWriter.resume(path, 2)) as writer:
        writer.write(row(3))
    assert path.read_bytes() == whole
    assert not (tmp_path / COMPACT_FILE).exists()


def test_resuming_with_no_calls_starts_a_file(tmp_path: Path) -> None:
    with contextlib.closing(RowWriter.resume(tmp_path / ROWS_FILE, 0)) as writer:
        writer.write(row(1))
    assert len(read_rows(tmp_path)) == 1


def test_resuming_after_more_calls_than_there_are_rows_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="has 3 whole rows, but the run was saved after 4 calls"):
        RowWriter.resume(path, 4)
    assert path.read_bytes() == whole


_FLOATS = st.floats() | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])
_ROWS = st.lists(
    st.builds(
        CallRow,
        *(st.just("r"), st.integers(1, 2**62)),
        *([st.integers(1, 9)] * 4),
        st.text(),
        *([_FLOATS] * 3),
        st.booleans(),
        st.text(),
        *([_FLOATS] * 2),
    ),
    min_size=1,
    max_size=5,
)


@hypothesis.settings(max_examples=15)
@hypothesis.given(_ROWS)
def test_rows_of_a_frame_are_hashed_as_they_were_when_they_were_written(rows: list[CallRow]) -> None:
    one_by_one = [row.to_json(NO_ROWS_DIGEST) for row in rows]
    head = run_head("r")
    frame = pd.DataFrame(rows, columns=list(CallRow._fields))
    assert [chained_line(head, body, NO_ROWS_DIGEST) for body in bodies(frame)] == one_by_one


@pytest.mark.parametrize("compacted", [False, True])
def test_what_a_seal_covers_is_compared_and_what_came_after_it_followed(tmp_path: Path, compacted: bool) -> None:
    path = tmp_path / ROWS_FILE
    seals: list[Seal] = []
    with contextlib.closing(RowWriter(path)) as writer:
        for number in range(1, 6):
            writer.write(row(number))
            seals.append(writer.seal())
    seal = seals[2]
    whole = path.read_bytes()
    assert len(read_rows(tmp_path, seal=seal)) == whole_rows(tmp_path, seal) == 5
    path.write_bytes(whole.replace(b'"call": 5', b'"call": 6'))
    with pytest.raises(DamagedRows, match="line 5 is damaged"):
        read_rows(tmp_path, seal=seal)
    path.write_bytes(whole.replace(b'"call": 2', b'"call": 3'))
    with pytest.raises(DamagedRows, match="line 2 is damaged"):
        whole_rows(tmp_path, seal)
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(DamagedRows, match="has 2 rows, but was saved after 3 calls"):
        whole_rows(tmp_path, seal)
    path.write_bytes(whole)
    if compacted:
        compact(path, tmp_path / COMPACT_FILE)
    with contextlib.closing(RowWriter.resume(path, 3, seal)) as writer:
        assert writer.seal() == seal
        writer.write(row(4))
        writer.write(row(5))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_run_never_mixes_with_an_old_one(tmp_path: Path, compacted: bool) -> None:
    path = written(tmp_path, 2)
    if compacted:
        compact(path, tmp_path / COMPACT_FILE)
    with pytest.raises(FileExistsError, match="contains a run already"):
        RowWriter(path)
    assert len(read_rows(tmp_path)) == 2


def test_compacting_keeps_every_value_and_type(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    before = read_rows(tmp_path)
    compact(path, tmp_path / COMPACT_FILE)
    assert [file.name for file in tmp_path.iterdir()] == [COMPACT_FILE]
    after = read_rows(tmp_path)
    pd.testing.assert_frame_equal(before, after)
    assert [CallRow(*values) for values in after.itertuples(index=False)] == [row(1), row(2), row(3)]
    compact(path, tmp_path / COMPACT_FILE)
    assert len(read_rows(tmp_path)) == 3


def test_compacting_a_run_without_calls_keeps_the_columns(tmp_path: Path) -> None:
    compact(written(tmp_path, 0), tmp_path / COMPACT_FILE)
    rows = read_rows(tmp_path)
    assert list(rows.columns) == list(CallRow._fields)
    assert len(rows) == 0


def test_compacting_that_was_killed_halfway_loses_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    whole = path.read_bytes()
    (tmp_path / f".{COMPACT_FILE}.1").write_bytes(b"PAR1 half")
    assert len(read_rows(tmp_path)) == 3
    compact(path, tmp_path / COMPACT_FILE)
    path.write_bytes(whole)  # killed between the rename and the removal
    assert len(read_rows(tmp_path)) == 3
    RowWriter.resume(path, 3).close()
    assert not (tmp_path / COMPACT_FILE).exists()
    assert path.read_bytes() == whole


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes().replace(b'"call": 2', b'"call" 2'))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is damaged"):
        read_rows(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_damaged_compact_file_is_named(tmp_path: Path, kept: int) -> None:
    compact(written(tmp_path, 3), tmp_path / COMPACT_FILE)
    (tmp_path / COMPACT_FILE).write_bytes((tmp_path / COMPACT_FILE).read_bytes()[:kept])
    with pytest.raises(DamagedRows, match=r"rows\.parquet is damaged"):
        read_rows(tmp_path)


def test_a_folder_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no calls in .*expected rows\.jsonl or rows\.parquet"):
        read_rows(tmp_path)


@pytest.mark.slow
def test_a_killed_process_loses_no_row_it_reported(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        import numpy as np
        from envs import CallGate, RowWriter, StrategyEnv
        from sim.config.catalog import load_workload

        env = StrategyEnv(load_workload(sys.argv[2]))
        gate = CallGate(env, 10**6, RowWriter(Path(sys.argv[1])), "r")
        rng = np.random.default_rng(0)
        while True:
            gate.step(env.space.sample(rng))
            print(gate.calls, flush=True)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / ROWS_FILE), MOE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 100:
                os.kill(process.pid, signal.SIGKILL)
                reported = max(map(int, process.stdout.read().split()), default=100)
                break
    rows = read_rows(tmp_path)
    assert len(rows) >= reported >= 100
    assert list(rows["call"]) == list(range(1, len(rows) + 1))


def test_closing_the_gate_closes_its_rows(new_gate: NewGate, tmp_path: Path) -> None:
    gate = new_gate(tmp_path)
    call(gate)
    gate.close()
    gate.close()
    with pytest.raises(ValueError, match="closed"):
        call(gate)
    assert len(read_rows(tmp_path)) == gate.calls == 1


def test_a_row_is_one_line_of_json() -> None:
    line, _ = row(1).to_json(NO_ROWS_DIGEST)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    fields = json.loads(line)
    assert len(fields.pop("digest")) == 32
    assert CallRow(**fields) == row(1)
