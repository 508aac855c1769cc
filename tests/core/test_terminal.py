"""Text that users typed and rows brought along is shown as it is."""

from __future__ import annotations

import io

from rich.table import Table

from bench import sweep
from bench.core.command_line import PlainConsole
from bench.core.errors import UsageError


def shown(thing: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=100).print(thing)
    return file.getvalue()


def test_markup_emoji_codes_and_control_characters_are_plain_text():
    assert shown("[/a] [red]x[/red] :smile:") == "[/a] [red]x[/red] :smile:\n"
    assert shown("a\x1b[31mb\udcffc\nd") == "a\\x1b[31mb\\udcffc\nd\n"
    table = Table()
    table.add_row("[/b]\x1b]0;title\a")
    assert "[/b]\\x1b]0;title\\x07" in shown(table)


def test_a_refusal_is_one_line_whatever_was_typed():
    assert str(UsageError("model=\x1b[2J\nx is not valid.")) == r"model=\x1b[2J\nx is not valid."


def test_a_name_that_looks_like_markup_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(["model=t5_tiny", "model.name='[/a]'", "hardware=a100_80gb", "mode=predict", "dry_run=true"]) == 0
    assert "[/a]" in capsys.readouterr().out
