"""`meshloom serve` as a process of its own: it starts, answers, and stops on SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from scripts.benchmarks.serve import announced_port
from tests.scripts.commands.serving.client import WAIT_S, Client
from tests.scripts.conftest import Place
from tests.toys import ROOT


def test_sigterm_ends_the_server_after_the_requests_that_run(trained: Place) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.meshloom", "serve", trained.model_dir, "--port=0",
         "--slots=1", "--max_length=7", "--simulate_devices=1"],
        cwd=ROOT, env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache"),
             "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        text=True, stderr=subprocess.PIPE,
    ) as process, ThreadPoolExecutor(1) as pool:  # fmt: skip
        try:
            client = Client(announced_port(process))
            assert client.get("/health").json == {"status": "ok"}
            running = pool.submit(
                client.post, prompt="lo", n=128, max_tokens=4, min_tokens=4, seed=1
            )
            until = time.monotonic() + WAIT_S
            while not client.metric("meshloom_new_tokens_total"):
                assert time.monotonic() < until
            assert not running.done()
            process.send_signal(signal.SIGTERM)
            while client.get("/health").status == 200:
                assert time.monotonic() < until
            assert client.post(prompt="lo").status == 503
            answer = running.result()
            assert answer.status == 200
            assert answer.json["usage"]["completion_tokens"] == 128 * 4
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
