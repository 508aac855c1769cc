"""`results/README.md` says what the schema says. `python -m tests.records.test_results_readme` rewrites its tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.config.groups import list_config_groups
from bench.records.checking import upgrade_record
from bench.records.schema import COLUMNS, FORMAT_VERSION, NESTED_PARTS, STATUSES
from bench.records.store import validate_record
from tests.conftest import compose_run_config
from tests.finetune.test_finetune import needs_peft

README = Path(__file__).resolve().parents[2] / "results" / "README.md"


def section(text: str, name: str) -> str:
    """What lies between the marks of a generated table."""
    found = re.search(rf"<!-- {name}:.*?-->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found, f"results/README.md has lost the marks of its table of {name}"
    return found[1]


def rows(table: str) -> list[tuple[str, ...]]:
    """The cells of a Markdown table, without its two head lines."""
    lines = [line.strip().strip("|").split("|") for line in table.strip().splitlines()]
    return [tuple(cell.strip() for cell in cells) for cells in lines[2:]]


def generated() -> dict[str, str]:
    columns = [f"| `{column.name}` | {column.dtype} | {column.meaning} |\n" for column in COLUMNS]
    nested = [f"| `{name}` | {meaning} |\n" for name, meaning in NESTED_PARTS.items()]
    return {
        "columns": "".join(["| column | type | meaning |\n", "|---|---|---|\n", *columns]),
        "nested": "".join(["| part | meaning |\n", "|---|---|\n", *nested]),
    }


def rewrite() -> None:
    text = README.read_text()
    for name, table in generated().items():
        mark = re.search(rf"<!-- {name}:.*?-->\n", text)
        assert mark
        text = text[: mark.end()] + table + text[text.index("<!-- end -->", mark.end()) :]
    README.write_text(text)


def test_every_column_is_documented_as_the_schema_has_it() -> None:
    documented = rows(section(README.read_text(), "columns"))
    assert documented == [(f"`{column.name}`", column.dtype, column.meaning) for column in COLUMNS]


def test_every_nested_part_is_documented_as_the_schema_has_it() -> None:
    documented = rows(section(README.read_text(), "nested"))
    assert documented == [(f"`{name}`", meaning) for name, meaning in NESTED_PARTS.items()]


MEANINGS = {column.name: column.meaning for column in COLUMNS}


def test_every_precision_is_named() -> None:
    named = MEANINGS["precision"].partition("(")[2].rstrip(")").split(", ")
    assert sorted(named) == sorted(list_config_groups()["precision"])


@needs_peft
def test_what_is_trained_is_explained_where_it_is_told() -> None:
    run = compose_run_config("model=gpt_tiny", "strategy=fsdp", "gpus=2", "finetune=lora")
    assert run.effective_strategy in MEANINGS["effective_strategy"]


def test_the_statuses_are_documented() -> None:
    table = README.read_text().partition("## Status")[2].partition("##")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(STATUSES)


def test_the_example_is_a_record_of_the_current_format() -> None:
    example = json.loads(README.read_text().partition("```json")[2].partition("```")[0])
    validate_record(upgrade_record(example))
    assert example["format"] == FORMAT_VERSION
    assert f"this is version {FORMAT_VERSION}" in README.read_text()


if __name__ == "__main__":
    rewrite()
