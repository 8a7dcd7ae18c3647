"""The plot of ``striate bench``. The only module that imports matplotlib (``pip install striate[plot]``)."""

from __future__ import annotations

import base64
import html
import io
import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from striate.cli.bench_run import Measured

__all__ = ["SUFFIXES", "plot"]

SUFFIXES = (".png", ".svg", ".html")


def plot(measured: Measured, path: Path) -> None:
    """Bandwidth over drives beside the ideal, CPU for each GiB, and what each drive did during one save."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8))
    _bandwidth(axes[0][0], measured)
    _layouts(axes[0][1], measured)
    _cpu(axes[1][0], measured)
    _timeline(axes[1][1], measured)
    figure.tight_layout()
    if path.suffix != ".html":
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    pyplot.close(figure)
    encoded = base64.b64encode(image.getvalue()).decode()
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>striate bench</title><h1>striate bench</h1>'
        f"<p>{html.escape(', '.join(drive.path for drive in measured.drives))}</p>"
        f'<img alt="bandwidth, CPU and time line" src="data:image/svg+xml;base64,{encoded}"></html>\n'
    )


def _bandwidth(axis: Axes, measured: Measured) -> None:
    counts = [result.drives for result in measured.scaling]
    axis.plot(
        counts,
        [sum(d.write_mib_per_s for d in measured.drives[:n]) for n in counts],
        "--",
        color="C0",
        label="ideal write: the drives' sum",
    )
    axis.plot(
        counts,
        [sum(d.read_mib_per_s for d in measured.drives[:n]) for n in counts],
        ":",
        color="C1",
        label="ideal read",
    )
    axis.plot(counts, [r.save_mib_per_s for r in measured.scaling], "o-", color="C0", label="save, stripe")
    axis.plot(counts, [r.load_mib_per_s for r in measured.scaling], "s-", color="C1", label="load, stripe")
    axis.set(title="bandwidth over drives", xlabel="drives", ylabel="MiB/s", xticks=counts, ylim=(0, None))
    axis.legend()


def _layouts(axis: Axes, measured: Measured) -> None:
    names = [r.label for r in measured.layouts] + [peer.name for peer in measured.peers]
    saves = [r.save_mib_per_s for r in measured.layouts] + [peer.save_mib_per_s for peer in measured.peers]
    loads = [r.load_mib_per_s for r in measured.layouts] + [peer.load_mib_per_s for peer in measured.peers]
    at = range(len(names))
    axis.barh([y - 0.2 for y in at], saves, 0.4, label="save")
    axis.barh([y + 0.2 for y in at], loads, 0.4, label="load")
    axis.axvline(measured.together.write_mib_per_s, color="C0", linestyle="--", linewidth=1)
    axis.axvline(measured.together.read_mib_per_s, color="C1", linestyle=":", linewidth=1)
    axis.set(
        title="payload by layout (lines: all drives raw)", xlabel="MiB/s", yticks=list(at), yticklabels=names
    )
    axis.invert_yaxis()
    axis.legend()


def _cpu(axis: Axes, measured: Measured) -> None:
    names = [r.label for r in measured.layouts]
    at = range(len(names))
    axis.barh([y - 0.2 for y in at], [r.save_cpu_s_per_gib for r in measured.layouts], 0.4, label="save")
    axis.barh([y + 0.2 for y in at], [r.load_cpu_s_per_gib for r in measured.layouts], 0.4, label="load")
    axis.set(title="CPU", xlabel="seconds for each GiB", yticks=list(at), yticklabels=names)
    axis.invert_yaxis()
    axis.legend()


def _timeline(axis: Axes, measured: Measured) -> None:
    for drive, points in measured.timeline.items():
        name = os.path.basename(drive.rstrip("/")) or drive
        axis.plot([p.at_s for p in points], [p.mib_per_s for p in points], label=name, linewidth=1)
    axis.set(
        title=f"each drive during one save ({measured.best.label})",
        xlabel="seconds",
        ylabel="MiB/s",
        ylim=(0, None),
    )
    if measured.timeline:
        axis.legend()
    else:
        axis.text(0.5, 0.5, "these file systems have no block device", ha="center", transform=axis.transAxes)
