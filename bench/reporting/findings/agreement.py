"""What predictions and rehearsals say that measured or published rows do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from bench.core.presentation import format_number, format_percent, format_plural
from bench.reporting.findings.finding import Finding
from bench.reporting.tables.agreement import MEMORY, build_pairs, summarize_pairs
from bench.reporting.tables.cells import describe_disagreement
from bench.reporting.tables.frontier import FRONTIER_NEEDS, build_frontier_cells

UNITS = {MEMORY: "GB"}
MIN_DEVIATION = 0.05
"""Mean deviation from which on a source is a finding of its own; the others are summed up in one sentence."""


def find_disagreements(table: pd.DataFrame, all_trials: pd.DataFrame) -> list[Finding]:
    """Contradictions about what fits first, then sources with the largest deviations, then how close the rest is.

    Parameters
    ----------
    table, all_trials: DataFrame
        Rows without, and with, what a search for the largest batch tried on its way.
    """
    return _find_contradictions(all_trials) + _find_deviations(table)


def _find_contradictions(table: pd.DataFrame) -> list[Finding]:
    if not FRONTIER_NEEDS.are_met_by(table):
        return []
    cells = build_frontier_cells(table).to_dict("records")
    compared = [cell for cell in cells if len(cell["answers"]) > 1]
    disagreeing = [cell for cell in compared if describe_disagreement(cell["answers"])]
    if not disagreeing:
        return []
    first = disagreeing[0]
    text = (
        f"Kinds of evidence contradict each other on whether {len(disagreeing)} of "
        f"{format_plural(len(compared), 'configuration')} fit. For one, {first['lane']}, {first['heading']}, on "
        f"{first['world_size']} ranks: {describe_disagreement(first['answers'])}."
    )
    return [Finding(text, tuple(link for cell in disagreeing for link in cell["links"]))]


def _find_deviations(table: pd.DataFrame) -> list[Finding]:
    pairs = build_pairs(table)
    representative = pairs[~pairs["degraded"].astype(bool)]
    if representative.empty:
        return []
    summary = summarize_pairs(pairs)
    far = summary[(summary["mean"] >= MIN_DEVIATION) | (summary["worst"].abs() >= 2 * MIN_DEVIATION)]
    findings = []
    for source in far.sort_values("mean", ascending=False).to_dict("records"):
        keys = ("quantity", "source", "against", "evidence")
        is_source = (representative[list(keys)] == [source[key] for key in keys]).all(axis=1)
        of_source = representative[is_source]
        worst = of_source.iloc[int(of_source["deviation"].abs().argmax())]
        unit = UNITS.get(source["quantity"], "TFLOP/s")
        text = (
            f"{source['evidence'].capitalize()} {source['quantity']} is {format_percent(source['mean'])} off what was "
            f"{source['against']} on average ({source['source']}, {format_plural(source['pairs'], 'pair')}), at worst "
            f"{format_percent(source['worst'], signed=True)}: {worst['label']}, {format_number(worst['value'])} "
            f"against {format_number(worst['reference'])} {unit}.{_describe_interval(source)}"
        )
        findings.append(Finding(text, tuple(link for links in of_source["links"] for link in links)))
    close = representative.drop(index=[index for index, pair in representative.iterrows() if _is_among(pair, far)])
    if len(close):
        deviations = close["deviation"].abs()
        text = (
            f"{'The rest agrees better' if findings else 'They agree'}: {format_plural(len(close), 'pair')} of what "
            f"was estimated and what was measured or published {'is' if len(close) == 1 else 'are'} "
            f"{format_percent(float(deviations.mean()))} apart on average, at most "
            f"{format_percent(float(deviations.max()))}."
        )
        findings.append(Finding(text, tuple(link for links in close["links"] for link in links)))
    return findings


def _is_among(pair: pd.Series, summary: pd.DataFrame) -> bool:
    keys = ["quantity", "source", "against", "evidence"]
    return bool((summary[keys] == list(pair[keys])).all(axis=1).any())


def _describe_interval(source: Mapping[Any, Any]) -> str:
    """How many references lie within the intervals that the estimates state."""
    if pd.isna(source["inside"]):
        return ""
    return f" {format_percent(float(source['inside']))} lie within the interval that is stated for 95 %."
