"""A Hugging Face configuration as the content of a model file, with a word on what was read and what was not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sim.config.huggingface.families import APPROXIMATED, BY_ARCHITECTURE, IMPORTED_FAMILIES, REFUSED, UNSAID
from sim.config.huggingface.keys import CannotImport, Keys
from sim.config.huggingface.parts import ImportedLayer
from sim.config.huggingface.quantisation import Formats, formats_of
from sim.json_object import JsonFields, JsonObject
from sim.near_names import nearest_name

_TIED = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified_text", "vaultgemma", "cohere",
    "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "granite_swa", "minicpm3", "smollm3", "starcoder2", "youtu",
)  # fmt: skip
"""Families that share embedding and LM head unless they say otherwise."""
_WIDESPREAD = ("llama", "mixtral", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "gemma3")
_ALIKE = 0.7
_MIXES_STREAMS = ("deepseek_v4", "deepseek_ref", "kimi_linear", "hy_v4")
"""Families with hyper-connections or attention residuals."""


@dataclass(frozen=True, slots=True)
class ModelImport:
    """What came of a configuration.

    Attributes:
        family: Its `model_type`.
        content: Of the model file that it stands for.
        formats: Of its weights and cache.
        read: Keys that were read.
        unread: Keys that may matter and were not understood.
        notes: What the model file says otherwise than the configuration.
    """

    family: str
    content: JsonFields
    formats: Formats
    read: tuple[str, ...]
    unread: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> JsonObject:
        """The same for programs, without the model itself."""
        return {
            "family": self.family,
            "weights": self.formats.weights,
            "experts": self.formats.experts,
            "kv_cache": self.formats.kv_cache,
            "read": list(self.read),
            "not_understood": list(self.unread),
            "notes": list(self.notes),
        }


def import_model(
    content: JsonFields, name: str, quantisation: JsonFields | None = None, family: str = ""
) -> ModelImport:
    """The model file that a configuration stands for.

    Args:
        content: Of config.json.
        name: Of the model.
        quantisation: Of hf_quant_config.json.
        family: `model_type` to read it as, whatever it calls itself; "" for its own.

    Raises:
        CannotImport: An unknown family, or one with layers that a model file cannot say.

    >>> config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    >>> import_model({**config, "intermediate_size": 128, "vocab_size": 1000}, "tiny").content["layers"]
    2
    """
    whole = Keys(content)
    text = whole.inside("text_config") or whole
    read_as, family = family, _family(whole, text, family)
    own_name = text.text("model_type")
    unstated = {key: value for key, value in UNSAID.get(read_as or own_name, {}).items() if key not in text.stated()}
    keys = Keys({**unstated, **text.stated()}) if unstated else text
    keys.seen("model_type")
    layers = IMPORTED_FAMILIES[family](keys)
    moe = any(layer.feed_forward.get("experts", 1) > 1 for layer in layers)
    formats = formats_of({**content, **keys.stated()}, quantisation, layers=len(layers), moe=moe)
    tied = keys.flag("tie_word_embeddings", default=whole.flag("tie_word_embeddings", default=family in _TIED))
    model: JsonObject = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-")[:100] or family,
        "layers": len(layers),
        "hidden": keys.need("hidden"),
        "vocab": keys.need("vocab"),
        "tied_embeddings": tied,
        "mtp_layers": keys.known("mtp_layers"),
        **_grouped(layers),
    }
    for name, key, usual in (("residual_streams", "hc_mult", 1), ("residual_blocks", "attn_res_block_size", 0)):
        if family in _MIXES_STREAMS and (stated := keys.whole(key, default=usual)) != usual:
            model[name] = stated
    if formats.experts and moe:
        model["expert_dtype"] = formats.experts
    notes = _notes(formats, unstated, is_text=text is whole)
    notes += [APPROXIMATED[family]] if family in APPROXIMATED else []
    notes += [f"read as {family}, as asked for; it calls itself {own_name or 'nothing'}"] if read_as else []
    return ModelImport(family, model, formats, keys.read(), keys.unread(), tuple(notes))


def _family(whole: Keys, text: Keys, read_as: str) -> str:
    if read_as:
        if read_as not in IMPORTED_FAMILIES:
            raise CannotImport(f"no family {read_as!r} to read it as: {_like(read_as)}")
        return read_as
    names = [name for name in (text.text("model_type"), whole.text("model_type")) if name]
    names += [BY_ARCHITECTURE[name] for name in whole.texts("architectures") if name in BY_ARCHITECTURE]
    for name in names:
        if name in IMPORTED_FAMILIES:
            return name
    for name in names:
        if name in REFUSED:
            raise CannotImport(f"model_type {name!r} has {REFUSED[name]}, which no model file can say")
    if not names:
        raise CannotImport("it names no model_type, so it is no configuration of a Hugging Face model")
    raise CannotImport(f"unknown model_type {names[0]!r}: {_like(names[0])}; --as reads it as a family that is known")


def _like(name: str) -> str:
    """A family that is called alike, or some of them."""
    some = ", ".join(name for name in _WIDESPREAD if name in IMPORTED_FAMILIES)
    return (
        nearest_name(name, IMPORTED_FAMILIES, least=_ALIKE) or f"known are {some} and {len(IMPORTED_FAMILIES)} in all"
    )


def _grouped(layers: list[ImportedLayer]) -> JsonObject:
    """Layers that are alike as groups, and their order."""
    kinds: list[ImportedLayer] = []  # few, whatever the layers are
    for layer in layers:
        if layer not in kinds:
            kinds.append(layer)
    if len(kinds) == 1:
        return {**layers[0].attention, **layers[0].feed_forward}
    labels = Counter(kind.label for kind in kinds)
    names = [kind.label if labels[kind.label] == 1 else f"{kind.label}_{index}" for index, kind in enumerate(kinds)]
    order = [names[kinds.index(layer)] for layer in layers]
    counts = Counter(order)
    groups = [
        {"name": name, "count": counts[name], **kind.attention, **kind.feed_forward}
        for name, kind in zip(names, kinds, strict=True)
    ]
    in_turn = [name for name in names for _ in range(counts[name])]
    return {"groups": groups} if order == in_turn else {"groups": groups, "order": _period(order)}


def _period(order: list[str]) -> list[str]:
    """The shortest beginning that repeats over all of it."""
    return order[: next(n for n in range(1, len(order) + 1) if order[n:] == order[:-n])]


def _notes(formats: Formats, unstated: Mapping[str, int], *, is_text: bool) -> list[str]:
    notes: list[str] = []
    if unstated:
        assumed = ", ".join(f"{key} {value}" for key, value in unstated.items())
        notes.append(f"not stated, so as transformers has it: {assumed}")
    if not is_text:
        notes.append("the text model alone: what sees or hears is left out")
    if formats.unknown and formats.weights is None:
        usual = "bf16" if formats.experts else "fp8"
        notes.append(
            f"{formats.unknown}: charged as {usual}, or as the engine requires, unless --weights names another"
        )
    elif formats.unknown:
        notes.append(formats.unknown)
    if formats.kv_cache is None:
        notes.append("format of the KV cache not stated: bf16, as engines take it, unless --kv-cache names another")
    return notes
