"""Prepares the data of a run of several processes, each with the same disk or with its own."""

import contextlib
import logging
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data import cache, manifest
from data.cache import Prepared
from data.task import Task
from data.vocabs import Vocabs
from trainer.multihost import check_same, gather, is_first_process

logger = logging.getLogger(__name__)


def prepare(
    task: Task, data_dir: Path, *, vocabs: Vocabs | None = None, rebuild: bool = False
) -> Prepared:
    """Returns the rows of a task: process 0 prepares them while the others wait.

    A process that does not find them in data_dir then has a disk of its own and prepares them
    there.  Raises in every process unless all have the same rows.
    """
    given = {"vocab": vocabs.target, "source_vocab": vocabs.source} if vocabs else {}
    if is_first_process():
        prepared = cache.prepare(task, data_dir, rebuild=rebuild, **given)
        gather(prepared.manifest)
    else:
        folder = cache.cache_folder(task, data_dir)
        if rebuild or not cache.is_there(folder):
            logger.info("%s: process 0 prepares it; this one waits.", task.name)
        no_manifest: dict[str, Any] = {}
        first = gather(no_manifest)[0]
        is_stale = rebuild and first != _manifest(folder)
        prepared = cache.prepare(task, data_dir, rebuild=is_stale, **given)
    check_same(
        {f"{name} of {task.name}": prepared.manifest[name] for name in
         ("content_hash", *prepared.vocabs.hashes())},
        "Give all the same text, or copy the data of process 0: the folder "
        f"{task.name} of its --data_dir.",
    )  # fmt: skip
    return prepared


def _manifest(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(UserError):
        return manifest.read(folder)
    return None
