"""``python -m bench.advise``: which strategy? A decision tree whose every step is answered by a prediction."""

from __future__ import annotations

import sys

from bench.advice.remembered import answer_or_remember
from bench.core.command_line import open_stdout_console, report_usage_errors, run_main

WIDTH_WITHOUT_TERMINAL = 120


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Answer with the path through the tree and the ranked prediction.

    Returns
    -------
    int
        0 if something may fit, 1 if nothing does, 2 on bad input.
    """
    # These take seconds to import, and a remembered answer needs nothing of them.
    from bench.advice.question import answer_with_progress, parse_advise_arguments
    from bench.advice.tree.page import build_guidance, build_pages, build_terms_table, format_guidance_json

    question, output_format = parse_advise_arguments(sys.argv[1:] if arguments is None else arguments, __doc__)
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    if question is None:
        console.print(build_terms_table(), highlight=False)
        return 0
    guidances = answer_with_progress(build_guidance, question)
    if output_format == "json":
        print(format_guidance_json(guidances))
    else:
        console.print(build_pages(guidances), highlight=False, crop=False)
    return 0 if any(guidance.can_fit for guidance in guidances) else 1


if __name__ == "__main__":
    sys.exit(run_main(lambda: answer_or_remember("advise", main)))
