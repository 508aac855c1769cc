"""Every command on a page is executed: here, on the test cluster, or by the build of the site (``{command}`` blocks).

A page's commands run in its order, in a folder of their own, in this process, which has torch imported. ``make`` only
says what it would do: the targets are those that run these tests. A block that says ``not executed: REASON`` is left
out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import shlex
import subprocess
from pathlib import Path

import pytest
from page_commands import CodeBlock, read_code_blocks

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGES = sorted(
    path
    for folder in (".", "docs", "results", "conf", "slurm", "analysis")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    if ".venv" not in path.parts
)

ON_CLUSTER = "cluster=slurm_test"

MAX_BLOCKS_NOT_EXECUTED = 12


def list_executed_blocks(page: Path) -> list[CodeBlock]:
    """Blocks of a page that the build of the site does not execute, and that may be executed."""
    return [
        block
        for block in read_code_blocks(page)
        if block.commands and not block.is_directive and block.reason_not_executed is None
    ]


def is_for_cluster(block: CodeBlock) -> bool:
    return any(ON_CLUSTER in command for command in block.commands)


def list_pages(*, for_cluster: bool) -> list[Path]:
    return [page for page in PAGES if any(is_for_cluster(block) is for_cluster for block in list_executed_blocks(page))]


def execute(command: str) -> None:
    """Carry out one command as it is written."""
    words = shlex.split(command)
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return
    module, arguments = (words[2], words[3:]) if words[0] == "python" else (f"bench.{words[1]}", words[2:])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = importlib.import_module(module).main(arguments)
    assert code == 0, f"{command} ended with {code}: {output.getvalue()[-2000:]}"


def execute_page(page: Path, *, for_cluster: bool) -> None:
    commands = [
        command
        for block in list_executed_blocks(page)
        if is_for_cluster(block) is for_cluster
        for command in block.commands
    ]
    for command in dict.fromkeys(commands):
        execute(command)


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with ``results`` in it, as the build of the site has it."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("page", list_pages(for_cluster=False), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_can_be_executed(page: Path, page_folder: Path) -> None:
    execute_page(page, for_cluster=False)


@pytest.mark.long
@pytest.mark.parametrize("page", list_pages(for_cluster=True), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_for_a_cluster_can_be_executed_on_the_test_cluster(slurm, page: Path, page_folder: Path) -> None:
    execute_page(page, for_cluster=True)


def test_few_blocks_are_not_executed_and_each_says_why() -> None:
    reasons = [block.reason_not_executed for page in PAGES for block in read_code_blocks(page)]
    given = [reason for reason in reasons if reason is not None]
    assert all(given)
    assert 0 < len(given) <= MAX_BLOCKS_NOT_EXECUTED


def test_commands_and_prose_are_told_apart() -> None:
    block = CodeBlock(
        "bash", "$ python -m bench.sweep gpus=2 \\\n  model=t5_tiny   # small\n# a comment\ncd folder\nmake test\n"
    )
    assert block.commands == ["python -m bench.sweep gpus=2 model=t5_tiny", "make test"]


def test_a_command_that_fails_is_noticed(page_folder: Path) -> None:
    with pytest.raises(AssertionError, match="gpus=0"):
        execute("python -m bench.sweep gpus=0")
