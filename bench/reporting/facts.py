"""Small tables that explain a figure: what the paper's text says of it, what its TFLOPS count, what memory consists of.

Each is a table of words and numbers for people, one row per fact; nothing in them is typed, everything follows from
rows (published ones included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bench.records import Record
from bench.records.published import load_published
from bench.reporting.labels import FAMILIES, GIB, MISSING, Variant, count, number, variant
from bench.reporting.paper import BF16, COMPARISONS, SHARDING, SIZES, compare
from bench.reporting.style import evidence_in_order

# ---- the paper's text beside its own figures


@dataclass(frozen=True)
class Statement:
    """One sentence of the paper about one of its figures."""

    figure: str
    what: str
    claim: Mapping[str, object]
    """Columns of the published row that quotes it."""
    said: str
    """The sentence, with the quoted ``{value}``."""
    shown: Callable[[pd.DataFrame], str]
    """The same quantity of one kind's points of the figure; empty if they do not have it."""


def _gain(points: pd.DataFrame) -> str:
    """Speed with prefetching over speed without, by number of GPUs."""
    table = points.pivot_table(index="world_size", columns="series", values="value")
    if table.shape[1] < 2:
        return ""
    gains = table["backward prefetch on"] / table["backward prefetch off"] - 1
    return ", ".join(f"{100 * gain:+.1f} % ({size} GPUs)" for size, gain in gains.dropna().items())


def _limited(points: pd.DataFrame) -> str:
    """Seconds without the rate limiter over seconds with it, by number of machines."""
    table = points.pivot_table(index=["column", "panel"], columns="series", values="value")
    if table.shape[1] < 2:
        return ""
    ratios = (table["rate limiter off"] / table["rate limiter on"]).dropna()
    rows = ratios.rename("ratio").reset_index().to_dict("records")
    return ", ".join(
        f"{number(row['ratio'])} times ({row['panel']}{', ' + row['column'] if row['column'] else ''})" for row in rows
    )


def _of_batch(batch: int) -> Callable[[pd.DataFrame], str]:
    """The range of speeds of one batch size, and the speed on the most GPUs."""

    def shown(points: pd.DataFrame) -> str:
        line = points[(points["series"] == f"batch {batch}") & points["value"].notna()].sort_values("world_size")
        if line.empty:
            return ""
        first, last = line.iloc[0], line.iloc[-1]
        inner = line["value"].max()
        return (
            f"{number(first['value'], 4)} on {int(first['world_size'])} GPUs, at most {number(inner, 4)}, "
            f"{number(last['value'], 4)} on {int(last['world_size'])}"
        )

    return shown


def _decline(points: pd.DataFrame) -> str:
    """Speed lost between the fewest and the most GPUs, by batch size."""
    parts = []
    for series, line in points[points["value"].notna()].groupby("series"):
        ends = line.sort_values("world_size")["value"].iloc[[0, -1]].tolist()
        parts.append((int(str(series).split()[-1]), f"{100 * (1 - ends[1] / ends[0]):.1f} % ({series})"))
    return ", ".join(words for _, words in sorted(parts))


def _largest_ddp(points: pd.DataFrame) -> str:
    """Which models ran under DDP, and which ran out of memory."""
    line = points[points["series"] == SHARDING["ddp"]]
    if line.empty:
        return ""
    ran = [name for name in SIZES.values() if (line[line["value"].notna()]["panel"] == name).any()]
    lost = [name for name in SIZES.values() if (line[line["out_of_memory"]]["panel"] == name).any()]
    return f"runs: {', '.join(ran) or MISSING}; out of memory: {', '.join(lost) or MISSING}"


_GPT = {"model": "gpt_175b", "source_metric": "tflops_per_gpu"}
STATEMENTS = (
    Statement(
        "Figure 6(a)",
        "Models that fit with DDP",
        {"source_metric": "outcome", "model": "t5_11b"},
        "runs out of memory when it wraps a model larger than 2.28B",
        _largest_ddp,
    ),
    Statement(
        "Figure 6(b)",
        "What backward prefetch gains",
        {"source_metric": "backward_prefetch_speedup_claimed"},
        "about {value} % faster",
        _gain,
    ),
    Statement(
        "Figure 6(c)",
        "What the rate limiter gains",
        {"source_metric": "speedup_claimed_max", "model": "t5_11b"},
        "up to {value} times faster",
        _limited,
    ),
    Statement(
        "Figure 7(b)",
        "GPT-175B, batch 1: TFLOPS per GPU",
        {**_GPT, "batch_size_per_gpu": 1},
        "more than {value}",
        _of_batch(1),
    ),
    Statement(
        "Figure 7(b)",
        "GPT-175B, batch 2: TFLOPS per GPU",
        {**_GPT, "batch_size_per_gpu": 2},
        "more than {value}",
        _of_batch(2),
    ),
    Statement(
        "Figure 7(c)",
        "T5-11B: speed per GPU lost from 8 to 512 GPUs",
        {"source_metric": "tflops_per_gpu_regression", "model": "t5_11b"},
        "{value} %",
        _decline,
    ),
)


def text_and_figures(table: pd.DataFrame, figures: Sequence[str]) -> pd.DataFrame:
    """What the paper's text says, what its own figure shows, and what the rows of `table` say.

    Returns
    -------
    DataFrame
        ``What``, ``Text of the paper``, ``Its figure``, and a column per kind of evidence in `table`. One row per
        `Statement` and per setting of our choice that the figure is drawn for.
    """
    published = load_published()
    rows = []
    for statement in STATEMENTS:
        if statement.figure not in figures:
            continue
        comparison = next(one for one in COMPARISONS if one.figure == statement.figure)
        claim = _claim(published, statement)
        for setting, points in compare(comparison, table):
            row = {"What": statement.what, "Text of the paper": claim}
            row["What"] += f" ({setting})" if setting and not comparison.setting else ""
            for kind in reversed(evidence_in_order(points["evidence"])):
                name = "Its figure" if kind == "published" else f"{kind.capitalize()} here"
                row[name] = statement.shown(points[points["evidence"] == kind])
            rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _claim(published: pd.DataFrame, statement: Statement) -> str:
    """What the text says, with its section."""
    text = published[(published["source_key"] == "fsdp_paper") & (published["source_provenance"] == "text")]
    for column, value in statement.claim.items():
        text = text[(text[column] == value).fillna(False)]
    (row,) = text.to_dict("records")
    section = str(row["source_figure"]).partition(" / ")[0]
    return f"{statement.said.format(value=row['source_value'])} ({section.lower()})"


# ---- what TFLOPS count


def flops_counted(table: pd.DataFrame, figures: Sequence[str] = ("Figure 7(b)", "Figure 7(c)")) -> pd.DataFrame:
    """The fastest published point of each figure as hardware and as model TFLOP/s, with HFU and MFU.

    How many FLOPs are computed twice under checkpointing, and the GPU's peak, are taken from rows of the same model
    in `table`; the paper does not give its formula, and is taken to count what is computed again.
    """
    rows = []
    for comparison in COMPARISONS:
        if comparison.figure not in figures:
            continue
        for _, points in compare(comparison, table):
            fastest = points[points["evidence"] == "published"]["value"].max()
            same = table[table["model"].isin(comparison.where["model"]) & table["mfu"].notna()]
            same = same[(same["activation_checkpointing"] == "full") & (same["precision"] == BF16)]
            again = float((same["hardware_tflops_per_gpu"] / same["tflops_per_gpu"]).median())
            peak = float((same["tflops_per_gpu"] / same["mfu"]).median())
            rows.append(
                {
                    "Figure": comparison.figure,
                    "Model": comparison.where["model"][0],
                    "Fastest point, TFLOPS": number(fastest, 4),
                    "Peak, TFLOPS": number(peak),
                    "Executed / model FLOPs": number(again),
                    "HFU": f"{100 * fastest / peak:.1f} %",
                    "Model TFLOP/s": number(fastest / again, 4),
                    "MFU": f"{100 * fastest / again / peak:.1f} %",
                    "MFU if nothing was counted twice": f"{100 * fastest / peak:.1f} %",
                }
            )
    return pd.DataFrame(rows)


# ---- memory


def memory_parts(records: Sequence[Record]) -> pd.DataFrame:
    """What the predicted peak of memory consists of, in GiB: a row per predicted record, from small models to large.

    ``Gathered`` are parameters of blocks that a rank holds for the moment, and gradients being reduced; ``Reserved`` is
    what the caching allocator takes for all of it, with what it loses between blocks; ``Device`` is what it can have.
    Numbers of GPUs, batch and precision are shown where they differ.
    """
    known = [record for record in records if record.get("prediction")]
    rows = [{**_named(record), **_memory(record["prediction"]["memory"])} for record in sorted(known, key=_order)]
    frame = pd.DataFrame(rows)
    return frame.drop(
        columns=[name for name in ("GPUs", "Batch", "Precision") if name in frame and len(set(frame[name])) == 1]
    )


def _named(record: Record) -> dict[str, str]:
    return {
        "Model": f"{record['model']}, {count(record['parameters'])}",
        "Strategy": _variant(record).label,
        "GPUs": str(record["world_size"]),
        "Batch": str(record["batch_size_per_gpu"]),
        "Precision": record["precision"],
    }


def _variant(record: Record) -> Variant:
    return variant(*(record[name] for name in ("strategy", "effective_strategy", "sharding_factor", "world_size")))


def _order(record: Record) -> tuple[object, ...]:
    return record["parameters"], _variant(record), record["world_size"], record["batch_size_per_gpu"]


def _memory(memory: Mapping[str, Any]) -> dict[str, str]:
    parts = dict(memory["parts_bytes"])
    shown = {name.capitalize(): parts.pop(name, 0) for name in ("parameters", "gradients", "optimizer", "activations")}
    shown["Gathered"] = parts.pop("gathered", 0) + parts.pop("reduced", 0)
    shown["Other"] = sum(parts.values())
    shown |= {name.capitalize(): memory[f"{name}_bytes"]["value"] for name in ("allocated", "reserved")}
    sizes = {name: number(size / GIB) for name, size in shown.items()}
    capacity = memory["capacity_bytes"]
    return {**sizes, "Device": number(capacity / GIB) if capacity else MISSING, "": memory["verdict"] or ""}


# ---- time and communication


def steps(table: pd.DataFrame, *knobs: str) -> pd.DataFrame:
    """Step time and communication not hidden by computation, a row per run; `knobs` are further columns to show."""
    ran = table[(table["status"] == "ok") & table["step_time_median_s"].notna()]
    ran = ran.sort_values(["model", "batch_size_per_gpu", "world_size", *knobs], kind="stable")
    rows = [
        {
            "Model": row["model"],
            "Batch": str(row["batch_size_per_gpu"]),
            "GPUs": str(row["world_size"]),
            **{knob.replace("_", " ").capitalize(): str(row[knob]) for knob in knobs},
            "Evidence": row["evidence"],
            "Step, s": number(row["step_time_median_s"]),
            "Not hidden": MISSING if pd.isna(row["exposed_communication"])
            else f"{number(100 * row['exposed_communication'], 2)} %",
            "Hardware TFLOP/s": number(row["hardware_tflops_per_gpu"]),
            "Reserved, GiB": number(None if pd.isna(row["peak_reserved_bytes"]) else row["peak_reserved_bytes"] / GIB),
            "Waits for": "" if pd.isna(row["limited_by"]) else row["limited_by"],
            "": "degraded" if row["degraded"] is True else "",
        }
        for row in ran.to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows).drop_duplicates()


def time_parts(records: Sequence[Record]) -> pd.DataFrame:
    """What the predicted step consists of, in ms: a row per predicted record that has a time, by sharding factor.

    ``Compute``, ``Optimizer`` and ``Communication not hidden`` add up to the step but for what the CPU is late with;
    ``Communication`` is all of it, hidden or not.
    """
    names = {
        "compute_s": "Compute",
        "optimizer_s": "Optimizer",
        "exposed_communication_s": "Communication not hidden",
        "communication_s": "Communication",
    }
    rows = []
    for record in sorted(records, key=lambda row: (row["model"], row["strategy"], row["sharding_factor"])):
        time = (record.get("prediction") or {}).get("time")
        if time is None or record["status"] != "ok":
            continue
        rows.append(
            {
                "Model": record["model"],
                "Strategy": FAMILIES[record["strategy"]],
                "F": str(record["sharding_factor"]),
                "GPUs": str(record["world_size"]),
                "Step": number(1e3 * time["step_s"]["value"]),
                **{name: number(1e3 * time[part]) for part, name in names.items()},
                "TFLOP/s": number(record["tflops_per_gpu"]),
            }
        )
    return pd.DataFrame(rows)


def traffic(parameters: int, value_bytes: int, world_size: int, per_node: int) -> pd.DataFrame:
    """What each rank sends per step at every sharding factor F, in GB (10^9 bytes).

    Of a copy of M bytes, a group of F ranks gathers the parameters twice (forward and backward) and reduce-scatters the
    gradients: 3 M (F - 1) / F per rank. The R = W / F groups all-reduce their shards' gradients: 2 (M / F) (R - 1) / R.
    At F = 1 and F = W these are what the FSDP paper (arXiv:2304.11277, section 3.2) gives for full replication,
    2 M (W - 1) / W, and for full sharding; for a hybrid inside machines of G it writes 2 M (W - 1) / (G W) across
    machines, a little more than the ring all-reduce counted here.

    Parameters
    ----------
    parameters: int
        Of the whole model.
    value_bytes: int
        Bytes of one gathered parameter or reduced gradient: 2 for BF16.
    world_size: int
        W, a multiple of `per_node` or less than it.
    per_node: int
        Ranks of one machine.
    """
    whole = parameters * value_bytes / 1e9
    rows = []
    factor = 1
    while factor <= world_size:
        replicas = world_size // factor
        inside = 3 * whole * (factor - 1) / factor
        between = 2 * whole / factor * (replicas - 1) / replicas
        crosses = [inside if factor > per_node else 0.0, between if world_size > per_node else 0.0]
        rows.append(
            {
                "F": factor,
                "Keeps of the states": f"1/{factor}" if factor > 1 else "all",
                "Inside a group": number(inside),
                "Between groups": number(between),
                "Sent in all": number(inside + between),
                "Of it in rings that leave the machine": number(float(np.sum(crosses))),
            }
        )
        factor *= 2
    return pd.DataFrame(rows)


# ---- what was printed


def published(figure: str) -> pd.DataFrame:
    """Every number that one of the FSDP paper's figures or its text gives, as printed, with how it was obtained.

    ``±`` is the uncertainty of a point that was read off a plot; ``How`` says which are (`digitised`).
    """
    printed = load_published()
    paper = printed[(printed["source_key"] == "fsdp_paper") & printed["source_figure"].str.endswith(figure)]
    rows = [
        {
            "Model": row["source_model"],
            "Sharding": row["source_sharding"],
            "GPUs": _or_missing(row["source_gpu_count"]),
            "Machines": _or_missing(row["nodes"]),
            "Batch": _or_missing(row["batch_size_per_gpu"]),
            "What": row["source_metric"].replace("_", " "),
            "Value": row["source_value"],
            "±": _or_missing(row["source_uncertainty"]),
            "Unit": _or_missing(row["source_unit"]),
            "How": row["source_provenance"],
        }
        for row in paper.to_dict("records")
    ]
    frame = pd.DataFrame(rows)
    empty = [name for name in frame if (frame[name] == MISSING).all()]
    return frame.drop(columns=empty)


def _or_missing(value: object) -> str:
    return MISSING if pd.isna(value) else str(value)  # type: ignore[call-overload]


def shares_of_memory(table: pd.DataFrame, figures: Sequence[str] = ("Figure 8(b)", "Figure 8(c)")) -> pd.DataFrame:
    """How allocated memory depends on the number of GPUs W: a + b / W, fitted to the points of each line.

    What is sharded falls as 1 / W: ``Bytes per parameter`` is b over the model's parameters. ``Stays`` is a.
    """
    rows = []
    for comparison in COMPARISONS:
        if comparison.figure not in figures:
            continue
        parameters = float(table[table["model"].isin(comparison.where["model"])]["parameters"].median())
        for _, points in compare(comparison, table):
            allocated = points[(points["quantity"] == "allocated") & points["value"].notna()]
            for (series, kind), line in allocated.groupby(["series", "evidence"], sort=False):
                if line["world_size"].nunique() < 3:
                    continue
                slope, stays = np.polyfit(1 / line["world_size"].astype(float), line["value"].astype(float), 1)
                rows.append(
                    {
                        "Figure": comparison.figure,
                        "Model": comparison.where["model"][0],
                        "Line": series,
                        "Evidence": kind,
                        "Bytes per parameter, sharded": number(slope * 1e9 / parameters, 2),
                        "Stays, GB": number(stays),
                    }
                )
    return pd.DataFrame(rows)
