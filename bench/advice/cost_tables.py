"""What a training takes, for people: columns of GPU-hours, days, dollars and kWh, and tables that were asked for beside
one another in a line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table

from bench.advice.answer import AdviceSection
from bench.advice.budget import TrainingBudget
from bench.advice.ranking import RankedCandidate
from bench.advice.wording import format_strategy
from bench.core.presentation import MISSING, format_number

CandidateColumn = tuple[str, bool, Callable[[RankedCandidate], str]]
"""Heading, whether it is a number, and the text of a row."""


def list_budget_columns(budget: TrainingBudget) -> list[CandidateColumn]:
    """What the training takes; without tokens what a billion of them takes, where price or energy was asked for."""
    if budget.tokens is not None:
        return [
            ("GPU-hours", True, lambda candidate: format_number(budget.compute_gpu_hours(candidate))),
            ("days", True, lambda candidate: format_number(budget.compute_days(candidate))),
            ("$", True, lambda candidate: format_number(budget.compute_dollars(candidate))),
            ("kWh", True, lambda candidate: format_number(budget.compute_kwh(candidate))),
        ]
    if not budget.cost_terms.is_requested:
        return []
    return [
        ("$/1e9 tokens", True, lambda candidate: format_number(budget.compute_unit_dollars(candidate))),
        ("kWh/1e9 tokens", True, lambda candidate: format_number(budget.compute_unit_kwh(candidate))),
    ]


def build_cost_table(sections: Sequence[AdviceSection], budget: TrainingBudget) -> RenderableType:
    """The best row of every section, side by side, in the order of the sections."""
    table = Table(box=None, pad_edge=False, title="The best of each", title_justify="left")
    budget_columns = list_budget_columns(budget)
    for heading in (
        "GPUs",
        "hardware",
        "model",
        "strategy",
        "$/GPU-hour",
        *(heading for heading, _, _ in budget_columns),
    ):
        is_text = heading in ("hardware", "model", "strategy")
        table.add_column(heading, no_wrap=True, justify="left" if is_text else "right")
    for section in sections:
        candidate = section.ranking.top_candidate
        config, offer = candidate.config, budget.cost_terms.choose_offer(candidate.config)
        assert offer is not None
        cells = [
            format_cell(candidate) if section.ranking.possible else MISSING for _, _, format_cell in budget_columns
        ]
        strategy_text = format_strategy(config) if section.ranking.possible else "nothing fits"
        price_text = format_number(offer.dollars_per_gpu_hour)
        table.add_row(str(config.gpus), config.hardware.name, config.model.name, strategy_text, price_text, *cells)
    return table
