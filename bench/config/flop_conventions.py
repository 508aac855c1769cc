"""What others count as a step's FLOPs, so that a number of theirs can be compared with one of ours."""

from __future__ import annotations

from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError, require_choice
from bench.models import Family

FLOP_CONVENTIONS = ("model", "hardware", "megatron", "palm", "nanogpt", "llm_foundry")
"""Values of ``flops=``. The first two are the suite's own: without and with recomputation, attention in full."""

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


def count_flops_per_sequence(convention: str, config: RunConfig) -> float:
    """FLOPs of a step of one sequence, as a convention counts them.

    Of a mixture of experts N are the parameters that a token goes through. Adapters are counted as if all parameters
    were trained, by all conventions but the suite's own.

    Raises
    ------
    UsageError
        If there is no such convention.
    ImpossibleError
        If its formula is not for this model.
    """
    require_choice("flops", convention, FLOP_CONVENTIONS)
    family, length = config.model, config.sequence_length
    if convention in ("model", "hardware"):
        if convention == "hardware":
            return config.hardware_flops_per_sequence
        return config.trained_model.count_flops_per_sequence(length).model_flops
    dimensions = [getattr(family, name, None) for name in ("num_layers", "hidden_size", "num_heads", "vocabulary_size")]
    if None in dimensions:
        raise ImpossibleError(
            f"flops={convention} is not valid for model={family.name}, whose layers its formula is not for: choose "
            "model or hardware, or a model of family gpt, llama or moe."
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


def count_position_parameters(family: Family) -> int:
    """Parameters of the tables of learned positions, 0 where there are none."""
    return sum(
        parameter.numel()
        for name, parameter in family.build_model().named_parameters()
        if any(part in POSITION_TABLES for part in name.split("."))
    )


def compute_convention_tflops(convention: str, config: RunConfig, step_time_s: float) -> tuple[float, float | None]:
    """TFLOP/s per rank as a convention counts, and their share of the precision's dense peak, None where unknown."""
    sequences = config.batch_size_per_gpu * config.gradient_accumulation
    tflops = sequences * count_flops_per_sequence(convention, config) / step_time_s / 1e12
    peak_tflops = config.hardware.peak_tflops.get(config.precision.peak)
    return tflops, tflops / peak_tflops if peak_tflops else None
