"""The command line of ``bench.compare``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.comparison.interleaved_runs import InterleavedRuns, check_overrides, find_code_version
from bench.comparison.result import ComparisonSettings
from bench.config.flop_conventions import FLOP_CONVENTIONS, add_flops_option, read_flops_option
from bench.core.command_line import build_parser, parse_path_argument
from bench.core.errors import UsageError, require_at_least, require_choice
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

`run BASE CANDIDATE key=value …` makes the runs first: BASE and CANDIDATE are checkouts of this suite, virtual
environments or Python interpreters, and every repetition of the sweep is run with both, one after the other (`run
--help`), so that a machine that drifts raises no alarm.

exit code: 0 no regression, 1 regression (with --strict also what cannot be told), 2 nothing comparable, or bad input.
"""

RUN_EPILOG = """\
Every round runs the whole sweep once with BASE and once with CANDIDATE, which of them first is drawn. A machine that
slows down or speeds up meanwhile does so for both, and the rounds' differences are what is judged. Rows go to DIR/base
and DIR/candidate.

example:
  python -m bench.compare run ../before . -m model=gpt_tiny strategy=ddp,fsdp gpus=2 --repeats 7 --store after-upgrade
"""

DEFAULT_REPEATS = 5

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
    _add_options(parser)
    options = parser.parse_args(read_flops_option(arguments))
    return _build_request(options, options.base, options.candidate)


def parse_run_arguments(arguments: Sequence[str]) -> tuple[InterleavedRuns, CompareRequest]:
    """Read a command line of ``bench.compare run``.

    Raises
    ------
    UsageError
        Also if base or candidate is nothing that could run.
    """
    parser = build_parser(
        "compare run", "Run a sweep with two versions of the code in turn, and compare them.", RUN_EPILOG
    )
    parser.add_argument("base", type=parse_path_argument, metavar="BASE", help="checkout, environment or interpreter")
    parser.add_argument("candidate", type=parse_path_argument, metavar="CANDIDATE", help="the same, of after")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the sweep, as of bench.sweep")
    parser.add_argument("-m", "--multirun", action="store_true", help="values with commas are axes of a grid")
    parser.add_argument("--repeats", type=int, default=DEFAULT_REPEATS, metavar="N", help="rounds (default 5)")
    parser.add_argument(
        "--store", type=parse_path_argument, default=Path("compared"), metavar="DIR", help="a new folder"
    )
    _add_options(parser)
    options = parser.parse_intermixed_args(read_flops_option(arguments))
    require_at_least("--repeats", options.repeats, 2)
    check_overrides(options.overrides)
    versions = find_code_version("base", options.base), find_code_version("candidate", options.candidate)
    overrides = (*(["-m"] if options.multirun else []), *options.overrides)
    runs = InterleavedRuns(versions, overrides, options.repeats, options.store)
    return runs, _build_request(options, *runs.stores)


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, help_text in PERCENT_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="PERCENT", help=help_text)
    parser.add_argument("--strict", action="store_true", help="what cannot be told fails, as a regression does")
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


def _build_request(options: argparse.Namespace, base: Path, candidate: Path) -> CompareRequest:
    """The request for two stores, from options that were read."""
    require_choice("flops", options.flops, FLOP_CONVENTIONS)
    fractions = {name: getattr(options, name) / 100 for name in PERCENT_OPTIONS if getattr(options, name) is not None}
    return CompareRequest(
        base=base,
        candidate=candidate,
        settings=_build_settings(fractions, across_machines=options.across_machines, strict=options.strict),
        tracker=parse_tracker(options.alert) if options.alert is not None else None,
        shows_all=options.all,
        markdown_path=options.markdown,
        json_path=options.json,
        junit_path=options.junit,
        flops=options.flops,
    )


def _build_settings(fractions: dict[str, float], *, across_machines: bool, strict: bool) -> ComparisonSettings:
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
    return ComparisonSettings(**fractions, across_machines=across_machines, strict=strict)
