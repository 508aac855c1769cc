"""``bench.sweep --help`` names every option with its values."""

from __future__ import annotations

import pytest

from bench import sweep
from bench.config.documented_fields import MAIN_FILE, list_documented_fields
from bench.config.groups import list_config_groups
from bench.config.run_config import SECTION_NAMES, RunConfig
from bench.core.typed_config import get_field_types
from bench.planning.request import ExecutionOptions


@pytest.fixture(scope="module")
def help_text(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        import contextlib
        import io

        output = io.StringIO()
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as end:
            sweep.main(["--help"])
        assert end.value.code == 0
    return output.getvalue()


def test_every_field_of_a_run_and_of_a_sweep_is_named(help_text):
    derived = {"requested", "attempt"}
    fields = {*get_field_types(RunConfig), *get_field_types(ExecutionOptions)} - {*SECTION_NAMES} - derived
    assert len(fields) > 20
    assert [name for name in sorted(fields) if f"\n  {name} [" not in help_text] == []


def test_every_option_of_every_group_is_named(help_text):
    words = set(help_text.replace(",", " ").split())
    missing = [(group, option) for group, options in list_config_groups().items() for option in set(options) - words]
    assert missing == []


def test_values_and_fields_of_groups_are_said(help_text):
    flat = " ".join(help_text.split())
    for words in (
        "mode [measure]",
        "measure, rehearse, predict",
        "true, false, script",
        "strategy.sharding_factor",
        "model.num_layers",
        "hardware.memory_limit_gib",
        "cluster.partition (slurm",
        "tracker.time_limit_s",
    ):
        assert words in flat


def test_comments_of_several_lines_are_one():
    comments = {key: comment for key, _, comment in list_documented_fields(MAIN_FILE)}
    assert comments["mode"].endswith("(nothing runs, no GPU needed)")
    assert "measurement.steps" in comments
    assert not any(key.startswith(("hydra", "defaults")) for key in comments)
