"""Where the YAML files of the configuration's groups are: the suite's, those of installed packages, those of one's own
folder."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from bench.core.errors import UsageError
from bench.core.installation import DATA_FOLDER
from bench.core.plugins import list_installed_conf_folders

CONF_FOLDER = DATA_FOLDER / "conf"

OWN_CONF_VARIABLE = "BENCH_CONF"
"""Names a folder with options of one's own, laid out as ``conf``."""


def list_conf_folders() -> tuple[Path, ...]:
    """Where options are: the suite's own, before those of installed packages, before those of one's own folder.

    Raises
    ------
    UsageError
        If there is no folder of one's own where it is said to be.
    """
    folders = (CONF_FOLDER, *list_installed_conf_folders())
    own_folder = os.environ.get(OWN_CONF_VARIABLE)
    if not own_folder:
        return folders
    if not Path(own_folder).is_dir():
        raise UsageError(
            f"{OWN_CONF_VARIABLE}={own_folder} is not valid: choose a folder with folders named as conf's."
        )
    return (*folders, Path(own_folder).absolute())


def list_options(group: str) -> list[str]:
    """The options of a group, sorted."""
    return sorted({file.stem for conf in list_conf_folders() for file in conf.glob(f"{group}/*.yaml")})


def find_option_file(group: str, option: str) -> Path:
    """The file of an option: the suite's, or else that of an installed package or of one's own folder."""
    return _find_option_file(list_conf_folders(), group, option)


@functools.cache
def _find_option_file(folders: tuple[Path, ...], group: str, option: str) -> Path:
    files = [folder / group / f"{option}.yaml" for folder in folders]
    return next((file for file in files if file.is_file()), files[0])
