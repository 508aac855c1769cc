"""A machine on which nobody is logged in to wandb, or somebody is to the fake server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fake_wandb import API_KEY, FakeWandb


def remove_wandb_login(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A home without a login, and none of wandb's variables."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))


def add_wandb_login(monkeypatch: pytest.MonkeyPatch, server: FakeWandb | str) -> None:
    """A login at a server, given by its address if it is not there."""
    monkeypatch.setenv("WANDB_BASE_URL", server if isinstance(server, str) else server.url)
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
