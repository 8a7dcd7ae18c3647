"""The training run that the demo interrupts: contrastive fine-tuning of MiniLM, every source of chance in its state.

Run as a program it trains and writes one JSON line a step to its standard output. Everything that the next step
depends on is in `Training.state`: weights, Adam's moments and counters, the step, and the states of three random
number generators (torch for dropout, numpy and random for the batches).
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from minilm import Tokenizer, pretrained
from torch.nn import functional

import striate

LEARNING_RATE = 2e-5
BATCH_SENTENCES = 8
WORDS_LEFT_OUT = 0.2
SCALE = 20.0  # of cosines, before the softmax over the batch
SEED = 1234
TEMPORARY_FILES = ".striate-*"
POLL_S = 0.0002

SUBJECTS = (
    "The engineer",
    "A tired sailor",
    "My neighbour",
    "The old teacher",
    "A young doctor",
    "The pilot",
)
VERBS = ("repaired", "painted", "forgot", "sold", "described", "photographed")
OBJECTS = (
    "the lighthouse",
    "a broken clock",
    "her first bicycle",
    "the last train",
    "a stone bridge",
    "his umbrella",
)
TIMES = ("yesterday", "before the storm", "in early spring", "after a long night", "without a word")


class Training:
    """Model, optimizer, step and generators; `train_step` moves all of them on."""

    def __init__(self) -> None:
        # Sums of floats depend on how they are split between threads: one thread gives the same bits everywhere here.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(SEED)
        self.random = random.Random(SEED)
        self.numpy = np.random.default_rng(SEED)
        self.model = pretrained()
        self.tokenizer = Tokenizer()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.step = 0

    def train_step(self) -> float:
        """One step. Two views of a sentence, under other dropout and with other words left out, belong together."""
        sentences = self._sentences()
        first, second = (self.model(self.tokenizer(self._view(sentences))) for _ in range(2))
        loss = functional.cross_entropy(first @ second.T * SCALE, torch.arange(BATCH_SENTENCES))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def _sentences(self) -> list[list[str]]:
        parts = (SUBJECTS, VERBS, OBJECTS, TIMES)
        return [" ".join(map(self.random.choice, parts)).split() for _ in range(BATCH_SENTENCES)]

    def _view(self, sentences: list[list[str]]) -> list[str]:
        kept = [[word for word in words if self.numpy.random() > WORDS_LEFT_OUT] for words in sentences]
        return [" ".join(words) for words in kept]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "rng": {
                "torch": torch.get_rng_state(),
                "numpy": self.numpy.bit_generator.state,
                "python": self.random.getstate(),
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"]["torch"])
        self.numpy.bit_generator.state = state["rng"]["numpy"]
        self.random.setstate(state["rng"]["python"])


def digest(state: dict[str, Any]) -> str:
    """SHA-256 over every tensor, number and generator of a training state, types and keys included."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        sha.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(key)
                add(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                add(inner)
        else:
            sha.update(repr(value).encode())

    add(state)
    return sha.hexdigest()


def die_in_the_middle(directory: Path) -> None:
    """Start a thread that kills this process once a save's temporary file has data, but not yet all of it."""

    def watch() -> None:
        while not any(written_bytes(path) > 0 for path in directory.glob(TEMPORARY_FILES)):
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def written_bytes(path: Path) -> int:
    """Bytes of a file that hold data; preallocated ones that were not written yet do not count."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    total = position = 0
    try:
        while True:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, start, os.SEEK_HOLE)
            total += position - start
    except OSError:
        return total  # ENXIO: no data after this position
    finally:
        os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--until", type=int, required=True, help="last step")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--save-at", type=int, action="append", default=[], metavar="STEP")
    parser.add_argument(
        "--die-at", type=int, metavar="STEP", help="be killed in the middle of the save at this step"
    )
    given = parser.parse_args()
    training = Training()
    if given.resume:
        training.restore(striate.load(given.checkpoint))
    while training.step < given.until:
        loss = training.train_step()
        tell(step=training.step, loss=loss.hex())
        if training.step == given.die_at:
            die_in_the_middle(given.checkpoint.parent)
            striate.save(training.state(), given.checkpoint)
            tell(survived=True)
        elif training.step in given.save_at:
            started = time.perf_counter()
            striate.save(training.state(), given.checkpoint)
            tell(saved=training.step, seconds=time.perf_counter() - started, digest=digest(training.state()))
    tell(digest=digest(training.state()))
    return 0


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
