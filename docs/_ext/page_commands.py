"""Commands on pages: which there are, and the directive ``command``, which runs them and shows what they print.

A page's ``command`` blocks are executed in the order of the page, in a folder of their own with nothing but
``results`` in it, while the site is built; one that ends with another exit code than its block says stops the build.
Outputs are kept under ``build/docs/commands`` until the commands of the page or the code change. With
``PAGES_ONE_IN=3`` in the environment one page in three is executed, others with every commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from bench.core.files import replace_file
from tests.commit_draws import is_drawn, read_commit

ROOT = Path(__file__).resolve().parents[2]
CACHE_FOLDER = ROOT / "build" / "docs" / "commands"
EXAMPLES = ROOT / "docs" / "examples"
NUM_PROCESSES = 2
TIME_LIMIT_S = 600
NOT_EXECUTED = "not executed:"
"""In the info string of a code block, with the reason: its commands are not run by any test."""
NOT_DRAWN = "(not executed in this build)"
"""In the place of what commands print, on a page that the build does not execute."""

BLOCK_PATTERN = re.compile(
    r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
COMMAND_PATTERN = re.compile(r"^(?:\$ )?((?:python -m bench(?:\.|\s|$)|fsdp-bench\b|make\b|python -m tests\.).*)$")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a Markdown file."""

    info: str
    body: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_directive(self) -> bool:
        """Whether the build executes it."""
        return self.info == "{command}"

    @property
    def reason_not_executed(self) -> str | None:
        """Why nobody executes it, where its info string says so."""
        _, mark, reason = self.info.partition(NOT_EXECUTED)
        return reason.strip() if mark else None

    @property
    def commands(self) -> list[str]:
        """Its command lines of this suite, continued lines joined, without comments."""
        lines = self.body.replace("\\\n", " ").splitlines()
        matches = [COMMAND_PATTERN.match(line.strip()) for line in lines]
        return [" ".join(match[1].partition(" # ")[0].split()) for match in matches if match]


def read_code_blocks(path: Path) -> list[CodeBlock]:
    """The fenced blocks of a Markdown file, in its order."""
    blocks = []
    for match in BLOCK_PATTERN.finditer(path.read_text(encoding="utf-8")):
        lines = match["body"].splitlines(keepends=True)
        options = {}
        while lines and (option := re.match(r":([\w-]+):[ \t]*(.*)$", lines[0])):
            options[option[1]] = option[2].strip()
            lines.pop(0)
        blocks.append(CodeBlock(match["info"].strip(), "".join(lines), options))
    return blocks


def hash_files(*folders: str) -> str:
    """Hash of the names and contents of all files below folders of the repository."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def execute_page(path: Path, code_hash: str) -> list[str]:
    """What each ``command`` block of a page prints, from the cache where nothing has changed.

    Raises
    ------
    ExtensionError
        If a command ends with another exit code than its block says, or does not print what the block says.
    """
    blocks = [block for block in read_code_blocks(path) if block.is_directive]
    key = json.dumps([code_hash, [[block.commands, block.options] for block in blocks]])
    cache_file = CACHE_FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if cache_file.is_file():
        return json.loads(cache_file.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "results").symlink_to(ROOT / "results")
        outputs = [_execute_block(block, Path(folder), path) for block in blocks]
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(cache_file, json.dumps(outputs))  # pages are executed at once, and some have the same commands
    return outputs


def _execute_block(block: CodeBlock, folder: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    output = ""
    for name in block.options.get("files", "").split():
        shutil.copy(EXAMPLES / name, folder)
    if not block.commands:
        raise ExtensionError(f"{path.name}: a command block without a command")
    for command in block.commands:
        words = shlex.split(command)
        words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", "bench", *words[1:]]
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        expected_codes = [int(code) for code in block.options.get("exit-code", "0").split()]
        if done.returncode not in expected_codes or block.options.get("prints", "") not in done.stdout:
            raise ExtensionError(f"{path.name}: {command} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        output += done.stdout
    return output.replace(f"{folder}/", "").replace(f"{ROOT}/", "")


class CommandDirective(SphinxDirective):
    """``{command}``: the commands as they are typed, and below them what they print.

    ``lines`` shows a part of the output (``1-12``, ``-5`` the first, ``20-`` the rest), ``silent`` none of it;
    ``files`` are copied from ``docs/examples`` before; ``exit-code`` is the one that the commands must end with, or
    those, where it depends on the machine; ``prints`` is a text that must be in the output.
    """

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "exit-code": directives.unchanged_required,
        "files": directives.unchanged_required,
        "lines": directives.unchanged_required,
        "prints": directives.unchanged_required,
        "silent": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Show the block's commands with the output that `execute_pages` got of them."""
        index = self.env.temp_data.setdefault("num_command_blocks", 0)
        self.env.temp_data["num_command_blocks"] = index + 1
        output = self.env.app.page_outputs[self.env.docname][index]
        self.env.note_reread()
        typed_text = "\n".join(f"$ {line}" if COMMAND_PATTERN.match(line) else line for line in self.content)
        typed = nodes.literal_block(typed_text, typed_text, language="console")
        typed["classes"].append("command")
        if "silent" in self.options:
            return [typed]
        shown_text = _select_lines(output.rstrip("\n"), self.options.get("lines", ""))
        shown = nodes.literal_block(shown_text, shown_text, language="text")
        return [typed, nodes.container("", shown, classes=["command-output"])]


def _select_lines(text: str, span: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    if span and text != NOT_DRAWN:
        first, _, last = span.partition("-")
        lines = lines[int(first or 1) - 1 : int(last) if last else None]
    return "\n".join(lines)


def draw_pages(names: Sequence[str]) -> list[str]:
    """All pages, or the share of them that the environment asks for, which this commit draws."""
    num_shares = int(os.environ.get("PAGES_ONE_IN", "1"))
    commit = read_commit()
    drawn = [name for name in names if is_drawn(name, commit, num_shares)]
    if left_out := sorted({*names} - {*drawn}):
        print(f"NOT RUN: {', '.join(left_out)}: other commits draw these pages, and `make docs` alone runs all")
    return drawn


def execute_pages(app: Sphinx, _env: Any, docnames: Iterable[str]) -> None:
    """Execute the commands of all pages that are drawn, two pages at a time."""
    code_hash = hash_files("bench", "conf")
    paths = {name: Path(app.env.doc2path(name)) for name in sorted({*docnames, *app.env.found_docs})}
    num_blocks = {name: sum(block.is_directive for block in read_code_blocks(path)) for name, path in paths.items()}
    drawn = draw_pages([name for name in paths if num_blocks[name]])
    with ThreadPoolExecutor(NUM_PROCESSES) as executor:
        outputs = executor.map(lambda name: execute_page(paths[name], code_hash), drawn)
        app.page_outputs = {  # type: ignore[attr-defined]
            **{name: [NOT_DRAWN] * num_blocks[name] for name in paths},
            **dict(zip(drawn, outputs, strict=True)),
        }


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("command", CommandDirective)
    app.connect("env-before-read-docs", execute_pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
