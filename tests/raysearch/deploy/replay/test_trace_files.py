"""Public formats of traces, read."""

import json
import os
import random
from pathlib import Path

import pytest

from raysearch.base.errors import InputError
from raysearch.deploy.replay.trace_files import read_trace
from tests.raysearch.forging import WRONG, encoded, places, replaced
from tests.raysearch.fuzzing import INPUTS, broken, tried
from tests.raysearch.fuzzing import within_memory as within_memory


def _mooncake(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_mooncake_s_bunches_are_spread_until_the_next(tmp_path: Path) -> None:
    rows = [(0, 600, 5, [1, 2]), (0, 1200, 6, [1, 3, 4]), (3000, 500, 7, [9]), (6000, 10, 8, [1])]
    trace = read_trace(_mooncake(tmp_path / "t.jsonl", rows), 100)
    assert trace.arrival_s.tolist() == [0.0, 1.5, 3.0, 6.0]
    assert trace.prompt_tokens.tolist() == [600, 1200, 500, 10]
    assert trace.output_tokens.tolist() == [5, 6, 7, 8]
    assert trace.blocks == [(1, 2), (1, 3, 4), (9,), (1,)]
    assert trace.block_tokens == 512


def test_bailian_counts_seconds_and_smaller_blocks(tmp_path: Path) -> None:
    row = {"chat_id": 1, "timestamp": 2.5, "input_length": 40, "output_length": 3, "hash_ids": [7, 8, 9], "turn": 1}
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(row | {"timestamp": at}) for at in (2.5, 4.0)))
    trace = read_trace(path, 100)
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.block_tokens == 16


def test_azure_s_times_are_dates(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    trace = read_trace(path, 100)
    assert trace.arrival_s == pytest.approx([0.0, 0.052])
    assert trace.blocks is None


def test_requests_that_failed_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,,GPT-4,472,18,490,API log\n45,,ChatGPT,1087,0,1087,API log\n46,,ChatGPT,100,20,120,API log\n"
    )
    assert read_trace(path, 100).output_tokens.tolist() == [18, 20]
    assert len(read_trace(path, 1)) == 1


def test_hashes_may_be_of_whole_blocks_alone_or_missing_and_counts_may_be_written_with_a_point(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(WHOLE.replace("[1, 2]", "[1]"))
    assert read_trace(path, 100).blocks == [(1,)]
    path.write_text(f"{PLAIN}\n{PLAIN}\n")
    assert read_trace(path, 100).blocks is None
    path.write_text("Timestamp,Request tokens,Response tokens\n0,0,0\n5,300.0,20\n")
    assert read_trace(path, 100).prompt_tokens.tolist() == [300]


def test_a_rate_that_no_trace_has_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_trace(_mooncake(tmp_path / "t.jsonl", [(500 * at, 600, 5, [1, 2]) for at in range(40)]), 100)
    assert not caplog.messages
    read_trace(_mooncake(tmp_path / "t.jsonl", [(at // 2, 600, 5, [1, 2]) for at in range(40)]), 100)
    (message,) = caplog.messages
    assert "40 requests in 0.0195 s, 2,000 requests/s" in message
    assert "Mooncake's column timestamp is in milliseconds" in message


WHOLE = '{"timestamp": 1, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}'
PLAIN = '{"timestamp": 1, "input_length": 1000, "output_length": 5}'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "no known trace: it has a, b"),
        ('{"timestamp": 1}\n', "no known trace"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n",
            "line 2: TIMESTAMP: expected a date .*, got 'now'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,2\n",
            "line 2: .* prompt .* delete the line",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,9\n", "line 2: 2 cells, the header has 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request, its header alone"),
        ("Timestamp,Request tokens,Response tokens\n1,2.5,3\n", "line 2: Request tokens: .* whole .*, got 2.5"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,3,0\n", "no request with an answer"),
        ("Timestamp,Request tokens,Response tokens\ninf,1,2\n", "line 2: expected a time"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": "x"}\n',
            "line 1: hash_ids: .* 'x'",
        ),
        ('{"timestamp": true, "input_length": 5, "output_length": 5}\n', "line 1: timestamp: .* number, got True"),
        ('{"timestamp": 1, "input_length": 5}\n', "no known trace"),
        (f"{WHOLE}\n{PLAIN}\n", "line 2: expected hash_ids of all requests or of none"),
        (f'{PLAIN}\n{{"timestamp": 1}}\n', "line 2: expected the column 'input_length' of Mooncake"),
        (WHOLE.replace("[1, 2]", "[1, 2, 3]"), "line 1: hash_ids: expected 2 hashes, of 1,000 tokens .* 512, got 3"),
        ("{[}\n", "line 1"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff,1,2\n", "line 2: expected text in UTF-8"),
        ("Timestamp,Request tokens,Response tokens\n1\r2,3,4\n", "line 2: cannot be read as CSV: new-line"),
        (
            "Timestamp,Request tokens,Response tokens\n1,2," + "3" * 200_000,
            "line 2: cannot be read as CSV: field larger",
        ),
        ("Timestamp,Request tokens,Response tokens\n1e308,2,3\n", r"line 2: expected a time, got 1e\+308"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, content: str | bytes, expected: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=expected):
        read_trace(path, 100)


def test_a_missing_trace_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none", 100)


HASHED = {"timestamp": 2, "input_length": 40, "output_length": 3, "hash_ids": [7, 8, 9]}
LINES = {
    "Mooncake": [HASHED | {"hash_ids": [7]}, HASHED | {"hash_ids": [7], "timestamp": 5}],
    "Bailian": [HASHED | {"chat_id": 1}, HASHED | {"chat_id": 2}],
    "Azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    "BurstGPT": "Timestamp,Request tokens,Response tokens\n5,472,18\n46,100,20\n",
}


@pytest.mark.parametrize("name", LINES)
def test_a_broken_or_forged_trace_is_understood_or_refused(tmp_path: Path, name: str) -> None:
    path, whole = tmp_path / "trace", LINES[name]
    for seed in range(INPUTS):
        rng = random.Random(f"{name} {seed}")
        if isinstance(whole, str):
            path.write_bytes(broken(whole.encode(), rng))
        else:
            rows = [replaced(row, rng.choice(list(places(row))), rng.choice(WRONG)) for row in whole]
            path.write_bytes(b"\n".join(encoded(row, rng) for row in rows))
        tried(lambda: read_trace(path, 100))


def test_what_is_no_file_or_has_no_end_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    os.truncate(os.open(long := tmp_path / "long", os.O_CREAT | os.O_RDWR), 3 * 10**9)
    for path, why in ((pipe, "no regular file"), (tmp_path, "no regular file"), (Path("/dev/zero"), "no regular file")):
        with pytest.raises(InputError, match=why):
            read_trace(path, 100)
    with pytest.raises(InputError, match="a line is too long"):
        read_trace(long, 100)


def test_hashes_without_end_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysearch.deploy.replay.trace_files._MOST_BLOCKS", 5)
    path = _mooncake(tmp_path / "t.jsonl", [(0, 600, 5, [1, 2]), (1, 1200, 6, [1, 3, 4]), (2, 500, 7, [9])])
    assert len(read_trace(path, 2)) == 2
    with pytest.raises(InputError, match="line 3: more than 5 hashes"):
        read_trace(path, 3)
