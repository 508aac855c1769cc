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

from bench.config.run_config import RunConfig
from bench.core.files import READABLE_MODE, make_folder
from bench.core.installation import IS_CHECKOUT, PACKAGE_FOLDER
from bench.rank import environment

SUITE_PATHS = ("bench", *(("conf", "pyproject.toml", "constraints.txt") if IS_CHECKOUT else ()))
EXCLUDED_NAMES = {"__pycache__", ".git"}
MAX_FILES = 20_000


def take_snapshot(store: Path, configs: Iterable[RunConfig]) -> Path:
    """Copy the suite, and the families and strategies of one's own that some runs use, into the store.

    Equal code has one copy: its folder is named by a hash of all files, ``<store>/.code/<hash>``. Jobs run in it, so
    that Python finds these modules before any others. Of one's own modules every ``.py`` file of the top package is
    taken; installed packages are left where they are.

    Returns
    -------
    Path
        The folder.
    """
    code_folder = PACKAGE_FOLDER.parent
    path_by_relative_path = {
        path.relative_to(code_folder): path for name in SUITE_PATHS for path in _list_files(code_folder / name)
    }
    module_names = {type(plugin).__module__ for config in configs for plugin in (config.model, config.strategy)}
    for package in sorted({module.partition(".")[0] for module in module_names} - {"bench"}):
        path_by_relative_path |= _list_package_files(package)
    commit = json.dumps(environment.find_commit())
    digest = hashlib.sha256(commit.encode())
    for relative in sorted(path_by_relative_path):
        digest.update(f"\0{relative}\0".encode() + path_by_relative_path[relative].read_bytes())
    snapshot_folder = store / ".code" / digest.hexdigest()[:16]
    if snapshot_folder.exists():
        return snapshot_folder
    make_folder(snapshot_folder.parent)
    temporary_folder = Path(tempfile.mkdtemp(dir=snapshot_folder.parent, prefix=".new-"))
    try:
        for relative, path in path_by_relative_path.items():
            (temporary_folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, temporary_folder / relative)
        (temporary_folder / environment.COMMIT_FILE).write_text(commit)
        for path in (temporary_folder, *temporary_folder.rglob("*")):  # another account submits equal code by this copy
            path.chmod(0o755 if path.is_dir() else READABLE_MODE)
        try:
            temporary_folder.rename(snapshot_folder)
        except OSError:
            if not snapshot_folder.exists():  # otherwise somebody else was faster, with the same code
                raise
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    return snapshot_folder


def _list_files(path: Path, suffix: str = "") -> list[Path]:
    if path.is_file():
        return [path]
    files: list[Path] = []
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if name not in EXCLUDED_NAMES)
        files += [Path(folder) / name for name in names if name.endswith(suffix or "")]
        if len(files) > MAX_FILES:
            raise RuntimeError(f"{path} has more than {MAX_FILES} files: put the module into a package of its own")
    return [file for file in files if file.suffix != ".pyc"]


def _list_package_files(name: str) -> dict[Path, Path]:
    """The Python files of a package or module of one's own; none if it is an installed one."""
    module = importlib.import_module(name)
    package_roots = [Path(root).resolve() for root in getattr(module, "__path__", [])] or [Path(str(module.__file__))]
    installed_folders = [
        *site.getsitepackages(),
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["stdlib"],
        sys.prefix,
    ]
    if any(str(package_roots[0]).startswith(str(Path(folder).resolve()) + os.sep) for folder in installed_folders):
        return {}
    return {Path(name) / path.relative_to(root) if root.is_dir() else Path(path.name): path
            for root in package_roots for path in _list_files(root, ".py")}  # fmt: skip
