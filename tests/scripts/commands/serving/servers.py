"""Servers in a thread of the test, and what `decode` makes of what they are asked."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.commands.decoding.decode import decoder_of
from scripts.commands.serving.flags import ServeFlags
from scripts.commands.serving.launch import server_of
from scripts.commands.shared_flags import CheckpointFlags, SearchFlags
from scripts.commands.trained import trained_models
from tests.scripts.commands.serving.client import WAIT_S, Client
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.requests import Hypothesis


@contextlib.contextmanager
def serving(model_dir: Path, **changes: Any) -> Iterator[Client]:
    """Runs a server of a model until the end of the context, and checks that it stops."""
    model = CheckpointFlags(model_dir=model_dir)
    flags = dataclasses.replace(ServeFlags(model=model, slots=3, port=0, reload_s=0), **changes)
    with server_of(flags) as (server, listener):
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        client = Client(listener.getsockname()[1])
        try:
            client.wait_until_it_listens()
            yield client
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(WAIT_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def restored(model_dir: Path, step: int | None = None) -> Iterator[TrainedModel]:
    with trained_models(CheckpointFlags(model_dir=model_dir)) as models:
        yield models.restore(step)


def decoded(trained: TrainedModel, lines: Sequence[str], **search: Any) -> list[list[Hypothesis]]:
    """What `meshloom decode` makes of each line."""
    decoder = decoder_of([trained], SearchFlags(**search), 3)
    decoder = dataclasses.replace(decoder, max_length=None)
    batches = decoder.decode(decoder.requests(lines), range(len(lines)))
    texts = dict(line for batch in batches for line in batch)
    return [texts[line] for line in range(len(lines))]
