"""Long tests: every commit runs a part of them, each of them comes in its turn, and the last lines count the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, draw_long_tests_to_leave_out

COMMITS = [f"{number:040x}" for number in range(40)]


def build_items(num_long: int, num_others: int) -> list[Any]:
    return [
        SimpleNamespace(
            nodeid=f"tests/test_a.py::test_{number}", get_closest_marker=lambda name, long=number < num_long: long
        )
        for number in range(num_long + num_others)
    ]


def test_every_long_test_is_run_with_some_commit_and_no_other_is_left_out() -> None:
    items = build_items(200, 50)
    left_out = [{item.nodeid for item in draw_long_tests_to_leave_out(items, 3, commit)} for commit in COMMITS]
    assert all(100 < len(nodeids) < 165 for nodeids in left_out)
    assert set.intersection(*left_out) == set()
    assert set.union(*left_out) == {item.nodeid for item in items[:200]}
    assert draw_long_tests_to_leave_out(items, 3, COMMITS[0]) == draw_long_tests_to_leave_out(items, 3, COMMITS[0])


@pytest.mark.long
@pytest.mark.slow
def test_the_last_lines_count_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n@pytest.mark.long\n@pytest.mark.parametrize('n', range(300))\ndef test_long(n): pass\n"
        "def test_short(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=2", "--rootdir", str(tmp_path)]
    ini = ["-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LONG_TESTS_ONE_IN": "3"}
    done = subprocess.run([*command, *ini], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    passed = int(done.stdout.partition(" passed")[0].split()[-1])
    assert 50 < passed < 170
    assert f"NOT RUN: {301 - passed} long tests of 1 files" in done.stdout
