"""The page: what the figures do not say (what was run, where, what failed, every row, every machine) and its HTML."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from bench.records import Contents
from bench.reporting import differences, labels, machines, runs
from bench.reporting.causes import causes
from bench.reporting.cells import by, in_order
from bench.reporting.details import details, packed
from bench.reporting.drawing import Section
from bench.reporting.interactive import Chart, library, packed_library
from bench.reporting.packing import packed_json
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
SCRIPTS = ("page_table.js", "page_run.js", "page_machines.js", "page_charts.js", "page_figures.js")
"""In this order: later ones use what earlier ones define."""


def render(
    name: str,
    contents: Contents,
    table: pd.DataFrame,
    sections: list[Section],
    images: dict[str, str],
    charts: Sequence[Chart] = (),
) -> str:
    """The complete page as HTML, figures included.

    Parameters
    ----------
    name: str
        Where the rows come from.
    images: dict
        Text of the SVG of every drawing, by its name.
    charts: sequence of Chart
        Figures to hover over; with none, the page does not carry the library that draws them.
    """
    environment = Environment(
        loader=PackageLoader("bench.reporting", ""),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def source(file: str) -> str:
        return environment.loader.get_source(environment, file)[0]  # type: ignore[union-attr]

    ordered = in_order(table)
    files = contents.files or [f"{record['run_id']}/{record.get('attempt', 0)}.json" for record in contents.records]
    places = [_place(str(place), rows) for (place,), rows in by(ordered, "place")]
    places.sort(key=lambda place: -place["count"])
    found, others = machines.machines(table, contents.records)
    script = "(() => {\n" + "\n".join(source(file) for file in SCRIPTS) + "})();\n"
    executed = [script, *([library()] if charts else [])]
    return environment.get_template("page.html.j2").render(
        name=name,
        total=labels.counted(len(table), "run"),
        style=source("page.css"),
        script=script,
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in executed),
        lead=_lead(table, places),
        counts=_counts(table["status"], STATUS_MEANING),
        evidence=_counts(table["evidence"], EVIDENCE_MEANING),
        places=places,
        on_cpu=any(place["cpu"] for place in places),
        shared=_shared(table),
        period=_period(table),
        sections=sections,
        images=packed_json(images),
        causes=causes(table),
        **_runs(ordered, contents, files),
        details=packed_json(_details(table, contents, files)),
        charts=list(dict.fromkeys(chart.group for chart in charts)),
        chart_data=packed_json([asdict(chart) for chart in charts]),
        library=packed_library() if charts else "",
        out_of_memory=[_oom(row) for row in _records(ordered[ordered["status"] == "oom"])],
        failures=[_failure(row) for row in _records(ordered[~ordered["status"].isin(["ok", "oom"])])],
        machines=found,
        facts=machines.side_by_side(found),
        other_machines=others,
        pairs=differences.pairs(found),
        change=differences.change,
        labels=labels,
        unreadable=contents.unreadable,
        cpu_note=labels.CPU_NOTE,
    )


def _sha256(text: str) -> str:
    """A script's hash as a content security policy names it: only scripts with these are executed."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _runs(ordered: pd.DataFrame, contents: Contents, files: Sequence[str]) -> dict[str, Any]:
    """The table of all runs: its columns and lines."""
    rows = _records(ordered)
    shown = runs.columns(rows)
    variants = {key: place for place, key in enumerate(sorted(set(ordered["variant_key"])))}
    orders = [variants[key] for key in ordered["variant_key"]]
    lines = [
        runs.run(row, contents.records[position], shown, files[position], order)
        for row, position, order in zip(rows, ordered.index, orders, strict=True)
    ]
    return {"columns": shown, "runs": lines}


def _details(table: pd.DataFrame, contents: Contents, files: Sequence[str]) -> dict[str, Any]:
    headings = table["variant"] + " · " + table["precision"] + " · " + table["heading"]
    return packed(
        {
            str(link): details(record, file, str(heading))
            for link, record, file, heading in zip(table["link"], contents.records, files, headings, strict=True)
        }
    )


def _counts(column: pd.Series, meanings: dict[str, str]) -> list[tuple[str, int, str]]:
    found = column.value_counts()
    return [(name, int(found[name]), meaning) for name, meaning in meanings.items() if name in found]


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return runs.plain(frame, "variant_key", *NESTED)


def _distinct(values: Iterable[Any], most: int = 12) -> str:
    return labels.listing(_known(values), most) or labels.MISSING


def _known(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if not pd.isna(value)))


def _lead(table: pd.DataFrame, places: Sequence[dict[str, Any]]) -> str:
    """What was run and what came of it, in two sentences."""
    kinds = [f"{count} {kind}" for kind, count, _ in _counts(table["evidence"], EVIDENCE_MEANING)]
    foretold = " or are predicted to" if (table["evidence"] == "predicted").any() else ""
    words = {"ok": f"ended well{foretold}", "oom": "ran out of memory", "error": "failed", "timeout": "took too long"}
    words |= {"preempted": "taken off their machine", "skipped": "not started"}
    fates = [f"{count} {words[status]}" for status, count, _ in _counts(table["status"], STATUS_MEANING)]
    models, variants = (_known(in_order(table)[column]) for column in ("model", "variant"))
    what = f"{labels.counted(len(models), 'model')} and {labels.counted(len(variants), 'way')} to spread them"
    where = labels.counted(len(places), "kind") + " of device"
    lead = f"{labels.counted(len(table), 'run')} ({', '.join(kinds)}) of {what}, on {where}: {', '.join(fates)}."
    degraded = int((table["degraded"].fillna(False) & (table["status"] == "ok")).sum())
    verb = "has times that do" if degraded == 1 else "have times that do"
    return lead + (
        f" {degraded} of those that ended well {verb} not represent the speed (degraded)." if degraded else ""
    )


def _place(place: str, rows: pd.DataFrame) -> dict[str, Any]:
    commits = [
        f"{str(row['git_sha'])[:10]}{' with uncommitted changes' if row['git_clean'] is False else ''}"
        for row in _records(rows)
        if row["git_sha"]
    ]
    hosts = [host.strip() for text in rows["hosts"].dropna() for host in str(text).split(",")]
    sizes = sorted({int(size) for size in rows["world_size"].dropna()})
    device = rows["device"].iloc[0]
    nouns = labels.rank_nouns(device)
    facts = [
        ("Runs", _fates(rows)),
        ("Evidence", _distinct(rows["evidence"])),
        ("Models", _distinct(rows["model"])),
        ("Strategies", _distinct(rows["variant"])),
        ("Precisions", _distinct(rows["precision"])),
        (nouns[0].upper() + nouns[1:], _distinct(sizes)),
        ("Device", _distinct(rows["gpu_name"])),
        ("Hosts", _distinct(hosts)),
        ("torch", _distinct(rows["torch_version"])),
        ("Commit", _distinct(commits, 6)),
        ("Sweeps", _distinct(rows["sweep"])),
        ("Started", _period(rows)),
    ]
    return {
        "title": place,
        "count": len(rows),
        "cpu": (rows["device"] == "cpu").any(),
        "facts": [(name, value) for name, value in facts if value != labels.MISSING],
    }


def _fates(rows: pd.DataFrame) -> str:
    fates = [f"{count} {status}" for status, count, _ in _counts(rows["status"], STATUS_MEANING)]
    return f"{len(rows)}: {', '.join(fates)}"


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


def _oom(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": _what(row),
        "phase": row["oom_phase"] or labels.MISSING,
        "asked_for": labels.memory(row["oom_bytes"]),
        "limit": row["limit"].removeprefix("limit ") or "none set",
        "rank": labels.MISSING if row["oom_rank"] is None else row["oom_rank"],
        "run_id": row["run_id"],
        "link": row["link"],
    }


def _failure(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": row["status"],
        "what": _what(row),
        "cause": row["error"] or "no cause recorded",
        "run_id": row["run_id"],
        "link": row["link"],
    }


def _what(row: dict[str, Any]) -> str:
    return f"{row['variant']} · {row['precision']} · {row['heading']}"
