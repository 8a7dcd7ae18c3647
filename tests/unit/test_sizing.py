"""The arithmetic of checkpoint storage, by values that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from striate.sizing import Checkpoint, Drives, LayoutPlan, Policy, checkpoint_of, plan


def test_seventy_billion_parameters() -> None:
    found = checkpoint_of(70e9, dtype="bf16", optimizer="adam")
    assert found.weights == 140e9
    assert found.moments == 560e9 and found.total > 400e9
    in_bf16 = checkpoint_of(70e9, optimizer="adam", optimizer_dtype="bf16")
    assert in_bf16.total == 420e9
    assert checkpoint_of(70e9, optimizer="adam", master=True).total == 140e9 + 560e9 + 280e9
    assert checkpoint_of(70e9, optimizer="adam-8bit").moments == 140e9
    assert checkpoint_of(70e9, optimizer="none").total == 140e9


def test_four_hundred_gigabytes_every_half_hour() -> None:
    found = plan(Checkpoint(0, 400e9, 0, 0), Policy(interval_s=1800))
    assert found.written_per_hour == 800e9
    assert found.written_per_day == 19.2e12
    assert round(found.bandwidth_needed / 1e9, 2) == 2.22
    assert found.capacity_needed == 3 * 400e9  # two kept, and one being written
    assert found.stall_async_s == 40
    assert found.save_s is None and found.fits


@pytest.mark.parametrize(
    ("layout", "factor", "save_s"),
    [
        (LayoutPlan("stripe"), 1.0, 100.0),
        (LayoutPlan("mirror", copies=2), 2.0, 200.0),
        (LayoutPlan("mirror", copies=3), 3.0, 300.0),
        (LayoutPlan("parity", parity=1), 4 / 3, 400 / 3),
        (LayoutPlan("parity", parity=2), 2.0, 200.0),
    ],
)
def test_what_a_layout_writes_and_how_long_it_takes(layout: LayoutPlan, factor: float, save_s: float) -> None:
    drives = Drives(4, write_rate=1e9, capacity=4e12, endurance=7e15)
    found = plan(Checkpoint(0, 400e9, 0, 0), Policy(interval_s=1800), drives=drives, layout=layout)
    assert found.amplification == pytest.approx(factor)
    assert found.save_s == pytest.approx(save_s)
    assert found.bandwidth_fits == (save_s <= 180)
    assert found.capacity_needed == pytest.approx(3 * 400e9 * factor)
    assert found.life is not None and found.life.years is not None
    assert found.life.written_per_drive_per_day == pytest.approx(19.2e12 * factor / 4)
    assert found.life.years == pytest.approx(7e15 / (19.2e12 * factor / 4) / 365.25)
    assert found.lost_drive is not None
    assert found.lost_drive.data_lost == (layout.name == "stripe")
    if layout.name != "stripe":
        assert found.lost_drive.repair_bytes == pytest.approx(2 * 400e9 * factor / 4)
        assert found.lost_drive.repair_s == pytest.approx(2 * 400e9 * factor / 4 / 1e9)


def test_what_is_kept_counts() -> None:
    policy = Policy(interval_s=1800, keep=3, archive_every_s=86400, archive_for_s=30 * 86400)
    assert policy.kept == 3 + 30 + 1


def test_nodes_share_and_ranks_share() -> None:
    drives = Drives(2, write_rate=1e9)
    one = plan(
        Checkpoint(0, 400e9, 0, 0), Policy(interval_s=3600), drives=drives, layout=LayoutPlan("stripe")
    )
    four = plan(
        Checkpoint(0, 400e9, 0, 0),
        Policy(interval_s=3600),
        drives=drives,
        layout=LayoutPlan("stripe"),
        nodes=4,
        ranks=32,
    )
    assert one.save_s == 200 and four.save_s == 50
    assert four.size_per_rank == 12.5e9 and four.written_per_day == one.written_per_day


def test_advice_is_what_would_do() -> None:
    drives = Drives(2, write_rate=1e9, capacity=1e12, endurance=1e15)
    found = plan(
        Checkpoint(0, 400e9, 0, 0), Policy(interval_s=1200), drives=drives, layout=LayoutPlan("stripe")
    )
    assert not found.fits and found.bandwidth_fits is False
    text = " ".join(found.advice)
    assert "4 drives of this kind" in text and "every 34 min" in text
    better = plan(
        Checkpoint(0, 400e9, 0, 0),
        Policy(interval_s=1200),
        drives=Drives(4, write_rate=1e9),
        layout=LayoutPlan("stripe"),
    )
    assert better.bandwidth_fits and not better.advice
    less = plan(
        Checkpoint(0, 400e9, 0, 0),
        Policy(interval_s=34 * 60),
        drives=Drives(2, write_rate=1e9),
        layout=LayoutPlan("stripe"),
    )
    assert less.bandwidth_fits


def test_advice_on_room_and_wear_is_what_would_do() -> None:
    drives = Drives(2, capacity=1e12)
    tight = plan(
        Checkpoint(0, 400e9, 0, 0),
        Policy(interval_s=3600, keep=9),
        drives=drives,
        layout=LayoutPlan("stripe"),
    )
    assert tight.capacity_fits is False and "keep 4 checkpoints" in tight.advice[0]
    assert plan(
        Checkpoint(0, 400e9, 0, 0),
        Policy(interval_s=3600, keep=4),
        drives=drives,
        layout=LayoutPlan("stripe"),
    ).capacity_fits
    worn = plan(
        Checkpoint(0, 400e9, 0, 0),
        Policy(interval_s=1800),
        drives=Drives(2, endurance=1e15),
        layout=LayoutPlan("stripe"),
    )
    assert worn.life_fits is False and any("endurance" in line for line in worn.advice)


sizes = st.floats(1e6, 1e13)


@given(
    size=sizes,
    interval=st.floats(10, 1e6),
    count=st.integers(3, 32),
    rate=st.floats(1e7, 1e11),
    name=st.sampled_from(["stripe", "mirror", "parity"]),
)
def test_more_drives_are_never_slower_and_longer_intervals_never_fit_worse(
    size: float, interval: float, count: int, rate: float, name: str
) -> None:
    def asked(n: int, every: float) -> tuple[float, bool]:
        found = plan(
            Checkpoint(0, size, 0, 0),
            Policy(interval_s=every),
            drives=Drives(n, write_rate=rate),
            layout=LayoutPlan(name),  # type: ignore[arg-type]
        )
        assert found.save_s is not None and found.bandwidth_fits is not None
        return found.save_s, found.bandwidth_fits

    assert asked(count + 1, interval)[0] <= asked(count, interval)[0] * (1 + 1e-9)
    if asked(count, interval)[1]:
        assert asked(count, interval * 2)[1]
