"""Hostile files made from what ours hold: values of a record replaced, and instances of a schema, right and wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raysearch.base.file_io import SEAL, _seal

Place = tuple[str | int, ...]
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 10**9, 10**19, -(2**63), 10**40, 10**400, 0.5, -0.0, 1e-300, 1e300, 5e-324),
    *("", "x", "0", "..", "/", "a/b", "\0", "\n", "\x1b[2J", "\u202e", "[/x]", "{0}", "é" * 300, "x" * 5000, "\udcff"),
    *([], {}, [[]], [None], {"": {}}, [1] * 50, {"a": 1}, [[1, 2.0]], [[[[[[[[1]]]]]]]]),
]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where in plain data a value stands: everything, inside before outside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))
    if at:
        yield at


def replaced(value: Any, at: Place, new: Any) -> Any:
    """A copy with another value in one place."""
    if not at:
        return new
    key, *within = at
    whole = value.copy()
    whole[key] = replaced(value[key], tuple(within), new)
    return whole


def resealed(fields: dict[str, Any]) -> dict[str, Any]:
    """A record with the digest that is right for it, as somebody writes who wants it believed."""
    content = {key: value for key, value in fields.items() if key != SEAL}
    return {**content, SEAL: _seal(content)}


def forge(path: Path, at: Place, new: Any) -> None:
    """Replaces one value of a record on disk."""
    path.write_text(json.dumps(resealed(replaced(json.loads(path.read_text()), at, new))))


def instance(schema: type[BaseModel], rng: random.Random) -> Any:
    """Something that the schema describes, near its bounds, with something wrong in it now and then."""
    whole = _schema_of(schema)
    return _made(whole, whole.get("$defs", {}), rng)


@cache
def _schema_of(schema: type[BaseModel]) -> dict[str, Any]:
    return schema.model_json_schema()


def _made(part: dict[str, Any], named: dict[str, Any], rng: random.Random) -> Any:
    if rng.random() < 0.02:
        return rng.choice(WRONG)
    if "$ref" in part:
        return _made(named[part["$ref"].rpartition("/")[2]], named, rng)
    if "anyOf" in part or "oneOf" in part:
        return _made(rng.choice(part.get("anyOf") or part["oneOf"]), named, rng)
    if "enum" in part or "const" in part:
        return rng.choice([*part.get("enum", []), *([part["const"]] if "const" in part else [])])
    low, high = part.get("minimum", part.get("exclusiveMinimum", -3)), part.get("maximum", 2**63)
    match part.get("type"):
        case "integer":
            return rng.choice([int(low), int(low) + 1, int(high), rng.randrange(1, 100)])
        case "number":
            return rng.choice([low, high, 1.5, rng.random() * 1000, 3])
        case "string":
            return rng.choice(["a", "gpt_moe_1_2t", "h100_sxm", "vllm", "serve", "tiny", "0.1.0", "..", "x" * 300])
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            if "prefixItems" in part:
                return [_made(each, named, rng) for each in part["prefixItems"]]
            return [_made(part.get("items", {}), named, rng) for _ in range(rng.choice([0, 1, 2, 12]))]
        case "object" if "properties" in part:
            required = part.get("required", [])
            keys = [key for key in part["properties"] if rng.random() < (0.99 if key in required else 0.5)]
            made = {key: _made(part["properties"][key], named, rng) for key in keys}
            return made | ({"unknown": 1} if rng.random() < 0.01 else {})
        case "object":
            inside = part.get("additionalProperties")
            names = rng.sample(["a", "tiny", "one", "x y"], rng.choice([0, 1, 2]))
            return {name: _made(inside if isinstance(inside, dict) else {}, named, rng) for name in names}
        case _:
            return rng.choice(WRONG)


def encoded(value: Any, rng: random.Random) -> bytes:
    """JSON, or now and then something that only looks like it."""
    text = json.dumps(value)
    match rng.randrange(40):
        case 0:
            return text.encode("utf-16")
        case 1:
            return b"\xef\xbb\xbf" + text.encode()
        case 2:
            return text.encode()[: rng.randrange(len(text) + 1)]
        case 3:
            return text.replace('": ', '": NaN, "x": ', 1).encode()
        case 4:
            return (text[:-1] + ', "version": 1, "version": 2}').encode()
        case 5:
            return b'{"a": ' * 3000 + text.encode() + b"}" * 3000
        case 6:
            return text.replace(rng.choice("0123456789"), "9" * rng.choice([30, 70, 5000]), 1).encode()
        case 7:
            return text.replace('"', "\xff", 1).encode("latin-1", "replace")
        case 8:
            return b"[" + b"0," * rng.choice([10, 1_000_001]) + b"0]"
        case _:
            return text.encode()
