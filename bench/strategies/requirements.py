"""What strategies ask of sharding factors, ranks and number formats, each refused in a sentence where it is not so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision

if TYPE_CHECKING:
    from bench.strategies.base import Strategy


def parse_rank_count(
    field: str,
    requested: int | str,
    world_size: int,
    ranks_per_node: int,
    min_ranks: int = 1,
    alternative: str = "another strategy",
) -> int:
    """Ranks that a knob means: a divisor of the world size, ``node`` (the ranks of one machine) or ``full`` (all).

    Parameters
    ----------
    alternative: str
        What else to choose where fewer than `min_ranks` are asked for.

    Raises
    ------
    UsageError
        If it is none of these, or fewer than `min_ranks`.
    """
    num_ranks: int | str = requested
    if isinstance(num_ranks, str):
        num_ranks = {"full": world_size, "node": min(ranks_per_node, world_size)}.get(num_ranks, num_ranks)
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise invalid_value_error(field, num_ranks, f"full, node, or a whole number of at least {min_ranks}")
    if world_size % num_ranks:
        valid_counts = [str(n) for n in list_divisors(world_size) if n >= min_ranks]
        valid = f"a divisor of the world size, gpus={world_size}: {', '.join(valid_counts)}"
        if not valid_counts:
            valid = f"gpus={num_ranks} or a multiple of it, instead of gpus={world_size}"
        raise invalid_value_error(field, num_ranks, valid, ImpossibleError)
    if num_ranks < min_ranks:
        alternatives = f"{min_ranks} or more" if world_size >= min_ranks else f"gpus={min_ranks} or more"
        raise ImpossibleError(
            f"{field}={requested} is not valid with gpus={world_size} and gpus_per_node={ranks_per_node}, where that "
            "is "
            f"fewer than {min_ranks} ranks: choose {alternatives}, or {alternative}."
        )
    return num_ranks


def list_divisors(number: int) -> list[int]:
    """The divisors of a number, in order: of 10^9 in a millisecond."""
    small_divisors = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small_divisors, *(number // n for n in small_divisors)})


def require_sharding_factor(
    strategy: Strategy, automatic_value: str, required_factor: int, world_size: int, reason: str
) -> None:
    """Raise `ImpossibleError` unless the sharding factor asked for is the one that other knobs have decided.

    Parameters
    ----------
    automatic_value: str
        What is typed to leave it to them.
    reason: str
        What spreads a copy of the model over so many ranks.
    """
    requested_factor = world_size if strategy.sharding_factor == "full" else strategy.sharding_factor
    if requested_factor not in (automatic_value, required_factor):
        valid = f"{automatic_value}: {reason} over {required_factor} of gpus={world_size} ranks"
        raise invalid_value_error("strategy.sharding_factor", strategy.sharding_factor, valid, ImpossibleError)


def require_unsharded(strategy: Strategy) -> None:
    """Raise `ImpossibleError` unless the sharding factor is 1, for strategies with a whole model on every rank."""
    if strategy.resolved_sharding_factor != 1:
        raise ImpossibleError(
            f"strategy.sharding_factor={strategy.resolved_sharding_factor} is not valid for strategy={strategy.name}, "
            "which keeps the "
            "whole model on every rank: choose 1, or strategy fsdp or fsdp1."
        )


def require_stored_reduce_dtype(subject: str, precision: Precision, alternative: str = "") -> None:
    """Raise `ImpossibleError` where gradients should be reduced in another format than the one they are stored in.

    Parameters
    ----------
    subject: str
        What reduces them as they are: ``strategy=NAME``, perhaps with knobs.
    alternative: str
        What else to choose, with its comma.
    """
    if precision.reduce != precision.parameters:
        raise ImpossibleError(
            f"precision.reduce={precision.reduce} is not valid for {subject}, which reduces gradients as they are "
            "stored: "
            f"choose {precision.parameters}{alternative}."
        )


PACKED_BITS = 4
"""Of the quantised weights that are parameters packed into numbers of another format."""


def require_packed_bits(strategy_name: str, quantised_bits: int | None) -> None:
    """Raise `ImpossibleError` where what is sharded is not what a quantised layer computes with.

    bitsandbytes 0.50.2 computes with a layer's parameter where that has 4 bits, but with ``Linear8bitLt.state.CB``, the
    whole weight, where it has 8.
    """
    if quantised_bits not in (None, PACKED_BITS):
        raise ImpossibleError(
            f"finetune=qlora is not valid with strategy={strategy_name} for finetune.bits={quantised_bits}, since "
            "bitsandbytes keeps such a weight whole in the state of its layer, whatever becomes of the parameter: "
            f"choose finetune.bits={PACKED_BITS}, or strategy ddp, single or zero1."
        )


def require_no_dropout(field: str, dropout: float, condition: str) -> None:
    """Raise `ImpossibleError` where ranks that have the same elements would drop out different ones."""
    if dropout:
        valid = f"0.0 with {condition}, whose ranks would have to drop out the same where they have the same"
        raise invalid_value_error(field, dropout, valid, ImpossibleError)
