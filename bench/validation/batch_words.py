"""Batches, micro-batches and accumulation as rows state them: in their own column, in notes, or by the global batch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.records.published import PublishedLine
from bench.validation.mesh_words import (
    DEGREE_PATTERNS,
    MicroBatches,
    count_ranks_per_copy,
    divide_batch,
    plan_micro_batches,
)
from bench.validation.overrides import NotExpressibleError
from bench.validation.printed_numbers import is_blank, parse_count
from bench.validation.sources import SourceKnowledge

ACCUMULATION_PATTERNS = (
    r"(?:grad(?:ient)?[ _-]?acc?um(?:ulation)?(?:[ _]steps)?|gas|micro_num|accumulation(?: steps)?|\bga)[ =:]*(\d+)",
    r"(\d+)[ -]micro-?batches(?: per step)?",
    r"(\d+) (?:gradient )?accumulation steps",
    r"(no) accumulation",
)
GLOBAL_BATCH_PATTERN = (
    r"(?:global[ _-]?batch(?:[ _-]?size)?|\bgbs)[ =:]*(\d[\d,]*)(?![\d.,]*[mk] ?tok|\.\d)"
    r"|batch(?: size)?[ =:]*(\d[\d,]*) \(global\)"
)
MICRO_BATCH_PATTERN = r"(?:\bmicro[ _-]?batch(?:[ _-]?size)?|\bmbs)[ =:]*(\d+)\b"


def read_count(line: PublishedLine, column: str, name: str) -> int:
    """The whole number in a column.

    Raises
    ------
    NotExpressibleError
        If nothing is there, or no such number; the reason calls it `name`.
    """
    text = line.get(column) or ""
    if is_blank(text):
        raise NotExpressibleError(f"the {name} is not stated")
    try:
        return parse_count(text)
    except ValueError as error:
        raise NotExpressibleError(f"{column}: {error}") from None


def read_micro_batches(line: PublishedLine, settings: Mapping[str, str], knowledge: SourceKnowledge) -> MicroBatches:
    """Of a mesh: a row's batch is that of one copy of the model at a time; of copies that are not divided, the whole
    step unless it is stated.

    Raises
    ------
    NotExpressibleError
        If the micro-batch is not stated, or of a divided model how many there are.
    """
    note = f"{line.get('note') or ''}; {line['sharding']}".lower()
    size = _read_size(line, note, knowledge) or read_count(line, "batch_size_per_gpu", "micro-batch")
    copies = int(settings["gpus"]) // count_ranks_per_copy(settings)
    global_batch = _read_global_batch(note, knowledge)
    count = _read_accumulation(note)
    if global_batch is not None:
        count = max(1, round(global_batch / (copies * size)))
    elif count is None and any(f"strategy.{name}" in settings for name in DEGREE_PATTERNS):
        raise NotExpressibleError("the number of micro-batches is not stated")
    return plan_micro_batches(settings, size, count or 1)


def _read_global_batch(note: str, knowledge: SourceKnowledge) -> int | None:
    if knowledge.global_batch is not None:
        return knowledge.global_batch
    match = re.search(GLOBAL_BATCH_PATTERN, note)
    return int((match[1] or match[2]).replace(",", "")) if match else None


def _read_size(line: PublishedLine, note: str, knowledge: SourceKnowledge) -> int | None:
    """Sequences at a time: what is known of the source, else the column, else the note; None where nothing says so."""
    if knowledge.micro_batch is not None:
        return knowledge.micro_batch
    if not is_blank(line["batch_size_per_gpu"]):
        return read_count(line, "batch_size_per_gpu", "batch per GPU")
    match = re.search(MICRO_BATCH_PATTERN, note)
    return int(match[1]) if match and int(match[1]) else None


def read_batch(
    line: PublishedLine, settings: Mapping[str, str], knowledge: SourceKnowledge, assumptions: list[str]
) -> dict[str, str]:
    """The overrides, with sequences per GPU and micro-batch, and how many micro-batches.

    Raises
    ------
    NotExpressibleError
        If no batch is stated, nor follows from a global batch, or there are fewer GPUs than share one.
    """
    note = f"{line.get('note') or ''}; {line['sharding']}".lower()
    stated_degree = settings.get("strategy.degree", settings.get("strategy.tensor", ""))
    degree = int(stated_degree) if stated_degree.isdecimal() else 1
    replicas = int(settings["gpus"]) // degree
    if replicas == 0:
        raise NotExpressibleError(f"a tensor-parallel degree of {degree} is more than {settings['gpus']} GPUs")
    accumulation = _read_accumulation(note)
    global_batch = _read_global_batch(note, knowledge)
    if knowledge.micro_batch is None and "batch_size_per_gpu" in settings:
        batch = int(settings["batch_size_per_gpu"])
    elif (size := _read_size(line, note, knowledge)) is not None:
        batch = size
    elif global_batch is not None and global_batch % (replicas * (accumulation or 1)) == 0:
        batch = global_batch // (replicas * (accumulation or 1))
        assumptions.append(f"a micro-batch of {batch}, which the global batch comes to")
    else:
        raise NotExpressibleError("the batch per GPU is not stated")
    if accumulation is None and global_batch is not None and global_batch % (batch * replicas) == 0:
        accumulation = global_batch // (batch * replicas)
    accumulated = {"gradient_accumulation": str(accumulation)} if accumulation else {}
    return {**divide_batch(settings, batch, degree), **accumulated}


def _read_accumulation(note: str) -> int | None:
    for pattern in ACCUMULATION_PATTERNS:
        if match := re.search(pattern, note):
            return 1 if match[1] == "no" else int(match[1]) or None
    return None
