#!/usr/bin/env python3
"""A real model's training, killed in the middle of a save, goes on bit for bit: shown, not told.

Takes the published weights of all-MiniLM-L6-v2 (22.7 million parameters), trains them with Adam in processes of their
own, and checks every claim it prints. Needs about 2 GiB free on the drive of --dir and less than two minutes.

Exit status: 0 every claim held, 1 one did not, 2 it could not run here.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# The speed table is made by the benchmarks' own means.
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from minilm import ModelMissing, Tokenizer, model_directory, pretrained  # noqa: E402
from rich.console import Console  # noqa: E402
from training import TEMPORARY_FILES, digest, written_bytes  # noqa: E402

import striate  # noqa: E402
from harness import report  # noqa: E402
from harness.ceiling import ceilings  # noqa: E402
from harness.contenders import ours, safetensors_file, torch_save  # noqa: E402
from harness.duel import duel  # noqa: E402
from harness.machine import machine  # noqa: E402
from harness.sample import MeasurementFailed, single_threaded_torch, terminate_as_interrupt  # noqa: E402
from harness.state import State, transformer  # noqa: E402
from harness.workspace import RAM_FILE_SYSTEMS, NoRoom, file_system, workspace  # noqa: E402

STEPS_SAVED, STEPS_KILLED, STEPS_LAST = 3, 6, 8
ROOM_BYTES = 2 << 30
KILLS_MAX = 5  # a save that ends before it is killed proves nothing: try again
ROUNDS = 3
# What the model's publishers print for these three sentences.
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
SIMILARITIES = ((0, 1, 0.6660), (0, 2, 0.1046), (1, 2, 0.1411))


@dataclass
class Claims:
    """Prints each claim with its outcome, and remembers whether all held."""

    screen: Console
    failed: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self.screen.print()
        self.screen.print(f"[bold]{title}[/bold]")

    def check(self, holds: bool, text: str) -> None:
        mark = "[green]  ok   [/green]" if holds else "[bold red] FAILED[/bold red]"
        self.screen.print(f"{mark} {text}")
        if not holds:
            self.failed.append(text)

    def say(self, text: str) -> None:
        self.screen.print(f"        {text}")


class RunFailed(Exception):
    """A training process ended otherwise than it should."""


@dataclass(frozen=True)
class Run:
    losses: dict[int, str]  # step -> the loss, as exact hexadecimal
    facts: list[dict[str, Any]]
    exit_code: int

    def fact(self, name: str) -> Any:
        """The last value told under this name, None if it never was."""
        return next((line[name] for line in reversed(self.facts) if name in line), None)


def train(checkpoint: Path, *options: str) -> Run:
    """A training process, run to its end, however it ends. Raises RunFailed when it fails by itself."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("training.py")),
        "--checkpoint",
        str(checkpoint),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RunFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    return Run({line["step"]: line["loss"] for line in facts if "step" in line}, facts, done.returncode)


def shows_the_model(claims: Claims) -> None:
    claims.section("1. A real model: all-MiniLM-L6-v2, in plain torch")
    model = pretrained()
    count = sum(parameter.numel() for parameter in model.parameters())
    claims.say(f"{count / 1e6:.1f} million published weights, loaded strictly by name")
    model.eval()
    with torch.no_grad():
        embeddings = model(Tokenizer()(SENTENCES))
    similarity = embeddings @ embeddings.T
    for number, sentence in enumerate(SENTENCES):
        claims.say(f"{number + 1}. {sentence}")
    for first, second, published in SIMILARITIES:
        found = similarity[first, second].item()
        claims.check(
            abs(found - published) < 1e-3,
            f"similarity {found:.4f}, published {published:.4f}: sentences {first + 1} and {second + 1}",
        )


def shows_the_kill(claims: Claims, directory: Path) -> tuple[Path, Run]:
    claims.section("2. Training, saved at one step and killed in the middle of the next save")
    checkpoint = directory / "training.safetensors"
    save_and_die = (
        "--until",
        str(STEPS_KILLED),
        "--save-at",
        str(STEPS_SAVED),
        "--die-at",
        str(STEPS_KILLED),
    )
    for _ in range(KILLS_MAX):
        killed = train(checkpoint, *save_and_die)
        if killed.exit_code == -signal.SIGKILL:
            break
        claims.say("the save was quicker than the kill; once more")
    temporary = list(directory.glob(TEMPORARY_FILES))
    claims.say(
        f"steps 1-{STEPS_KILLED}; step {STEPS_SAVED} saved, {checkpoint.stat().st_size / 2**20:.0f} MiB "
        f"in {killed.fact('seconds'):.2f} s"
    )
    claims.check(
        killed.exit_code == -signal.SIGKILL, f"the process died by SIGKILL while it saved step {STEPS_KILLED}"
    )
    written, length = (written_bytes(temporary[0]), temporary[0].stat().st_size) if temporary else (0, 0)
    claims.check(
        len(temporary) == 1 and 0 < written < length,
        f"what it was writing stopped at {written / 2**20:.0f} of {length / 2**20:.0f} MiB, in a temporary file",
    )
    names = {path.name for path in directory.iterdir()} - {path.name for path in temporary}
    claims.check(names == {checkpoint.name}, f"beside that there is only {checkpoint.name}")
    claims.check(bool(striate.verify(checkpoint)), "verify: every chunk of it matches its checksum")
    loaded = striate.load(checkpoint)
    claims.check(
        loaded["step"] == STEPS_SAVED and digest(loaded) == killed.fact("digest"),
        f"it is step {STEPS_SAVED}, whole: equal in every bit to the state that was saved",
    )
    return checkpoint, killed


def shows_the_resume(claims: Claims, checkpoint: Path, killed: Run) -> None:
    claims.section("3. A new process goes on from it, as if nothing had happened")
    resumed = train(checkpoint, "--until", str(STEPS_LAST), "--resume", "--save-at", str(STEPS_LAST))
    straight = train(checkpoint, "--until", str(STEPS_LAST))
    claims.say("step   uninterrupted   killed run      resumed run")
    for step in range(1, STEPS_LAST + 1):
        told = [run.losses.get(step) for run in (straight, killed, resumed)]
        claims.say(
            f"{step:4d}   "
            + "   ".join(f"{float.fromhex(loss):13.10f}" if loss else " " * 13 for loss in told)
        )
    after = range(STEPS_SAVED + 1, STEPS_LAST + 1)
    claims.check(
        list(resumed.losses) == list(after)
        and all(resumed.losses[step] == straight.losses[step] for step in after),
        f"losses of steps {after.start}-{STEPS_LAST} are those of an uninterrupted run, bit for bit",
    )
    claims.check(
        all(loss == straight.losses[step] for step, loss in killed.losses.items()),
        "so were those before the kill: saving changes nothing",
    )
    claims.check(
        resumed.fact("digest") == straight.fact("digest"),
        f"so is the whole state after step {STEPS_LAST} (SHA-256 {straight.fact('digest')[:12]}...)",
    )
    left = sorted(path.name for path in checkpoint.parent.iterdir())
    claims.check(left == [checkpoint.name], f"the next save (step {STEPS_LAST}) left nothing beside its file")


def shows_the_file(claims: Claims, checkpoint: Path) -> State:
    """Returns what other tools see in the file: the bytes for the speed table."""
    claims.section("4. The checkpoint is a safetensors file")
    state = striate.load(checkpoint)
    opened: State = safetensors.torch.load_file(checkpoint)
    model = {name: tensor for name, tensor in opened.items() if name.startswith("model.")}
    claims.check(
        {f"model.{name}" for name in state["model"]} == set(model)
        and all(torch.equal(model[f"model.{name}"], tensor) for name, tensor in state["model"].items()),
        f"safetensors.torch.load_file opens it: {len(opened)} tensors, the model's {len(model)} equal",
    )
    moments = state["optimizer"]["state"]
    claims.check(
        all(
            torch.equal(opened[f"optimizer.state.{i}.exp_avg"], entry["exp_avg"])
            for i, entry in moments.items()
        ),
        "Adam's moments are equal too: optimizer.state.0.exp_avg and its like",
    )
    # Copies: the file that load_file mapped is about to go.
    return {name: tensor.clone() for name, tensor in opened.items()}


def shows_the_speed(claims: Claims, state: State, directory: Path) -> None:
    size = sum(tensor.nbytes for tensor in state.values())
    claims.section(f"5. Speed with these {size / 2**20:.0f} MiB (benchmarks/ has the real measurements)")
    chosen = [ours("auto"), torch_save(), safetensors_file(), *ceilings()]
    results = duel(chosen, state, directory, rounds=ROUNDS, tiny=transformer(1 << 20))
    claims.screen.print(str(machine(directory)))
    claims.screen.print(f"{ROUNDS} rounds; saves durable; loads cold by {results.cold_by}, and compared.")
    for title, samples in (("save", results.saves), ("load", results.loads)):
        claims.screen.print(report.throughput_table(title, samples, size, chosen[0].name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=REPOSITORY / "build" / "demo", help="where to work: a real drive"
    )
    parser.add_argument("--no-speed", action="store_true", help="leave the speed table out")
    given = parser.parse_args(argv)
    claims = Claims(report.console())
    # This process measures forked children, and must not have started torch's threads.
    single_threaded_torch()
    try:
        model_directory()
        with terminate_as_interrupt(), workspace(given.dir, ROOM_BYTES) as directory:
            if file_system(directory)[0] in RAM_FILE_SYSTEMS:
                claims.screen.print(
                    f"{given.dir} is in RAM, where a save survives nothing: choose another --dir"
                )
                return 2
            shows_the_model(claims)
            checkpoint, killed = shows_the_kill(claims, directory)
            shows_the_resume(claims, checkpoint, killed)
            state = shows_the_file(claims, checkpoint)
            checkpoint.unlink()
            if not given.no_speed:
                shows_the_speed(claims, state, directory)
    except (ModelMissing, NoRoom) as refusal:
        claims.screen.print(str(refusal), markup=False)
        return 2
    except (RunFailed, MeasurementFailed, striate.StriateError) as failure:
        claims.screen.print(str(failure), markup=False)
        return 1
    except KeyboardInterrupt:
        claims.screen.print("interrupted: nothing is left behind")
        return 130
    claims.screen.print()
    if claims.failed:
        claims.screen.print(f"[bold red]{len(claims.failed)} claims did not hold[/bold red]")
        return 1
    claims.screen.print("[bold green]every claim held[/bold green]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
