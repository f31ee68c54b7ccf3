"""What a Parquet file unfolds to is counted from its pages, whatever its footer claims."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pytest
from pyarrow import parquet

from envs import parquet_pages
from envs.calls import CallRow
from envs.chain import DamagedRows
from envs.frames import read_parquet
from envs.parquet_pages import unfolded_bytes
from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.public_database import write_tables

MANY = 10**12


def written(table: Any, **options: Any) -> bytes:
    parquet.write_table(table, file := io.BytesIO(), **options)
    return file.getvalue()


def counted(content: bytes, most: int = MANY) -> int:
    return unfolded_bytes(io.BytesIO(content), most)


def varint(value: int, length: int = 1) -> bytes:
    """A whole number as Thrift has it in a footer, of at least so many bytes."""
    value, found = 2 * value, []
    while value or len(found) < length:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found[:-1], found[-1] & 127])


def claiming(content: bytes) -> bytes:
    """The same file, with a footer in which each column has a thousand bytes."""
    group = parquet.read_metadata(io.BytesIO(content)).row_group(0)
    sizes = [group.column(number).total_uncompressed_size for number in range(group.num_columns)]
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    head, tail = content[:footer], content[footer:]
    for size in {*sizes, group.total_byte_size}:
        tail = tail.replace(varint(size), varint(1000, len(varint(size)))) if size > 10**6 else tail
    return head + tail


def test_pages_are_counted_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_pages, "PAGE_BYTES", 0)
    rng = random.Random(0)
    for _ in range(30):
        rows = rng.randrange(1, 5000)
        table = pa.table({"a": [str(rng.randrange(99)) for _ in range(rows)], "b": [rng.random() for _ in range(rows)]})
        content = written(
            table,
            compression=rng.choice(["zstd", "snappy", "none"]),
            use_dictionary=rng.random() < 0.5,
            data_page_version=rng.choice(["1.0", "2.0"]),
            data_page_size=rng.choice([500, 10**6]),
            row_group_size=rng.choice([100, 10**6]),
        )
        metadata = parquet.read_metadata(io.BytesIO(content))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        stated = sum(group.total_byte_size for group in groups)  # with the headers
        assert 0.3 * stated < counted(content) < stated
        broken = bytearray(content)
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        for _ in range(rng.choice([1, 5])):
            broken[rng.randrange(4, footer)] = rng.randrange(256)
        with contextlib.suppress(ValueError):
            counted(bytes(broken))


def test_what_a_footer_claims_fills_no_memory(tmp_path: Path) -> None:
    one = {str: "x", int: 1, float: 1.0, bool: True}
    row = {name: [one[kind]] for name, kind in get_type_hints(CallRow).items()}
    long = pa.array(["x" * 80 * 1024**2])
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    rows, database = tmp_path / "rows.parquet", tmp_path / "data/b200_sxm/gemm/vllm/1.0/gemm.parquet"
    database.parent.mkdir(parents=True)
    for path, table in ((rows, pa.table(row | {"run_id": long})), (database, pa.table({"a": long, "b": long}))):
        path.write_bytes(forged := claiming(written(table, **options)))
        assert len(forged) < 50_000
        assert parquet.read_metadata(path).row_group(0).total_byte_size == 1000
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(DamagedRows, match="unfold to more"):
        read_parquet(rows)
    with pytest.raises(InputError, match="more than any table"):
        write_tables(tmp_path, "b200_sxm", tmp_path)
    assert pa.default_memory_pool().max_memory() < before + 20 * 1024**2


def test_texts_that_repeat_others_are_refused() -> None:
    with pytest.raises(ValueError, match="repeat parts"):
        counted(written(pa.table({"a": ["x", "xy"]}), use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"))


def test_a_file_of_other_columns_is_no_file_of_rows(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "rows.parquet")
    with pytest.raises(DamagedRows, match="expected the columns run_id"):
        read_parquet(tmp_path / "rows.parquet")


def test_a_footer_that_contradicts_itself_is_refused_or_read() -> None:
    """Pyarrow's own view of a column's footer ends the process where counts in it do not fit each other."""
    whole = written(pa.table({"a": ["x", "y"] * 10, "b": [1, None] * 10}))
    for place in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole)):
        content = bytearray(whole)
        content[place] ^= 1
        with contextlib.suppress(ValueError, OSError, pa.ArrowException):  # the second and the third are pyarrow's
            counted(bytes(content))
            parquet.read_table(io.BytesIO(bytes(content)))


def test_sizes_that_readers_pass_over_are_not_believed() -> None:
    whole = written(pa.table({"a": [1.0] * 10_000}), use_dictionary=False, compression="none")
    assert counted(whole) > 80_000
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    start = whole.index(b"\x15", 4)  # the header of the first page begins with its type, a number of 32 bits
    for kind in (b"\x16", b"\x14"):  # of 64 and of 16 bits, which are none
        with pytest.raises(ValueError, match="is none"):
            counted(
                whole[:start] + kind + whole[start + 1 : start + 2] + kind + whole[start + 3 : footer] + whole[footer:]
            )
