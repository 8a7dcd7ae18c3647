"""Fixtures of the face: which engine moves the bytes, and objects that exercise every part of a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(params=["uring", "posix"])
def engine(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A path in a folder of its own, so that what is left beside it shows."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder / "step-1.safetensors"


@pytest.fixture
def flat() -> dict[str, torch.Tensor]:
    """A flat dict of plain tensors, of sizes that share chunks and pages and of one that has neither."""
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(300, 64),
        "layer.0.weight": torch.randn(64, 64).to(torch.bfloat16),
        "layer.0.bias": torch.randn(7, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "step": torch.tensor(41),
        "empty": torch.empty(0, 5),
    }


@pytest.fixture
def nested() -> dict[str, Any]:
    """Everything that a training state has: module, optimizer, ties, views, parameters, plain values."""
    torch.manual_seed(4)
    base = torch.randn(1000)
    tied = torch.randn(40, 30)
    return {
        "model": OrderedDict(encoder=tied, decoder=tied, norm=torch.ones(30, dtype=torch.float16)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(40, 30)}, 1: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "views": [base[:10], base[5:15], base.view(10, 100).t()],
        "parameter": torch.nn.Parameter(torch.randn(3, 4)),
        "leaf": torch.randn(5, requires_grad=True),
        "complex": torch.randn(4, dtype=torch.complex128),
        "step": 12,
        "note": "twelfth",
        "nothing": None,
        (1, 2): [True, 2.5, b"raw"],
    }
