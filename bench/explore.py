"""``python -m bench.explore``: the questions of bench.predict in a browser, with controls; ``export`` for a web server.

Every state of the page has an address to share and the command that gives the same answer. Nothing is sent anywhere.
"""

from __future__ import annotations

import importlib.util
import sys

from bench.core.command_line import build_parser, report_usage_errors, require_path, run_main
from bench.core.errors import UsageError
from bench.core.installation import format_install_command

EPILOG = """\
examples:
  python -m bench.explore
  python -m bench.explore --port 8060 --no-browser
  python -m bench.explore export site model=llama3_8b,llama2_7b gpus=8,16 strategy=,ddp,fsdp

export writes a folder for any web server: a page that offers these values, and the answers to all their combinations.
"""


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Serve the page until Ctrl-C, or export it; exit code 0, or 2 on bad input."""
    parser = build_parser("explore", __doc__, EPILOG)
    parser.add_argument("words", nargs="*", metavar="export FOLDER key=value", help="write a folder instead of serving")
    parser.add_argument("--port", type=int, default=8050, help="where to listen, 0 for any free one (default: 8050)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="do not open a browser")
    options = parser.parse_intermixed_args(arguments)
    if importlib.util.find_spec("dash") is None:
        raise UsageError(f"bench.explore needs Dash, which is not installed: {format_install_command('explore')}.")
    if not options.words:
        from bench.explorer.app import serve  # takes seconds to import, as does what follows

        serve(options.host, options.port, opens_browser=options.browser, print_address=print_address)
        return 0
    if options.words[0] != "export" or len(options.words) < 2:
        raise UsageError(f"{' '.join(options.words)} is not valid here: choose export FOLDER key=value, or nothing.")
    from bench.explorer.export import export_page

    folder = require_path("FOLDER", options.words[1])
    count = export_page(folder, options.words[2:], lambda line: print(line, file=sys.stderr))
    print(f"{folder / 'index.html'}: {count} questions")
    return 0


def print_address(address: str) -> None:
    print(f"{address} (Ctrl-C ends it)", flush=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
