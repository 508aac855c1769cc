"""``python -m bench.sweep``: expand, plan, launch, collect, report."""

from __future__ import annotations

import sys

from bench.core.command_line import build_parser, open_stdout_console, report_usage_errors, run_main
from bench.core.processes import collect_garbage_rarely

EPILOG = """\
Every field of every group can be set: model=t5_small strategy=fsdp strategy.sharding_factor=2 gpus=4.
With -m, commas make axes: -m model=t5_tiny,gpt_tiny gpus=1,2. Without a run of your own, the default sweep runs;
others are sweep=NAME. dry_run=true shows the plan.

exit code: 0 every run has a result (ok or oom) or was submitted, 1 one has not, 2 bad input.
"""

WIDTH_WITHOUT_TERMINAL = 140


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Run a sweep; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    epilog = EPILOG
    if {"-h", "--help"} & set(arguments):
        from bench.planning.option_help import format_settings_help  # reads all configuration

        epilog = f"{EPILOG}\n{format_settings_help()}"
    parser = build_parser("sweep", __doc__, epilog)
    parser.add_argument("-m", "--multirun", action="store_true", help="values with commas are axes of a grid")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example sweep=model_scale dry_run=true")
    options = parser.parse_intermixed_args(arguments)
    from bench.sweeps.run_sweep import run_sweep  # of no use to --help

    return run_sweep(options.overrides, open_stdout_console(WIDTH_WITHOUT_TERMINAL), multirun=options.multirun)


if __name__ == "__main__":
    collect_garbage_rarely()
    sys.exit(run_main(main))
