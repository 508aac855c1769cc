"""Real Unix accounts that share a group, for tests as root; what they need to run the suite, and gone afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm_cluster import SLURM_TIMEOUT_S

OPENED_FOLDERS_FILE = Path("/tmp/bench-tests-opened-folders.json")
"""Which folders the tests on this machine have opened; locked by each of them for as long as they need it."""


FORKER_SCRIPT = """
import importlib, json, os, sys, traceback
import bench.jobs, bench.sweep
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(asked["output"], start=1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        os.umask(asked["umask"]), os.setgroups(asked["groups"]), os.setgid(asked["group"]), os.setuid(asked["user"])
        os.environ["HOME"] = asked["home"]
        code = 1
        try:
            code = importlib.import_module(asked["module"]).main(asked["arguments"])
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Calls the suite's commands as any account, without importing torch anew for each, which takes seconds."""


@dataclass(frozen=True)
class Account:
    """One account."""

    name: str
    group: str
    """Of the team, which is not its primary one."""
    umask: int
    home: str
    environment: Mapping[str, str]
    forker: subprocess.Popen[str]

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``python -m module arguments`` as this account."""
        account = pwd.getpwnam(self.name)
        with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
            request = {
                **{"module": module, "arguments": arguments, "output": [output.name, errors.name]},
                **{"user": account.pw_uid, "group": account.pw_gid, "groups": [grp.getgrnam(self.group).gr_gid]},
                **{"umask": self.umask, "home": self.home},
            }
            assert self.forker.stdin is not None
            assert self.forker.stdout is not None
            self.forker.stdin.write(json.dumps(request) + "\n")
            self.forker.stdin.flush()
            code = int(self.forker.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())

    def command(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Any command as this account."""
        return subprocess.run(
            command,
            user=self.name,
            group=self.name,
            extra_groups=[self.group],
            umask=self.umask,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "HOME": self.home, "PYTHONPATH": str(ROOT), **self.environment},
            capture_output=True,
            text=True,
            timeout=SLURM_TIMEOUT_S,
            check=False,
        )


@contextlib.contextmanager
def create_team(environment: Mapping[str, str], umasks: Mapping[str, int]) -> Iterator[tuple[str, dict[str, Account]]]:
    """Accounts of one group, by a short name each, and the group; they can read this checkout and its interpreter."""
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("only root can make accounts, with useradd")
    group = f"team{os.getpid()}"
    account_names = {name: f"{name}{os.getpid()}" for name in umasks}
    with (
        contextlib.ExitStack() as stack,
        _open_folders(ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve()),
    ):
        try:
            _run_command("groupadd", group)
            for account in account_names.values():
                _run_command("useradd", "--no-create-home", "--user-group", "--groups", group, account)
            accounts = {}
            forker = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", FORKER_SCRIPT],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name, umask in umasks.items():
                home = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
                shutil.chown(home, account_names[name], account_names[name])
                accounts[name] = Account(account_names[name], group, umask, home, environment, forker)
            yield group, accounts
        finally:
            for account in account_names.values():
                subprocess.run(["userdel", account], capture_output=True, check=False)
            subprocess.run(["groupdel", group], capture_output=True, check=False)


@contextlib.contextmanager
def _open_folders(*paths: Path) -> Iterator[None]:
    """Let everybody pass through the folders above some paths, as long as any test on this machine needs it."""
    with OPENED_FOLDERS_FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        previous_modes: dict[str, int] = json.loads(file.read() or "{}")
        for folder in {folder for path in paths for folder in path.parents}:
            mode = stat.S_IMODE(folder.stat().st_mode)
            if not mode & stat.S_IXOTH:
                previous_modes.setdefault(str(folder), mode)
                folder.chmod(mode | stat.S_IXOTH)
        _rewrite_file(file.fileno(), json.dumps(previous_modes))
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):  # others still need it, and the last of them closes
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.seek(0)
                for name, mode in json.loads(file.read() or "{}").items():
                    Path(name).chmod(mode)
                _rewrite_file(file.fileno(), "")


def _rewrite_file(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _run_command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
