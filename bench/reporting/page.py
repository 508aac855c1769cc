"""The page: what the figures do not say (what was run, where, every row, every failure) and its HTML."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from bench.records import Contents
from bench.reporting import labels
from bench.reporting.cells import by, in_order
from bench.reporting.drawing import Section
from bench.reporting.table import NESTED, SETTINGS

STATUS_MEANING = {
    "ok": "ran to its end, or is predicted to",
    "oom": "ran out of memory, or is predicted to: a result, drawn in the figures",
    "error": "failed for another reason",
    "timeout": "took longer than it was allowed to",
    "preempted": "taken off its machine; it can be run again",
    "skipped": "not started",
}
EVIDENCE_MEANING = {
    "measured": "every rank ran, with real communication",
    "rehearsed": "one real rank of the job, communication faked: memory is real, speed leaves communication out",
    "predicted": "nothing ran: traced and simulated",
    "published": "quoted from a paper",
}


def render(name: str, contents: Contents, table: pd.DataFrame, sections: list[Section], images: dict[str, str]) -> str:
    """The complete page as HTML, figures included.

    Parameters
    ----------
    name: str
        Where the rows come from.
    images: dict
        Text of the SVG of every drawing, by its name.
    """
    environment = Environment(
        loader=PackageLoader("bench.reporting", ""),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ordered = in_order(table)
    style, _, _ = environment.loader.get_source(environment, "page.css")  # type: ignore[union-attr]
    return environment.get_template("page.html.j2").render(
        name=name,
        total=labels.counted(len(table), "run"),
        style=style,
        counts=_counts(table["status"], STATUS_MEANING),
        evidence=_counts(table["evidence"], EVIDENCE_MEANING),
        places=[_place(str(place), rows) for (place,), rows in by(ordered, "place")],
        shared=_shared(table),
        period=_period(table),
        sections=sections,
        images={key: base64.b64encode(text.encode()).decode() for key, text in images.items()},
        out_of_memory=[_oom(row) for row in _records(ordered[ordered["status"] == "oom"])],
        failures=[_failure(row) for row in _records(ordered[~ordered["status"].isin(["ok", "oom"])])],
        unreadable=contents.unreadable,
        cpu_note=labels.CPU_NOTE,
    )


def _counts(column: pd.Series, meanings: dict[str, str]) -> list[tuple[str, int, str]]:
    found = column.value_counts()
    return [(name, int(found[name]), meaning) for name, meaning in meanings.items() if name in found]


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, with None for what is missing."""
    plain = frame.drop(columns=["variant_key", *NESTED]).astype(object)
    rows = plain.to_dict("records")
    return [{str(key): None if pd.isna(value) else value for key, value in row.items()} for row in rows]


def _distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if not pd.isna(value))) or labels.MISSING


def _place(place: str, rows: pd.DataFrame) -> dict[str, Any]:
    commits = [
        f"{str(row['git_sha'])[:10]}{' with uncommitted changes' if row['git_clean'] is False else ''}"
        for row in _records(rows)
        if row["git_sha"]
    ]
    hosts = [host.strip() for text in rows["hosts"].dropna() for host in str(text).split(",")]
    return {
        "title": place,
        "cpu": (rows["device"] == "cpu").any(),
        "noun": labels.rank_noun(rows["device"].iloc[0]),
        "nouns": labels.rank_nouns(rows["device"].iloc[0]),
        "facts": [
            ("Device", _distinct(rows["gpu_name"])),
            ("Hosts", _distinct(hosts)),
            ("torch", _distinct(rows["torch_version"])),
            ("Commit", _distinct(commits)),
            ("Sweeps", _distinct(rows["sweep"])),
            ("Runs", str(len(rows))),
        ],
        "runs": [_run(row) for row in _records(rows)],
    }


def _shared(table: pd.DataFrame) -> list[str]:
    """Settings that all runs have in common; those that differ are in the figures' headings."""
    phrases = []
    for column, phrase in SETTINGS.items():
        values = table[column].dropna().unique()
        if len(values) == 1 and table[column].notna().all():
            phrases.append(phrase(values[0]))
    return phrases


def _period(table: pd.DataFrame) -> str:
    times = sorted(str(time)[:16].replace("T", " ") for time in table["started_at"].dropna())
    if not times:
        return labels.MISSING
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def _run(row: dict[str, Any]) -> dict[str, Any]:
    asked = str(row["strategy"] or labels.MISSING)
    if row["sharding_factor"] is not None and asked in ("fsdp", "fsdp1"):
        asked += f", F={row['sharding_factor']}"
    p95 = f" ({labels.seconds(row['step_time_p95_s'])})" if row["step_time_p95_s"] is not None else ""
    share = row["mfu"]
    return {
        "status": "degraded" if row["degraded"] and row["status"] == "ok" else row["status"],
        "fit": row["fit"] or "",
        "evidence": row["evidence"],
        "model": row["model"],
        "parameters": labels.count(row["parameters"]),
        "variant": row["variant"],
        "asked": asked,
        "precision": row["precision"],
        "world_size": labels.MISSING if row["world_size"] is None else row["world_size"],
        "workload": row["workload"] or labels.MISSING,
        "settings": " · ".join(text for text in (row["limit"], row["settings"]) if text) or labels.MISSING,
        "tflops": labels.number(row["tflops_per_gpu"]),
        "mfu": labels.MISSING if share is None else f"{labels.number(100 * share)} %",
        "tokens": labels.number(row["tokens_per_second_per_gpu"]),
        "step": labels.seconds(row["step_time_median_s"]) + p95,
        "allocated": labels.memory(row["peak_allocated_bytes"]),
        "reserved": labels.memory(row["peak_reserved_bytes"]),
        "used": labels.memory(row["peak_device_used_bytes"]),
        "repeat": labels.MISSING if row["repeat"] is None else row["repeat"],
        "run_id": row["run_id"],
    }


def _oom(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": _what(row),
        "phase": row["oom_phase"] or labels.MISSING,
        "asked_for": labels.memory(row["oom_bytes"]),
        "limit": row["limit"].removeprefix("limit ") or "none set",
        "rank": labels.MISSING if row["oom_rank"] is None else row["oom_rank"],
        "run_id": row["run_id"],
    }


def _failure(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": row["status"],
        "what": _what(row),
        "cause": row["error"] or "no cause recorded",
        "run_id": row["run_id"],
    }


def _what(row: dict[str, Any]) -> str:
    return f"{row['variant']} · {row['precision']} · {row['heading']}"
