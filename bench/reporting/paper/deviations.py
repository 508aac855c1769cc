"""How far points of a store are from the paper's, and the ratios that some of its figures are about."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from bench.reporting.paper.comparisons import PaperComparison


def compute_ratios(comparison: PaperComparison, points: pd.DataFrame) -> dict[tuple[str, str, str, int], float]:
    """The comparison's ratio by panel, evidence, column and world size (0 if not stated); empty if it has none."""
    if comparison.ratio_series is None:
        return {}
    values: dict[str, dict[tuple[str, str, str, int], float]] = {name: {} for name in comparison.ratio_series}
    for _, row in points[points["series"].isin(comparison.ratio_series) & points["value"].notna()].iterrows():
        world_size = 0 if pd.isna(row["world_size"]) else int(row["world_size"])
        values[row["series"]][row["panel"], row["evidence"], row["column"], world_size] = float(row["value"])
    numerators, denominators = (values[name] for name in comparison.ratio_series)
    return {key: value / denominators[key] for key, value in numerators.items() if key in denominators}


def list_errors(store_points: pd.DataFrame, published: pd.DataFrame) -> list[float]:
    """Of every point its relative difference from the published one of the same panel, series, quantity and, where that
    is stated, number of GPUs; NaN where there is none, or one of both ran out of memory."""
    errors = []
    for point in store_points.to_dict("records"):
        is_same = published[["panel", "series", "quantity"]].eq([point["panel"], point["series"], point["quantity"]])
        has_size = published["world_size"].isna() | (published["world_size"] == point["world_size"])
        values = published.loc[is_same.all(axis=1) & has_size, "value"].dropna()
        errors.append(float(point["value"]) / float(values.iloc[0]) - 1 if len(values) else float("nan"))
    return errors


def compute_deviations(points: pd.DataFrame, evidence: str = "predicted") -> Sequence[float]:
    """Relative differences of what was predicted (or measured) from what was published, point by point."""
    completed_points = points[points["value"].notna() & points["world_size"].notna()]
    merge_columns = ["panel", "series", "world_size", "quantity"]
    store_points = completed_points[completed_points["evidence"] == evidence].merge(
        completed_points[completed_points["evidence"] == "published"], on=merge_columns, suffixes=("", "_published")
    )
    return list(store_points["value"] / store_points["value_published"] - 1)
