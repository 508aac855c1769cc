"""A copy of the code that a submission runs, so that a later edit in the checkout cannot change queued runs."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench.config import RunConfig
from bench.measure import environment
from bench.records import sharing

ROOT = Path(__file__).resolve().parents[3]
OWN = ("bench", "conf", "pyproject.toml", "constraints.txt")
LEFT_OUT = {"__pycache__", ".git"}
MOST_FILES = 20_000


def take(store: Path, configs: Iterable[RunConfig]) -> Path:
    """Copy the suite, and the families and strategies of one's own that some runs use, into the store.

    Equal code has one copy: its folder is named by a hash of all files, ``<store>/.code/<hash>``. Jobs run in it, so
    that Python finds these modules before any others. Of one's own modules every ``.py`` file of the top package is
    taken; installed packages are left where they are.

    Returns
    -------
    Path
        The folder.
    """
    files = {path.relative_to(ROOT): path for name in OWN for path in _files(ROOT / name)}
    modules = {type(part).__module__ for config in configs for part in (config.model, config.strategy)}
    for package in sorted({module.partition(".")[0] for module in modules} - {"bench"}):
        files |= _package(package)
    commit = json.dumps(environment.commit())
    digest = hashlib.sha256(commit.encode())
    for relative in sorted(files):
        digest.update(f"\0{relative}\0".encode() + files[relative].read_bytes())
    target = store / ".code" / digest.hexdigest()[:16]
    if target.exists():
        return target
    sharing.make_folder(target.parent)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=".new-"))
    try:
        for relative, path in files.items():
            (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, temporary / relative)
        (temporary / environment.COMMIT_FILE).write_text(commit)
        for path in (temporary, *temporary.rglob("*")):  # another account submits equal code by this copy
            path.chmod(0o755 if path.is_dir() else sharing.READABLE)
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # otherwise somebody else was faster, with the same code
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _files(path: Path, suffix: str = "") -> list[Path]:
    if path.is_file():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        found += [Path(folder) / name for name in names if name.endswith(suffix or "")]
        if len(found) > MOST_FILES:
            raise RuntimeError(f"{path} has more than {MOST_FILES} files: put the module into a package of its own")
    return [file for file in found if file.suffix != ".pyc"]


def _package(name: str) -> dict[Path, Path]:
    """The Python files of a package or module of one's own; none if it is an installed one."""
    module = importlib.import_module(name)
    places = [Path(place).resolve() for place in getattr(module, "__path__", [])] or [Path(str(module.__file__))]
    installed = [*site.getsitepackages(), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], sys.prefix]
    if any(str(places[0]).startswith(str(Path(folder).resolve()) + os.sep) for folder in installed):
        return {}
    return {Path(name) / path.relative_to(place) if place.is_dir() else Path(path.name): path
            for place in places for path in _files(place, ".py")}  # fmt: skip
