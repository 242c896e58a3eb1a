"""Makes the pictures of docs/screenshots/: a plan, two runs side by side, a served model, and the
load of experts.

`make screenshots` runs this.  It trains three small language models for some minutes, and needs
Chromium and playwright (`.venv/bin/pip install playwright`).
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.metrics.plots import RunPlots

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "screenshots"
MESHLOOM = (sys.executable, "-m", "scripts.meshloom")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 1200
PLAN = (
    "plan", "--gin_file=configs/runs/lm1b_mtf.gin", "--gin_file=configs/models/mtf_lm_4.90b.gin",
    "--gin_file=layouts/data_and_model_parallel.gin",
    "--gin_param=Layout.mesh='data:16,model:32'", "--topology=v2:16x16", "--analytic",
)  # fmt: skip
TRAIN = (
    "train", "--gin_file=configs/runs/quickstart.gin", "--gin_param=Run.steps=100",
    "--gin_param=Run.evaluate_every=20",
)  # fmt: skip
OPTIMIZERS = {"adamw": (), "muon": ("--gin_param=Run.optimizer=@Muon()",)}
EXPERTS = "--gin_file=configs/models/tiny_moe.gin"
PROMPT = "Return the"


def meshloom(folder: Path, *arguments: str) -> None:
    subprocess.run([*MESHLOOM, *arguments], cwd=folder, check=True, stdout=sys.stderr)


@contextlib.contextmanager
def served(model_dir: Path) -> Iterator[str]:
    """Serves a model, and yields the address of its page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*MESHLOOM, "serve", f"--model_dir={model_dir}", f"--port={port}"]
    with subprocess.Popen(command) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()


def take(browser: Any, name: str, address: str, height: int) -> None:
    """Saves what a window shows of a page."""
    page = browser.new_page(viewport={"width": WIDTH, "height": height})
    page.goto(address)
    if name == "serve":
        page.wait_for_selector("#send[aria-disabled=false]")
        page.fill("textarea", PROMPT)
        page.click("#send")
        page.wait_for_timeout(2000)
        page.wait_for_selector("#send[aria-disabled=false]")
    page.screenshot(path=PICTURES / f"{name}.png")
    page.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        meshloom(folder, *PLAN, "--html=plan.html")
        for name, settings in OPTIMIZERS.items():
            meshloom(folder, *TRAIN, *settings, f"--model_dir={name}")
        meshloom(folder, "report", *OPTIMIZERS)
        meshloom(folder, *TRAIN, EXPERTS, "--model_dir=experts")
        RunPlots(folder / "experts").save(PICTURES, "load")
        program = next(filter(None, map(shutil.which, CHROMIUM)), None)
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        stack.callback(browser.close)
        take(browser, "plan", (folder / "plan.html").as_uri(), 900)
        take(browser, "report", (folder / "report.html").as_uri(), 900)
        take(browser, "serve", stack.enter_context(served(folder / "adamw")), 640)


if __name__ == "__main__":
    main()
