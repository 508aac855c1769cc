"""The command line of ``bench.compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.comparison.result import ComparisonSettings
from bench.config.flop_conventions import FLOP_CONVENTIONS, add_flops_option, read_flops_option
from bench.core.command_line import build_parser, parse_path_argument
from bench.core.errors import UsageError, require_choice
from bench.planning.request import parse_tracker
from bench.tracking import Tracker

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

PERCENT_OPTIONS = {
    "threshold": "smallest change of the step time that counts (default 1.5)",
    "margin": "change of the time that 'no change' excludes (default 3)",
    "memory_threshold": "smallest change of allocated memory that counts (default 1)",
    "reserved_threshold": "smallest change of reserved memory that counts (default 3)",
    "false_alarms": "how many of 100 comparisons of equal code may raise a false alarm on times (default 1)",
}
"""Options in percent and what they are."""


@dataclass(frozen=True)
class CompareRequest:
    """Two stores, how to compare them, and where to write what comes of it."""

    base: Path
    candidate: Path
    settings: ComparisonSettings
    tracker: Tracker | None
    """Told of a regression."""
    shows_all: bool
    markdown_path: Path | None
    json_path: Path | None
    junit_path: Path | None
    flops: str
    """What FLOPs the TFLOP/s count: one of `FLOP_CONVENTIONS`."""


def parse_compare_arguments(arguments: Sequence[str] | None, description: str | None) -> CompareRequest:
    """Read a command line of ``bench.compare``.

    Raises
    ------
    UsageError
        If a percentage is out of range, a setting of the tracker is none, or there is no such way to count FLOPs.
    """
    parser = build_parser("compare", description, EPILOG)
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
    add_flops_option(parser, "what TFLOPS count")
    options = parser.parse_args(read_flops_option(arguments))
    require_choice("flops", options.flops, FLOP_CONVENTIONS)
    fractions = {name: getattr(options, name) / 100 for name in PERCENT_OPTIONS if getattr(options, name) is not None}
    return CompareRequest(
        base=options.base,
        candidate=options.candidate,
        settings=_build_settings(fractions, across_machines=options.across_machines),
        tracker=parse_tracker(options.alert) if options.alert is not None else None,
        shows_all=options.all,
        markdown_path=options.markdown,
        json_path=options.json,
        junit_path=options.junit,
        flops=options.flops,
    )


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
