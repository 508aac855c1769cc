"""Words and numbers for people: names of variants, quantities with their units."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.core.precision import AUTOCAST_MIXING
from bench.core.presentation import Presentation, get_presentation, read_presentations
from bench.core.units import GIB, KIB, MIB

MISSING = "–"
CPU_NOTE = "CPU processes: functional evidence, not scaling evidence"

TOO_CLOSE = "too close to call"
"""What `fit` says of a prediction that may go either way."""

STRATEGIES, FINETUNES = "bench.strategies", "bench.finetune"
"""Packages whose files state how they are presented."""

MIXING_LABELS = {AUTOCAST_MIXING: "autocast", "fsdp policy": "parameters"}
"""Ways of mixed precision that several strategies have, by what rows call them."""


@dataclass(frozen=True, order=True)
class Variant:
    """One way to spread a model over ranks, as figures and tables name it. Sorts from replicated to sharded."""

    order: tuple[int, int, int, str]
    label: str
    kind: str
    """``effective_strategy`` of the row, which decides the colour: ``ddp``, ``fsdp/full_shard``, ..."""


def build_variant(
    strategy: str | None, effective_strategy: str | None, sharding_factor: int | None, world_size: int | None
) -> Variant:
    """Name what a run really did; where the row does not say (it failed early), what it was asked to do.

    The sharding factor is part of the name only where it is a choice: more than 1 and less than the world size.
    """
    kind = effective_strategy or _infer_kind(strategy, sharding_factor, world_size)
    family, _, sharding = kind.partition("/")
    is_hybrid = sharding_factor is not None and world_size is not None and 1 < sharding_factor < world_size
    sharding, finetune = split_finetune(sharding)
    presentation = get_strategy_presentation(family)
    kind_label, _ = presentation.kinds.get(sharding, (sharding.replace("_", " "), ""))
    label_parts = [get_strategy_label(family), kind_label, get_finetune_labels().get(finetune, "")]
    label_parts += [f"(F={sharding_factor})"] if is_hybrid and sharding else []
    sort_order = (
        presentation.position,
        _find_position(sharding, list(presentation.kinds)),
        (sharding_factor or 0) if is_hybrid else 0,
        kind,
    )
    return Variant(sort_order, " ".join(part for part in label_parts if part), kind)


def get_strategy_presentation(name: str) -> Presentation:
    """How a strategy is shown, by its name or by what stands before the slash of an effective strategy."""
    return get_presentation(STRATEGIES, name)


def get_strategy_label(name: str) -> str:
    """What figures and tables call a strategy."""
    return get_strategy_presentation(name).label or name


def get_finetune_labels() -> dict[str, str]:
    """What figures and tables call ways to train a part of a model, by the ends of effective strategies."""
    return {name: presentation.label for name, presentation in read_presentations(FINETUNES).items()}


def format_precision(precision_name: str, mixed_precision: str | None) -> str:
    """A precision with its way of mixing, where something is mixed: ``bf16 autocast``."""
    label_by_mixing = dict(MIXING_LABELS)
    for presentation in read_presentations(STRATEGIES).values():
        label_by_mixing |= presentation.mixed_precision
    return f"{precision_name} {label_by_mixing.get(mixed_precision or '', '')}".strip()


def split_finetune(sharding: str) -> tuple[str, str]:
    """What of a kind says how a model is spread, and what says which part of it is trained."""
    base, _, suffix = sharding.rpartition("_")
    return (base, suffix) if suffix in get_finetune_labels() else (sharding, "")


def _infer_kind(strategy: str | None, sharding_factor: int | None, world_size: int | None) -> str:
    if strategy is None or not get_strategy_presentation(strategy).is_sharded_by_factor:
        return strategy or "strategy not stated"
    if world_size == 1:
        return f"{strategy}/unsharded"
    if sharding_factor is None or sharding_factor == world_size:
        return f"{strategy}/full_shard"
    return f"{strategy}/full_replication" if sharding_factor == 1 else f"{strategy}/hybrid_shard"


def _find_position(name: str, ordered_names: list[str]) -> int:
    return ordered_names.index(name) if name in ordered_names else len(ordered_names)


def format_number(value: float | None, digits: int = 3) -> str:
    """`value` to so many significant digits, without an exponent where that can be read."""
    if value is None or math.isnan(value):
        return MISSING
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")  # 0.0998 to 2 digits is 0.10, not 0.100
    magnitude = math.floor(math.log10(abs(rounded)))
    if magnitude < -4 or magnitude >= 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def format_percent(share: float, *, signed: bool = False) -> str:
    """A share in percent with two digits."""
    if math.isnan(share):
        return MISSING
    plus = "+" if signed and share > 0 else ""
    return f"{plus}{format_number(100 * share, 2)} %".replace("-", "−")


def choose_memory_unit(largest_bytes: float) -> tuple[str, int]:
    """Name and size in bytes of the unit in which `largest_bytes` reads well."""
    if largest_bytes >= GIB / 10 or largest_bytes == 0:
        return "GiB", GIB
    return ("MiB", MIB) if largest_bytes >= MIB / 10 else ("KiB", KIB)


def format_memory(value: float | None) -> str:
    """Bytes with the unit that suits them."""
    if value is None or math.isnan(value):
        return MISSING
    unit, unit_bytes = choose_memory_unit(value)
    return f"{format_number(value / unit_bytes)} {unit}"


def format_seconds(value: float | None) -> str:
    """Seconds, or milliseconds below one second."""
    if value is None or math.isnan(value):
        return MISSING
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(value * 1e3)} ms"


def format_count(value: float | None) -> str:
    """A large count with K, M, B or T."""
    if value is None or math.isnan(value):
        return MISSING
    for threshold, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= threshold:
            return f"{format_number(value / threshold)} {letter}"
    return f"{value:.0f}"


def format_ranks(world_size: int | None, device: str | None) -> str:
    """A world size in words: ``4 GPUs``, ``1 process``; a CPU process is never called a GPU."""
    if world_size is None:
        return "world size not stated"
    return f"{world_size} {get_rank_noun(device) if world_size == 1 else get_rank_nouns(device)}"


def get_rank_noun(device: str | None) -> str:
    """What one rank is: ``GPU``, on a CPU ``process``, and ``rank`` where the row does not say."""
    return {"cuda": "GPU", "cpu": "process"}.get(device or "", "rank")


def get_rank_nouns(device: str | None) -> str:
    return {"cuda": "GPUs", "cpu": "processes"}.get(device or "", "ranks")


def format_plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def build_slug(*parts: object) -> str:
    """A file name made of `parts`: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(str(part) for part in parts).lower()).strip("-")[:80].strip("-")


def format_list(items: Sequence[str], max_items: int = 6) -> str:
    """Items separated by commas; beyond `max_items`, how many more."""
    shown_items = ", ".join(items[:max_items])
    return shown_items if len(items) <= max_items else f"{shown_items} and {len(items) - max_items} more"
