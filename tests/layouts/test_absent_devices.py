"""Devices that are not there: which JAX looks for, and what their compilers are told."""

from importlib.metadata import EntryPoint
from pathlib import Path

import jax
import pytest

from configs.errors import UserError
from layouts import absent_devices
from layouts.absent_devices import gpu_target, has_compiler, leave_absent_devices, topology_mesh
from layouts.cost.hardware import GPUS


@pytest.mark.parametrize(
    ("given", "compilers", "device_file", "plugins", "platforms"),
    [
        (None, "tpu", "null", [], "cpu"),
        (None, "", "null", [], None),
        (None, "tpu", "accel0", [], None),
        (None, "tpu", "vfio/0", [], None),
        (None, "tpu", "vfio/vfio", [], "cpu"),
        (None, "tpu gpu", "nvidia0", ["xla_cuda12"], None),
        (None, "gpu", "nvidiactl", ["xla_cuda13"], None),
        (None, "gpu", "null", ["xla_cuda13"], "cpu"),
        (None, "gpu", "null", ["xla_cuda13", "other"], None),
        ("tpu,cpu", "tpu", "null", [], "tpu,cpu"),
    ],
)
def test_a_runtime_starts_only_where_a_device_may_be(
    given: str | None,
    compilers: str,
    device_file: str,
    plugins: list[str],
    platforms: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / device_file).parent.mkdir(exist_ok=True)
    (tmp_path / device_file).touch()
    monkeypatch.setattr(absent_devices, "has_compiler", lambda platform: platform in compilers)
    named = [EntryPoint(name, name, "jax_plugins") for name in plugins]
    monkeypatch.setattr(absent_devices, "entry_points", lambda group: named)
    before = jax.config.values["jax_platforms"]
    try:
        jax.config.update("jax_platforms", given)
        leave_absent_devices(tmp_path)
        assert jax.config.values["jax_platforms"] == platforms
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("kind", GPUS)
def test_each_gpu_is_described_to_its_compiler(kind: str) -> None:
    chip = GPUS[kind]
    target = gpu_target(chip)
    assert f"device_memory_size: {chip.memory_bytes}" in target
    assert f'device_description_str: "{chip.kind}"' in target
    assert target.count("{") == target.count("}") == 4


@pytest.mark.parametrize(("name", "platform"), [("v5e:2x4", "tpu"), ("h100:2x4", "gpu")])
def test_a_mesh_of_absent_devices_has_their_platform(name: str, platform: str) -> None:
    if not has_compiler(platform):
        pytest.skip(f"the compiler for {platform.upper()}s is not installed")
    mesh = topology_mesh(name, {"data": 4, "model": 2})
    assert mesh.devices.shape == (4, 2)
    assert {device.platform for device in mesh.devices.flat} == {platform}


def test_a_slice_that_the_compiler_counts_otherwise_is_an_error() -> None:
    if not has_compiler("tpu"):
        pytest.skip("libtpu is not installed")
    with pytest.raises(UserError, match=r"as 16 devices, not 8 of whole chips\.  Add --analytic"):
        topology_mesh("v4:2x2x2", {"data": 8})
