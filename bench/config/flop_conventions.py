"""What others count as a step's FLOPs, so that a number of theirs can be compared with one of ours."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.core.errors import ImpossibleError, UsageError, require_choice
from bench.core.presentation import BENCH_DIR, format_plural

if TYPE_CHECKING:
    from bench.config.run_config import RunConfig
    from bench.models import Family

# What needs torch is imported where it is needed: reports that count FLOPs as rows do are made without it.

CONVENTION_LABELS = {
    "model": "model",
    "hardware": "hardware",
    "causal": "causal model",
    "megatron": "Megatron",
    "palm": "PaLM",
    "nanogpt": "nanoGPT",
    "llm_foundry": "llm-foundry",
}
"""Values of ``flops=``, and what stands before TFLOP/s in tables and figures."""

FLOP_CONVENTIONS = tuple(CONVENTION_LABELS)

SUITE_COLUMNS = {
    "model": ("tflops_per_gpu", "mfu"),
    "hardware": ("hardware_tflops_per_gpu", "hfu"),
    "causal": ("causal_tflops_per_gpu", "causal_mfu"),
}
"""Columns of the suite's own conventions: without recomputation, with it, and with half of the scores where attention
is causal; the first two count attention in full."""

POSITION_TABLES = ("wpe", "position_embeddings", "embed_positions")
"""How models call their tables of learned positions."""


def count_palm_flops(parameters: int, layers: int, heads: int, head_size: int, length: int) -> int:
    """FLOPs of a token: ``6 N + 12 L H Q T``, forward and backward without recomputation, attention in full.

    Chowdhery et al. 2022, arXiv:2204.02311, appendix B. N: all parameters; L: layers; H: heads; Q: their width; T:
    tokens per sequence.
    """
    return 6 * parameters + 12 * layers * heads * head_size * length


def count_nanogpt_flops(
    parameters: int, position_parameters: int, layers: int, heads: int, head_size: int, length: int
) -> int:
    """FLOPs of a token: PaLM's, with N less the table of learned positions.

    nanoGPT's ``GPT.estimate_mfu`` and ``get_num_params`` (https://github.com/karpathy/nanoGPT, model.py).
    """
    return count_palm_flops(parameters - position_parameters, layers, heads, head_size, length)


def count_llm_foundry_flops(parameters: int, layers: int, width: int, length: int) -> int:
    """FLOPs of a token: ``6 N + 12 L d s``, without recomputation; d: the model's width, s: tokens per sequence.

    https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
    """
    return 6 * parameters + 12 * layers * width * length


def count_megatron_flops(sequences: int, length: int, layers: int, width: int, vocabulary: int) -> float:
    """FLOPs of `sequences`: ``96 B s l h^2 (1 + s / (6 h) + V / (16 l h))``, recomputation of all layers counted.

    Narayanan et al. 2021, arXiv:2104.04473, equation 3: of a GPT whose feed-forward layers are four times as wide, with
    as many heads for keys and values as for queries.
    """
    return 96 * sequences * length * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))


def count_flops_per_sequence(convention: str, family: Family, length: int) -> float:
    """FLOPs of a step of one sequence of so many tokens, as others count them.

    Of a mixture of experts N are the parameters that a token goes through. Adapters are counted as if all parameters
    were trained.

    Raises
    ------
    ImpossibleError
        If the formula is not for this model.
    """
    dimensions = [getattr(family, name, None) for name in ("num_layers", "hidden_size", "num_heads", "vocabulary_size")]
    if None in dimensions:
        raise ImpossibleError(
            f"flops={convention} is not valid for model={family.name}, whose layers its formula is not for: choose "
            "model, hardware or causal, or a model of family gpt, llama or moe."
        )
    layers, width, heads, vocabulary = dimensions
    assert layers is not None
    assert width is not None
    assert heads is not None
    assert vocabulary is not None
    parameters: int = getattr(family, "num_active_parameters", family.num_parameters)
    head_size = getattr(family, "head_size", None) or width // heads
    if convention == "megatron":
        return count_megatron_flops(1, length, layers, width, vocabulary)
    if convention == "palm":
        return length * count_palm_flops(parameters, layers, heads, head_size, length)
    if convention == "nanogpt":
        positions = count_position_parameters(family)
        return length * count_nanogpt_flops(parameters, positions, layers, heads, head_size, length)
    return length * count_llm_foundry_flops(parameters, layers, width, length)


@functools.cache
def count_position_parameters(family: Family) -> int:
    """Parameters of the tables of learned positions, 0 where there are none."""
    return sum(
        parameter.numel()
        for name, parameter in family.build_model().named_parameters()
        if any(part in POSITION_TABLES for part in name.split("."))
    )


def compute_convention_tflops(
    convention: str, config: RunConfig, step_time_s: float
) -> tuple[float | None, float | None]:
    """TFLOP/s per rank as a convention counts, and their share of the precision's dense peak, None where unknown.

    Raises
    ------
    UsageError
        If there is no such convention, or its formula is not for this model.
    """
    from bench.config.speed_columns import compute_speed_columns

    columns = compute_speed_columns(config, step_time_s)
    sequences = config.sequences_per_gpu
    peak_tflops = config.hardware.peak_tflops.get(config.precision.peak)
    return _compute_tflops(convention, columns, config.model, config.sequence_length, sequences, peak_tflops)


def compute_record_tflops(convention: str, record: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The same of a row: what `compute_convention_tflops` says of the run's configuration and step time.

    Raises
    ------
    UsageError
        If there is no such convention, or the row lacks what it takes.
    """
    if convention in SUITE_COLUMNS or record.get("step_time_median_s") is None:
        return _compute_tflops(convention, record)
    config = _get_section(record, "config")
    model_fields = _get_section(config, "model")
    length, batch_size = record.get("sequence_length"), record.get("batch_size_per_gpu")
    if not model_fields or length is None or batch_size is None:
        raise ImpossibleError(
            f"flops={convention} is not valid for rows without a configuration, such as published ones: choose model."
        )
    _require_own_family(convention, model_fields)
    family = _build_family(json.dumps(model_fields, sort_keys=True))
    sequences = batch_size * (record.get("gradient_accumulation") or 1)
    sequences /= (config.get("strategy") or {}).get("ranks_per_batch") or 1
    peaks = _get_section(_get_section(config, "hardware"), "peak_tflops")
    peak_tflops = peaks.get(str(_get_section(config, "precision").get("peak")))
    return _compute_tflops(convention, record, family, length, sequences, peak_tflops)


def _get_section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a row's configuration; empty where a row has something else in its place."""
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _compute_tflops(
    convention: str,
    columns: Mapping[str, Any],
    family: Family | None = None,
    length: int = 0,
    sequences: float = 0,
    peak_tflops: float | None = None,
) -> tuple[float | None, float | None]:
    """TFLOP/s and share of the peak, of `sequences` of `length` tokens in a step.

    Parameters
    ----------
    columns: mapping
        Columns of a row: those of `SUITE_COLUMNS`, and the time of a step.
    family: Family, optional
        The model; None where only `columns` are needed, or no time is known.
    """
    require_choice("flops", convention, FLOP_CONVENTIONS)
    if convention in SUITE_COLUMNS:
        tflops, share = (columns.get(column) for column in SUITE_COLUMNS[convention])
        return tflops, share
    if family is None:
        return None, None
    flops = sequences * count_flops_per_sequence(convention, family, length)
    tflops = flops / columns["step_time_median_s"] / 1e12
    return tflops, tflops / peak_tflops if peak_tflops else None


def _require_own_family(convention: str, model_fields: Mapping[str, Any]) -> None:
    """Raise `ImpossibleError` unless a model's family is a file of the suite: what rows name is not imported."""
    name = str(model_fields.get("family"))
    if not (name.isidentifier() and (BENCH_DIR / "models" / f"{name}.py").is_file()):
        raise ImpossibleError(
            f"flops={convention} is not valid for model={model_fields.get('name')} of a row, whose family={name} is no "
            "file of bench/models: choose model, hardware or causal."
        )


@functools.lru_cache(maxsize=256)
def _build_family(content: str) -> Family:
    """The model of a row, given its section of the configuration as JSON."""
    from bench.core.typed_config import build_dataclass
    from bench.models import load_family

    values = json.loads(content)
    family_class = load_family(values["family"])
    family: Family = build_dataclass("model", family_class, family_class.complete_fields(values))
    return family


def format_tflops_label(convention: str, noun: str) -> str:
    """What an axis or a column of TFLOP/s is called: ``model TFLOP/s per GPU``."""
    return f"{CONVENTION_LABELS[convention]} TFLOP/s per {noun}"


# --- The option of commands that show rows, and the speeds of many rows in one convention.


def add_flops_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add ``--flops``, which `read_flops_option` lets users write ``flops=`` too."""
    parser.add_argument(
        "--flops",
        default="model",
        metavar="CONVENTION",
        help=f"{help_text}: {', '.join(FLOP_CONVENTIONS)} (default: model)",
    )


def read_flops_option(arguments: Sequence[str] | None) -> list[str]:
    """A command line, None for this process's, with ``flops=`` as an option that argparse knows."""
    typed = sys.argv[1:] if arguments is None else arguments
    return [f"--{argument}" if argument.startswith("flops=") else argument for argument in typed]


@dataclass(frozen=True)
class ConvertedSpeeds:
    """TFLOP/s per rank and their share of the peak, of rows in their order; None where unknown."""

    convention: str
    tflops: Sequence[float | None]
    peak_shares: Sequence[float | None]
    reasons: Mapping[str, int]
    """Why some rows have none although they have a time, and how many."""

    @property
    def note(self) -> str:
        """What is counted where it is not the model's own FLOPs, and which rows have no speed; else empty."""
        if self.convention == "model":
            return ""
        reasons_text = "".join(
            f" {format_plural(count, 'row')} without: {reason}" for reason, count in self.reasons.items()
        )
        return f"TFLOP/s and MFU are counted as flops={self.convention}.{reasons_text}"


def convert_speeds(convention: str, records: Sequence[Mapping[str, Any]]) -> ConvertedSpeeds:
    """The speeds of rows as a convention counts them.

    Raises
    ------
    UsageError
        If there is no such convention.
    """
    require_choice("flops", convention, FLOP_CONVENTIONS)
    speeds: list[tuple[float | None, float | None]] = []
    reasons: Counter[str] = Counter()
    for record in records:
        tflops = share = None
        try:
            tflops, share = compute_record_tflops(convention, record)
        except UsageError as error:
            reasons[str(error)] += 1
        else:
            if tflops is None and record.get("tflops_per_gpu") is not None:
                reasons[f"no {SUITE_COLUMNS[convention][0]}." if convention in SUITE_COLUMNS else "no step time."] += 1
        speeds.append((tflops, share))
    return ConvertedSpeeds(convention, [tflops for tflops, _ in speeds], [share for _, share in speeds], reasons)


def replace_speeds(records: Sequence[Mapping[str, Any]], speeds: ConvertedSpeeds) -> list[dict[str, Any]]:
    """Rows whose ``tflops_per_gpu`` and ``mfu`` are those of `speeds`."""
    return [
        {**record, "tflops_per_gpu": tflops, "mfu": share}
        for record, tflops, share in zip(records, speeds.tflops, speeds.peak_shares, strict=True)
    ]
