"""The command line, run as a person runs it, within this process: arguments in, exit status and text out."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from striate.cli.app import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``striate`` with arguments, in 80 columns and without colour."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("STRIATE_VOLUME", raising=False)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["striate", *map(str, arguments)])
        capfd.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            shown = warnings.showwarning
            try:
                with pytest.raises(SystemExit) as ended:
                    main()
            finally:
                warnings.showwarning = shown
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(60, 60)
        self.b = torch.nn.Linear(60, 60, bias=False)
        self.b.weight = self.a.weight


def training_state(seed: int = 1) -> dict[str, Any]:
    """A model with tied weights, its optimizer after one step, views, odd types, plain values."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.b(model.a(torch.randn(4, 60))).sum().backward()
    optimizer.step()
    base = torch.randn(30, 20)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "base": base,
        "view": base[3:, ::2],
        "halves": torch.randn(7).bfloat16(),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(5),
        "step": 5,
        "name": "run",
        "list": [torch.ones(3), {"deep": torch.zeros(2, 2)}],
    }


@pytest.fixture
def state() -> dict[str, Any]:
    return training_state()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three drives in little."""
    made = [tmp_path / f"drive{n}" for n in range(3)]
    for folder in made:
        folder.mkdir()
    return made


def require_narrow(text: str) -> None:
    """Readable in 80 columns; a line with a long path in it stays whole."""
    for line in text.splitlines():
        assert len(line.rstrip()) <= 80 or max(map(len, line.split())) > 40, line
