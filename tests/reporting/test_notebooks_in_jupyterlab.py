"""A notebook opened in the real JupyterLab, in a real browser: its cells run, and the figures are there."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.conftest import ROOT, needs

pytestmark = [pytest.mark.long, pytest.mark.slow, needs("jupyterlab")]

TIMEOUT_MS = 120_000


@pytest.fixture
def jupyterlab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab whose folder is a copy of ``analysis`` beside the committed results."""
    shutil.copytree(ROOT / "analysis", tmp_path / "work" / "analysis")
    (tmp_path / "work" / "results").symlink_to(ROOT / "results")
    every_cell = (
        tmp_path / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    )
    every_cell.parent.mkdir(parents=True)
    every_cell.write_text('{"windowingMode": "none"}')  # cells out of sight are part of the page, too
    own = {
        name: str(tmp_path / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR")
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = (
        "--no-browser",
        "--core-mode",  # else it asks whether to build the extensions of other packages
        "--LabApp.news_url=None",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--IdentityProvider.token=only-here",
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *settings, f"--ServerApp.root_dir={tmp_path / 'work'}"],
            env={**os.environ, **own, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api?token=only-here"):
                break
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("name", ["your_own_rows"])
def test_cells_run_and_draw(jupyterlab: str, name: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"{jupyterlab}/lab/tree/analysis/{name}.ipynb?token=only-here&reset")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".jp-RenderedImage img").first.wait_for()
    page.locator(".jp-RenderedHTMLCommon figure img").first.wait_for()  # the suite's figures, of the last cell
    assert page.locator(".jp-RenderedImage img").count() >= 1
    assert page.locator(".jp-RenderedHTMLCommon table").count() >= 2
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    page.close()
