"""Sets up eight virtual CPU devices, strict types and shapes, and a cache of compiled programs."""

import collections
import contextlib
import gc
import importlib.util
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest

from configs.paths import path_of
from trainer.processes.ending import STOPS, is_ignored

if TYPE_CHECKING:
    from tests.clouds import Cloud

# Imports, collected tests and traces create many long-lived objects: it takes time to scan all of
# them again and again.
gc.set_threshold(200_000, 50, 100)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A small checkpoint spends most of its time in fsync: keep temporary files in memory if they fit.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4e9:
    os.environ.setdefault("TMPDIR", str(MEMORY))
    tempfile.tempdir = None  # so that tempfile reads TMPDIR again
# The older of XLA's two emitters for fused loops compiles in a third of the time, and one piece of
# a program compiles faster than 32 pieces on as many threads.  XLA ends the process at an unknown
# flag.
if jax.__version_info__ < (0, 11) and importlib.util.find_spec("libtpu") is None:
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
# tests/test_accelerator.py runs on others too: MESHLOOM_TEST_PLATFORMS=cuda,cpu
jax.config.update("jax_platforms", os.environ.get("MESHLOOM_TEST_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
    "jax_compilation_cache_dir", os.path.join(os.path.dirname(__file__), "..", ".cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
# Child processes start again and again with the same programs, including short ones.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of a test's time is compilation, and laws hold at any optimization level.
jax.config.update("jax_disable_most_optimizations", True)

# Child processes of tests would inherit ignored signals, as under nohup, but no handlers.
for number in STOPS:
    if is_ignored(number):
        signal.signal(number, lambda *_: None)

# Linux gives a process 65,530 memory maps, and XLA crashes when they run out (jax 0.12 on CPU: each
# program needs about ten, and returns them when it is freed).
MAX_MAPS = 30_000
MAPS = Path("/proc/self/maps")


class Refusing(logging.Handler):
    """Fails if something is logged that no model of this repository should cause."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


logging.getLogger("trainer.step").addHandler(Refusing())


@pytest.fixture(autouse=True, scope="function" if jax.__version_info__ >= (0, 12) else "module")
def few_memory_maps() -> Iterator[None]:
    """Clears compiled programs after a test, or a test file, if they use many memory maps."""
    yield
    free_memory_maps()


def free_memory_maps() -> None:
    """Clears compiled programs if they use many memory maps."""
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Enables float64, for models with `tests.toys.FLOAT64`."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def s3() -> Iterator["Cloud"]:
    """Runs an emulated S3 for the whole session, as s3fs keeps its address."""
    from tests.s3 import running_s3

    with running_s3() as cloud:
        yield cloud


@pytest.fixture(scope="module")
def cloud(request: pytest.FixtureRequest) -> Iterator["Cloud"]:
    """Runs an emulated Google Cloud Storage, or S3 for tests `on_both`."""
    from tests.gcs import running_gcs

    is_s3 = getattr(request, "param", "gs") == "s3"
    with contextlib.ExitStack() as stack:
        cloud = request.getfixturevalue("s3") if is_s3 else stack.enter_context(running_gcs())
        stack.enter_context(cloud.used())
        yield cloud


@pytest.fixture
def there(cloud: "Cloud", tmp_path: Path) -> Path:
    """Returns a folder in its bucket, in which no request fails."""
    from tests.clouds import BUCKET

    cloud.rate = 0.0
    return path_of(f"{cloud.scheme}://{BUCKET}/{tmp_path.name}")


# Files that take minutes start first, so that no worker waits for one at the end.
LONGEST = ("test_readme.py", "test_layout_sweep.py", "test_translation.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="also the cases that are left out")


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests marked `long`, and all but n cases of each test marked `few(n)`."""
    cases = collections.defaultdict[object, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("long") or item.get_closest_marker("few"):
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    result = set[pytest.Item]()
    for group in cases.values():
        few = group[0].get_closest_marker("few")
        count = few.args[0] if few else 0
        kept = {(i + 1) * len(group) // count - 1 for i in range(count)}  # spread over all cases
        result.update(item for i, item in enumerate(group) if i not in kept)
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases"):
        others = left_out(items)
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: item.path.name not in LONGEST)
    gc.freeze()
