"""``python -m bench.compare BASE CANDIDATE``: did the last upgrade make it slower, fatter, or fail?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.comparison import ComparisonSettings, compare_records
from bench.core import command_line
from bench.core.command_line import open_stdout_console, parse_path_argument
from bench.core.errors import UsageError
from bench.planning.request import parse_tracker
from bench.reporting.builder import read_store
from bench.reporting.drawing.labels import format_plural
from bench.reporting.regressions.data import format_comparison_json
from bench.reporting.regressions.files import write_texts
from bench.reporting.regressions.junit import format_junit_xml
from bench.reporting.regressions.markdown import format_markdown
from bench.reporting.regressions.terminal import build_comparison_tables

EPILOG = """\
BASE and CANDIDATE are stores, folders of stores, runs or row files. Runs match by configuration, whatever their
versions, commit, repetition, seed and sweep; measured runs with measured ones, rehearsed with rehearsed, predicted with
predicted.

verdicts:
  regression   slower, more memory, or failing: large enough to count and, of times, significant over repeated runs
  improvement  the opposite
  no change    the confidence interval of the time excludes a change of --margin, and memory and status are as before
  cannot tell  too few runs, too much scatter, different machines, runs that fail only now and then: the reason is given

exit code: 0 no regression, 1 regression, 2 nothing comparable, or bad input.
"""

WIDTH_WITHOUT_TERMINAL = 160

PERCENT_OPTIONS = {
    "threshold": "smallest change of the step time that counts (default 1.5)",
    "margin": "change of the time that 'no change' excludes (default 3)",
    "memory_threshold": "smallest change of allocated memory that counts (default 1)",
    "reserved_threshold": "smallest change of reserved memory that counts (default 3)",
    "false_alarms": "how many of 100 comparisons of equal code may raise a false alarm on times (default 1)",
}
"""Options in percent and what they are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write what was asked for.

    Returns
    -------
    int
        0 no regression, 1 regression, 2 nothing comparable or bad input.
    """
    options = _build_parser().parse_args(arguments)
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    try:
        fractions = {
            name: getattr(options, name) / 100 for name in PERCENT_OPTIONS if getattr(options, name) is not None
        }
        settings = _build_settings(fractions, across_machines=options.across_machines)
        tracker = parse_tracker(options.alert) if options.alert is not None else None
        base, candidate = read_store(options.base), read_store(options.candidate)
        comparison = compare_records(base.records, candidate.records, settings)
        store_names = str(options.base), str(options.candidate)
        formatters = (
            (options.markdown, format_markdown),
            (options.json, format_comparison_json),
            (options.junit, format_junit_xml),
        )
        write_texts(
            {file: format_text(comparison, *store_names) for file, format_text in formatters if file is not None}
        )
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    for name, contents in zip(("base", "candidate"), (base, candidate), strict=True):
        if contents.unreadable:
            print(f"{format_plural(len(contents.unreadable), 'file')} of {name} left out: {contents.unreadable[0]}")
    console.print(
        build_comparison_tables(comparison, show_all=options.all), highlight=False, soft_wrap=not comparison.rows
    )
    if tracker is not None and comparison.comparable:
        from bench.dashboards.alerts import send_alert

        send_alert(
            comparison,
            *store_names,
            [*base.records, *candidate.records],
            tracker,
            lambda line: print(line, file=sys.stderr),
        )
    return comparison.exit_code


def _build_settings(fractions: dict[str, float], *, across_machines: bool) -> ComparisonSettings:
    """The settings, in whose messages an option is called as it was typed and in percent.

    Raises
    ------
    UsageError
        If a percentage is out of range.
    """
    for name, value in fractions.items():
        min_value = 0.0 if name != "false_alarms" else 1e-9
        if not min_value <= value < 1:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}={100 * value:g} is not valid: choose a percentage from 0 to below 100.")
    defaults = ComparisonSettings()
    threshold, margin = fractions.get("threshold", defaults.threshold), fractions.get("margin", defaults.margin)
    if "margin" not in fractions:
        fractions["margin"] = margin = max(margin, threshold)
    if margin < threshold:
        raise UsageError(
            f"--margin={100 * margin:g} is not valid: choose a percentage of at least --threshold={100 * threshold:g}."
        )
    return ComparisonSettings(**fractions, across_machines=across_machines)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", type=parse_path_argument, metavar="BASE", help="rows from before")
    parser.add_argument("candidate", type=parse_path_argument, metavar="CANDIDATE", help="rows from after")
    for name, help_text in PERCENT_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="PERCENT", help=help_text)
    parser.add_argument("--across-machines", action="store_true", help="compare although the machines differ")
    parser.add_argument("--all", action="store_true", help="list everything that only one side has")
    parser.add_argument(
        "--markdown", type=parse_path_argument, metavar="FILE", help="write a comment for a pull request"
    )
    parser.add_argument("--json", type=parse_path_argument, metavar="FILE", help="write everything, for scripts")
    parser.add_argument(
        "--alert", nargs="*", metavar="tracker.KEY=VALUE", help="tell Weights & Biases, which alerts of a regression"
    )
    parser.add_argument(
        "--junit", type=parse_path_argument, metavar="FILE", help="write a test report, for a CI system"
    )
    return parser


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
