"""A store that several people share through a Unix group: what one of them makes there, the others can use.

Folders and locks inside a store are open to a group where the folder they lie in is, whatever the umask of their
maker; rows and claims, which are never written twice, can be read by all who can reach them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
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


# --- Files that are there whole or not at all, and readable by everybody who reaches their folder.

READABLE_MODE = 0o644
"""Temporary files are made for their maker alone."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Put a file in the place of another, or where there is none; text is written as UTF-8.

    Raises
    ------
    OSError
        If it cannot be written; then what was there is still there.
    """
    temporary_path = write_temporary_file(path.parent, content)
    try:
        temporary_path.replace(path)
    except OSError:
        temporary_path.unlink()
        raise


def write_temporary_file(folder: Path, content: str | bytes) -> Path:
    """A new file with a hidden name in a folder, written through to the disk: to be renamed, or linked and removed.

    Raises
    ------
    OSError
        If it cannot be written; then it is not there.
    """
    descriptor, temporary_path = tempfile.mkstemp(dir=folder, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, READABLE_MODE)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        os.unlink(temporary_path)
        raise
    return Path(temporary_path)
