"""``striate plan``: what a checkpoint every so often asks of the drives."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from striate.cli.output import (
    ExitCode,
    Failure,
    JsonOption,
    emit,
    plain,
    say,
    seconds_text,
    stop,
    table,
    with_codes,
)
from striate.sizing import (
    DTYPE_BYTES,
    OPTIMIZERS,
    YEAR_DAYS,
    Checkpoint,
    Drives,
    LayoutPlan,
    Plan,
    Policy,
    checkpoint_of,
)
from striate.sizing import plan as planned

__all__ = ["plan"]

_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15, "eb": 1e18,
          "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40, "pib": 2.0**50}  # fmt: skip
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_HEADER_MAX = 100_000_000
_SAFETENSORS_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
}


def plan(
    params: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="Parameters of the model: 70e9, 70B, 350M.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Or a model: a .safetensors file, its index, a config.json (then an estimate), or their directory.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Or the size of a checkpoint as it is: 400GB.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help=f"Of the weights: {', '.join(DTYPE_BYTES)}.")
    ] = "bf16",
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help=f"Whose moments are saved: {', '.join(OPTIMIZERS)}.")
    ] = "adam",
    optimizer_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of the moments.")] = "fp32",
    master: Annotated[bool, typer.Option("--master", help="fp32 master weights are saved too.")] = False,
    compression: Annotated[
        float, typer.Option(metavar="SHARE", help="What is left of each byte: 0.8 for a fifth less.")
    ] = 1.0,
    nodes: Annotated[
        int, typer.Option(min=1, help="Nodes that share the checkpoint, each with drives of its own.")
    ] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that hold the model in shards.")] = 1,
    interval: Annotated[
        str, typer.Option(metavar="TIME", help="From one save to the next: 30min, 2h.")
    ] = "30min",
    fraction: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the interval that a save may take.")
    ] = 0.1,
    keep: Annotated[int, typer.Option(min=1, help="The newest checkpoints that are kept.")] = 2,
    archive_every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Also keep one of each such time ...", show_default=False),
    ] = None,
    archive_for: Annotated[
        str | None, typer.Option(metavar="TIME", help="... for so long.", show_default=False)
    ] = None,
    snapshot_rate: Annotated[
        str,
        typer.Option(metavar="RATE", help="At which an async save copies the state to memory, in each node."),
    ] = "10GB/s",
    drives: Annotated[
        int | None, typer.Option(min=1, help="Drives in each node.", show_default=False)
    ] = None,
    drive_write: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="What one writes for long: 2.5GB/s.", show_default=False),
    ] = None,
    drive_capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What one holds: 3.84TB.", show_default=False)
    ] = None,
    dwpd: Annotated[
        float | None, typer.Option(help="Drive writes a day that the vendor allows.", show_default=False)
    ] = None,
    tbw: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Or what one may be written in all: 7PB.", show_default=False),
    ] = None,
    warranty_years: Annotated[
        float, typer.Option(metavar="YEARS", help="For how long, and how long they shall last.")
    ] = 5.0,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Drives and layout as `striate bench --json` found them.", show_default=False
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="stripe, mirror or parity. (default: bench's, or stripe)"),
    ] = None,
    copies: Annotated[int, typer.Option(min=2, help="Of a mirror.")] = 2,
    parity: Annotated[int, typer.Option(min=1, help="Check blocks of a group.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Tells how large a checkpoint is, how fast it must be written, whether drives do, how long they last, and what to
    change. Everything that is left out is left out of the answer. Exit status 1 if the drives do not do.
    """
    checkpoint, notes = _checkpoint(params, model, size, dtype, optimizer, optimizer_dtype, master)
    policy = Policy(
        interval_s=_time(interval, "--interval"),
        keep=keep,
        archive_every_s=None if archive_every is None else _time(archive_every, "--archive-every"),
        archive_for_s=None if archive_for is None else _time(archive_for, "--archive-for"),
        fraction=_share(fraction, "--fraction"),
        snapshot_rate=_rate(snapshot_rate, "--snapshot-rate"),
        compression=_share(compression, "--compression"),
    )
    if (archive_every is None) != (archive_for is None):
        raise typer.BadParameter("give both or neither.", param_hint="--archive-every, --archive-for")
    measured = {} if bench is None else _bench(bench)
    used = _layout(layout, copies, parity, measured)
    given = _drives(
        drives,
        drive_write,
        drive_capacity,
        dwpd,
        tbw,
        _positive(warranty_years, "--warranty-years"),
        measured,
    )
    if given is not None and not used.fits(given.count):
        raise typer.BadParameter(
            f"{_layout_text(used, given.count)} is not possible over {given.count} drive(s).",
            param_hint="--drives",
        )
    found = planned(
        checkpoint,
        policy,
        drives=given,
        layout=used if given is not None else None,
        nodes=nodes,
        ranks=ranks,
        years_wanted=warranty_years,
    )
    described = {**plain(found), "total": found.checkpoint.total, "fits": found.fits, "notes": notes}
    emit(as_json, described, lambda console: _draw(console, found, notes, warranty_years))
    if not found.fits:
        stop(ExitCode.FAILED)


plan.__doc__ = with_codes(plan.__doc__)


# ---- what was given ------------------------------------------------------------


def _number(text: str, units: Mapping[str, float], hint: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise typer.BadParameter(f"{text!r} is not understood: write {example}.", param_hint=hint)
    return _positive(float(match[1]) * units[match[2].lower()], hint)


def _positive(value: float, hint: str) -> float:
    if not (math.isfinite(value) and 0 < value < 1e30):
        raise typer.BadParameter(f"{value:g} makes no sense: give a number above 0.", param_hint=hint)
    return value


def _share(value: float, hint: str) -> float:
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{value:g} is no share: give a number above 0, at most 1.", param_hint=hint)
    return value


def _size(text: str, hint: str) -> float:
    return _number(text, _BYTES, hint, "400GB or 1.5TiB")


def _rate(text: str, hint: str) -> float:
    return _number(re.sub(r"(/s|ps)\s*$", "", text), _BYTES, hint, "2.5GB/s")


def _time(text: str, hint: str) -> float:
    return _number(text, _TIMES, hint, "90s, 30min, 2h or 7d")


def _checkpoint(
    params: str | None,
    model: Path | None,
    size: str | None,
    dtype: str,
    optimizer: str,
    optimizer_dtype: str,
    master: bool,
) -> tuple[Checkpoint, list[str]]:
    if sum(value is not None for value in (params, model, size)) != 1:
        raise typer.BadParameter("give one of the three.", param_hint="--params, --model, --size")
    for name, known, hint in (
        (dtype, DTYPE_BYTES, "--dtype"),
        (optimizer_dtype, DTYPE_BYTES, "--optimizer-dtype"),
        (optimizer, OPTIMIZERS, "--optimizer"),
    ):
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not known; there are {', '.join(known)}.", param_hint=hint)
    if size is not None:
        return Checkpoint(0.0, _size(size, "--size"), 0.0, 0.0), []
    notes: list[str] = []
    weights = None
    if model is not None:
        count, weights, notes = _read_model(model)
    else:
        assert params is not None
        count = _number(params, _COUNTS, "--params", "70e9, 70B or 350M")
    found = checkpoint_of(
        count, dtype=dtype, optimizer=optimizer, optimizer_dtype=optimizer_dtype, master=master
    )
    if weights is not None:
        found = Checkpoint(found.parameters, weights, found.moments, found.master)
    return found, notes


def _read_model(path: Path) -> tuple[float, float | None, list[str]]:
    """Parameters, bytes of weights if they are known, and what to say of it."""
    try:
        if path.is_dir():
            shards = sorted(path.glob("*.safetensors"))
            if shards:
                return _add_up(shards, f"weights as in {len(shards)} file(s) of {path}")
            return _from_config(path / "config.json")
        if path.suffix == ".safetensors":
            return _add_up([path], f"weights as in {path}")
        if path.name.endswith(".index.json"):
            return _from_index(path)
        return _from_config(path)
    except OSError as e:
        raise Failure(f"{e.filename or path}: {e.strerror}.") from None


def _add_up(shards: list[Path], note: str) -> tuple[float, float, list[str]]:
    totals = [_from_header(shard) for shard in shards]
    return float(sum(count for count, _ in totals)), float(sum(nbytes for _, nbytes in totals)), [note]


def _from_header(path: Path) -> tuple[int, int]:
    """Values and bytes of the tensors of a safetensors file, from its header alone."""
    wrong = Failure(f"{path} is no safetensors file, or its header is damaged.")
    with open(path, "rb") as opened:
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_MAX, os.fstat(opened.fileno()).st_size - 8):
            raise wrong
        header = opened.read(length)
    try:
        entries = json.loads(header)
        count = nbytes = 0
        for name, entry in entries.items():
            if name == "__metadata__" or name.startswith("__striate__."):
                continue
            begin, end = (int(at) for at in entry["data_offsets"])
            if end < begin:
                raise ValueError
            nbytes += end - begin
            count += (end - begin) // _SAFETENSORS_BYTES.get(entry["dtype"], 1)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise wrong from None
    return count, nbytes


def _json_file(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _HEADER_MAX:
        raise Failure(f"{path} is too large to be what it should be.")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Failure(f"{path} is no JSON file that describes a model.")
    return found


def _from_index(path: Path) -> tuple[float, float | None, list[str]]:
    names = _json_file(path).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and "/" not in name for name in names.values()
    ):
        raise Failure(f'{path} is no index of shards: it has no "weight_map" of names to files beside it.')
    return _add_up(
        [path.parent / name for name in sorted(set(names.values()))], f"weights as in the shards of {path}"
    )


def _from_config(path: Path) -> tuple[float, float | None, list[str]]:
    """An estimate for a decoder of transformers: attention, a gated or a plain MLP, embeddings."""
    config = _json_file(path)

    def value(*names: str, default: int | None = None) -> int:
        for name in names:
            found = config.get(name)
            if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 10**9:
                return found
        if default is None:
            raise Failure(f"{path} does not say {names[0]}: give --params.")
        return default

    hidden, layers = (
        value("hidden_size", "n_embd", "d_model"),
        value("num_hidden_layers", "n_layer", "num_layers"),
    )
    heads = value("num_attention_heads", "n_head", default=1)
    grouped = value("num_key_value_heads", default=heads)
    width = value("head_dim", default=max(1, hidden // heads))
    inner = value("intermediate_size", "n_inner", "d_ff", default=4 * hidden)
    gated = config.get("hidden_act") in ("silu", "swiglu", "geglu") or "num_key_value_heads" in config
    experts = value("num_local_experts", "num_experts", "n_routed_experts", default=1)
    attention = hidden * width * (2 * heads + 2 * grouped)
    each = attention + experts * (3 if gated else 2) * hidden * inner + 2 * hidden
    # Where a config does not say it, transformers ties, but for the newer decoders.
    tables = 1 if config.get("tie_word_embeddings", not gated) else 2
    count = layers * each + tables * value("vocab_size") * hidden + hidden
    return float(count), None, [f"{count / 1e9:.3g} billion parameters, estimated from {path}"]


def _bench(path: Path) -> dict[str, Any]:
    """The drives and the best setting of ``striate bench --json``."""
    wrong = Failure(f"{path} is not what `striate bench --json` writes.")
    try:
        found = json.loads(path.read_bytes())
        rates = [float(drive["write_mib_per_s"]) * 2**20 for drive in found["drives"]]
        if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError
        best = found["best"]
        if best["layout"] not in ("stripe", "mirror", "parity"):
            raise ValueError
        together = float(found["together"]["write_mib_per_s"]) * 2**20
    except OSError as e:
        raise Failure(f"{path}: {e.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise wrong from None
    # All at once, they may do less than each alone.
    return {"count": len(rates), "write_rate": min(sum(rates), together) / len(rates), "best": best}


def _layout(layout: str | None, copies: int, parity: int, measured: dict[str, Any]) -> LayoutPlan:
    if layout is None and measured:
        best = measured["best"]
        return LayoutPlan(best["layout"], best.get("copies") or 2, best.get("parity") or 1)
    name = layout or "stripe"
    if name not in ("stripe", "mirror", "parity"):
        raise typer.BadParameter(f"{name!r} is none of stripe, mirror and parity.", param_hint="--layout")
    return LayoutPlan(name, copies, parity)  # type: ignore[arg-type]


def _drives(
    count: int | None,
    write: str | None,
    capacity: str | None,
    dwpd: float | None,
    tbw: str | None,
    years: float,
    measured: dict[str, Any],
) -> Drives | None:
    if count is None and not measured:
        for value, hint in (
            (write, "--drive-write"),
            (capacity, "--drive-capacity"),
            (dwpd, "--dwpd"),
            (tbw, "--tbw"),
        ):
            if value is not None:
                raise typer.BadParameter("give --drives too.", param_hint=hint)
        return None
    if dwpd is not None and tbw is not None:
        raise typer.BadParameter("give one of the two.", param_hint="--dwpd, --tbw")
    if dwpd is not None and capacity is None:
        raise typer.BadParameter("give --drive-capacity too.", param_hint="--dwpd")
    holds = None if capacity is None else _size(capacity, "--drive-capacity")
    endurance = None if tbw is None else _size(tbw, "--tbw")
    if dwpd is not None and holds is not None:
        endurance = _positive(dwpd, "--dwpd") * holds * YEAR_DAYS * years
    rate = measured.get("write_rate") if write is None else _rate(write, "--drive-write")
    return Drives(count or measured["count"], rate, holds, endurance)


# ---- what is told --------------------------------------------------------------


def _bytes(count: float) -> str:
    """In powers of ten, as drives are sold: three digits."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def _layout_text(layout: LayoutPlan, drives: int) -> str:
    if layout.name == "mirror":
        return f"a mirror of {layout.copies}"
    return f"parity {drives - layout.parity}+{layout.parity}" if layout.name == "parity" else "a stripe"


def _draw(console: Console, found: Plan, notes: list[str], years_wanted: float) -> None:
    lines = table("", "")
    lines.show_header = False

    def row(name: str, value: str) -> None:
        lines.add_row(name, value)

    parts = found.checkpoint
    row(
        "checkpoint",
        _bytes(parts.total) + (f", compressed {_bytes(found.size)}" if found.size != parts.total else ""),
    )
    if parts.moments or parts.master:
        row("", f"weights {_bytes(parts.weights)}, moments {_bytes(parts.moments)}"
                + (f", master weights {_bytes(parts.master)}" if parts.master else ""))  # fmt: skip
    if found.nodes > 1:
        row("for each node", _bytes(found.size_per_node))
    if found.ranks > 1:
        row("for each rank", _bytes(found.size_per_rank))
    policy = found.policy
    row("every", seconds_text(policy.interval_s))
    row("written", f"{_bytes(found.written_per_hour)}/h, {_bytes(found.written_per_day)}/day")
    where = " in each node" if found.nodes > 1 else ""
    needed = f"{_bytes(found.bandwidth_needed)}/s{where}"
    row("bandwidth needed", f"{needed}, to be done in {policy.fraction:.0%} of the interval")
    kept = f"{policy.kept - 1} kept and one being written"
    row("capacity needed", f"{_bytes(found.capacity_needed)}{where}, for {kept}")
    row(
        "async stall",
        f"{seconds_text(found.stall_async_s)} for the snapshot ({found.stall_async_share:.2%} of the time)",
    )
    console.print(lines)
    if found.drives is not None and found.layout is not None:
        console.print()
        _draw_drives(console, found, found.drives, found.layout, years_wanted)
    for note in notes:
        console.print()
        say(console, note)
    if found.advice:
        console.print("\nWhat to change:")
        for line in found.advice:
            say(console, f"- {line}")


def _draw_drives(
    console: Console, found: Plan, drives: Drives, layout: LayoutPlan, years_wanted: float
) -> None:
    lines = table("", "", "")
    lines.show_header = False

    def row(name: str, value: str, fits: bool | None = None) -> None:
        lines.add_row(name, value, {None: "", True: "ok", False: "NOT ENOUGH"}[fits])

    text = _layout_text(layout, drives.count)
    row("drives", f"{drives.count}, {text} (writes {found.amplification:.3g} bytes for each byte)")
    if found.save_s is not None and found.bandwidth is not None and found.share_of_interval is not None:
        row(
            "a save",
            f"{seconds_text(found.save_s)} at {_bytes(found.bandwidth)}/s: {found.share_of_interval:.1%} of the time",
            found.bandwidth_fits,
        )
        row("sync stall", f"{seconds_text(found.save_s)} of each {seconds_text(found.policy.interval_s)}")
    if found.capacity is not None:
        row("capacity", f"{_bytes(found.capacity)}", found.capacity_fits)
    if found.life is not None:
        written = f"{_bytes(found.life.written_per_drive_per_day)}/day to each"
        if found.life.drive_writes_per_day is not None:
            written += f", {found.life.drive_writes_per_day:.2g} of its size"
        row("wear", written)
        if found.life.years is not None:
            row("drive life", f"{found.life.years:.1f} years of {years_wanted:g} wanted", found.life_fits)
    if found.lost_drive is not None:
        row("a lost drive", _lost_text(found))
    console.print(lines)


def _lost_text(found: Plan) -> str:
    lost = found.lost_drive
    assert lost is not None
    if lost.data_lost:
        return "every checkpoint that lies on it: keep copies elsewhere, or take mirror or parity"
    time = "" if lost.repair_s is None else f", {seconds_text(lost.repair_s)}"
    return f"nothing; repair writes {_bytes(lost.repair_bytes)} to a new one{time}"
