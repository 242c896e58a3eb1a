"""Checks the machine: packages, devices, memory, clocks, and the folders that a run writes to."""

import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from packaging.requirements import Requirement

from configs.load import Config
from configs.paths import is_remote
from data.storage.files import FULL, atomic_write, describe_full
from layouts.absent_devices import COMPILERS, has_device_files
from layouts.layout import Layout
from scripts.commands.doctor.findings import Finding, warning
from scripts.terminal import print_note
from trainer import multihost
from trainer.device_check import compare_with_cpu

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
INSTALL = "pip install -e .  in the folder of Meshloom."
LEAST_MEMORY_BYTES = 2 << 30
"""JAX, its compiler and the quickstart's model need about 1 GiB."""
WRONG_GRADIENTS = (
    "Do not train with such a layout until this is ok: try another version of jax with its plugin "
    "or libtpu, unset XLA_FLAGS and LIBTPU_INIT_ARGS, or use another layout."
)
MAX_SKEW_S = 2.0
"""Difference of clocks in seconds above which logs of several hosts are hard to read together."""
GIB = 1 << 30
WRITTEN_BYTES = 32 << 20
SLOW_BYTES_PER_S = 50e6
"""Half the write speed of a single hard disk."""
LEAST_FREE_BYTES = 1 << 30


def versions() -> Iterator[Finding]:
    """Compares the installed packages with those that Meshloom requires."""
    try:
        problems = list(filter(None, map(unmet, importlib.metadata.requires("meshloom") or ())))
    except importlib.metadata.PackageNotFoundError:
        problems = ["meshloom is not installed for this Python"]
    for problem in problems:
        yield Finding("versions", "error", problem, INSTALL)
    jaxlib = importlib.metadata.version("jaxlib")
    for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        version = installed(plugin)
        if version is not None and version != jaxlib:
            text = f"{plugin} is {version} and jaxlib is {jaxlib}: JAX does not load the plugin"
            yield Finding("versions", "error", text, f'pip install -U "jax[{plugin[4:10]}]".')
    if not problems:
        packages = ", ".join(f"{name} {installed(name)}" for name in SHOWN)
        text = f"Python {platform.python_version()}, {packages}"
        yield Finding("versions", "ok", text, "Install the same versions on all hosts: pip install "
                      "-r requirements.lock.", is_common=True)  # fmt: skip


def unmet(requirement: str) -> str | None:
    """Describes how an installed package violates a requirement such as jax>=0.10.2, or None."""
    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    if (version := installed(wanted.name)) is None:
        return f"{wanted.name} is not installed"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{wanted.name} {version} is installed, {wanted.specifier} is required"
    return None


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """Computes a sum on each device of this process."""
    local = jax.local_devices()
    for device in local:
        total = float(jax.device_put(np.arange(5, dtype=np.float32), device).sum())
        if total != 10:
            yield Finding("devices", "error", f"{device} computes 0 + 1 + 2 + 3 + 4 = {total:g}",
                          "Replace this device.")  # fmt: skip
    kinds = Counter(device.device_kind for device in local)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        text += f" of {limit / GIB:.1f} GiB"
    present = [platform for platform in COMPILERS if has_device_files(platform)]
    if local[0].platform == "cpu" and present and not os.environ.get("JAX_PLATFORMS"):
        extra = {"gpu": "cuda", "tpu": "tpu"}[present[0]]
        yield Finding("devices", "warning", f"{text}, but the machine has an accelerator that JAX "
                      "does not use", f'make {extra}, or pip install -e ".[{extra}]".')  # fmt: skip
    else:
        yield Finding("devices", "ok", text)


def gradients(config: Config | None) -> Iterator[Finding]:
    """Compares gradients on the devices, under the configured layout, with those on a CPU."""
    layout = Layout() if config is None else config.make(Layout)
    print_note(
        f"Comparing gradients of tiny models with a CPU's, under mesh {layout.mesh!r}, rules "
        f"{layout.rules!r} and param_rules {layout.param_rules!r}; this takes minutes."
    )
    for model, results in itertools.groupby(compare_with_cpu(layout), lambda each: each.model):
        differences = []
        for each in results:
            if each.refusal:
                yield Finding(f"gradients, {model}", "warning", f"{each.where}: {each.refusal}")
            elif each.is_equal:
                differences.append(f"{each.difference:.1g} on {each.where}")
            else:
                text = (
                    f"{each.where}: the gradient of {each.weight} differs from a CPU's by "
                    f"{each.difference:.2g} of its largest number"
                )
                yield Finding(f"gradients, {model}", "error", text, WRONG_GRADIENTS)
        if differences:
            text = f"relative differences from a CPU's: {', '.join(differences)}"
            yield Finding(f"gradients, {model}", "ok", text)


def memory() -> Iterator[Finding]:
    """Checks the free memory of the host, or of this process's control group."""
    match, group = None, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if match is None:
        yield Finding("memory", "warning", "this system does not report free memory")
        return
    available = int(match[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no group, or "max": no limit
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    is_short, text = available < LEAST_MEMORY_BYTES, f"{available / GIB:.1f} GiB are free"
    yield warning("memory", is_short, text, "End other processes: ps aux --sort=-rss | head.")


def clocks() -> Iterator[Finding]:
    """Compares the clocks of the processes.  Every process must call it."""
    multihost.gather(None)  # all continue from here together
    times = multihost.gather(time.time())
    if len(times) == 1:
        return
    skew_s, late = max(times) - min(times), times.index(min(times))
    text = f"the clocks of the processes differ by {skew_s:.1f} s"
    fix = f"On the host of process {late}: chronyc makestep."
    yield warning("clock", skew_s > MAX_SKEW_S, text, fix)


def disk(flag: str, folder: Path, checkpoint_bytes: int = 0) -> Iterator[Finding]:
    """Writes to the file system of a folder, and removes what it wrote.

    checkpoint_bytes is the size of the next checkpoint that a run will save there.
    """
    if is_remote(folder):
        yield from bucket(flag, folder)
        return
    name, place = f"disk of {flag}", folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    make_room = f"du -xh {place} | sort -h | tail  lists what is large."
    try:
        bytes_per_s, ahead_s = write_rate(place)
    except OSError as error:
        reason, fix = error.strerror, f"chmod u+rwx {place}, or give another {flag}."
        if error.errno in FULL:
            reason, fix = describe_full(place, error), make_room
        yield Finding(name, "error", f"{place} cannot be written: {reason or error}", fix)
        return
    text = f"{place} has {free / GIB:.1f} GiB free and writes {bytes_per_s / 1e6:,.0f} MB/s"
    if free < checkpoint_bytes:
        text += f"; the next checkpoint needs {checkpoint_bytes / GIB:.1f} GiB"
        yield Finding(name, "error", text, make_room)
    elif free < LEAST_FREE_BYTES:
        yield Finding(name, "warning", text, make_room)
    else:
        fix = f"Give a {flag} on a faster disk."
        yield warning(name, bytes_per_s < SLOW_BYTES_PER_S, text, fix)
    text, differs = "agrees with this host's", abs(ahead_s) > MAX_SKEW_S
    if differs:
        text = f"the dates of files in {place} differ from this host's clock by {ahead_s:.1f} s"
    fix = "On the host and on the file server: chronyc makestep."
    yield warning(f"clock of {flag}", differs, text, fix)


def write_rate(folder: Path) -> tuple[float, float]:
    """Returns the bytes a second that reach the disk, and how far its dates are ahead."""
    block = os.urandom(1 << 20)  # not zeros, which some file systems do not write
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        start = time.monotonic()
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.monotonic() - start
        file.truncate()
        os.utime(file.fileno())  # the file system sets the date
        return WRITTEN_BYTES / seconds, os.fstat(file.fileno()).st_mtime - time.time()


def bucket(flag: str, folder: Path) -> Iterator[Finding]:
    """Writes an object, reads it back and removes it."""
    block, path = os.urandom(WRITTEN_BYTES), folder / f".doctor-{uuid.uuid4().hex}"
    name, megabytes = f"storage of {flag}", WRITTEN_BYTES / 1e6
    times = [time.monotonic()]
    atomic_write(path, block)
    times.append(time.monotonic())
    is_same = path.read_bytes() == block
    times.append(time.monotonic())
    path.unlink()
    if not is_same:
        text = f"{folder} returns other bytes than were written"
        yield Finding(name, "error", text, f"Give another {flag}.")
        return
    written, read = (megabytes / (end - start) for start, end in itertools.pairwise(times))
    yield Finding(name, "ok", f"{folder} writes {written:,.0f} MB/s, reads {read:,.0f} MB/s")
