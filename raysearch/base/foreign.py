"""Code of others in our process: whatever it raises becomes one line of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from envs.strategy_env import failure_text
from raysearch.base.errors import InputError, Interrupted, RunFailed


@contextmanager
def foreign(what: str, becomes: type[InputError | RunFailed]) -> Iterator[None]:
    """Runs code of others, which may end neither us nor itself in silence; a stop of ours, `Interrupted`, passes.

    Args:
        what: It is or does; begins the message.
        becomes: What is raised in place of anything that it raises, SystemExit and KeyboardInterrupt included.
    """
    try:
        yield
    except (InputError, RunFailed, Interrupted):
        raise
    except BaseException as raised:
        raise becomes(f"{what}: {_words(raised)}") from raised


def _words(raised: BaseException) -> str:
    try:
        return failure_text(raised)
    except Exception:  # it cannot even be printed
        return type(raised).__name__
