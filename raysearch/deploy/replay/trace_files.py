"""Recorded traffic: public formats of traces, recognised by their first line.

Mooncake: JSON lines with timestamp (ms), input_length, output_length and hash_ids of blocks of 512 tokens. Bailian: the
same with chat_id, seconds and blocks of 16. Azure: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. BurstGPT: CSV
with Timestamp (s), Request tokens, Response tokens, 0 of failed ones. Sources: kvcache-ai/Mooncake (FAST25-release),
alibaba-edu/qwen-bailian-usagetraces-anon, Azure/AzurePublicDataset, HPMLL/BurstGPT.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysearch.base.errors import InputError
from sim.arrays import Floats
from sim.config.question import Question
from sim.config.reading import Unreadable, lines, parse_object
from sim.replay.requests import Blocks, Requests

_LONGEST_LINE = 10_000_000
_MOST_TOKENS = 10**9
_MOST_BLOCKS = 10**7
"""[assumed] Hashes of all prompts; in memory each takes some forty bytes."""
_LATEST_S = 1e12
"""[assumed] Of a time: seconds since 1970 have ten digits."""


class _Recorded(NamedTuple):
    """A request of a trace; of one that failed there are no answer tokens."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks | None = None


class _Format(NamedTuple):
    """How a trace is written: columns that it must have, how a row reads, tokens of a block."""

    name: str
    needs: frozenset[str]
    read: Callable[[Mapping[str, Any]], _Recorded]
    block_tokens: int = 16


def _hashed(seconds: float) -> Callable[[Mapping[str, Any]], _Recorded]:
    def read(row: Mapping[str, Any]) -> _Recorded:
        blocks = tuple(int(each) for each in row["hash_ids"])
        return _Recorded(float(row["timestamp"]) * seconds, int(row["input_length"]), int(row["output_length"]), blocks)

    return read


def _azure(row: Mapping[str, Any]) -> _Recorded:
    when = datetime.fromisoformat(str(row["TIMESTAMP"]).strip()[:26])
    return _Recorded(when.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burst_gpt(row: Mapping[str, Any]) -> _Recorded:
    return _Recorded(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


_LENGTHS = {"timestamp", "input_length", "output_length", "hash_ids"}
_FORMATS = (
    _Format("Bailian", frozenset(_LENGTHS | {"chat_id"}), _hashed(1.0), 16),
    _Format("Mooncake", frozenset(_LENGTHS), _hashed(1e-3), 512),
    _Format("Azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    _Format("BurstGPT", frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burst_gpt),
)


def trace_file(named: str | Path | None) -> Path | None:
    """The path of a trace, None for none.

    Raises:
        InputError: It is no path.
    """
    if named is not None and ("://" in str(named) or not str(named).strip()):
        raise InputError(f"--set trace: expected the path of a local file, got {str(named)!r}")
    return None if named is None else Path(named)


def read_trace(path: Path, most: int) -> Requests:
    """The first requests of a trace, from time 0 on.

    Requests of one time stamp are spread evenly until the next one: traces bunch them (Mooncake's every 3 s).

    Args:
        path: A file in one of the formats above.
        most: How many requests, at most.

    Raises:
        InputError: No such file, none of the formats, or a row that cannot be read; it names the line.
    """
    try:
        found = list(islice((each for each in _recorded(path) if each.output_tokens > 0), most))
        size = _format_of(path, next(_rows(path))[1]).block_tokens if found else 16
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except Unreadable as error:
        raise InputError(f"{path}: {error}") from error
    if not found:
        raise InputError(f"{path}: no request with an answer")
    found.sort(key=lambda each: each.time_s)
    times_s = _spread(np.array([each.time_s for each in found]))
    hashed = [each.blocks for each in found if each.blocks is not None]
    return Requests(
        times_s - times_s[0],
        np.array([each.prompt_tokens for each in found]),
        np.array([each.output_tokens for each in found]),
        hashed if len(hashed) == len(found) else None,
        size,
    )


def with_lengths_of(question: Question, recorded: Requests) -> Question:
    """The question about requests as long as a trace's are on average, where it says no length."""
    if question.workload is not None:
        return question
    isl, osl = recorded.mean_tokens
    return replace(
        question, isl=isl if question.isl is None else question.isl, osl=osl if question.osl is None else question.osl
    )


def recorded_per_s(trace: Requests) -> float:
    """The mean rate of a trace. Raises: InputError: Its requests all come at once."""
    if not (span_s := float(trace.arrival_s[-1])):
        raise InputError("--set trace: its requests all come at once: no number of GPUs is enough for them")
    return (len(trace) - 1) / span_s


def _recorded(path: Path) -> Iterator[_Recorded]:
    kind: _Format | None = None
    blocks = 0
    for number, row in _rows(path):
        kind = kind or _format_of(path, row)
        try:
            found = kind.read(row)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: cannot be read as a row of {kind.name}: {error}") from None
        if not (1 <= found.prompt_tokens <= _MOST_TOKENS and 0 <= found.output_tokens <= _MOST_TOKENS):
            raise InputError(
                f"{path}, line {number}: expected a prompt of at least 1 token and an answer, "
                f"got {found.prompt_tokens} and {found.output_tokens}"
            )
        if not abs(found.time_s) <= _LATEST_S:
            raise InputError(f"{path}, line {number}: expected a time, got {found.time_s}")
        if (blocks := blocks + len(found.blocks or ())) > _MOST_BLOCKS:
            raise InputError(
                f"{path}, line {number}: more than {_MOST_BLOCKS:,} hashes of blocks so far; take fewer requests by "
                "--set requests"
            )
        yield found


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and rows, of JSON lines or of CSV."""
    texts = ((number, line) for number, line in enumerate(lines(path, _LONGEST_LINE), 1) if line.strip())
    first = next(texts, None)
    if first is None:
        raise InputError(f"{path}: empty")
    if first[1].lstrip().startswith(b"{"):
        yield from ((number, _object(path, number, line)) for number, line in chain([first], texts))
        return
    header = [name.strip() for name in _cells(path, *first)]
    for number, line in texts:
        yield number, dict(zip(header, _cells(path, number, line), strict=False))


def _object(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        return parse_object(line)
    except Unreadable as error:
        raise InputError(f"{path}, line {number}: {error}") from error


def _cells(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")]))
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {number}: expected text in UTF-8") from None
    except csv.Error as error:
        raise InputError(f"{path}, line {number}: cannot be read as CSV: {error}") from None


def _format_of(path: Path, row: Mapping[str, Any]) -> _Format:
    for kind in _FORMATS:
        if kind.needs <= row.keys():
            return kind
    known = "; ".join(f"{kind.name}: {', '.join(sorted(kind.needs))}" for kind in _FORMATS)
    raise InputError(f"{path}: no known trace: it has {', '.join(map(str, row)) or 'no columns'}, expected {known}")


def _spread(times_s: Floats) -> Floats:
    """Requests of one time stamp at even distances until the next one; the last bunch is as long as the one before."""
    stamps, first, counts = np.unique(times_s, return_index=True, return_counts=True)
    if len(stamps) == 1:
        return times_s
    gaps = np.diff(stamps)
    gaps = np.append(gaps, gaps[-1])
    within = np.arange(len(times_s)) - np.repeat(first, counts)
    return times_s + within * np.repeat(gaps / counts, counts)
