"""Names of models as people print them, as overrides: those of conf/model and of results/published/models.yaml."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import yaml

from bench.config.groups import list_config_groups
from bench.records.published import PUBLISHED_CSV
from bench.validation.overrides import NotExpressibleError, Overrides
from bench.validation.printed_numbers import is_blank

MODELS_FILE = PUBLISHED_CSV.with_name("models.yaml")

NOISE_WORDS = (
    *("hf", "instruct", "chat", "base", "model", "meta", "it", "pretrain", "pretraining", "pytorch", "style", "like"),
    *("gptq", "awq", "bnb", "4bit", "v0", "v0p1", "v0p2", "v0p3", "v1p5", "bf16", "shape", "shapes", "params", "ish"),
    *("lora", "qlora", "sft", "finetune", "finetuning", "math"),
)
"""Parts of names that say nothing of a model's shape."""

SAME_SHAPES = (
    (r"\bllama[ _-]?3[._][13](?=[ _-]|$)", "llama3"),
    (r"\bqwen2(?![.p_\d])", "qwen2.5"),
    (r"\bgpt-?[234]?(?=[ _-]*[\d.]+[bm]\b)", "gpt"),
    (r"\bt5[ _-]?v?1[._]1", "t5v1.1"),
)
"""Patterns of names, in lower case, and the name of models of the same shapes."""

VOCABULARY = "model.vocabulary_size"

SHAPE_PATTERNS = {
    "model.hidden_size": r"(?:hidden(?:[ _]size)?|d_model|nhidden|width)[ =:]*(\d{3,5})|\bh[ =](\d{3,5})\b",
    "model.num_layers": r"(?:cut to|num_layers|n_layers|nlayers|layers|layer)[ =:]*(\d{1,3})|(\d{1,3})[ -]layers?\b|"
    r"\bl[ =](\d{1,3})\b",
    "model.num_heads": r"(?:n_heads|nheads|num_heads|heads)[ =:]*(\d{1,3})|(\d{1,3})[ -]heads\b|\ba[ =](\d{1,3})\b",
    VOCABULARY: r"vocab(?:ulary)?(?:[ _]size)?[ =:]*(\d{4,6})",
}
"""Dimensions that a name or a note states."""

ENTRY_WORDS = ("source", "assumed", "refuse")
"""Keys of an entry of the file that are no overrides."""


@functools.cache
def load_model_entries() -> Mapping[str, dict[str, Any]]:
    """Normalised names of models and what they come to: overrides, and the keys of `ENTRY_WORDS`."""
    entries: dict[str, dict[str, Any]] = {}
    for option in list_config_groups()["model"]:
        if option != "hf":
            entries |= {key: {"model": option} for key in _list_option_keys(option)}
    return entries | yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))


def _list_option_keys(option: str) -> list[str]:
    """How a name of conf/model may be printed: ``qwen2_5_7b`` as qwen2.5-7b, ``gpt_1b3`` as gpt-1.3b."""
    text = re.sub(r"(\d)b(\d)", r"\1p\2b", option)
    parts = re.split(r"(?<=\d)_(?=\d)", text)
    joins = itertools.product(("", "p"), repeat=len(parts) - 1)
    texts = ["".join(part + join for part, join in zip(parts, (*join_set, ""), strict=True)) for join_set in joins]
    return [text.replace("_", "") for text in texts]


def normalise_model_name(text: str) -> str:
    """A name in lower case without punctuation, organisation and what says nothing of its shape; p for a point."""
    name = re.sub(r"\([^)]*\)", " ", text.lower()).strip().rpartition("/")[2]
    name = re.split(r"\bcut to\b|\b\d+ layers\b|\blayers\b|\bheads\b", name)[0]
    name = re.sub(r"\b\d+[ -](?:node|gpu)s?\b", " ", name)
    for pattern, replacement in SAME_SHAPES:
        name = re.sub(pattern, replacement, name)
    name = re.sub(r"(\d)[._](\d+b\b)", r"\1p\2", re.sub(r"(\d)\.(\d)", r"\1p\2", name))
    words = [word for word in re.findall(r"[a-z0-9]+", name) if word not in NOISE_WORDS]
    return "".join(words)


def read_model(name: str, parameters: str, note: str = "") -> Overrides:
    """The model that a name means; where names say no size, the number of parameters does.

    Raises
    ------
    NotExpressibleError
        If the suite has no shape of that name, and none is stated.
    """
    if is_blank(name):
        raise NotExpressibleError("the model is not stated")
    key, entries = normalise_model_name(name), load_model_entries()
    size = re.sub(r"\.", "p", parameters.strip().lower())
    rounded_size = re.sub(r"p0(?=b)", "", size)
    names = (key, key + size, key + rounded_size, key.removesuffix(size) if size else key)
    entry = next((entries[name] for name in names if name in entries), None)
    shape, noted_shape = _read_shape(name), _read_shape(note)
    if entry is None:
        shape = {**noted_shape, **shape}
        if len({"model.hidden_size", "model.num_layers", "model.num_heads"} & set(shape)) < 3:
            raise NotExpressibleError(f"the suite has no shape of a model called {name.strip()}")
        entry = {"model": "gpt_1b3", "assumed": f"{name.strip()} is predicted as a GPT of the stated shape"}
    if entry.get("refuse"):
        raise NotExpressibleError(f"{name.strip()}: {entry['refuse']}")
    settings = {
        field: "null" if value is None else str(value) for field, value in entry.items() if field not in ENTRY_WORDS
    }
    is_gpt = settings["model"].startswith(("gpt", "mpt"))
    if is_gpt and VOCABULARY in noted_shape:
        settings[VOCABULARY] = noted_shape[VOCABULARY]
    settings |= {field: value for field, value in shape.items() if is_gpt or field != "model.hidden_size"}
    return Overrides(settings, [entry["assumed"]] if entry.get("assumed") else [])


def _read_shape(text: str) -> dict[str, str]:
    shape = {}
    for field, pattern in SHAPE_PATTERNS.items():
        if match := re.search(pattern, text.lower()):
            shape[field] = next(group for group in match.groups() if group)
    return shape
