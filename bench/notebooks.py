"""`python -m bench.notebooks [NAME...] [store=STORE] [base=STORE] [output=DIR]`: render notebooks to HTML.

NAME is a file of ``analysis`` without its ending; without a name all are carried out and rendered. ``store`` is a store
of your own, drawn beside the committed rows; ``base`` one with rows from before, for the notebook ``regressions``. DIR
(default: ``build/notebooks``) takes one page per notebook, complete in itself, and the static figures as PNG and SVG
under ``figures``. The notebooks themselves are not changed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import command
from bench.errors import UsageError, bad_value, how_to_install, require_choice
from bench.reporting.reading import read_store

ANALYSIS = Path(__file__).resolve().parents[1] / "analysis"
OUTPUT = Path("build/notebooks")
OPTIONS = ("store", "base", "output")
NEEDED = ("nbformat", "nbclient", "nbconvert", "ipykernel")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 if a notebook failed, 2 where the user must change something."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__.replace("``", ""))
        return 0
    try:
        names, stores, output = read(arguments)
        _require_libraries()
        output.mkdir(parents=True, exist_ok=True)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"Cannot write to {output} ({error.strerror}): choose another folder with output=DIR.", file=sys.stderr)
        return 2
    return render(names, stores, output)


def available() -> list[str]:
    """Names of the notebooks, in the order of their questions' files."""
    return sorted(path.stem for path in ANALYSIS.glob("*.ipynb"))


def read(arguments: Sequence[str]) -> tuple[list[str], dict[str, Path], Path]:
    """Names, stores by option and output folder that were asked for.

    Raises
    ------
    UsageError
        For a notebook, an option or a store that there is not.
    """
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for option in values:
        require_choice("option", option, OPTIONS)
    names = [argument.removesuffix(".ipynb") for argument in arguments if "=" not in argument]
    for name in names:
        if name not in available():
            raise bad_value("notebook", name, available())
    stores: dict[str, Path] = {}
    for option in ("store", "base"):
        if option in values:
            stores[option] = Path(values[option]).resolve()
    for store in stores.values():
        read_store(store)
    return list(dict.fromkeys(names)) or available(), stores, Path(values.get("output", OUTPUT)).resolve()


def _require_libraries() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"Rendering notebooks needs {', '.join(missing)}: install the extra, {how_to_install('notebooks')}."
        )


def render(names: Sequence[str], stores: Mapping[str, Path], output: Path) -> int:
    """Carry out notebooks one after the other and write their pages; 1 if one failed, else 0."""
    import nbformat

    from bench.reporting import execution

    failed = 0
    for name in names:
        notebook = nbformat.read(ANALYSIS / f"{name}.ipynb", as_version=4)
        values = {option.upper(): str(store) for option, store in stores.items()} | {"FIGURES": str(output / "figures")}
        try:
            execution.execute(execution.with_parameters(notebook, values), ANALYSIS)
        except execution.NotebookFailedError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
            continue
        page = output / f"{name}.html"
        page.write_text(execution.page(notebook, name), encoding="utf-8")
        print(page, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(command.execute(main))
