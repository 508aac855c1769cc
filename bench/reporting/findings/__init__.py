"""Findings of a report: sentences with numbers, and the runs that each comes from."""

from __future__ import annotations

import pandas as pd

from bench.reporting.findings.agreement import find_disagreements
from bench.reporting.findings.finding import FindingTopic, build_topic, list_configurations
from bench.reporting.findings.news import ReportedRuns, find_news
from bench.reporting.findings.out_of_memory import find_out_of_memory
from bench.reporting.findings.sharding import find_communication_costs, find_sharding_trades
from bench.reporting.findings.strategies import find_fastest, find_leanest


def find_topics(
    table: pd.DataFrame, all_trials: pd.DataFrame, last_runs: ReportedRuns | None = None
) -> list[FindingTopic]:
    """What a report begins with; questions that the rows do not answer are left out.

    Parameters
    ----------
    table, all_trials: DataFrame
        Rows without, and with, what a search for the largest batch tried on its way, as `prepare_table` makes them.
    last_runs: mapping, optional
        What the last report of the store showed; None for the first.
    """
    configurations = list_configurations(table)
    topics = [
        build_topic("Fastest", find_fastest(configurations)),
        build_topic("Leanest", find_leanest(configurations)),
        build_topic("Out of memory, and what fits instead", find_out_of_memory(list_configurations(all_trials))),
        build_topic("What the sharding factor gives and costs", find_sharding_trades(table)),
        build_topic("Where communication hurts", find_communication_costs(table, configurations)),
        build_topic("Where estimates and reality differ", find_disagreements(table, all_trials)),
        build_topic("New since the last report", find_news(all_trials, last_runs)),
    ]
    return [topic for topic in topics if topic is not None]


__all__ = ["find_topics"]
