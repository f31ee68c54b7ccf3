"""What the pages of a Parquet file unfold to, by their own headers: its footer may claim less.

Source: PageHeader of Parquet's thrift definition (apache/parquet-format), in Thrift's compact protocol.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

_ENCODINGS = ((5, 2), (8, 4))
"""Fields of a header that say how a page of data is encoded, within its fields of either version."""
_DELTA_BYTE_ARRAY = 7
"""[spec] Texts that repeat the beginnings of those before them: a short page may mean terabytes."""
PAGE_BYTES = 64 * 1024
"""[assumed] What a page counts at least: a file of pages that hold nothing would be looked at for hours."""
_INTEGERS, _BINARY, _STRUCT = (4, 5, 6), 8, 12
_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of Thrift's other types that a header may have: true, false, a byte, a double. It has no lists and no maps."""
_MOST_LEVELS = 8
"""[assumed] Nesting of a header; Parquet's own has three levels."""


def unfolded_bytes(file: BinaryIO, metadata: Any, most: int) -> int:
    """Bytes of all pages once they are decompressed, which is what reading the file takes; small ones count more.

    Args:
        file: The Parquet file.
        metadata: Its footer, as pyarrow reads it.
        most: Beyond it nothing is counted any more.

    Raises:
        ValueError: A page is none, or its texts may be longer than it says.
    """
    size, left = 0, file.seek(0, os.SEEK_END)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            places = column.data_page_offset, column.dictionary_page_offset if column.has_dictionary_page else 0
            file.seek(min(filter(None, places), default=0))  # without rows there is a dictionary alone, or nothing
            chunk = file.read(column.total_compressed_size)
            if (left := left - len(chunk)) < 0:
                raise ValueError("its columns share their pages")
            at = 0
            while at < len(chunk) and size <= most:
                page, at = _struct(chunk, at)
                unfolded, compressed = page.get((2,), -1), page.get((3,), -1)
                if compressed < 0:
                    raise ValueError("the header of a page is none")
                if _DELTA_BYTE_ARRAY in map(page.get, _ENCODINGS):
                    raise ValueError("its texts repeat parts of others")
                size += max(unfolded, PAGE_BYTES)
                at += compressed
    return size


def _struct(data: bytes, at: int, within: tuple[int, ...] = ()) -> tuple[dict[tuple[int, ...], int], int]:
    """The whole numbers of a struct by their fields' numbers, from the outermost in, and where it ends.

    Raises:
        ValueError: It is none.
    """
    if len(within) > _MOST_LEVELS:
        raise ValueError("the header of a page nests too deeply")
    found: dict[tuple[int, ...], int] = {}
    number = 0
    try:
        while head := data[at]:
            at += 1
            if head >> 4:
                number += head >> 4
            else:
                number, at = _integer(data, at)
            kind, field = head & 15, (*within, number)
            if kind == _STRUCT:
                inside, at = _struct(data, at, field)
                found |= inside
            elif kind in _INTEGERS:
                found[field], at = _integer(data, at)
            elif kind == _BINARY:
                length, at = _varint(data, at)
                at += length
            else:
                at += _SIZES[kind]
    except (IndexError, KeyError) as error:
        raise ValueError("the header of a page is cut off, or none") from error
    return found, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number in the header of a page is too long")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at
