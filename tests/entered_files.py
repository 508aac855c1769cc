"""How many files of the suite one answer enters: one run, one prediction, a report of one row.

``python -m tests.entered_files`` runs each command with a profile hook in every process of it, and lists the files of
``bench`` in which a function was called, each with how many. What runs while modules are imported does not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]

HOOK = """
import os, sys, threading
target, root = os.environ.get("ENTERED_FILE"), os.environ.get("ENTERED_ROOT")
if target:
    descriptor, seen = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT), set()
    def is_importing(frame):
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
                return True
            frame = frame.f_back
        return False
    def note_call(frame, event, argument):
        code = frame.f_code
        if event != "call" or code in seen:
            return
        if not code.co_filename.startswith(root) or not code.co_filename.endswith(".py"):
            seen.add(code)
        elif code.co_name != "<module>" and not is_importing(frame):
            seen.add(code)
            os.write(descriptor, f"{code.co_filename}\\t{code.co_qualname}\\n".encode())
    def start():
        sys.setprofile(note_call)
        threading.setprofile(note_call)
    start()
    os.register_at_fork(after_in_child=start)
"""

COMMANDS = {
    "run": ("bench.run", "strategy=ddp", "model=gpt_tiny", "gpus=2", "store={store}"),
    "predict": (
        *("bench.predict", "model=t5_2b", "strategy=fsdp", "strategy.sharding_factor=8", "precision=bf16"),
        *("activation_checkpointing=full", "batch_size_per_gpu=8", "gpus=8", "hardware=a100_80gb"),
    ),
    "report": ("bench.report", "{store}", "--output", "{store}/page"),
}


def list_entered(folder: Path) -> dict[str, dict[str, int]]:
    """Of each command, the files of ``bench`` that it entered and how many functions of each.

    Parameters
    ----------
    folder: Path
        For the row that the run leaves and the report draws.
    """
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    entered: dict[str, dict[str, int]] = {}
    for name, (module, *arguments) in COMMANDS.items():
        calls = folder / f"{name}.calls"
        environment = {
            **os.environ,
            "ENTERED_FILE": str(calls),
            "ENTERED_ROOT": str(ROOT / "bench"),
            "PYTHONPATH": f"{folder / 'hook'}:{ROOT}",
            "BENCH_CACHE": str(folder / "cache"),
        }
        command = [sys.executable, "-m", module, *(text.format(store=folder / "store") for text in arguments)]
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        functions: defaultdict[str, set[str]] = defaultdict(set)
        for line in calls.read_text().splitlines():
            file, _, function = line.partition("\t")
            functions[str(Path(file).relative_to(ROOT))].add(function)
        entered[name] = {file: len(names) for file, names in sorted(functions.items())}
    return entered


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary_folder:
        for command_name, files in list_entered(Path(temporary_folder)).items():
            print(f"{command_name}: {len(files)} files, {sum(files.values())} functions")
            for file_name, number in files.items():
                print(f"  {number:4} {file_name}")
