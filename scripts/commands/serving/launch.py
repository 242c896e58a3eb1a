"""Restores a model, and serves it over HTTP."""

import contextlib
import dataclasses
import functools
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from configs.errors import UserError
from configs.paths import is_remote, path_of
from data.task import Task
from data.tokenizers.tokenizer_json import template_text
from models.decoding.ensemble import as_ensemble
from models.decoding.generate import Search
from scripts.commands.decoding.decode import search_of
from scripts.commands.serving.app import ROUTES, application
from scripts.commands.serving.exchange import ServedModel
from scripts.commands.serving.flags import ServeFlags
from scripts.commands.serving.guard import Guard, ServiceCollector
from scripts.commands.serving.rendering import ChatRenderer
from scripts.commands.serving.server import Server
from scripts.commands.shared_flags import BeamFlags, SearchFlags
from scripts.commands.trained import batch_of, decode_trace_fn, trained_models
from scripts.terminal import print_note
from trainer.checkpoints.restore import TrainedModel, chosen_steps, restore_adapters
from trainer.checks import TraceFn
from trainer.decoding.decoder import Decoder, prepared
from trainer.decoding.requests import DecodeOptions, check_prefix
from trainer.run import Run
from trainer.serving.batches import BatchService, batch_shapes
from trainer.serving.continuous import ContinuousService
from trainer.serving.reload import CheckpointWatcher, check_finite
from trainer.serving.service import Compilations, Service
from trainer.serving.slot_engine import SlotEngine

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN = re.compile("[!-~]+")
MIN_TOKEN_CHARACTERS = 16
"""Minimum length of a token; other machines could guess a shorter one."""


@contextlib.contextmanager
def server_of(flags: ServeFlags) -> Iterator[tuple[Server, socket.socket]]:
    """Restores a model and compiles what serving needs; finishes all jobs at the end."""
    check_address(flags.host, flags.token)

    def traces(run: Run) -> list[TraceFn]:  # close enough to explain layout errors
        return [decode_trace_fn(run, served_search(flags.search, run.task))]

    with (
        bound_socket(flags.host, flags.port) as listener,
        trained_models(flags.model, traces) as models,
    ):
        steps = chosen_steps(models.checkpoints, flags.model.checkpoint)

        def restore(step: int | None) -> TrainedModel:
            trained = models.restore(step, flags.model.average)
            check_finite(trained)
            return trained

        def restore_newer(step: int) -> TrainedModel:
            models.directory.check_records()  # another run may have saved it
            return restore(step)

        # No variable here keeps the weights, so that a newer checkpoint frees them.
        served = served_model([restore(step) for step in steps], flags)

        print_note("Compiling.")
        compilations = Compilations()
        served.service.start()
        print_note(f"Compiled what the first request needs in {compilations.seconds:.1f} s.")
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        registry = CollectorRegistry()
        registry.register(ServiceCollector(served.service, Compilations()))  # those for requests
        guard = Guard(
            application(served, registry),
            paths=[route.path for route in ROUTES],
            token=flags.token,
            # If there is a token, it decides who may connect.
            hosts={*LOOPBACK_NAMES, flags.host.lower()} if flags.token is None else None,
            registry=registry,
        )
        names = ", ".join(each.name for each in (served, *served.adapted))
        announce = functools.partial(print_note, f"Serving {names} at {url}")
        server = Server(guard, served.service, flags.time_limit_s, announce)
        reloads = flags.model.checkpoint == "latest" and not flags.adapter
        reload_s = flags.reload_s if reloads else 0.0
        checkpoints = models.checkpoints
        watcher = CheckpointWatcher(
            served.service, lambda: checkpoints.latest, checkpoints.files, restore_newer, reload_s
        )
        watcher.start()
        yield server, listener
        watcher.stop()
        served.service.stop()


def check_address(host: str, token: str | None) -> None:
    """Refuses an address that other machines can reach, unless clients need a token."""
    if token is not None and not TOKEN.fullmatch(token):
        raise UserError(
            "--token: a header cannot carry it.  Legal: letters, digits and punctuation of ASCII "
            "without spaces (openssl rand -hex 32), or no --token."
        )
    if is_loopback(host):
        return
    if token is None:
        raise UserError(
            f"--host={host}: other machines may reach this address, and no token is set.  Set "
            "MESHLOOM_TOKEN to a long random text (openssl rand -hex 32), or omit --host."
        )
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise UserError(
            f"--token: it has {len(token)} characters, and other machines may guess it at "
            f"--host={host}.  Legal: at least {MIN_TOKEN_CHARACTERS} (openssl rand -hex 32)."
        )


def bound_socket(host: str, port: int) -> socket.socket:
    """Binds the address before anything slow; connections are accepted later."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"--host={host} --port={port}: {error.strerror or error}.  Choose another address."
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    """Returns whether an address can be reached only from this machine."""
    if host in LOOPBACK_NAMES:
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def served_search(flags: BeamFlags, task: Task) -> Search:
    """Returns the search for translations, chosen as in `decode`."""
    if not task.has_source and flags.beam is not None:
        raise UserError(f"--beam={flags.beam}: {task.name} has no translations.  Remove the flag.")
    return search_of(SearchFlags(**dataclasses.asdict(flags)), task)


def served_model(members: Sequence[TrainedModel], flags: ServeFlags) -> ServedModel:
    """Makes the service of a model, and its description."""
    trained, step = members[0], members[-1].step
    run, vocabs, mesh = trained.run, trained.vocabs, trained.mesh
    name, *names = names_of(flags)
    adapted = adapted_runs(members, flags)
    if adapted:
        chosen = tuple(run.model.adapter for run, _, _ in adapted)
        params = {str(number): adapter for number, (_, adapter, _) in enumerate(adapted, 1)}
        of_base: Any = trained.model
        model = dataclasses.replace(of_base, adapters=chosen)
        params |= trained.params
    else:
        model, params = as_ensemble(trained.model, [member.params for member in members])
    options = DecodeOptions(max_tokens=flags.search.max_tokens, prefix=flags.prefix)
    check_prefix(options, run.task)
    task, search = run.task, served_search(flags.search, run.task)
    rows = batch_of(trained, flags.slots)
    room = 2**31 if run.model.max_length is None else run.model.max_length - 1
    if task.has_source:
        if flags.max_length is not None:
            raise UserError(
                f"--max_length={flags.max_length}: {task.name} translates.  Remove the flag."
            )
        weights, special = prepared(model, params, mesh), vocabs.target.special
        decoder = Decoder(model, weights, mesh, search, rows, **special)
        length = task.row_lengths["source_length"]
        [prefix] = vocabs.target.encode([options.prefix or ""])
        room -= len(prefix)
        if room < 1:
            raise UserError(
                f"--prefix has {len(prefix)} tokens, which leave no room for a translation.  "
                "Shorten it."
            )
        shapes = batch_shapes(rows, length, len(prefix), options, room)
        service: Service = BatchService(decoder, step, flags.queue, shapes=shapes)
        max_new_tokens = min(shapes[-1].new_tokens, room)
    else:
        if flags.max_length is not None and flags.max_length > room:
            raise UserError(
                f"--max_length={flags.max_length}: the model has {room + 1} positions.  "
                f"Legal: 2 to {room}."
            )
        length = flags.max_length or min(task.length, room)
        of_engine = (vocabs.target, rows, length, flags.cached_prompts)
        engine = SlotEngine(model, params, mesh, *of_engine)
        service = ContinuousService(engine, step, flags.queue)
        max_new_tokens = length
    chat = None
    try:
        end = vocabs.target.pieces([vocabs.target.end_id])
        if not task.has_source and template_text(vocabs.target.files) is not None:
            chat = ChatRenderer(vocabs.target.files, *end)
    except UserError as error:
        print_note(f"Warning: {error}  Chats are not served.")
    if chat is not None and flags.max_length is None:
        print_note(
            f"Chats have at most {length} tokens, the row length of {task.name}.  --max_length=N "
            "sets another limit."
        )
    limits, sizes = (flags.body_bytes, flags.time_limit_s), (length, max_new_tokens)
    served = ServedModel(name, run, vocabs, service, options, *limits, search.width, *sizes, chat)
    others = [
        dataclasses.replace(served, name=name, run=run, adapter=number, adapter_step=step)
        for number, (name, (run, _, step)) in enumerate(zip(names, adapted, strict=True), 1)
    ]
    return dataclasses.replace(served, adapted=others)


def names_of(flags: ServeFlags) -> list[str]:
    """Returns the names of the model and its adapters; by default, those of their directories."""
    folders = [flags.model.model_dir, *map(path_of, flags.adapter)]
    names = [f.name if is_remote(f) else os.path.basename(os.path.abspath(f)) for f in folders]
    names[0] = flags.name or names[0]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"--adapter: two models are named {twice[0]}.  Rename a directory.")
    return names


def adapted_runs(
    members: Sequence[TrainedModel], flags: ServeFlags
) -> list[tuple[Run, dict[str, Any], int]]:
    """Restores the adapters to serve, with their runs."""
    trained = members[0]
    if not flags.adapter:
        return []
    if len(members) > 1 or trained.run.task.has_source or flags.model.weights != "stored":
        raise UserError(
            "--adapter: legal with one checkpoint of a language model, and its stored weights."
        )
    return [restore_adapters(path_of(folder), trained) for folder in flags.adapter]
