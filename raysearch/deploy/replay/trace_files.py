"""Recorded traffic: public formats of traces, recognised by their first line.

Mooncake: JSON lines with timestamp (ms), input_length, output_length and, if known, hash_ids of blocks of 512 tokens.
Bailian: the same with chat_id, seconds and blocks of 16. Azure: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
BurstGPT: CSV with Timestamp (s), Request tokens, Response tokens, 0 of failed ones. Sources: kvcache-ai/Mooncake
(FAST25-release), alibaba-edu/qwen-bailian-usagetraces-anon, Azure/AzurePublicDataset, HPMLL/BurstGPT.
"""

from __future__ import annotations

import csv
import logging
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysearch.base.errors import InputError
from sim.arrays import Floats
from sim.config.question import Question
from sim.config.reading import Unreadable, lines, parse_object
from sim.replay.requests import Blocks, Requests

_log = logging.getLogger(__name__)
_LONGEST_LINE = 10_000_000
_MOST_TOKENS = 10**9
_MOST_BLOCKS = 10**7
"""[assumed] Hashes of all prompts; in memory each takes some forty bytes."""
_LATEST_S = 1e12
"""[assumed] Of a time: seconds since 1970 have ten digits."""
_MOST_PER_S = 1000
"""[assumed] Of a trace in these units: the public ones have below a hundred requests per second."""


class _Recorded(NamedTuple):
    """A request of a trace; of one that failed there are no answer tokens."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks | None = None


class _Format(NamedTuple):
    """How a trace is written: columns that it must have, how a row reads, what its times are, tokens of a block."""

    name: str
    needs: frozenset[str]
    read: Callable[[Mapping[str, Any]], _Recorded]
    times: str
    block_tokens: int = 16


def _number(row: Mapping[str, Any], column: str) -> float:
    value = row[column]
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except (OverflowError, ValueError):
        pass
    raise InputError(f"{column}: expected a number, got {reprlib.repr(value)}")


def _tokens(row: Mapping[str, Any], column: str) -> int:
    if not (0 <= (value := _number(row, column)) <= _MOST_TOKENS and value.is_integer()):
        raise InputError(f"{column}: expected a whole number of tokens, 0 to {_MOST_TOKENS:,}, got {value:.12g}")
    return int(value)


def _hashed(seconds: float, block_tokens: int) -> Callable[[Mapping[str, Any]], _Recorded]:
    def read(row: Mapping[str, Any]) -> _Recorded:
        prompt, answer = _tokens(row, "input_length"), _tokens(row, "output_length")
        hashes = row.get("hash_ids")
        if hashes is not None:
            if not isinstance(hashes, list) or not all(type(each) is int for each in hashes):
                raise InputError(f"hash_ids: expected a list of whole numbers, got {reprlib.repr(hashes)}")
            whole, part = divmod(prompt, block_tokens)
            if len(hashes) not in (whole, expected := whole + (part > 0)):
                raise InputError(
                    f"hash_ids: expected {expected:,} hashes, of {prompt:,} tokens in blocks of {block_tokens}, got "
                    f"{len(hashes):,}"
                )
        blocks = None if hashes is None else tuple(hashes)
        return _Recorded(_number(row, "timestamp") * seconds, prompt, answer, blocks)

    return read


def _azure(row: Mapping[str, Any]) -> _Recorded:
    text = str(row["TIMESTAMP"]).strip()
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        got = reprlib.repr(text)
        raise InputError(f"TIMESTAMP: expected a date and time as 2023-11-16 18:17:03.97, got {got}") from None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return _Recorded(when.timestamp(), _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))


def _burst_gpt(row: Mapping[str, Any]) -> _Recorded:
    return _Recorded(_number(row, "Timestamp"), _tokens(row, "Request tokens"), _tokens(row, "Response tokens"))


_LENGTHS = {"timestamp", "input_length", "output_length"}
_FORMATS = (
    _Format("Bailian", frozenset(_LENGTHS | {"chat_id"}), _hashed(1.0, 16), "timestamp is in seconds"),
    _Format("Mooncake", frozenset(_LENGTHS), _hashed(1e-3, 512), "timestamp is in milliseconds", 512),
    _Format("Azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure, "TIMESTAMP is a date"),
    _Format(
        "BurstGPT",
        frozenset({"Timestamp", "Request tokens", "Response tokens"}),
        _burst_gpt,
        "Timestamp is in seconds",
    ),
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
        kind, recorded = _opened(path)
        found = list(islice((each for each in recorded if each.output_tokens > 0), most))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except Unreadable as error:
        raise InputError(f"{path}: {error}") from error
    if not found:
        raise InputError(f"{path}: no request with an answer")
    found.sort(key=lambda each: each.time_s)
    times_s = _spread(np.array([each.time_s for each in found]))
    hashed = [each.blocks for each in found if each.blocks is not None]
    read = Requests(
        times_s - times_s[0],
        np.array([each.prompt_tokens for each in found]),
        np.array([each.output_tokens for each in found]),
        hashed or None,
        kind.block_tokens,
    )
    if (span_s := float(read.arrival_s[-1])) and len(read) > _MOST_PER_S * span_s:
        _log.warning(
            "warning: %s: %s requests in %.3g s, %s requests/s: is that its rate? %s's column %s",
            *(path, f"{len(read):,}", span_s, f"{recorded_per_s(read):,.0f}", kind.name, kind.times),
        )
    return read


def with_lengths_of(question: Question, recorded: Requests | None) -> Question:
    """The question about requests as long as a trace's are on average, where it says no length and there is a trace."""
    if question.workload is not None or recorded is None:
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


def _opened(path: Path) -> tuple[_Format, Iterator[_Recorded]]:
    """A trace's format, and its requests: a row each of JSON lines or of CSV."""
    texts = ((number, line) for number, line in enumerate(lines(path, _LONGEST_LINE), 1) if line.strip())
    if (first := next(texts, None)) is None:
        raise InputError(f"{path}: empty")
    if first[1].lstrip().startswith(b"{"):
        kind = _format_of(path, _object(path, *first))
        return kind, _recorded(path, kind, chain([first], texts), _object)
    header = [name.strip() for name in _cells(path, *first)]
    kind = _format_of(path, header)
    if (second := next(texts, None)) is None:
        raise InputError(f"{path}: holds no request, its header alone")

    def read(path: Path, number: int, line: bytes) -> Mapping[str, str]:
        cells = _cells(path, number, line)
        if len(cells) != len(header):
            raise InputError(f"{path}, line {number}: {len(cells)} cells, the header has {len(header)}")
        return dict(zip(header, cells, strict=True))

    return kind, _recorded(path, kind, chain([second], texts), read)


def _recorded(
    path: Path,
    kind: _Format,
    texts: Iterator[tuple[int, bytes]],
    row_of: Callable[[Path, int, bytes], Mapping[str, Any]],
) -> Iterator[_Recorded]:
    blocks, hashed = 0, None
    for number, line in texts:
        row = row_of(path, number, line)
        try:
            found = kind.read(row)
        except KeyError as error:
            raise InputError(f"{path}, line {number}: expected the column {error} of {kind.name}") from None
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        if found.output_tokens and not found.prompt_tokens:
            raise InputError(f"{path}, line {number}: expected a prompt of at least 1 token, got 0: delete the line")
        if not abs(found.time_s) <= _LATEST_S:
            raise InputError(f"{path}, line {number}: expected a time, got {found.time_s}")
        hashed = found.blocks is not None if hashed is None else hashed
        if hashed != (found.blocks is not None):
            raise InputError(f"{path}, line {number}: expected hash_ids of all requests or of none")
        if (blocks := blocks + len(found.blocks or ())) > _MOST_BLOCKS:
            raise InputError(
                f"{path}, line {number}: more than {_MOST_BLOCKS:,} hashes of blocks so far; take fewer requests by "
                "--set requests"
            )
        yield found


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


def _format_of(path: Path, columns: Collection[str]) -> _Format:
    for kind in _FORMATS:
        if kind.needs <= {*columns}:
            return kind
    known = "; ".join(f"{kind.name}: {', '.join(sorted(kind.needs))}" for kind in _FORMATS)
    raise InputError(f"{path}: no known trace: it has {', '.join(columns) or 'no columns'}, expected {known}")


def _spread(times_s: Floats) -> Floats:
    """Requests of one time stamp at even distances until the next one; the last bunch is as long as the one before."""
    stamps, first, counts = np.unique(times_s, return_index=True, return_counts=True)
    if len(stamps) == 1:
        return times_s
    gaps = np.diff(stamps)
    gaps = np.append(gaps, gaps[-1])
    within = np.arange(len(times_s)) - np.repeat(first, counts)
    return times_s + within * np.repeat(gaps / counts, counts)
