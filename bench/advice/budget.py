"""What a training takes with a candidate: GPU-hours, days, dollars and kWh, for a budget of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.advice.ranking import RankedCandidate
from bench.config.price import NO_COST_TERMS, CostTerms
from bench.config.run_config import RunConfig

UNIT_TOKENS = 1e9
"""Tokens that dollars and kWh are told for where no budget is given."""


@dataclass(frozen=True)
class TrainingBudget:
    """Tokens to train on, and what GPU-hours cost."""

    tokens: float | None = None
    """None where it was not said."""
    cost_terms: CostTerms = NO_COST_TERMS

    def compute_gpu_hours(self, candidate: RankedCandidate) -> float | None:
        """None where no tokens were said, or no speed is known."""
        return candidate.compute_gpu_hours(self.tokens)

    def compute_days(self, candidate: RankedCandidate) -> float | None:
        return candidate.compute_days(self.tokens)

    def compute_dollars(self, candidate: RankedCandidate) -> float | None:
        """Of all tokens, None where they have no price."""
        return self.cost_terms.compute_dollars(candidate.config, self.compute_gpu_hours(candidate))

    def compute_kwh(self, candidate: RankedCandidate) -> float | None:
        """Of all tokens, None where nobody says what power the GPUs take."""
        return self.cost_terms.compute_kwh(candidate.config, self.compute_gpu_hours(candidate))

    def compute_unit_dollars(self, candidate: RankedCandidate) -> float | None:
        """Of `UNIT_TOKENS` tokens."""
        return self.cost_terms.compute_dollars(candidate.config, candidate.compute_gpu_hours(UNIT_TOKENS))

    def compute_unit_kwh(self, candidate: RankedCandidate) -> float | None:
        """Of `UNIT_TOKENS` tokens."""
        return self.cost_terms.compute_kwh(candidate.config, candidate.compute_gpu_hours(UNIT_TOKENS))

    def describe(self, config: RunConfig) -> list[str]:
        """Sentences that say what dollars and kWh stand on; none where none are told."""
        return self.cost_terms.describe(config) if self.tokens is not None or self.cost_terms.is_requested else []

    def build_values(self, candidate: RankedCandidate) -> dict[str, Any]:
        """What it takes, by the keys of an answer for scripts; None for what is unknown."""
        return {
            "gpu_hours": self.compute_gpu_hours(candidate),
            "days": self.compute_days(candidate),
            "dollars": self.compute_dollars(candidate),
            "kwh": self.compute_kwh(candidate),
            "dollars_per_billion_tokens": self.compute_unit_dollars(candidate),
            "kwh_per_billion_tokens": self.compute_unit_kwh(candidate),
        }


COST_KEYS = ("dollars", "kwh", "dollars_per_billion_tokens", "kwh_per_billion_tokens")
"""Of `TrainingBudget.build_values`, those that came after GPU-hours and days."""
