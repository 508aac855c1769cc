"""What sharding over more ranks costs and gives, and where communication takes most of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from bench.core.presentation import CPU_NOTE, format_memory, format_number, format_plural, get_rank_noun
from bench.reporting.figures import scaling, sharding_factor
from bench.reporting.findings.finding import (
    Configuration,
    Finding,
    describe_source,
    group_configurations,
    is_known,
    list_links,
)
from bench.reporting.tables.cells import compute_median, iterate_groups

HIGH_EXPOSED_SHARE = 0.1
"""Share of a step in exposed communication from which on a configuration is counted as slowed by it."""


def find_sharding_trades(table: pd.DataFrame) -> list[Finding]:
    """A sentence per place and kind of evidence: the smallest factor against the largest of the longest series, and
    what the others come to."""
    if not sharding_factor.FIGURE.needs.are_met_by(table):
        return []
    points = sharding_factor.select(table)
    findings = []
    for (place, evidence), of_source in iterate_groups(points, "place", "evidence"):
        series_columns = [*sharding_factor.FACET_COLUMNS, "strategy", "series"]
        series = [
            group.sort_values("sharding_factor")
            for _, group in iterate_groups(of_source, *series_columns)
            if group["sharding_factor"].nunique() >= sharding_factor.MIN_FACTORS
        ]
        if not series:
            continue
        longest = max(
            series,
            key=lambda group: (is_known(_compute_changes(group)["memory"]), len(group), group["parameters"].max()),
        )
        text = _describe_trade(longest, describe_source(str(place), str(evidence)))
        if len(series) > 1:
            changes = [_compute_changes(group) for group in series]
            memory, speed = (
                [change[name] for change in changes if is_known(change[name])] for name in ("memory", "tflops")
            )
            parts = [f"memory {_format_change(compute_median(memory))}"] if memory else []
            parts += [f"speed {_format_change(compute_median(speed))}"] if speed else []
            text += f" Over all {len(series)} such series, in the middle: {', '.join(parts)}."
        links = tuple(link for links in longest["links"] for link in links)
        findings.append((len(series), Finding(text, links)))
    return [finding for _, finding in sorted(findings, key=lambda pair: -pair[0])]


def _compute_changes(series: pd.DataFrame) -> dict[str, float]:
    """The largest factor against the smallest, as shares; NaN where one of them has no value."""
    first, last = series.iloc[0], series.iloc[-1]
    return {name: float(last[name]) / float(first[name]) - 1 for name in ("memory", "tflops")}


def _describe_trade(series: pd.DataFrame, source: str) -> str:
    first, last = series.iloc[0], series.iloc[-1]
    changes, noun = _compute_changes(series), get_rank_noun(first["device"])
    memory = f"{_format_memory(first)} to {_format_memory(last)} per {noun}"
    memory += f" ({_format_change(changes['memory'])})" if is_known(changes["memory"]) else ""
    parts = [f"memory goes from {memory}"]
    if is_known(changes["tflops"]):
        speeds = f"{format_number(first['tflops'])} to {format_number(last['tflops'])} TFLOP/s"
        parts.append(f"speed from {speeds} ({_format_change(changes['tflops'])})")
    if is_known(first["exposed"]) and is_known(last["exposed"]):
        shares = [format_number(100 * point["exposed"], 2) for point in (first, last)]
        parts.append(f"exposed communication from {shares[0]} to {shares[1]} % of the step")
    details = " · ".join(part for part in (first["workload"], first["limit"], first["settings"]) if part)
    return (
        f"{first['series']} from F = {first['sharding_factor']} to F = {last['sharding_factor']} ({source}; "
        f"{sharding_factor.describe_subject(series)}, {details or 'batch not stated'}): {', '.join(parts)}."
    )


def _format_memory(point: Any) -> str:
    if not point["out_of_memory"]:
        return format_memory(point["memory"])
    return f"{format_memory(point['memory'])} (out of memory)" if is_known(point["memory"]) else "out of memory"


def _format_change(share: float) -> str:
    sign = "+" if share > 0 else "−"
    return f"{sign}{format_number(abs(100 * share), 2)} %"


def find_communication_costs(table: pd.DataFrame, configurations: Sequence[Configuration]) -> list[Finding]:
    """A sentence per place and kind of evidence: the largest share of a step in exposed communication, or where no row
    says it the largest loss of speed from fewer to more ranks with an equal batch on each."""
    findings = []
    with_share = [one for one in configurations if is_known(one.exposed_share)]
    sources = group_configurations(with_share, ["place", "evidence"])
    for (place, evidence), of_source in sources.items():
        worst = max(of_source, key=lambda one: one.exposed_share)
        if worst.exposed_share <= 0:
            continue
        num_high = sum(one.exposed_share > HIGH_EXPOSED_SHARE for one in of_source)
        text = (
            f"{format_number(100 * worst.exposed_share, 2)} % of the step of {worst.variant}, {worst.row['heading']}, "
            f"{worst.row['precision']} ({describe_source(str(place), str(evidence))}): the most of "
            f"{format_plural(len(of_source), 'configuration')}, of which {num_high} communicate for more than "
            f"{100 * HIGH_EXPOSED_SHARE:.0f} % of the step without computing."
        )
        findings.append(Finding(text, worst.run_links))
    return findings + _find_scaling_losses(table, configurations, set(sources))


def _find_scaling_losses(
    table: pd.DataFrame, configurations: Sequence[Configuration], known_sources: set[tuple[Any, ...]]
) -> list[Finding]:
    if not scaling.FIGURE.needs.are_met_by(table):
        return []
    findings = []
    for (place, evidence), of_source in iterate_groups(scaling.select(table), "place", "evidence"):
        if (place, evidence) in known_sources or evidence == "rehearsed":
            continue
        losses = []
        for (series, *_), points in iterate_groups(of_source, "series", *scaling.FACET_COLUMNS):
            timed = points[points["median"].notna() & ~points["degraded"].astype(bool)].sort_values("world_size")
            if timed["world_size"].nunique() > 1:
                first, last = timed.iloc[0], timed.iloc[-1]
                losses.append((1 - last["median"] / first["median"], str(series), first, last))
        if not losses or max(losses, key=lambda loss: loss[0])[0] <= 0:
            continue
        share, series, first, last = max(losses, key=lambda loss: loss[0])
        noun = get_rank_noun(last["device"])
        details = " · ".join(part for part in (last["workload"], last["limit"], last["settings"]) if part)
        text = (
            f"{series} of {last['model']}, {last['precision']}, {details} ({describe_source(str(place), evidence)}) "
            f"loses {format_number(100 * share, 2)} % of its speed from {first['world_size']} to "
            f"{last['world_size']} ranks ({format_number(first['median'])} to {format_number(last['median'])} TFLOP/s "
            f"per {noun}), the most of {len(losses)} series."
        )
        if last["device"] == "cpu":
            text += f" {CPU_NOTE}; processes share cores, too."
        shown = [one for one in configurations if any(_is_cell(one, point) for point in (first, last))]
        findings.append(Finding(text, list_links(shown)))
    return findings


def _is_cell(configuration: Configuration, point: pd.Series) -> bool:
    columns = ("place", "evidence", "model", "workload", "limit", "settings", "precision", "world_size", "variant")
    return all(configuration.row[name] == point[name] for name in columns)
