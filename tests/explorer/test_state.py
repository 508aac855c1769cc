"""The state of the page: one question, as an address, as a form and as a command line."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import explore
from bench.core.errors import UsageError
from bench.explorer.controls import CONTROL_KEYS, CONTROLS, DEFAULT_SETTINGS
from bench.explorer.export import list_states, parse_grid
from bench.explorer.state import ExplorerState, find_refused_key, read_model_file
from tests.conftest import ROOT

MODEL_FILE = ROOT / "docs" / "examples" / "my-model.json"


def test_an_address_that_says_nothing_is_the_default_question() -> None:
    state = ExplorerState.from_address("")
    assert dict(state.settings) == dict(DEFAULT_SETTINGS)
    assert state.command == ("python -m bench.predict model=llama3_8b hardware=h100_80gb gpus=8 sequence_length=4096")


@pytest.mark.parametrize(
    "query",
    [
        "?gpus=16&model=t5_11b&strategy=fsdp&strategy.sharding_factor=8",
        "?price=aws_p5&tokens=300e9&pue=1.2",
        "?further=model.num_layers%3D16+optimizer%3Dlion",
        "?hardware=like%3Aa100_80gb&hardware.memory_gb=96",
        "?network=aws_p5,nvlink4%2Bethernet_100&model.block_lists=[a.b,c]",
    ],
)
def test_address_and_command_line_say_the_same_and_lose_nothing(query: str) -> None:
    state = ExplorerState.from_address(query)
    assert ExplorerState.from_address(state.address) == state
    words = shlex.split(state.command)[3:]
    assert ExplorerState.from_settings(dict(word.split("=", 1) for word in words)) == state
    assert "further" not in dict(state.settings)


@given(st.dictionaries(st.from_regex(r"\+?[a-z][a-z_.]{0,12}", fullmatch=True), st.text(max_size=12), max_size=5))
def test_any_settings_come_back_from_their_address_or_are_refused_in_a_sentence(settings: dict[str, str]) -> None:
    try:
        state = ExplorerState.from_settings({key: value.strip() for key, value in settings.items()})
    except UsageError:
        return
    assert ExplorerState.from_address(state.address) == state
    assert shlex.split(state.command)[3:] == state.overrides


@given(st.text(max_size=60))
def test_whatever_an_address_says_is_a_state_or_one_sentence(query: str) -> None:
    with contextlib.suppress(UsageError):
        assert ExplorerState.from_address(query).address.startswith("?")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?model.family=os.path", r"model\.family=os\.path is not valid"),
        ("?strategy.name=a.b", r"strategy\.name=a\.b is not valid"),
        ("?top=all", "top is not a setting of the page"),
        ("?mode=measure", "mode is not a setting of the page"),
        ("?further=abc", "further=abc is not valid: choose key=value"),
        ("?further=%22abc", "further is not valid"),
        ("?gpus=" + "8" * 20_000, "at most 16000 characters"),
    ],
)
def test_what_no_address_may_ask_for_is_refused(query: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ExplorerState.from_address(query)


def test_a_refusal_is_shown_beside_its_control() -> None:
    settings = (("model.num_layers", "x"), ("gpus", "8"))
    assert find_refused_key("gpus=9 is not valid: choose 8.", settings) == "gpus"
    assert (
        find_refused_key("strategy.sharding_factor=3 is not valid: choose 1.", settings) == "strategy.sharding_factor"
    )
    assert find_refused_key("hardware.memory_gb=-1 is not valid: choose 1.", ()) == "hardware"
    assert find_refused_key("model.num_layers=x is not valid: choose 1.", settings) == "further"
    assert find_refused_key("Something else.", settings) == "further"


def test_a_config_json_becomes_settings_that_need_no_file() -> None:
    settings = read_model_file("My model.json", MODEL_FILE.read_text())
    assert settings["model"] == "hf"
    assert settings["model.name"] == "My_model"
    assert settings["model.hidden_size"] == str(json.loads(MODEL_FILE.read_text())["hidden_size"])
    state = ExplorerState.from_settings(settings)
    assert ExplorerState.from_address(state.address) == state


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"model_type": 3}', "{" * 2000])
def test_what_is_no_config_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"model=x\.json is not valid: choose a config\.json"):
        read_model_file("x.json", text)


def test_every_control_offers_what_its_setting_takes() -> None:
    assert len(set(CONTROL_KEYS)) == len(CONTROLS)
    for control in CONTROLS:
        choices = control.list_choices() if control.list_choices else ()
        assert control.key not in DEFAULT_SETTINGS or not choices or DEFAULT_SETTINGS[control.key] in choices


# --- The command.


def test_a_grid_is_read_and_bounded() -> None:
    choices = parse_grid(["gpus=4,8", "strategy=,ddp", "batch_size_per_gpu="])
    assert choices["gpus"] == ["4", "8"]
    assert choices["strategy"] == ["", "ddp"]
    states = list_states(choices)
    assert len(states) == 4
    assert len({state.address for state in states}) == 4
    with pytest.raises(UsageError, match=r"The grid has .* questions: choose values that make at most"):
        parse_grid(
            [f"gpus={','.join(map(str, range(1, 200)))}", f"batch_size_per_gpu={','.join(map(str, range(1, 99)))}"]
        )
    with pytest.raises(UsageError, match="setting=optimizer=lion is not valid: choose key=value with one of model"):
        parse_grid(["optimizer=lion"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "-1"], r"--port=-1 is not valid: choose a whole number of at least 0\."),
        (["--port", "70000"], r"--port=70000 is not valid: choose a whole number of at most 65535\."),
        (["--host", "203.0.113.7"], r"--host=203\.0\.113\.7 is not valid: choose an address of this machine"),
        (["export"], "export is not valid here: choose export FOLDER key=value, or nothing"),
        (["serve", "x"], "serve x is not valid here: choose export FOLDER key=value, or nothing"),
        (["export", "FOLDER", "colour=red"], "setting=colour=red is not valid: choose key=value with one of"),
        (["export", str(ROOT / "docs")], r"FOLDER=.*docs is not valid: choose a folder that is new"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_one_sentence_and_nothing_starts(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert explore.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.match(sentence, printed.err)
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_dash_the_command_says_what_to_install() -> None:
    script = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'dash' else find(name, *rest)\n"
        "from bench import explore; sys.exit(explore.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == 'bench.explore needs Dash, which is not installed: pip install -e ".[explore]".\n'
