"""The benchmark of serving measures what a model allows."""

from pathlib import Path

from scripts.benchmarks.serve import allowed


def test_limits_are_at_most_what_learned_positions_allow(tmp_path: Path) -> None:
    config = tmp_path / "config.gin"
    config.write_text("include 'configs/runs/quickstart.gin'\n")
    assert allowed(tmp_path, [128, 2048]) == [128, 2048]
    config.write_text(config.read_text() + "Transformer.positions = @Learned()\n")
    config.write_text(config.read_text() + "Transformer.length = 300\n")
    assert allowed(tmp_path, [128, 2048, 4096]) == [128, 299]
