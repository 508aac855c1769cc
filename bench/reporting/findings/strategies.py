"""Which strategy is fastest and which is leanest, where nothing but the strategy differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.core.presentation import format_memory, format_number, format_plural, get_rank_noun, split_finetune
from bench.reporting.findings.finding import (
    GROUP_COLUMNS,
    Configuration,
    Finding,
    describe_source,
    group_configurations,
    is_known,
    join_words,
    list_links,
)
from bench.reporting.tables.cells import compute_median

EQUAL_RATIO = 1.005
"""Ratio of two peaks up to which they count as equal."""


def find_fastest(configurations: Sequence[Configuration]) -> list[Finding]:
    """A sentence per place and kind of evidence; rehearsals, whose speed leaves communication out, have none."""
    timed = [one for one in configurations if is_known(one.speed) and one.row["evidence"] != "rehearsed"]
    return _find_best(timed, lambda configuration: -configuration.speed, _describe_fastest)


def find_leanest(configurations: Sequence[Configuration]) -> list[Finding]:
    """A sentence per place and kind of evidence."""
    known = [one for one in configurations if is_known(one.peak_bytes)]
    return _find_best(known, lambda configuration: configuration.peak_bytes, _describe_leanest)


def _find_best(
    configurations: Sequence[Configuration],
    get_cost: Callable[[Configuration], float],
    describe: Callable[[list[Configuration]], str],
) -> list[Finding]:
    """Where several strategies were tried with everything else equal: who wins how often, and the widest comparison."""
    findings = []
    for (place, evidence), of_source in group_configurations(configurations, ["place", "evidence"]).items():
        comparisons = [
            sorted(group, key=get_cost)
            for group in _group_by_trained_part(of_source)
            if len({one.variant for one in group}) > 1
        ]
        if not comparisons:
            continue
        wins = Counter(group[0].variant for group in comparisons)
        winner, num_wins = wins.most_common(1)[0]
        leads = [get_cost(group[1]) / get_cost(group[0]) for group in comparisons if group[0].variant == winner]
        shown_group = max(comparisons, key=lambda group: (group[0].variant == winner, _measure_breadth(group)))
        text = f"{winner} ({describe_source(str(place), str(evidence))})"
        if len(comparisons) > 1:
            lead = max(compute_median(leads), 1 / compute_median(leads))
            often = "" if 2 * num_wins > len(comparisons) else " most often,"
            text += (
                f"{often} in {num_wins} of {format_plural(len(comparisons), 'comparison')} where only the strategy "
                f"differs, in the middle by a factor of {format_number(lead)} to the next. The widest"
            )
        text += f": {shown_group[0].row['heading']}, {shown_group[0].row['precision']}: {describe(shown_group)}."
        findings.append((len(comparisons), Finding(text, list_links(shown_group))))
    return [finding for _, finding in sorted(findings, key=lambda pair: -pair[0])]


def _group_by_trained_part(configurations: Sequence[Configuration]) -> list[list[Configuration]]:
    """Configurations that differ in the strategy alone: adapters are not held against training the whole model."""
    groups: dict[tuple[Any, ...], list[Configuration]] = {}
    for key, group in group_configurations(configurations, GROUP_COLUMNS).items():
        for configuration in group:
            _, finetune = split_finetune(configuration.row["variant_key"].kind.partition("/")[2])
            groups.setdefault((key, finetune), []).append(configuration)
    return list(groups.values())


def _measure_breadth(group: list[Configuration]) -> tuple[int, float, int]:
    """How much a comparison says: its strategies, then the size of the model, then the number of ranks."""
    row = group[0].row
    return len(group), float(row["parameters"] or 0), int(row["world_size"] or 0)


def _describe_fastest(group: list[Configuration]) -> str:
    first, second, last = group[0], group[1], group[-1]
    noun = get_rank_noun(first.row["device"])
    text = (
        f"{format_number(first.speed)} TFLOP/s per {noun}, {format_number(first.speed / second.speed)} times "
        f"{second.variant}"
    )
    if last is not second:
        text += f" and {format_number(first.speed / last.speed)} times {last.variant}, the slowest of {len(group)}"
    return text + _qualify_lead(first, second)


def _qualify_lead(first: Configuration, second: Configuration) -> str:
    """What a lead is to be held against: overlapping repeats, or the interval of a prediction."""
    if first.tflops[0] <= second.tflops[-1] and max(len(first.tflops), len(second.tflops)) > 1:
        return " (their repeats overlap: not told apart)"
    step_s, low_s, high_s = (first.row[f"step_time_{name}_s"] for name in ("median", "ci_low", "ci_high"))
    if first.row["evidence"] == "predicted" and None not in (step_s, low_s, high_s):
        slowest_speed = first.speed * step_s / high_s
        if slowest_speed < second.speed:
            return f" (less than the prediction's interval, {format_number(100 * (high_s / step_s - 1), 2)} %)"
    return ""


def _describe_leanest(group: list[Configuration]) -> str:
    first, last = group[0], group[-1]
    equal = [one.variant for one in group[1:] if one.peak_bytes <= EQUAL_RATIO * first.peak_bytes]
    text = f"{format_memory(first.peak_bytes)} allocated at the peak"
    if equal:
        text += f", as {join_words(equal)}"
    if last.peak_bytes > EQUAL_RATIO * first.peak_bytes:
        saved = 100 * (1 - first.peak_bytes / last.peak_bytes)
        text += (
            f", {format_number(saved, 2)} % less than {last.variant} ({format_memory(last.peak_bytes)}), the most of "
            f"{len(group)}"
        )
    return text
