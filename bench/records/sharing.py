"""A store that several people share through a Unix group: what one of them makes there, the others can use.

Folders and locks inside a store are open to a group where the folder they lie in is, whatever the umask of their
maker; rows and claims, which are never written twice, can be read by all who can reach them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TextIO

READABLE_MODE = 0o644


def make_folder(path: Path) -> None:
    """Make a folder inside a store, and those above it, open to the same group as the folder it lies in."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):  # somebody else was faster
        path.mkdir()
        _open_to_group(path, stat.S_IRWXG)


def open_lock(path: Path) -> TextIO:
    """Open a file that is there to be locked, by everybody who may write to its folder.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, READABLE_MODE)
    if is_own_file(path):
        _open_to_group(path, stat.S_IRGRP | stat.S_IWGRP)
    return os.fdopen(descriptor, "r+")


def make_readable(descriptor: int) -> None:
    """Let everybody who reaches a file read it: temporary files are made for their maker alone."""
    os.fchmod(descriptor, READABLE_MODE)


def is_own_file(path: Path) -> bool:
    """Whether a file is this account's, or not there yet."""
    try:
        return path.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _open_to_group(path: Path, permissions: int) -> None:
    """Give a path the group of the folder it lies in, and of some permissions those that the folder's group has."""
    folder_status, path_status = path.parent.stat(), path.stat()
    if path_status.st_gid != folder_status.st_gid:
        try:
            os.chown(path, -1, folder_status.st_gid)
        except PermissionError:  # its maker is not of that group, which then is not the one that shares the store
            return
    wanted_mode = stat.S_IMODE(path_status.st_mode) | (folder_status.st_mode & permissions)
    if wanted_mode != stat.S_IMODE(path.stat().st_mode):
        path.chmod(wanted_mode)
