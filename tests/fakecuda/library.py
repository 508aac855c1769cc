"""Build the C++ part of the fake CUDA, once for each of its sources and versions of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
BUILD_FOLDER = HERE.parents[1] / "build" / "fakecuda"

SOURCES = tuple(sorted(HERE.glob("*.cpp")))
FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O1", "-w")


def build_library() -> Path:
    """The shared library, compiled now unless an earlier run compiled the same against the same torch.

    Raises
    ------
    subprocess.CalledProcessError
        If it cannot be compiled: what the compiler says goes to stderr.
    """
    folders = library_paths()
    torch_flags = [f"-I{path}" for path in include_paths()]
    torch_flags += [flag for path in folders for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    torch_flags += ["-lc10", "-ltorch_cpu"]
    key_parts = [torch.__version__, *FLAGS, *torch_flags, *(source.read_text() for source in SOURCES)]
    folder = BUILD_FOLDER / hashlib.sha256("\0".join(key_parts).encode()).hexdigest()[:16]
    library = folder / "libfakecuda.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that share the tests build it once
        if not library.exists():
            unfinished = folder / "unfinished.so"
            sources = [str(source) for source in SOURCES]
            subprocess.run(["g++", *FLAGS, *sources, *torch_flags, "-o", str(unfinished)], check=True)
            unfinished.rename(library)
    return library


def build_environment(library: Path, **variables: str) -> dict[str, str]:
    """Environment of a process whose torch has the fake CUDA from its start, as have the processes it starts."""
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(HERE.parents[1]), **variables}


def build_command_environment(library: Path, **variables: str) -> dict[str, str]:
    """Environment of a command all of whose processes are to see the fake CUDA: see `everywhere/sitecustomize.py`."""
    path = os.pathsep.join([str(HERE / "everywhere"), str(HERE.parents[1])])
    return build_environment(library, **variables, PYTHONPATH=path)


@pytest.fixture(scope="session")
def fake_cuda() -> Path:
    """The library that makes a CPU build of torch see CUDA devices where it is preloaded."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has a CUDA of its own")
    if shutil.which("g++") is None:
        pytest.skip("the fake CUDA is built with g++, which this machine lacks")
    return build_library()
