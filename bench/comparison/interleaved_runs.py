"""One sweep with two versions of the code in turn: every repetition with both, so that a drift favours neither."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.core.errors import UsageError, invalid_value_error
from bench.core.progress import ProgressLine

SIDES = ("base", "candidate")

ORDER_SEED = 0
"""Of the order within rounds, which is drawn so that neither side goes first more than once more than the other."""


@dataclass(frozen=True)
class CodeVersion:
    """What runs one side."""

    python: Path
    """The interpreter."""
    checkout: Path | None
    """The folder whose ``bench`` it imports; None for what is installed."""


@dataclass(frozen=True)
class InterleavedRuns:
    """What is to be run."""

    versions: tuple[CodeVersion, CodeVersion]
    """Of base and candidate."""
    overrides: tuple[str, ...]
    """What is typed behind ``python -m bench.sweep``, ``-m`` among it."""
    repeats: int
    store: Path
    """Folder of the two stores, ``base`` and ``candidate``."""

    @property
    def stores(self) -> tuple[Path, Path]:
        """The stores of base and candidate."""
        return self.store / SIDES[0], self.store / SIDES[1]


def find_code_version(side: str, path: Path) -> CodeVersion:
    """What a path stands for: a checkout of this suite, a virtual environment, or a Python interpreter.

    A checkout is run by the interpreter in its ``.venv``, or by this one.

    Raises
    ------
    UsageError
        If it is none of them.
    """
    if (path / "bench" / "sweep.py").is_file():
        own_python = path / ".venv" / "bin" / "python"
        return CodeVersion(own_python if own_python.is_file() else Path(sys.executable), path.absolute())
    python = path / "bin" / "python" if path.is_dir() else path
    if python.is_file() and os.access(python, os.X_OK):
        return CodeVersion(python.absolute(), None)
    raise invalid_value_error(
        side.upper(), path, "a checkout of this suite, a virtual environment or a Python interpreter"
    )


def draw_order(repeats: int) -> Iterator[tuple[int, int]]:
    """Which side goes first in each round: in every two rounds each once, by lot. 0 is the base."""
    generator = random.Random(ORDER_SEED)
    for _ in range(0, repeats, 2):
        first = generator.randrange(2)
        yield first, 1 - first
        yield 1 - first, first


def run_in_turn(runs: InterleavedRuns, console: Console) -> None:
    """Run every repetition with both versions, one right after the other.

    Raises
    ------
    UsageError
        If a store has rows already, or a version takes the command line for a mistake.
    """
    for store in runs.stores:
        if store.is_dir() and any(store.iterdir()):
            raise invalid_value_error(
                "--store", runs.store, "a new folder: rows of other code would be taken for these"
            )
    with ProgressLine(console, 2 * runs.repeats, "starting") as line:
        for repeat, order in zip(range(runs.repeats), draw_order(runs.repeats), strict=False):
            for side in order:
                line.show(f"round {repeat + 1} of {runs.repeats}: {SIDES[side]}")
                _run_sweep(runs, side, repeat)
                line.advance()


def _run_sweep(runs: InterleavedRuns, side: int, repeat: int) -> None:
    """One repetition of the sweep with one version; runs that come to no result are rows of the comparison."""
    version = runs.versions[side]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # not the bench of the folder that the command is typed in
    if version.checkout is not None:
        paths = [str(version.checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    settings = (f"store={runs.stores[side].absolute()}", f"repeat={repeat}", "sweep.repeats=1", "report=false")
    done = subprocess.run(
        [str(version.python), "-m", "bench.sweep", *runs.overrides, *settings],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode not in (0, 1):
        last_line = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise UsageError(f"{SIDES[side]} ({version.checkout or version.python}) cannot run this sweep: {last_line}")


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise `UsageError` for settings that are not the user's to give here."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if key in ("store", "repeat", "sweep.repeats", "dry_run", "mode", "report", "cluster"):
            raise UsageError(
                f"{override} is not valid here, where every repetition is run on this machine: choose --repeats and "
                "--store."
            )
