"""What is spelled almost right is suggested, in options, fields, values and commands."""

from __future__ import annotations

import pytest

from bench import __main__ as commands
from bench import advise, compare, predict, sweep
from bench.core.errors import invalid_value_error, suggest_nearest, unknown_field_error


@pytest.mark.parametrize(
    ("typed", "choices", "nearest"),
    [
        ("t5_smal", ["t5_tiny", "t5_small", "gpt_tiny"], "t5_small"),
        ("T5_TINY", ["t5_tiny", "t5_small"], "t5_tiny"),
        ("sharding_factor", ["model.num_layers", "strategy.sharding_factor"], "strategy.sharding_factor"),
        ("strategy.sharding_factr", ["strategy.sharding_factor", "strategy.cpu_offload"], "strategy.sharding_factor"),
        ("modle", ["mode", "model"], "model"),
        ("xyz", ["t5_tiny", "t5_small"], None),
    ],
)
def test_the_nearest_choice_is_suggested_and_nothing_where_none_is_near(typed, choices, nearest):
    assert suggest_nearest(typed, choices) == ("" if nearest is None else f" (did you mean {nearest}?)")


def test_suggestions_are_part_of_the_one_sentence():
    error = invalid_value_error("model", "t5_tny", ["t5_tiny", "gpt_tiny"])
    assert str(error) == "model=t5_tny is not valid: choose t5_tiny, gpt_tiny (did you mean t5_tiny?)."
    assert "did you mean" not in str(invalid_value_error("gpus", 0, "a whole number of at least 1"))
    assert str(unknown_field_error("gpu", ["gpus", "seed"])) == (
        "gpu is not a field: choose gpus, seed (did you mean gpus?)."
    )


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("model=t5_tny", "t5_tiny"),
        ("hardware=h100_80g", "h100_80gb"),
        ("sweep=defalt", "default"),
        ("gpu=4", "gpus"),
        ("sharding_factor=2", "strategy.sharding_factor"),
        ("strategy.sharding_factr=2", "strategy.sharding_factor"),
        ("mode=predct", "predict"),
        ("serch=largest_batch", "search"),
    ],
)
def test_what_is_mistyped_to_a_sweep_is_suggested(typed, suggestion, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sweep.main([typed]) == 2
    assert f"(did you mean {suggestion}?)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [predict, advise])
def test_a_mistyped_name_is_said_before_what_is_missing(command, capsys):
    assert command.main(["modle=gpt_tiny", "gpus=2"]) == 2
    assert "modle is not a field" in capsys.readouterr().err


def test_commands_and_options_are_suggested_too(capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["swep"])
    assert end.value.code == 2
    assert "(did you mean sweep?)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        compare.main(["a", "b", "--treshold", "2"])
    assert end.value.code == 2
    assert "(did you mean --threshold?)" in capsys.readouterr().err


def test_a_prediction_without_a_model_says_what_to_give(capsys):
    assert predict.main(["gpus=8", "hardware=a100_80gb"]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("model is not given: choose model=NAME, one of ")
    assert "llama3_8b" in refusal
    assert "python -m bench.predict model=llama3_8b gpus=8 hardware=h100_80gb" in refusal
