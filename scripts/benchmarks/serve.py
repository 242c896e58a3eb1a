"""Measures throughput and latency of `meshloom serve`, compared with `meshloom decode`.

    meshloom bench serve --model_dir=runs/quickstart --json=bench.json

Each client sends a request as soon as its last one is answered.  In alternating rounds, the same
requests are decoded as the lines of a file, with as many in a batch as the server has slots.  Every
answer is compared with the text of `decode`.  Clients, server and decoder share the machine.
"""

import contextlib
import dataclasses
import http.client
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.errors import UserError
from scripts.benchmarks.rounds import CHECKOUT, MESHLOOM, Count, JsonFlags, cores, show

WORDS = ("Return", "the", "number", "of", "axes", "in", "an", "array", "or", "None", "if", "not")
TEMPERATURE = 0.8


class LoadCase(NamedTuple):
    """Holds the fields of a request."""

    prompt: str
    max_tokens: int
    min_tokens: int
    seed: int


class Answer(NamedTuple):
    """Holds what a client receives."""

    status: int
    text: str
    new_tokens: int
    seconds: float


def cases_of(count: int, *, full_length: bool = False) -> list[LoadCase]:
    """Draws `count` requests, all with different seeds."""
    rng = np.random.default_rng(0)

    def case(seed: int) -> LoadCase:
        prompt = " ".join(rng.choice(WORDS, rng.integers(1, 9)))
        max_tokens = int(rng.integers(8, 65))
        return LoadCase(prompt, max_tokens, max_tokens if full_length else 0, seed)

    return list(map(case, range(count)))


def send(connection: http.client.HTTPConnection, case: LoadCase) -> Answer:
    """Sends a request, and waits for its answer."""
    body = {**case._asdict(), "temperature": TEMPERATURE, "echo": True}
    start = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    seconds = time.perf_counter() - start
    if response.status != 200:
        return Answer(response.status, "", 0, seconds)
    new_tokens = answer["usage"]["completion_tokens"]
    return Answer(200, answer["choices"][0]["text"], new_tokens, seconds)


def load(port: int, cases: Sequence[LoadCase], clients: int) -> list[Answer]:
    """Sends all requests from `clients` clients, each over its own connection."""

    def client(first: int) -> list[Answer]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            return [send(connection, case) for case in cases[first::clients]]

    with ThreadPoolExecutor(clients) as pool:
        by_client = list(pool.map(client, range(clients)))
    return [by_client[index % clients][index // clients] for index in range(len(cases))]


@contextlib.contextmanager
def server(model_dir: str, *flags: str) -> Iterator[int]:
    """Runs `meshloom serve` in a process; yields its port, and stops it with SIGTERM at the end."""
    command = [*MESHLOOM, "serve", f"--model_dir={model_dir}", "--port=0", *flags]
    with subprocess.Popen(command, cwd=CHECKOUT, text=True, stderr=subprocess.PIPE) as process:
        try:
            port = announced_port(process)
            # The rest of its output is read, too: a full pipe would stop it.
            threading.Thread(target=process.communicate, daemon=True).start()
            yield port
            process.terminate()
            process.wait(timeout=300)
        finally:
            process.kill()
    if process.returncode:
        sys.exit(f"meshloom serve ended with {process.returncode}")


def announced_port(process: "subprocess.Popen[str]") -> int:
    """Waits until a server prints its address, and returns the port."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"^Serving .* at http://.*:(\d+)$", line):
            return int(match[1])
    sys.exit("".join(["meshloom serve failed:\n", *lines]))


@contextlib.contextmanager
def decoding(
    model_dir: Path, batch_sequences: int
) -> Iterator[Callable[[Sequence[LoadCase]], list[str]]]:
    """Restores the model; yields a function that decodes requests like `meshloom decode`."""
    from scripts.commands.decoding.decode import decoder_of
    from scripts.commands.shared_flags import CheckpointFlags, SearchFlags
    from scripts.commands.trained import trained_models

    with trained_models(CheckpointFlags(model_dir=model_dir)) as models:
        flags = SearchFlags(temperature=TEMPERATURE)
        decoder = decoder_of([models.restore(None)], flags, batch_sequences)

        def decode(cases: Sequence[LoadCase]) -> list[str]:
            requests = []
            for case in cases:
                of_case = case._asdict()
                prompt = of_case.pop("prompt")
                options = dataclasses.replace(decoder.options, **of_case)
                requests += dataclasses.replace(decoder, options=options).requests([prompt])
            return decoder.best_texts(requests)

        yield decode


def allowed(model_dir: Path, limits: Sequence[int]) -> list[int]:
    """Returns the limits, cut to the positions that the model has."""
    from scripts.commands.common import settings
    from trainer.run import Run

    positions = settings(model_dir, (), ()).make(Run).model.max_length
    longest = max(limits) if positions is None else positions - 1
    return list(dict.fromkeys(min(limit, longest) for limit in limits))


def metric(port: int, name: str) -> float:
    """Reads a metric that has no labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    return float(dict(line.rsplit(" ", 1) for line in text.splitlines())[name])


def summary(
    answers: Sequence[Answer], texts: Sequence[str], serve_s: float, decode_s: float
) -> dict[str, Any]:
    """Summarizes a round: lost and different answers, and the speed of both sides."""
    latencies = [answer.seconds for answer in answers if answer.status == 200]
    new_tokens = sum(answer.new_tokens for answer in answers)
    pairs = zip(answers, texts, strict=True)
    return {
        "lost": sum(answer.status != 200 for answer in answers),
        "different_from_decode": sum(a.status == 200 and a.text != text for a, text in pairs),
        "new_tokens": new_tokens,
        "serve_s": serve_s,
        "decode_s": decode_s,
        "serve_tokens_per_s": new_tokens / serve_s,
        "ratio_to_decode": decode_s / serve_s,
        "median_latency_s": float(np.median(latencies)),
        "p95_latency_s": float(np.quantile(latencies, 0.95)),
    }


class Flags(JsonFlags):
    """Compares a server under load with offline decoding of the same requests."""

    model_dir: Path
    """Model directory of a language model, such as runs/quickstart."""
    rounds: Count = 3
    """Rounds to measure."""
    clients: Count = 64
    """Number of concurrent clients."""
    requests: Count = 2000
    """Requests per round."""
    slots: Count = 32
    """Slots of the server, and batch size of `decode`."""
    max_length: tuple[int, ...] = (128, 2048)
    """Maximum tokens of prompt and continuation, if the model supports them."""
    full_length: bool = False
    """Decodes every text to its limit."""


def measure(flags: Flags, cases: Sequence[LoadCase], max_length: int) -> dict[str, Any]:
    """Runs rounds of load on a server, and of decoding the same requests."""
    rounds, model_dir, clients = [], flags.model_dir.resolve(), flags.clients
    limits = f"--slots={flags.slots}", f"--queue={clients}", f"--max_length={max_length}"
    with server(str(model_dir), *limits) as port, decoding(model_dir, flags.slots) as decode:
        decode(cases)  # compiles
        compiled = -1.0
        while compiled != (now := metric(port, "meshloom_compilations_total")):
            compiled = now
            load(port, cases, clients)  # the server compiles for the sizes that the requests need
        for _ in range(flags.rounds):
            start = time.perf_counter()
            answers = load(port, cases, clients)
            served = time.perf_counter()
            texts = decode(cases)
            end = time.perf_counter()
            rounds.append(summary(answers, texts, served - start, end - served))
        compilations = metric(port, "meshloom_compilations_total") - compiled
    medians = {name: float(np.median([each[name] for each in rounds])) for name in rounds[0]}
    sizes = {"clients": clients, "requests": len(cases), "slots": flags.slots, "cores": cores()}
    return {"median": medians, "rounds": rounds, "compilations": compilations, **sizes}


def benchmark(flags: Flags) -> None:
    """Measures each limit separately."""
    if not flags.model_dir.is_dir():
        raise UserError(f"--model_dir={flags.model_dir}: no such folder.  Train a model first.")
    cases = cases_of(flags.requests, full_length=flags.full_length)
    limits = allowed(flags.model_dir, flags.max_length)
    measured = {limit: measure(flags, cases, limit) for limit in limits}
    show({"full_length": flags.full_length, "max_length": measured}, flags.json_file)
