"""What the pages of a Parquet file unfold to, by their own headers: its footer may claim less.

Source: FileMetaData and PageHeader of apache/parquet-format's thrift definition, by Thrift's compact protocol.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

_ENCODINGS = ((5, 2), (8, 4))
"""Fields of a page's header that say how data are encoded, within its fields of either version."""
_DELTA_BYTE_ARRAY = 7
"""[spec] Texts that repeat the beginnings of those before them: a short page may mean terabytes."""
PAGE_BYTES = 64 * 1024
"""[assumed] What a page counts at least: a file of pages that hold nothing would be looked at for hours."""
_TRUE, _FALSE, _BYTE, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 5, 6, 7, 8, 9, 12
_SIZES = {_BYTE: 1, _DOUBLE: 8}
_MOST_LEVELS = 16
"""[assumed] Nesting of a header or a footer; Parquet's own have eight levels."""


def unfolded_bytes(file: BinaryIO, most: int) -> int:
    """Bytes of all pages once they are decompressed, which is what reading the file takes; small ones count more.

    The footer is read here, too: pyarrow ends the process where a column's part of it contradicts itself.

    Args:
        file: The Parquet file.
        most: Beyond it nothing is counted any more.

    Raises:
        ValueError: A page or the footer is none, or texts may be longer than a page says.
    """
    size, left = 0, file.seek(0, os.SEEK_END)
    for start, length in _chunks(file, left):
        file.seek(start)
        chunk = file.read(length)
        if (left := left - len(chunk)) < 0:
            raise ValueError("its columns share their pages")
        at = 0
        while at < len(chunk) and size <= most:
            page, at = _struct(chunk, at)
            unfolded, compressed = (_integer_of(page, number, _I32) for number in (2, 3))
            if _DELTA_BYTE_ARRAY in [_struct_of(page, outer).get((inner, _I32)) for outer, inner in _ENCODINGS]:
                raise ValueError("its texts repeat parts of others")
            size += max(unfolded, PAGE_BYTES)
            at += compressed
    return size


def _chunks(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Where the pages of each column of each group of rows are, and how many bytes they take: (start, length)."""
    file.seek(max(size - 8, 0))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(size - 8 - length, 0))
    footer, _ = _struct(file.read(length), 0)
    for group in _structs_of(footer, 4):
        for column in _structs_of(group, 1):
            stated = _struct_of(column, 3)
            starts = [_integer_of(stated, 9, _I64), stated.get((11, _I64), 0)]
            yield min([each for each in starts if each > 0], default=0), _integer_of(stated, 7, _I64)


_Struct = dict[tuple[int, int], Any]
"""What its fields hold, by their numbers and types; readers pass over a field whose type is another."""


def _integer_of(struct: _Struct, number: int, kind: int) -> int:
    if (found := struct.get((number, kind), -1)) < 0:
        raise ValueError("the header of a page or the footer is none: a size or a place is missing or below zero")
    return found


def _struct_of(struct: _Struct, number: int) -> _Struct:
    return struct.get((number, _STRUCT), {})


def _structs_of(struct: _Struct, number: int) -> list[_Struct]:
    return [each for each in struct.get((number, _LIST), []) if isinstance(each, dict)]


def _struct(data: bytes, at: int, level: int = 0) -> tuple[_Struct, int]:
    """A struct and where it ends.

    Raises:
        ValueError: It is none, or says something twice.
    """
    if level > _MOST_LEVELS:
        raise ValueError("the header of a page or the footer nests too deeply")
    found: _Struct = {}
    number = 0
    try:
        while head := data[at]:
            at += 1
            if head >> 4:
                number += head >> 4
            else:
                number, at = _integer(data, at)
            field = number, head & 15
            if field in found:
                raise ValueError("the header of a page or the footer says something twice")
            found[field], at = (None, at) if field[1] in (_TRUE, _FALSE) else _value(data, at, field[1], level)
    except (IndexError, KeyError) as error:
        raise ValueError("the header of a page or the footer is cut off, or none") from error
    return found, at + 1


def _value(data: bytes, at: int, kind: int, level: int) -> tuple[Any, int]:
    if kind == _STRUCT:
        return _struct(data, at, level + 1)
    if kind in (4, _I32, _I64):
        return _integer(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return None, at + length
    if kind == _LIST:
        return _list(data, at, level)
    return None, at + _SIZES[kind]


def _list(data: bytes, at: int, level: int) -> tuple[list[Any], int]:
    count, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if count == 15:
        count, at = _varint(data, at)
    if count > len(data):  # each takes a byte at least
        raise IndexError
    found: list[Any] = []
    for _ in range(count):
        value, at = _value(data, at, _BYTE if kind in (_TRUE, _FALSE) else kind, level + 1)
        found.append(value)
    return found, at


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
