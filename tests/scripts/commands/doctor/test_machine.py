"""Checks of the machine, where devices of a kind that this one lacks are pretended."""

import pytest

from scripts.commands.doctor import machine
from scripts.commands.doctor.machine import unmet


@pytest.mark.parametrize("platform, extra", [("gpu", "cuda"), ("tpu", "tpu")])
def test_an_accelerator_that_jax_does_not_use_is_a_warning(
    platform: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(machine, "has_device_files", lambda name: name == platform)
    (finding,) = machine.devices()
    assert finding.status == "warning" and "accelerator that JAX does not use" in finding.text
    assert f"make {extra}, or pip install" in str(finding.fix)


def test_devices_of_a_cpu_alone_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_device_files", lambda name: False)
    (finding,) = machine.devices()
    assert finding.status == "ok" and "8 x cpu" in finding.text


def test_requirements_that_are_not_met() -> None:
    assert unmet("jax>=0.1") is None and unmet('absent>=1; extra == "dev"') is None
    assert unmet("absent>=1") == "absent is not installed"
    assert str(unmet("numpy<1,>=0.5")).endswith("is installed, <1,>=0.5 is required")
