"""A store that two accounts share through a Unix group: whatever their umask, each can use what the other made."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core import files
from tests.conftest import ROOT
from tests.records_fixture import make_record

GROUP, ALICE, BOB = 41000, 41001, 41002
"""Ids that need no account."""

ROW = {"run_id": "0123456789abcdef", "status": "ok"}


@pytest.fixture
def shared_store() -> Iterator[Path]:
    """A folder that the group may write to, outside of pytest's, which only we can enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as other accounts")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, ALICE, GROUP)
        Path(folder).chmod(0o2770)
        yield Path(folder)


def act(account: int, umask: int, code: str, *arguments: object, groups: tuple[int, ...] = (GROUP,)) -> str:
    """Output of a piece of Python as an account, whose primary group is its own; it may not reach the interpreter."""
    become = f"os.umask({umask}); os.setgroups({list(groups)}); os.setgid({account}); os.setuid({account})"
    imports = "from bench.core import files as sharing\nfrom bench.records import claims, store\nimport json, os, sys"
    program = f"{imports}\n{become}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *(str(argument) for argument in arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TAKE = """
from pathlib import Path
claim = claims.take_claim(Path(sys.argv[1]), json.loads(sys.argv[2]), {"job": sys.argv[3], "restart": 0}, 4096)
with sharing.open_lock(Path(sys.argv[1]) / ".lock"):
    print(claim.attempt)
"""

BREAK = """
from pathlib import Path
claim = claims.find_claim(Path(sys.argv[1]), json.loads(sys.argv[2])["run_id"])
print(claim.owner["job"], claim.break_claim({"status": "error", "error": "it died"}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_one_account_can_do_with_a_claim_what_the_other_can(shared_store, umask):
    complete = json.dumps({**make_record(), **ROW})
    assert act(ALICE, umask, TAKE, shared_store, complete, "101") == "0"
    assert act(BOB, umask, BREAK, shared_store, complete) == "101 True"
    assert act(BOB, umask, TAKE, shared_store, complete, "102") == "1"
    assert act(ALICE, umask, BREAK, shared_store, complete) == "102 True"
    rows = [shared_store / ROW["run_id"] / f"{attempt}.json" for attempt in (0, 1)]
    assert [row.stat().st_uid for row in rows] == [BOB, ALICE]
    assert [stat.S_IMODE(row.stat().st_mode) for row in rows] == [0o644, 0o644]
    assert list((shared_store / ".running").iterdir()) == []
    assert [path.name for path in sorted((shared_store / ROW["run_id"]).iterdir())] == ["0.json", "1.json"]


PUT_BACK = """
from pathlib import Path
import dataclasses
claim = claims.find_claim(Path(sys.argv[1]), json.loads(sys.argv[2])["run_id"])
print(dataclasses.replace(claim, owner={"job": "100"}).break_claim({"status": "error", "error": "x"}))
"""


def test_the_claim_of_another_account_is_put_back_if_it_is_not_the_one_to_break(shared_store):
    """Where fs.protected_hardlinks is set, as it usually is, one cannot link what one may not write to."""
    complete = json.dumps({**make_record(), **ROW})
    assert act(ALICE, 0o022, TAKE, shared_store, complete, "101") == "0"
    assert act(BOB, 0o022, PUT_BACK, shared_store, complete) == "False"
    claim = shared_store / ".running" / f"{ROW['run_id']}.claim"
    assert json.loads(claim.read_text())["owner"]["job"] == "101"
    assert [path.name for path in claim.parent.iterdir()] == [claim.name]


def test_a_private_store_stays_private(tmp_path):
    tmp_path.chmod(0o700)
    previous = os.umask(0o077)
    try:
        files.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(previous)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_group_that_is_not_its_makers_is_let_in_nowhere(shared_store):
    """Its maker's own group would be, if the permissions were copied alone."""
    shared_store.chmod(0o777)
    code = "from pathlib import Path\nsharing.make_folder(Path(sys.argv[1]) / 'a')"
    act(BOB, 0o022, code, shared_store, groups=())
    made = (shared_store / "a").stat()
    assert (made.st_gid, stat.S_IMODE(made.st_mode)) == (BOB, 0o755)
