"""Where a draft runs beside a target on the only GPU, by the times of their steps."""

from __future__ import annotations

import pytest

from langchain_card.engine.draft_placement import PlacementTimes

PASS = {1: 0.030, 8: 0.031, 16: 0.032}


@pytest.mark.parametrize(
    ("on_gpu", "on_cpu", "low", "high"),
    [
        (0.003, 0.006, 1.05, 1.4),  # five draft steps a pass for nothing
        (0.010, 0.010, 1.5, 3.0),
        (0.0005, 0.030, 0.2, 0.8),  # one slow step a pass
        (0.003, 0.100, 0.1, 0.5),  # a draft that is slower than its target
    ],
)
def test_steps_decide(on_gpu: float, on_cpu: float, low: float, high: float) -> None:
    times = PlacementTimes(PASS, on_gpu, on_cpu, max_lead=16)
    assert low < times.gain < high
    assert times.together < PASS[1], "a draft on the GPU is used where it pays only"
