"""How a search bears with env runners that are lost, and with those that raise."""

import contextlib
import pickle
import signal
import time

import gymnasium
import pytest

from raysearch.processes.connection import connected
from raysearch.processes.deadline import Deadline, NoAnswer
from raysearch.searchers.ppo import remote
from raysearch.searchers.ppo.remote import Asked, RunnerError, Runners, attempt


@pytest.fixture
def losses(monkeypatch):
    killed = []
    monkeypatch.setattr(remote, "RETRY_S", 0.0)
    monkeypatch.setattr(remote.ray, "kill", lambda runner, no_restart: killed.append(runner))
    return Runners({1: "one", 2: "two"}, timeout_s=1.0, give_up_s=60.0), killed


def failure() -> RunnerError:
    return attempt(lambda: 1 / 0)


def test_the_reason_is_what_an_environment_raised_and_travels_with_its_traceback():
    def step():
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            raise RuntimeError from error

    arrived = pickle.loads(pickle.dumps(attempt(step)))
    assert arrived.reason == "ZeroDivisionError: division by zero"
    assert "raise RuntimeError from error" in str(arrived)


def test_a_runner_that_raises_is_begun_anew_once_and_then_the_reason_is_told(losses):
    borne, killed = losses
    for runner in (1, 2):
        borne.bear(runner, 40, failure())
    borne.bear(1, 48, failure())
    assert killed == ["one", "two", "one"]
    with pytest.raises(RuntimeError, match="env runner 2 failed in the calls from 40 on: ZeroDivisionError") as raised:
        borne.bear(2, 40, failure())
    assert "1 / 0" in str(raised.value.__cause__)


def test_nobody_waits_for_a_runner_that_is_not_restarted():
    with pytest.raises(RuntimeError, match="env runner 1 failed in the calls from 0 on: ZeroDivisionError"):
        Runners({1: "one"}, timeout_s=1.0, give_up_s=0.0).bear(1, 0, failure())


def test_a_lost_runner_is_told_of_once_until_it_is_back(losses, caplog, monkeypatch):
    borne, _ = losses
    for _ in range(3):
        borne.bear(1, 40, None)
    monkeypatch.setattr(remote.ray, "get", lambda answer, timeout: answer)
    assert borne.take(Asked(1, "back", 1.0, Deadline(1.0)), 40) == "back"
    borne.bear(1, 48, None)
    assert [record.message.split(";")[0] for record in caplog.records] == ["note: env runner 1 was lost"] * 2


@pytest.fixture(scope="module")
def local_ray():
    with connected(cpus=3):
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("way", "restarts"), [({}, False), ({"asynchronous": True}, True), ({"ahead": 2}, False)])
def test_an_environment_that_always_raises_stops_the_search_with_its_reason(toy, local_ray, way, restarts):
    class Broken(gymnasium.Wrapper):  # defined here, so that runners need not import it
        def __init__(self, context):
            super().__init__(toy_env({}))

        def step(self, action):
            raise ValueError("the simulator is out of order")

    toy_env = toy.Env
    config = toy.copy_config(budget=20).search(budget=20, **way).environment(env=Broken)
    config.env_runners(num_env_runners=1).fault_tolerance(restart_failed_env_runners=restarts)
    algorithm = config.build_algo()
    with pytest.raises(RuntimeError, match="from 0 on: ValueError: the simulator is out of order"):
        algorithm.train()
    algorithm.stop()


def stuck():
    time.sleep(1e6)


def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as machine code is that never returns to Python
    time.sleep(1e6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "hang", "reason"),
    [
        ({}, stuck, r"from 0 on: NoAnswer: no answer within 1 s on action \["),
        ({"asynchronous": True}, deaf, r"from 0 on: no answer within \d+ s$"),
        ({"ahead": 2}, deaf, r"from 0 on: no answer within \d+ s$"),
    ],
)
def test_a_call_that_never_returns_stops_the_search_with_what_was_asked(toy, local_ray, monkeypatch, way, hang, reason):
    class Hanging(gymnasium.Wrapper):
        def __init__(self, context):
            super().__init__(toy_env({}))

        def step(self, action):
            hang()

    toy_env = toy.Env
    monkeypatch.setattr(remote, "LEAST_SLACK_S", 3.0)
    config = toy.copy_config(budget=20).search(budget=20, **way).environment(env=Hanging)
    config.env_runners(num_env_runners=1, sample_timeout_s=1.0).fault_tolerance(restart_failed_env_runners=False)
    algorithm = config.build_algo()
    with pytest.raises(RuntimeError, match=reason):
        algorithm.train()
    algorithm.stop()


def test_a_call_in_this_process_that_never_returns_stops_the_search_too(toy):
    class Hanging(toy.Env):
        def step(self, action):
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(1e6)

    config = toy.copy_config(budget=20).environment(env=Hanging)
    config.lean = True
    config.env_runners(sample_timeout_s=0.2)
    algorithm = config.build_algo()
    with pytest.raises(NoAnswer, match=r"no answer within 0.2 s on action \["):
        algorithm.train()
