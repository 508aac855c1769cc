"""What ``bench.compare`` does with two stores: read, compare, write files, print."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from bench.comparison import RunComparison, compare_records
from bench.comparison.arguments import CompareRequest
from bench.config.flop_conventions import convert_speeds, replace_speeds
from bench.records import Record
from bench.reporting.builder import describe_unreadable, read_store
from bench.reporting.regressions.files import format_comparison_json, format_markdown, write_texts
from bench.reporting.regressions.junit import format_junit_xml
from bench.reporting.regressions.terminal import build_comparison_tables


def compare_stores(request: CompareRequest, console: Console) -> tuple[RunComparison, list[Record]]:
    """Compare, write what was asked for and print; the comparison, and the rows of both sides.

    Raises
    ------
    UsageError
        If a store cannot be read, or a file cannot be written.
    """
    base, candidate = read_store(request.base), read_store(request.candidate)
    all_records = [*base.records, *candidate.records]
    speeds = convert_speeds(request.flops, all_records)
    records = replace_speeds(all_records, speeds)
    base_count = len(base.records)
    comparison = compare_records(records[:base_count], records[base_count:], request.settings)
    if speeds.note:
        comparison = replace(comparison, notes=(*comparison.notes, speeds.note.removesuffix(".")))
    formatters = (
        (request.markdown_path, format_markdown),
        (request.json_path, format_comparison_json),
        (request.junit_path, format_junit_xml),
    )
    store_names = str(request.base), str(request.candidate)
    write_texts({path: format_text(comparison, *store_names) for path, format_text in formatters if path})
    for message in (*describe_unreadable(base, "base"), *describe_unreadable(candidate, "candidate")):
        print(message)
    tables = build_comparison_tables(comparison, show_all=request.shows_all)
    console.print(tables, highlight=False, soft_wrap=not comparison.rows)
    return comparison, all_records
