"""The benchmark of telemetry compares each variant with the block of the same round without it."""

from torchtitan_ext.benchmarks import telemetry


def test_ratios_are_taken_round_by_round() -> None:
    blocks = {"off": (1.0, 4.0), "every step": (3.0, 6.0)}
    seconds = [
        {name: {"wall": blocks.get(name, (1.0, 4.0))[i], "cpu": 2.0} for name in telemetry.VARIANTS}
        for i in range(2)
    ]
    measured = {(row.variant, row.clock): row for row in telemetry.rows(seconds)}
    assert len(measured) == 2 * len(telemetry.VARIANTS)
    every_step = measured["every step", "wall"]
    assert (every_step.rounds, every_step.step_ms) == (2, 450.0)
    assert every_step.ratio_to_off == 2.25
    assert (every_step.ratio_to_off_least, every_step.ratio_to_off_greatest) == (1.5, 3.0)
    assert all(row.ratio_to_off == 1 for row in measured.values() if row.clock == "cpu")
    assert "every 10th" in telemetry.table(list(measured.values()))
