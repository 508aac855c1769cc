"""`python -m bench.notebooks [NAME...] [store=STORE] [base=STORE] [output=DIR]`: render notebooks to HTML.

NAME is a file of ``analysis`` without its ending; without a name all are carried out and rendered. ``store`` is a store
of your own, drawn beside the committed rows; ``base`` one with rows from before, for the notebook ``regressions``. DIR
(default: ``build/notebooks``) takes one page per notebook, complete in itself, and the static figures as PNG and SVG
under ``figures``. The notebooks themselves are not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.core.command_line import report_usage_errors, run_main
from bench.reporting.notebook.render import render


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 if a notebook failed, 2 where the user must change something."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__.replace("``", ""))
        return 0
    return render(arguments)


if __name__ == "__main__":
    sys.exit(run_main(main))
