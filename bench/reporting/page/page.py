"""The page: what the figures do not say (what was run, where, what failed, every row, every machine) and its HTML."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from bench.core import presentation
from bench.core.presentation import format_plural
from bench.records import StoreContents
from bench.reporting.drawing.drawing import ReportSection
from bench.reporting.findings.finding import FindingTopic
from bench.reporting.page import run_table
from bench.reporting.page.hosts import build_comparison_rows, find_host_systems, format_change, pair_host_systems
from bench.reporting.page.interactive import InteractiveChart, compress_plotly_js, load_plotly_js
from bench.reporting.page.packing import compress_json, pack_figures
from bench.reporting.page.run_details import build_details, deduplicate_blocks
from bench.reporting.tables.cells import iterate_groups, sort_rows
from bench.reporting.tables.table import NESTED_COLUMNS, SETTING_FORMATTERS

NUMBER_PATTERN = re.compile(r"0x[0-9a-f]+|\d[\d.,]*")
"""What differs between two messages of one cause: addresses, sizes, ranks, ports."""

STATUS_LABELS = {
    "oom": "ran out of memory",
    "error": "failed",
    "timeout": "took longer than allowed",
    "preempted": "taken off its machine",
    "skipped": "not started",
}
PREDICTED_OOM_LABEL = "predicted not to fit"


@dataclass(frozen=True)
class FailureGroup:
    """Runs that did not end well, for one reason."""

    status: str
    outcome: str
    """What became of them, in words."""
    reason: str
    configurations: str
    """Strategies, models and ranks, in words."""
    place: str
    runs: tuple[tuple[str, str], ...]
    """Their ids, and the page's anchors of them."""

    @property
    def count(self) -> int:
        return len(self.runs)


def group_failures(table: pd.DataFrame) -> list[FailureGroup]:
    """The causes, out of memory first, then by the number of runs.

    Runs that ran out of memory are together if they did so in one phase and under one limit; others if their messages
    differ in nothing but numbers.
    """
    failed_rows = sort_rows(table[table["status"] != "ok"])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, row in enumerate(failed_rows.to_dict("records")):
        groups.setdefault(_build_group_key(row), []).append(position)
    failure_groups = [_build_failure_group(failed_rows.iloc[positions]) for positions in groups.values()]
    status_order = list(STATUS_LABELS)
    return sorted(
        failure_groups, key=lambda failure_group: (status_order.index(failure_group.status), -failure_group.count)
    )


def _build_group_key(row: dict[Any, Any]) -> tuple[Any, ...]:
    if row["status"] == "oom":
        return "oom", row["evidence"], row["place"], _format_or_empty(row["oom_phase"]), row["limit"]
    return row["status"], row["evidence"], row["place"], NUMBER_PATTERN.sub("#", _format_or_empty(row["error"]))


def _format_or_empty(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _build_failure_group(rows: pd.DataFrame) -> FailureGroup:
    first_row = rows.iloc[0]
    status, is_predicted = str(first_row["status"]), first_row["evidence"] == "predicted"
    outcome = PREDICTED_OOM_LABEL if status == "oom" and is_predicted else STATUS_LABELS[status]
    if first_row["evidence"] in ("rehearsed", "published"):
        outcome += f" ({first_row['evidence']})"
    return FailureGroup(
        status=status,
        outcome=outcome,
        reason=_describe_oom(rows) if status == "oom" else _describe_error(rows),
        configurations=_describe_configurations(rows),
        place=str(first_row["place"]),
        runs=tuple(zip(rows["run_id"].astype(str), rows["link"], strict=True)),
    )


def _describe_oom(rows: pd.DataFrame) -> str:
    first_row = rows.iloc[0]
    phase = f"in {first_row['oom_phase']}" if pd.notna(first_row["oom_phase"]) else "in a phase not recorded"
    limit = first_row["limit"].replace("limit ", "limit of ") or "no limit set: the device's own memory"
    requested_bytes = rows["oom_bytes"].dropna()
    requested_text = (
        ""
        if requested_bytes.empty
        else f"; asked for {_format_range(map(presentation.format_memory, sorted(requested_bytes.astype(float))))} more"
    )
    return f"{phase}, {limit}{requested_text}"


def _format_range(texts: Iterable[str]) -> str:
    """The first and the last of some texts, or the one they all are."""
    distinct_texts = list(dict.fromkeys(texts))
    return distinct_texts[0] if len(distinct_texts) == 1 else f"{distinct_texts[0]} to {distinct_texts[-1]}"


def _describe_error(rows: pd.DataFrame) -> str:
    messages = list(dict.fromkeys(_format_or_empty(error) for error in rows["error"]))
    others_note = (
        f" (and {format_plural(len(messages) - 1, 'message')} that differ only in numbers)" if messages[1:] else ""
    )
    return (messages[0] or "no cause recorded") + others_note


def _describe_configurations(rows: pd.DataFrame) -> str:
    """Strategies with how many runs each, and of which models on how many ranks."""
    variants = rows["variant"].value_counts(sort=False)
    variant_texts = [str(name) if count == 1 else f"{name} × {count}" for name, count in variants.items()]
    models = presentation.format_list(list(dict.fromkeys(rows["model"].astype(str))), 4)
    world_sizes = sorted({int(size) for size in rows["world_size"].dropna()})
    device = rows["device"].iloc[0]
    ranks_text = f", {presentation.format_world_sizes(world_sizes, device)}" if world_sizes else ""
    return f"{presentation.format_list(variant_texts, 6)}; {models}{ranks_text}"


# --- The page: what the figures do not say (what was run, where, what failed, every row, every machine) and its HTML.

STATUS_MEANINGS = {
    "ok": "ran to its end, or is predicted to",
    "oom": "ran out of memory, or is predicted to: a result, drawn in the figures",
    "error": "failed for another reason",
    "timeout": "took longer than it was allowed to",
    "preempted": "taken off its machine; it can be run again",
    "skipped": "not started",
}
EVIDENCE_MEANINGS = {
    "measured": "every rank ran, with real communication",
    "rehearsed": "one real rank of the job, communication faked: memory is real, speed leaves communication out",
    "predicted": "nothing ran: traced and simulated",
    "published": "quoted from a paper",
}


MAX_STATIC_RUNS = 100
"""Runs that the page's HTML itself lists; a script of the page shows the others, a page of as many at a time."""

MAX_SHOWN_FIGURES = 4
"""Figures of a section that are shown at once; the others when they are asked for."""
MAX_TABLES, MAX_TABLE_ROWS, MAX_CAUSES = 20, 100, 40
"""Tables of a section, lines of a table (but that of all runs) and causes of failures: of more the first are listed."""

MAX_LINKED_RUNS = 1000
"""Runs of a finding that its link selects; with more, it leads to the whole table."""


def render_page(
    store_name: str,
    contents: StoreContents,
    table: pd.DataFrame,
    sections: list[ReportSection],
    svg_texts: dict[str, str],
    topics: Sequence[FindingTopic],
    charts: Sequence[InteractiveChart] = (),
    speed_note: str = "",
) -> str:
    """The complete page as HTML, figures included.

    Parameters
    ----------
    store_name: str
        Where the rows come from.
    svg_texts: dict
        Text of the SVG of every drawing, by its name.
    topics: sequence of FindingTopic
        What was found, which the page begins with.
    charts: sequence of Chart
        Figures to hover over; with none, the page does not carry the library that draws them.
    speed_note: str
        Which FLOPs speeds count, and which rows have none of these; empty where there is nothing to say.
    """
    environment = Environment(
        loader=PackageLoader("bench.reporting.page", ""),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def read_source(file: str) -> str:
        return environment.loader.get_source(environment, file)[0]  # type: ignore[union-attr]

    ordered_rows = sort_rows(table)
    files = contents.files or [f"{record['run_id']}/{record.get('attempt', 0)}.json" for record in contents.records]
    places = [_describe_place(str(place), rows) for (place,), rows in iterate_groups(ordered_rows, "place")]
    places.sort(key=lambda place: -place["count"])
    host_systems, other_count = find_host_systems(table, contents.records)
    script = "(() => {\n" + read_source("table.js") + read_source("page.js") + "})();\n"
    executed_scripts = [script, *([load_plotly_js()] if charts else [])]
    return environment.get_template("page.html.j2").render(
        name=store_name,
        total=format_plural(len(table), "run"),
        topics=topics,
        max_linked_runs=MAX_LINKED_RUNS,
        max_shown_figures=MAX_SHOWN_FIGURES,
        max_tables=MAX_TABLES,
        max_table_rows=MAX_TABLE_ROWS,
        max_causes=MAX_CAUSES,
        style=read_source("page.css"),
        script=script,
        hashes=" ".join(f"'sha256-{_hash_script(text)}'" for text in executed_scripts),
        lead=_describe_runs(table, places),
        speed_note=speed_note,
        counts=_count_values(table["status"], STATUS_MEANINGS),
        evidence=_count_values(table["evidence"], EVIDENCE_MEANINGS),
        places=places,
        on_cpu=any(place["cpu"] for place in places),
        shared=_list_shared_settings(table),
        period=_format_period(table),
        sections=sections,
        images=pack_figures(svg_texts),
        causes=group_failures(table),
        **_build_run_table(ordered_rows, contents, files),
        details=pack_details(table, contents, files),
        charts=list(dict.fromkeys(chart.group for chart in charts)),
        chart_data=compress_json([asdict(chart) for chart in charts]),
        library=compress_plotly_js() if charts else "",
        out_of_memory=[_build_oom_row(row) for row in _list_rows(ordered_rows[ordered_rows["status"] == "oom"])],
        failures=[
            _build_failure_row(row) for row in _list_rows(ordered_rows[~ordered_rows["status"].isin(["ok", "oom"])])
        ],
        machines=host_systems,
        facts=build_comparison_rows(host_systems),
        other_machines=other_count,
        pairs=pair_host_systems(host_systems),
        change=format_change,
        presentation=presentation,
        unreadable=contents.unreadable,
        cpu_note=presentation.CPU_NOTE,
    )


def _hash_script(text: str) -> str:
    """A script's hash as a content security policy names it: only scripts with these are executed."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _build_run_table(ordered: pd.DataFrame, contents: StoreContents, files: Sequence[str]) -> dict[str, Any]:
    """The table of all runs: its columns and lines."""
    rows = _list_rows(ordered)
    columns = run_table.select_columns(rows)
    variant_positions = {variant: index for index, variant in enumerate(sorted(set(ordered["variant_key"])))}
    run_positions = [variant_positions[variant] for variant in ordered["variant_key"]]
    table_rows = [
        run_table.build_run_row(row, contents.records[position], columns, files[position], variant_position)
        for row, position, variant_position in zip(rows, ordered.index, run_positions, strict=True)
    ]
    return {
        "columns": columns,
        "runs": table_rows[:MAX_STATIC_RUNS],
        "num_runs": len(table_rows),
        "rows": compress_json([row.pack() for row in table_rows]),
    }


MAX_DETAILS_BYTES = 1_200_000
"""Of a page: what the details of its runs take, packed."""


def pack_details(table: pd.DataFrame, contents: StoreContents, files: Sequence[str]) -> str:
    """All that the rows hold, compressed, for the dialog that shows one; of many rows only what tells them apart, and
    of very many none: the dialog then shows the table's line and where the row lies."""
    headings = table["variant"] + " · " + table["precision"] + " · " + table["heading"]
    rows = list(zip(table["link"], contents.records, files, headings, strict=True))
    for is_complete in (True, False):
        details = deduplicate_blocks(
            {
                str(link): build_details(record, file, str(heading), is_complete=is_complete)
                for link, record, file, heading in rows
            }
        )
        packed = compress_json(details)
        if len(packed) <= MAX_DETAILS_BYTES:
            return packed
    return compress_json({"blocks": [], "runs": {}})


def _count_values(column: pd.Series, meanings: dict[str, str]) -> list[tuple[str, int, str]]:
    counts = column.value_counts()
    return [(name, int(counts[name]), meaning) for name, meaning in meanings.items() if name in counts]


def _list_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return run_table.list_plain_rows(frame, "variant_key", *NESTED_COLUMNS)


def _format_distinct(values: Iterable[Any], max_values: int = 12) -> str:
    return presentation.format_list(_list_distinct(values), max_values) or presentation.MISSING


def _list_distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if not pd.isna(value)))


def _describe_runs(table: pd.DataFrame, places: Sequence[dict[str, Any]]) -> str:
    """What was run and what came of it, in two sentences."""
    evidence_texts = [f"{count} {kind}" for kind, count, _ in _count_values(table["evidence"], EVIDENCE_MEANINGS)]
    predicted_note = " or are predicted to" if (table["evidence"] == "predicted").any() else ""
    status_phrases = {
        "ok": f"ended well{predicted_note}",
        "oom": "ran out of memory",
        "error": "failed",
        "timeout": "took too long",
    }
    status_phrases |= {"preempted": "taken off their machine", "skipped": "not started"}
    outcome_texts = [
        f"{count} {status_phrases[status]}" for status, count, _ in _count_values(table["status"], STATUS_MEANINGS)
    ]
    models, variants = (_list_distinct(sort_rows(table)[column]) for column in ("model", "variant"))
    models_text, variants_text = format_plural(len(models), "model"), format_plural(len(variants), "way")
    subject = f"{models_text} and {variants_text} to spread them"
    places_text = format_plural(len(places), "kind") + " of device"
    lead = (
        f"{format_plural(len(table), 'run')} ({', '.join(evidence_texts)}) of {subject}, on {places_text}: "
        f"{', '.join(outcome_texts)}."
    )
    degraded = int((table["degraded"].fillna(False) & (table["status"] == "ok")).sum())
    verb = "has times that do" if degraded == 1 else "have times that do"
    return lead + (
        f" {degraded} of those that ended well {verb} not represent the speed (degraded)." if degraded else ""
    )


def _describe_place(place: str, rows: pd.DataFrame) -> dict[str, Any]:
    commits = [
        f"{str(row['git_sha'])[:10]}{' with uncommitted changes' if row['git_clean'] is False else ''}"
        for row in _list_rows(rows)
        if row["git_sha"]
    ]
    hosts = [host.strip() for text in rows["hosts"].dropna() for host in str(text).split(",")]
    world_sizes = sorted({int(size) for size in rows["world_size"].dropna()})
    device = rows["device"].iloc[0]
    nouns = presentation.get_rank_nouns(device)
    properties = [
        ("Runs", _describe_outcomes(rows)),
        ("Evidence", _format_distinct(rows["evidence"])),
        ("Models", _format_distinct(rows["model"])),
        ("Strategies", _format_distinct(rows["variant"])),
        ("Precisions", _format_distinct(rows["precision"])),
        (nouns[0].upper() + nouns[1:], _format_distinct(world_sizes)),
        ("Device", _format_distinct(rows["gpu_name"])),
        ("Hosts", _format_distinct(hosts)),
        ("torch", _format_distinct(rows["torch_version"])),
        ("Commit", _format_distinct(commits, 6)),
        ("Sweeps", _format_distinct(rows["sweep"])),
        ("Started", _format_period(rows)),
    ]
    return {
        "title": place,
        "count": len(rows),
        "cpu": (rows["device"] == "cpu").any(),
        "facts": [(name, value) for name, value in properties if value != presentation.MISSING],
    }


def _describe_outcomes(rows: pd.DataFrame) -> str:
    outcome_texts = [f"{count} {status}" for status, count, _ in _count_values(rows["status"], STATUS_MEANINGS)]
    return f"{len(rows)}: {', '.join(outcome_texts)}"


def _list_shared_settings(table: pd.DataFrame) -> list[str]:
    """Settings that all runs have in common; those that differ are in the figures' headings."""
    phrases = []
    for column, format_setting in SETTING_FORMATTERS.items():
        values = table[column].dropna().unique()
        if len(values) == 1 and table[column].notna().all():
            phrases.append(format_setting(values[0]))
    return [phrase for phrase in phrases if phrase]


def _format_period(table: pd.DataFrame) -> str:
    times = sorted(str(time)[:16].replace("T", " ") for time in table["started_at"].dropna())
    if not times:
        return presentation.MISSING
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def _build_oom_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": _describe_run(row),
        "phase": row["oom_phase"] or presentation.MISSING,
        "asked_for": presentation.format_memory(row["oom_bytes"]),
        "limit": row["limit"].removeprefix("limit ") or "none set",
        "rank": presentation.MISSING if row["oom_rank"] is None else row["oom_rank"],
        "run_id": row["run_id"],
        "link": row["link"],
    }


def _build_failure_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": row["status"],
        "what": _describe_run(row),
        "cause": row["error"] or "no cause recorded",
        "run_id": row["run_id"],
        "link": row["link"],
    }


def _describe_run(row: dict[str, Any]) -> str:
    return f"{row['variant']} · {row['precision']} · {row['heading']}"
