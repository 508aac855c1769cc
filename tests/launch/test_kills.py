"""A few of the kills of ``make kills``, the same ones each time."""

from __future__ import annotations

import pytest

from tests import kills


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(capsys):
    assert kills.main(["--on", "local", "--kills", "2", "--runs", "2", "--seed", "12"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("This machine: 2 kills")
    assert "0 rows lost, 0 measured twice, 0 processes left" in output
