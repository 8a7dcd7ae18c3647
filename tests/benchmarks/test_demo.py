"""The parts of the demo that need no downloaded weights: the kill in the middle of a save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from minilm import MiniLM
from training import TEMPORARY_FILES, digest, written_bytes

import striate

MIB = 1 << 20
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SAVE_AND_DIE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
import striate
from training import die_in_the_middle
path = Path(sys.argv[1])
state = {"weights": torch.full((256 << 18,), 2.0)}
die_in_the_middle(path.parent)
striate.save(state, path)
"""


def test_written_bytes_counts_data_and_not_what_is_only_preallocated(drive: Path) -> None:
    path = drive / "file"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 * MIB)
        assert written_bytes(path) == 0
        os.pwrite(file.fileno(), os.urandom(4 * MIB), 8 * MIB)
        os.fsync(file.fileno())
    assert written_bytes(path) == 4 * MIB
    assert written_bytes(drive / "absent") == 0


def test_a_save_killed_in_the_middle_leaves_the_earlier_checkpoint_whole(drive: Path) -> None:
    path = drive / "training.safetensors"
    striate.save({"weights": torch.ones(1000)}, path)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", SAVE_AND_DIE, str(path), str(EXAMPLES)],
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    (temporary,) = drive.glob(TEMPORARY_FILES)
    assert 0 < written_bytes(temporary) < temporary.stat().st_size
    assert path.read_bytes() == before
    assert striate.verify(path)
    striate.save({"weights": torch.zeros(1000)}, path)
    assert [entry.name for entry in drive.iterdir()] == [path.name]


def test_the_digest_of_a_state_sees_every_kind_of_change() -> None:
    def state() -> dict[str, object]:
        return {"w": torch.arange(6.0), "step": 3, "rng": {"python": (3, (1, 2), None)}, 7: [1.5]}

    changes: list[dict[object, object]] = [
        {"w": torch.arange(6.0).view(2, 3)},
        {"w": torch.arange(6)},
        {"w": torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, -5.0])},
        {"step": 4},
        {"step": 3.0},
        {"rng": {"python": (3, (1, 3), None)}},
        {"rng": {"numpy": (3, (1, 2), None)}},
        {"more": 1},
    ]
    digests = {digest(state()), *(digest(state() | change) for change in changes)}  # type: ignore[arg-type]
    assert len(digests) == 1 + len(changes)
    assert digest(state()) == digest(state())


def test_the_models_parts_bear_the_published_names_and_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in MiniLM().state_dict().items()}
    assert len(shapes) == 104
    assert shapes["embeddings.word_embeddings.weight"] == (30522, 384)
    assert shapes["encoder.layer.5.attention.self.query.weight"] == (384, 384)
    assert shapes["encoder.layer.0.output.dense.weight"] == (384, 1536)
    assert sum(tensor.numel() for tensor in MiniLM().parameters()) == 22_713_216


def test_padding_changes_no_embedding() -> None:
    torch.manual_seed(1)
    model = MiniLM().eval()
    tokens = torch.randint(1000, 20000, (2, 9))
    with torch.no_grad():
        alone = model(tokens)
        padded = model(torch.cat([tokens, torch.zeros(2, 5, dtype=torch.long)], dim=1))
    torch.testing.assert_close(alone, padded, atol=1e-5, rtol=0)
