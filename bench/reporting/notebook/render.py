"""Render notebooks: which, with which stores, to where."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.core.installation import DATA_FOLDER, format_install_command
from bench.reporting.builder import read_store

NOTEBOOKS_DIR = DATA_FOLDER / "analysis"
DEFAULT_OUTPUT_DIR = Path("build/notebooks")
STORE_OPTIONS = ("store", "base", "output")
REQUIRED_LIBRARIES = ("nbformat", "nbclient", "nbconvert", "ipykernel")


def list_notebooks() -> list[str]:
    """Names of the notebooks, in the order of their questions' files."""
    return sorted(path.stem for path in NOTEBOOKS_DIR.glob("*.ipynb"))


def parse_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, Path], Path]:
    """Names, stores by option and output folder that were asked for.

    Raises
    ------
    UsageError
        For a notebook, an option or a store that there is not.
    """
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for option in values:
        require_choice("option", option, STORE_OPTIONS)
    names = [argument.removesuffix(".ipynb") for argument in arguments if "=" not in argument]
    for name in names:
        if name not in list_notebooks():
            raise invalid_value_error("notebook", name, list_notebooks())
    stores: dict[str, Path] = {}
    for option in ("store", "base"):
        if option in values:
            stores[option] = Path(values[option]).resolve()
    for store in stores.values():
        read_store(store)
    return (
        list(dict.fromkeys(names)) or list_notebooks(),
        stores,
        Path(values.get("output", DEFAULT_OUTPUT_DIR)).resolve(),
    )


def render(arguments: Sequence[str]) -> int:
    """Carry out and render the notebooks that a command line asks for.

    Returns
    -------
    int
        0, or 1 if a notebook failed.

    Raises
    ------
    UsageError
        For bad arguments, libraries that are missing, or a folder that cannot be written to.
    """
    names, stores, output_dir = parse_arguments(arguments)
    _require_libraries()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"Cannot write to {output_dir} ({error.strerror}): choose another folder with output=DIR."
        ) from None
    return render_notebooks(names, stores, output_dir)


def _require_libraries() -> None:
    missing_libraries = [name for name in REQUIRED_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing_libraries:
        raise UsageError(
            f"Rendering notebooks needs {', '.join(missing_libraries)}: install the extra, "
            f"{format_install_command('notebooks')}."
        )


def render_notebooks(names: Sequence[str], stores: Mapping[str, Path], output_dir: Path) -> int:
    """Carry out notebooks one after the other and write their pages; 1 if one failed, else 0."""
    import nbformat

    from bench.reporting.notebook import execution

    exit_code = 0
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in names:
        notebook = nbformat.read(NOTEBOOKS_DIR / f"{name}.ipynb", as_version=4)
        values = {option.upper(): str(store) for option, store in stores.items()} | {
            "FIGURES": str(output_dir / "figures")
        }
        try:
            execution.execute_notebook(execution.set_parameters(notebook, values), NOTEBOOKS_DIR)
        except execution.NotebookFailedError as error:
            print(f"{name}: {error}", file=sys.stderr)
            exit_code = 1
            continue
        page_path = output_dir / f"{name}.html"
        page_path.write_text(execution.render_page(notebook, name), encoding="utf-8")
        print(page_path, flush=True)
    return exit_code
