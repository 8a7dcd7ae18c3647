"""The arithmetic of checkpoint storage: how large, how often, how fast, how long the drives last. Pure.

Sizes in bytes, rates in bytes/s, times in seconds; drives are sold in powers of ten, and so are the units here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "DTYPE_BYTES",
    "OPTIMIZERS",
    "Checkpoint",
    "Drives",
    "LayoutPlan",
    "Life",
    "Plan",
    "Policy",
    "checkpoint_of",
    "plan",
]

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}

# Moments that an optimizer keeps for each parameter, and the bytes of one value where it is not the state's dtype.
# adafactor factors its second moment into rows and columns: next to nothing (Shazeer and Stern, 2018).
OPTIMIZERS: dict[str, tuple[float, float | None]] = {
    "adam": (2, None),
    "adamw": (2, None),
    "adam-8bit": (2, 1),
    "lion": (1, None),
    "sgd-momentum": (1, None),
    "adafactor": (0.01, None),
    "sgd": (0, None),
    "none": (0, None),
}

DAY_S = 86_400.0
YEAR_DAYS = 365.25

LayoutName = Literal["stripe", "mirror", "parity"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's parts, in bytes. ``master``: weights once more in fp32, as mixed precision keeps them."""

    parameters: float
    weights: float
    moments: float
    master: float

    @property
    def total(self) -> float:
        return self.weights + self.moments + self.master


@dataclass(frozen=True)
class Drives:
    """``count`` drives alike. None: not told. ``write_rate``: of one, with its sync. ``endurance``: bytes that one may
    be written in all."""

    count: int
    write_rate: float | None = None
    capacity: float | None = None
    endurance: float | None = None


@dataclass(frozen=True)
class LayoutPlan:
    """``copies`` of a mirror, ``parity`` check blocks of a group over all drives."""

    name: LayoutName
    copies: int = 2
    parity: int = 1

    def amplification(self, drives: int) -> float:
        """Bytes written for each byte of the checkpoint."""
        if self.name == "mirror":
            return float(self.copies)
        return drives / (drives - self.parity) if self.name == "parity" else 1.0

    def losses_survived(self) -> int:
        """Drives that may be lost."""
        return {"stripe": 0, "mirror": self.copies - 1, "parity": self.parity}[self.name]

    def fits(self, drives: int) -> bool:
        return drives >= {"stripe": 1, "mirror": self.copies, "parity": self.parity + 2}[self.name]


@dataclass(frozen=True)
class Policy:
    """How often, and what is kept: the newest ``keep``, and one of each ``archive_every_s`` for ``archive_for_s``.

    ``fraction`` of the interval that a save may take; ``snapshot_rate``: at which an async save copies the state to
    memory first, in bytes/s; ``compression``: of each byte so much is left.
    """

    interval_s: float
    keep: int = 2
    archive_every_s: float | None = None
    archive_for_s: float | None = None
    fraction: float = 0.1
    snapshot_rate: float = 10e9
    compression: float = 1.0

    @property
    def kept(self) -> int:
        """Checkpoints that are there at a time, and the one that is being written."""
        archived = 0
        if self.archive_every_s and self.archive_for_s:
            archived = math.floor(self.archive_for_s / self.archive_every_s)
        return self.keep + archived + 1


@dataclass(frozen=True)
class Life:
    """How long the drives last at this rate of writing."""

    written_per_drive_per_day: float
    drive_writes_per_day: float | None
    years: float | None


@dataclass(frozen=True)
class LostDrive:
    """What it costs when a drive is gone. ``repair_s``: until what the others hold is written to a new one."""

    data_lost: bool
    repair_bytes: float
    repair_s: float | None


@dataclass(frozen=True)
class Plan:
    """All that can be told from what was given; None where something was not.

    ``save_s``: how long a save takes on the drives; ``stall_sync_s``: what training waits for it;
    ``stall_async_s``: for the snapshot alone. ``fits``: no demand is missed. ``advice``: what to change, in words.
    """

    checkpoint: Checkpoint
    size: float
    nodes: int
    size_per_node: float
    ranks: int
    size_per_rank: float
    policy: Policy
    bandwidth_needed: float
    written_per_hour: float
    written_per_day: float
    capacity_needed: float
    drives: Drives | None
    layout: LayoutPlan | None
    amplification: float | None
    bandwidth: float | None
    save_s: float | None
    share_of_interval: float | None
    stall_sync_s: float | None
    stall_sync_share: float | None
    stall_async_s: float
    stall_async_share: float
    capacity: float | None
    life: Life | None
    lost_drive: LostDrive | None
    bandwidth_fits: bool | None
    capacity_fits: bool | None
    life_fits: bool | None
    advice: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return False not in (self.bandwidth_fits, self.capacity_fits, self.life_fits)


def checkpoint_of(
    parameters: float,
    *,
    dtype: str = "bf16",
    optimizer: str = "adam",
    optimizer_dtype: str = "fp32",
    master: bool = False,
) -> Checkpoint:
    """Weights, moments and, if asked for, fp32 master weights of a model. KeyError for names that are not known."""
    moments, fixed = OPTIMIZERS[optimizer]
    each = DTYPE_BYTES[optimizer_dtype] if fixed is None else fixed
    return Checkpoint(
        parameters,
        parameters * DTYPE_BYTES[dtype],
        parameters * moments * each,
        parameters * 4 if master else 0.0,
    )


def plan(
    checkpoint: Checkpoint,
    policy: Policy,
    *,
    drives: Drives | None = None,
    layout: LayoutPlan | None = None,
    nodes: int = 1,
    ranks: int = 1,
    years_wanted: float = 5.0,
) -> Plan:
    """What a checkpoint every so often takes of the drives of each node, each of which holds its share."""
    size = checkpoint.total * policy.compression
    mine = size / nodes
    used = layout or (LayoutPlan("stripe") if drives else None)
    factor = used.amplification(drives.count) if used and drives else 1.0
    per_day = size * DAY_S / policy.interval_s
    needed = policy.kept * mine * factor
    bandwidth = save_s = None
    if drives and drives.write_rate:
        bandwidth = drives.count * drives.write_rate / factor
        save_s = mine / bandwidth
    async_s = checkpoint.total / nodes / policy.snapshot_rate
    capacity = drives.count * drives.capacity if drives and drives.capacity else None
    life = _life(drives, mine * factor * DAY_S / policy.interval_s) if drives else None
    draft = Plan(
        checkpoint=checkpoint,
        size=size,
        nodes=nodes,
        size_per_node=mine,
        ranks=ranks,
        size_per_rank=size / ranks,
        policy=policy,
        bandwidth_needed=mine / (policy.interval_s * policy.fraction),
        written_per_hour=size * 3600 / policy.interval_s,
        written_per_day=per_day,
        capacity_needed=needed,
        drives=drives,
        layout=used,
        amplification=factor if drives else None,
        bandwidth=bandwidth,
        save_s=save_s,
        share_of_interval=None if save_s is None else save_s / policy.interval_s,
        stall_sync_s=save_s,
        stall_sync_share=None if save_s is None else save_s / policy.interval_s,
        stall_async_s=async_s,
        stall_async_share=async_s / policy.interval_s,
        capacity=capacity,
        life=life,
        lost_drive=_lost(drives, used, policy, mine, factor) if drives and used else None,
        bandwidth_fits=None if save_s is None else save_s <= policy.interval_s * policy.fraction * (1 + 1e-9),
        capacity_fits=None if capacity is None else needed <= capacity,
        life_fits=None if life is None or life.years is None else life.years >= years_wanted,
    )
    return Plan(**{**vars(draft), "advice": tuple(_advice(draft, years_wanted))})


def _life(drives: Drives, written_per_day: float) -> Life:
    each = written_per_day / drives.count
    years = None if drives.endurance is None else drives.endurance / each / YEAR_DAYS
    return Life(each, None if drives.capacity is None else each / drives.capacity, years)


def _lost(drives: Drives, layout: LayoutPlan, policy: Policy, mine: float, factor: float) -> LostDrive:
    if layout.losses_survived() == 0:
        return LostDrive(True, 0.0, None)
    # The checkpoints that are kept, without the one in the making: their share of one drive is written anew, by its
    # rate, while the others read faster than that.
    held = (policy.kept - 1) * mine * factor / drives.count
    return LostDrive(False, held, held / drives.write_rate if drives.write_rate else None)


# ---- advice ------------------------------------------------------------------

_DRIVES_MAX = 64


def _advice(found: Plan, years_wanted: float) -> list[str]:
    """Only what helps: the number of drives, the interval or the retention that would do."""
    said: list[str] = []
    drives, layout, policy = found.drives, found.layout, found.policy
    if drives is None or layout is None:
        return said
    if found.bandwidth_fits is False and drives.write_rate and found.save_s is not None:
        count = _drives_for(found, drives, layout)
        if count is not None:
            said.append(
                f"{count} drives of this kind in each node would save within {policy.fraction:.0%} of the interval"
            )
        minutes = math.ceil(found.save_s / policy.fraction / 60)
        said.append(f"or save every {minutes} min instead of every {policy.interval_s / 60:g} min")
        if found.save_s <= policy.interval_s:
            said.append(
                "or save asynchronously: training then waits for the snapshot alone, and a save may take as long as "
                "the interval"
            )
        if layout.name == "mirror" and drives.count >= 3:
            said.append("or take parity instead of a mirror: it writes less for the same checkpoint")
    if found.capacity_fits is False and drives.capacity and found.capacity is not None:
        each = found.capacity_needed / policy.kept
        room = math.floor(found.capacity / each)
        if room >= 2:
            fewer = f"keep {room - 1} checkpoints at a time" + (
                " in all, archive included" if policy.archive_every_s else ""
            )
            said.append(f"{fewer}: one more is there while it is being written")
        else:
            said.append(
                "two checkpoints, the kept one and the one being written, do not fit: more or larger drives"
            )
        count = math.ceil(found.capacity_needed / drives.capacity)
        said.append(f"or {max(count, drives.count + 1)} drives of this capacity in each node")
    if found.life_fits is False and found.life and found.life.years is not None:
        hours = policy.interval_s / 3600 * years_wanted / found.life.years
        said.append(f"save every {hours:.2g} h, so that the drives last {years_wanted:g} years")
        said.append(
            f"or take drives of {years_wanted / found.life.years:.1f} times the endurance, or so many times as many "
            "of them"
        )
    return said


def _drives_for(found: Plan, drives: Drives, layout: LayoutPlan) -> int | None:
    """The fewest drives of this kind that are fast enough."""
    assert drives.write_rate is not None
    for count in range(drives.count + 1, _DRIVES_MAX + 1):
        if not layout.fits(count):
            continue
        rate = count * drives.write_rate / layout.amplification(count)
        if found.size_per_node / rate <= found.policy.interval_s * found.policy.fraction:
            return count
    return None
