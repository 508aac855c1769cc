"""The batch of an optimizer step over all ranks, in sequences or tokens, and the accumulation that follows from it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bench.core.errors import ImpossibleError, invalid_value_error

MAX_ACCUMULATION = 1024
"""Micro-batches of one optimizer step, at most."""

MAX_SEQUENCES = 10**9
"""Of a global batch, or as many tokens."""

TOKEN_UNITS = {"": 1, "K": 2**10, "M": 2**20}
"""What a letter after the number of tokens stands for: batches are powers of two, so 4M are 4,194,304."""

TOKEN_COUNT_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KM]?)_?tokens")

VALID_VALUES = f"a whole number of sequences from 1 to {MAX_SEQUENCES}, or of tokens, as 4M_tokens or 4194304tokens"


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step reads on all ranks together."""

    count: int
    """Sequences, or tokens."""
    counts_tokens: bool

    @property
    def text(self) -> str:
        """As it is typed: ``512``, ``4194304tokens``."""
        return f"{self.count}tokens" if self.counts_tokens else str(self.count)

    def compute_accumulation(self, batch_size_per_gpu: int, gpus: int, tokens_per_sequence: int) -> int:
        """Micro-batches of one step: ``global_batch / (batch_size_per_gpu * gpus)``, in tokens divided by
        `tokens_per_sequence` as well.

        Raises
        ------
        ImpossibleError
            If that is no whole number, or more than `MAX_ACCUMULATION`.
        """
        micro_batch = batch_size_per_gpu * gpus * (tokens_per_sequence if self.counts_tokens else 1)
        accumulation = Fraction(self.count, micro_batch)
        if accumulation.denominator == 1 and accumulation <= MAX_ACCUMULATION:
            return int(accumulation)
        nearest = {
            max(1, min(MAX_ACCUMULATION, bound)) for bound in (math.floor(accumulation), math.ceil(accumulation))
        }
        unit = f"{micro_batch} {'tokens' if self.counts_tokens else 'sequences'}"
        length = f", {tokens_per_sequence} tokens per sequence" if self.counts_tokens else ""
        limit = f"at most {MAX_ACCUMULATION} " if accumulation > MAX_ACCUMULATION else ""
        choices = " or ".join(
            GlobalBatch(multiple * micro_batch, self.counts_tokens).text for multiple in sorted(nearest)
        )
        raise invalid_value_error(
            "global_batch",
            self.text,
            f"{choices} ({limit}micro-batches of {unit}: batch_size_per_gpu={batch_size_per_gpu} on each of {gpus} "
            f"ranks{length})",
            ImpossibleError,
        )

    def list_batch_sizes(self, gpus: int, tokens_per_sequence: int, multiple: int) -> list[int]:
        """The sizes of micro-batches per GPU that come to the global batch, smallest first.

        Parameters
        ----------
        multiple: int
            What sizes are multiples of.

        Raises
        ------
        ImpossibleError
            If there is none.
        """
        unit = gpus * multiple * (tokens_per_sequence if self.counts_tokens else 1)
        if self.count % unit:
            self.compute_accumulation(multiple, gpus, tokens_per_sequence)
        units = self.count // unit
        divisors = [divisor for divisor in range(1, math.isqrt(units) + 1) if units % divisor == 0]
        accumulations = sorted({*divisors, *(units // divisor for divisor in divisors)})
        return [
            multiple * units // accumulation
            for accumulation in reversed(accumulations)
            if accumulation <= MAX_ACCUMULATION
        ]


def parse_global_batch(value: Any) -> GlobalBatch:
    """Read ``global_batch=``: a whole number of sequences, or text such as ``4M_tokens``.

    Raises
    ------
    UsageError
        If it is neither.
    """
    match = TOKEN_COUNT_PATTERN.fullmatch(value) if isinstance(value, str) else None
    count = value if type(value) is int else None
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value):
        count = int(value)
    if match is not None:
        tokens = Fraction(match[1]) * TOKEN_UNITS[match[2]]
        count = int(tokens) if tokens.denominator == 1 else None
    if count is None or not 1 <= count <= MAX_SEQUENCES:
        raise invalid_value_error("global_batch", value, VALID_VALUES)
    return GlobalBatch(count, match is not None)


def require_accumulation(global_batch: GlobalBatch, requested: int | None, accumulation: int) -> None:
    """Raise `ImpossibleError` where an accumulation was asked for that does not come to the global batch."""
    if requested is not None and requested != accumulation:
        raise ImpossibleError(
            f"gradient_accumulation={requested} contradicts global_batch={global_batch.text}, from which "
            f"gradient_accumulation={accumulation} follows: leave one of them out."
        )
