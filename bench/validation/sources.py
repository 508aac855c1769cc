"""What is known of the sources of published rows, read from ``results/published/sources.yaml``.

An entry, and each of its rules, may have these keys:

* ``settings``: overrides of every run, with ``settings_source``; an empty value takes an override back.
* ``layout``: what is to be read as if it stood beside the strategy. ``mesh``: overrides of rows that are a mesh.
* ``micro_batch``, ``global_batch``: sequences of a copy of the model at a time, and of a step, where rows do not say.
* ``is_size_checked: false``: the printed number of parameters is of something else. ``spread``: how far runs of one
  configuration are apart, as a share, by their authors' own words: such rows fit no intervals.
* ``state_bytes``: of rows that are a mesh, bytes of parameters, gradients and what of the optimizer is not divided, and
  bytes of what is, each per parameter: see `bench.validation.other_software`. Null: as torch keeps it.
* ``balances_stages: true``: the last stage has fewer blocks, for its head over the vocabulary.
* ``waits_for_sends: true``: stages of a pipeline compute nothing while they send and receive, as DeepSpeed's.
* ``receives_in_turn: true``: they have one buffer to receive in, as all of those with ``state_bytes`` have.
* ``torch_version`` (with ``torch_source``): of rows whose own column does not say.
* ``assumed``: what had to be assumed beyond the words of a row; a row with assumptions is rough.
* ``complete: false``: all rows are rough. ``refuse``: rows are no runs of this suite, and why.
* ``flops``: what TFLOPS and MFU count (`bench.config.flop_conventions`).
* ``metrics``: metrics of the source that mean another one.
* ``measures``: ``step``, or ``forward_and_backward`` where times leave out the optimizer.
* ``frees_by_hand: true``: they free tensors of stages that torch keeps, so that whether a run fits is not compared.
* ``recomputes_whole``: checkpointing computes whole blocks again, though torch is 2.1 or later (reentrant).
* ``block_size: sequence_length``: as many positions as tokens.
* ``loss_memory``: ``freed`` where logits are let go before backward, or the bytes per logit that a loss holds at most
  whose gradient takes their place (`bench.prediction.simulation.other_loop`).
* ``miss_cause``: why predictions of its rows miss, as far as that is known.

A rule's pattern is searched in a column, in strategy and sharding together (``layout``), or in all that the row says of
its software (``names``).

The entry `UNKNOWN_SOURCE` is for rows of sources that the file does not have: what software that a row names does
unless it is told otherwise.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from bench.records.published import PUBLISHED_CSV, PublishedLine

SOURCES_FILE = PUBLISHED_CSV.with_name("sources.yaml")

UNKNOWN_VERSION = "unknown"

UNKNOWN_SOURCE = "unknown_source"

WHOLE_RECOMPUTATION_BEFORE = (2, 1)
"""Version of torch from which on checkpointing stops when it has what backward needs
(https://github.com/pytorch/pytorch/pull/90105, in 2.1)."""

FUSED_ATTENTION_SINCE = (2, 0)
"""Version of torch that brought `scaled_dot_product_attention` (https://github.com/pytorch/pytorch/releases/tag/v2.0.0)."""

NCCL_STREAM_RECORDED_BEFORE = (2, 2)
"""Version of torch from which on NCCL's stream is not recorded on what a collective that is waited for at once used
(https://github.com/pytorch/pytorch/pull/111431, merged in October 2023)."""


@dataclass(frozen=True)
class SourceKnowledge:
    """What applies to one row."""

    settings: dict[str, Any] = field(default_factory=dict)
    torch_version: str = UNKNOWN_VERSION
    assumed: tuple[str, ...] = ()
    complete: bool = True
    refuse: str | None = None
    flops: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)
    measures: str = "step"
    recomputes_whole: bool = False
    block_size: str | None = None
    layout: str = ""
    mesh: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    global_batch: int | None = None
    state_bytes: tuple[float, float] | None = None
    balances_stages: bool = False
    waits_for_sends: bool = False
    receives_in_turn: bool = False
    frees_by_hand: bool = False
    is_size_checked: bool = True
    spread: float = 0.0
    loss_memory: str | float | None = None
    miss_cause: str | None = None
    licence: str | None = None
    software: str | None = None
    torch_source: str | None = None
    settings_source: str | None = None


@functools.cache
def _load_entries() -> Mapping[str, dict[str, Any]]:
    return yaml.safe_load(SOURCES_FILE.read_text(encoding="utf-8"))


def load_sources() -> Mapping[str, dict[str, Any]]:
    """The file's entries by `source_key`."""
    return {key: entry for key, entry in _load_entries().items() if key != UNKNOWN_SOURCE}


def find_source_knowledge(line: PublishedLine) -> SourceKnowledge:
    """What the file says of a row."""
    entries = _load_entries()
    entry = dict(entries.get(line.get("source_key") or "", entries[UNKNOWN_SOURCE]))
    parts = [entry, *(rule for rule in entry.pop("rules", ()) if _matches(rule["where"], line))]
    merged: dict[str, Any] = {"settings": {}, "mesh": {}, "assumed": (), "metrics": {}}
    for part in parts:
        for key, value in part.items():
            if key in ("settings", "mesh", "metrics"):
                merged[key] |= value
            elif key == "assumed":
                merged[key] = (*merged[key], value)
            elif key != "where":
                merged[key] = (
                    str(value) if key == "torch_version" else tuple(value) if isinstance(value, list) else value
                )
    return SourceKnowledge(**merged)


LAYOUT_COLUMNS = ("strategy", "sharding")
"""In either of which people write degrees: what rules call the column ``layout``."""

NAMING_COLUMNS = ("source_key", "source_url", "figure_or_table", "strategy", "note")
"""In any of which software may be named: what rules call the column ``names``."""


def _matches(patterns: Mapping[str, str], line: PublishedLine) -> bool:
    joined = {
        name: " ".join(line.get(column) or "" for column in columns)
        for name, columns in (("layout", LAYOUT_COLUMNS), ("names", NAMING_COLUMNS))
    }
    texts = {**line, **joined}
    return all(re.search(pattern, texts.get(column) or "", re.IGNORECASE) for column, pattern in patterns.items())


def find_torch_version(line: PublishedLine) -> str:
    """The version of torch of a row: what its own column says, else what is known of the source, else unknown."""
    own_version = (line.get("torch_version") or "").strip()
    if own_version and own_version.lower() != UNKNOWN_VERSION:
        return own_version
    return find_source_knowledge(line).torch_version


def recomputes_whole_blocks(torch_version: str) -> bool:
    """Whether checkpointing of this version computes a whole block again; where unknown, it is taken to stop early."""
    return _is_before(torch_version, WHOLE_RECOMPUTATION_BEFORE)


def has_fused_attention(torch_version: str) -> bool:
    """Whether torch has kernels of attention in this version; where unknown, it does."""
    return not _is_before(torch_version, FUSED_ATTENTION_SINCE)


def records_nccl_stream(torch_version: str) -> bool:
    """Whether NCCL's stream is recorded on what FSDP1 gathers in this version; where unknown, it is not."""
    return _is_before(torch_version, NCCL_STREAM_RECORDED_BEFORE)


def _is_before(torch_version: str, limit: tuple[int, int]) -> bool:
    """Whether what is known of a version says that it is before another."""
    match = re.search(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        return False
    version = (int(match[1]), int(match[2]))
    return version <= limit if "before" in torch_version else version < limit
