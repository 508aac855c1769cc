"""``python -m bench.predict device NAME``: a description from a few numbers, never over another one."""

from __future__ import annotations

import pytest

from bench import predict
from bench.advice.own_device import DeviceNumbers, find_nearest_device
from bench.config.groups import list_config_groups
from bench.core.option_files import OWN_CONF_VARIABLE
from bench.hardware.hardware_file import read_hardware_file
from tests.conftest import compose_run_config

NUMBERS = ("memory_gb=96", "bf16_tflops=400", "bandwidth=2400")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(OWN_CONF_VARIABLE, raising=False)
    return tmp_path


def test_a_device_is_written_and_used(own_folder, capsys):
    assert predict.main(["device", "mine", *NUMBERS, "power_w=350", "fp8_tflops=1e3", "like=h100_80gb"]) == 0
    assert "hardware=hardware/mine.yaml" in capsys.readouterr().out
    hardware = read_hardware_file(own_folder / "hardware" / "mine.yaml")
    assert (hardware.name, hardware.memory_gb, hardware.memory_bandwidth_gb_s, hardware.power_w) == (
        "mine",
        96,
        2400,
        350,
    )
    assert hardware.peak_tflops == pytest.approx(
        {"fp32": 67 * 400 / 989, "tf32": 200, "bf16": 400, "fp16": 400, "fp8": 1000}
    )
    assert hardware.speeds is not None
    assert hardware.speeds.outside.device_gib == pytest.approx(79.11 * 96 / 80)
    assert hardware.sources["peak_tflops.fp32"].startswith("derived: h100_80gb's")
    assert compose_run_config("hardware=hardware/mine.yaml").hardware == hardware


def test_a_device_in_a_folder_of_ones_own_has_a_name(own_folder, monkeypatch, capsys):
    monkeypatch.setenv(OWN_CONF_VARIABLE, str(own_folder))
    assert predict.main(["device", "mine", *NUMBERS]) == 0
    assert capsys.readouterr().out.endswith("Use it: hardware=mine\n")
    list_config_groups.cache_clear()
    try:
        assert compose_run_config("hardware=mine").hardware.memory_gb == 96
        assert compose_run_config("hardware=like:mine").hardware.memory_gb == 96
    finally:
        list_config_groups.cache_clear()


def test_nothing_is_written_over_nor_where_it_is_printed(own_folder, capsys):
    assert predict.main(["device", "mine", *NUMBERS, "--print"]) == 0
    assert "name: mine" in capsys.readouterr().out
    assert list(own_folder.iterdir()) == []
    assert predict.main(["device", "mine", *NUMBERS]) == 0
    before = (own_folder / "hardware" / "mine.yaml").read_text()
    assert predict.main(["device", "mine", "memory_gb=1", "bf16_tflops=1", "bandwidth=1"]) == 2
    assert "none is overwritten" in capsys.readouterr().err
    assert (own_folder / "hardware" / "mine.yaml").read_text() == before
    assert len(list((own_folder / "hardware").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("mine", *NUMBERS[1:]), "device.memory_gb has no value: give one on the command line"),
        (("mine", *NUMBERS, "memory_gb=much"), "device.memory_gb=much is not valid: choose a number of GB"),
        (("mine", *NUMBERS, "colour=red"), "device.colour is not a field of device: choose memory_gb, bf16_tflops"),
        (("mine", *NUMBERS, "like=abacus"), "hardware.like=abacus is not valid: choose a10, "),
        (("mine", *NUMBERS, "power_w=-1"), "device.power_w=-1 is not valid: choose a number of W"),
        (("mine", "96"), "cannot read '96': write key=value, for example memory_gb=96."),
        (("h200", *NUMBERS), "NAME=h200 is not valid: choose a name that no description has yet."),
        (("../mine", *NUMBERS), "NAME=../mine is not valid: choose letters, digits and _, a letter first."),
    ],
)
def test_a_mistake_earns_a_sentence(arguments, sentence, own_folder, capsys):
    assert predict.main(["device", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(sentence)
    assert captured.err.count("\n") == 1
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("peak", "bandwidth", "nearest"), [(312, 2000, "a100_80gb"), (1300, 5300, "mi300x"), (160, 1000, "rtx_4090")]
)
def test_a_device_is_like_the_nearest(peak, bandwidth, nearest):
    assert find_nearest_device(DeviceNumbers(24, peak, bandwidth)) == nearest
