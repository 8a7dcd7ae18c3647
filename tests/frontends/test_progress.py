"""What a person sees of a long save or load, and how they end it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import striate
from support.same import same

Report = Callable[[int, int], None]


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6 << 20, dtype=torch.float32), "b": torch.ones(1000, dtype=torch.bfloat16)}


def into(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros_like(state["w"]), "b": torch.zeros(1000)}  # one direct, one copied


WAYS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "save": lambda state, path, engine, report: striate.save(state, path, engine=engine, progress=report),
    "load": lambda state, path, engine, report: striate.load(path, engine=engine, progress=report),
    "load_into": lambda state, path, engine, report: striate.load_into(
        into(state), path, engine=engine, progress=report
    ),
    "verify": lambda state, path, engine, report: striate.verify(path, engine=engine, progress=report),
    "save to a stream": lambda state, path, engine, report: striate.save(
        state, io.BytesIO(), progress=report
    ),
    "load from a stream": lambda state, path, engine, report: striate.load(
        io.BytesIO(Path(path).read_bytes()), progress=report
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_callable_is_told_of_rising_bytes_and_at_the_end_of_all(
    target: Path, state: Any, engine: Any, way: str
) -> None:
    striate.save(state, target, engine=engine)
    told: list[tuple[int, int]] = []
    WAYS[way](state, target, engine, lambda done, total: told.append((done, total)))
    assert told
    total = told[-1][1]
    assert told[-1] == (total, total) and {t for _, t in told} == {total}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    data_bytes = striate.info(target).data_bytes
    assert data_bytes <= total <= data_bytes + (4 << 20)


@pytest.mark.parametrize("way", WAYS)
def test_callable_is_told_once_where_there_is_nothing_to_move(target: Path, engine: Any, way: str) -> None:
    striate.save({}, target, engine=engine)
    told: list[tuple[int, int]] = []
    if way == "load_into":
        striate.load_into({}, target, engine=engine, progress=lambda done, total: told.append((done, total)))
    else:
        WAYS[way]({}, target, engine, lambda done, total: told.append((done, total)))
    assert told == [(0, 0)]


@pytest.mark.parametrize("way", WAYS)
def test_exception_in_the_callable_cancels_and_comes_through(
    target: Path, state: Any, engine: Any, way: str
) -> None:
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    earlier = {"earlier": torch.ones(3)} if way == "save" else state
    striate.save(earlier, target, engine=engine)
    with pytest.raises(Enough):
        WAYS[way](state, target, engine, stop)
    same(striate.load(target, engine=engine), earlier)
    assert os.listdir(target.parent) == [target.name]
    WAYS[way](state, target, engine, False)


def test_true_shows_a_bar_with_the_name(target: Path, state: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for way in ("save", "load", "load_into", "verify"):
        if way == "save":
            target.unlink(missing_ok=True)
        WAYS[way](state, target, "auto", True)
        output, shown = capfd.readouterr()
        assert output == ""  # what a script prints may be piped on
        doing = {"save": "saving", "verify": "verifying"}.get(way, "loading")
        assert f"{doing} {target.name}" in shown and "24.0/24.0 MiB" in shown, shown


def test_bar_takes_names_that_look_like_markup(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "[bold] [red]x"
    striate.save({"w": torch.ones(3)}, path, progress=True)
    same(striate.load(path, progress=True), {"w": torch.ones(3)})
    assert "saving [bold] [red]x" in capfd.readouterr().err


def test_no_bar_unless_asked_for(target: Path, state: Any, capfd: pytest.CaptureFixture[str]) -> None:
    striate.save(state, target)
    striate.load(target)
    striate.verify(target)
    for choice in (False, None):
        striate.save(state, target, progress=choice)  # type: ignore[arg-type]
    assert "".join(capfd.readouterr()) == ""
