"""The wheel: away from the checkout it has its configuration, rows and notebooks, and every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as listing
from bench.core import installation

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that the wheel is installed in, for PYTHONPATH; what it depends on is there for the tests."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", f"--target={folder / 'site'}", wheel], check=True)
    return folder / "site"


def run_installed(installed: Path, folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "BENCH_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_with_a_main_is_a_command():
    doors = {path.stem for path in (ROOT / "bench").glob("*.py") if not path.stem.startswith("_")}
    packages = {path.parent.name for path in (ROOT / "bench").glob("*/__main__.py")}
    assert set(listing.COMMANDS) == doors | packages


def test_a_door_is_one_screen():
    """The top of bench holds doors only: they parse, call one function of a package, and print."""
    for path in (ROOT / "bench").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


@pytest.mark.long
@pytest.mark.slow
def test_commands_run_from_the_wheel(installed, tmp_path):
    script = str(installed / "bin" / "fsdp-bench")
    listed = run_installed(installed, tmp_path, sys.executable, script)
    assert all(f"\n  {name} " in listed for name in listing.COMMANDS)
    as_module = run_installed(installed, tmp_path, sys.executable, "-m", "bench")
    assert as_module == listed.replace("usage: fsdp-bench", "usage: python -m bench")
    usage = run_installed(installed, tmp_path, sys.executable, script, "sweep", "--help")
    assert usage.startswith("usage: fsdp-bench sweep ")
    run_installed(
        installed, tmp_path, sys.executable, script, "sweep", "model=gpt_tiny", "strategy=ddp", "gpus=2", "check=false"
    )
    (row_path,) = (tmp_path / "runs").glob("*/0.json")
    row = json.loads(row_path.read_text())
    assert (row["status"], row["git_sha"]) == ("ok", None)
    assert (tmp_path / "runs" / "report" / "index.html").exists()
    predicted = run_installed(
        installed, tmp_path, sys.executable, "-m", "bench.predict", "model=gpt_tiny", "gpus=2", "hardware=a100_80gb"
    )
    assert "Use " in predicted
    run_installed(installed, tmp_path, sys.executable, "-m", "bench.notebooks", "prefetch")
    assert (tmp_path / "build" / "notebooks" / "prefetch.html").exists()


def test_the_hint_names_what_was_installed(installed, tmp_path):
    script = "from bench.core.installation import format_install_command as f; print(f('peft', 'fp8'))"
    (wheel,) = installed.parent.glob("*.whl")
    hint = run_installed(installed, tmp_path, sys.executable, "-c", script)
    assert hint.strip() == f'pip install "{wheel}[peft,fp8]"'
    wheel.rename(wheel.with_suffix(".moved"))
    try:
        hint = run_installed(installed, tmp_path, sys.executable, "-c", script)
    finally:
        wheel.with_suffix(".moved").rename(wheel)
    assert hint.startswith('pip install "peft')
    assert '"torchao' in hint


def test_the_hint_in_a_checkout_names_it_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert installation.format_install_command("peft") == 'pip install -e ".[peft]"'
    monkeypatch.chdir(tmp_path)
    assert installation.format_install_command("peft") == f'pip install -e "{ROOT}[peft]"'
