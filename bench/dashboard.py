"""``python -m bench.dashboard [key=value …]``: the dashboard in wandb, created or updated.

A workspace and a report: TFLOPs per GPU and peak memory over commits for each configuration, scaling curves, the runs
out of memory, and everything beside the runs tagged as baseline. ``python -m bench.dashboard alert BASE CANDIDATE``
compares two stores as bench.compare does, and sends an alert if the candidate is slower or fatter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.core.command_line import build_parser, report_usage_errors, run_main
from bench.core.errors import UsageError
from bench.dashboards.dashboard import (
    SETTINGS_HELP,
    compare_and_alert,
    parse_dashboard_request,
    print_dashboard,
    save_dashboard,
)


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Create or update the dashboard, or send an alert.

    Returns
    -------
    int
        0 if it is done, 1 if the server could not be asked, 2 on bad input; of ``alert`` what bench.compare says: 0 no
        regression, 1 regression, 2 nothing comparable.
    """
    parser = build_parser("dashboard", __doc__, SETTINGS_HELP)
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings; or alert BASE CANDIDATE")
    words = parser.parse_args(arguments).words
    commands = [word for word in words if "=" not in word]
    settings = [word for word in words if "=" in word]
    if commands[:1] == ["alert"]:
        return compare_and_alert(commands[1:], settings)
    if commands:
        raise UsageError(f"{commands[0]} is not valid here: choose settings (key=value), or alert BASE CANDIDATE.")
    request = parse_dashboard_request(settings)
    return print_dashboard(request) if request.dry_run else save_dashboard(request)


if __name__ == "__main__":
    sys.exit(run_main(main))
