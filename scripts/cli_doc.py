"""Writes docs/cli.md: each command of the command line run for real, in 80 columns, and what it printed.

    python scripts/cli_doc.py            (root: it makes three small drives on loop devices, capped at 200 MB/s)

The drives are mounted in a mount namespace of this program's own, under the names that the document shows.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE / "tests"), str(HERE / "benchmarks")]

import torch  # noqa: E402

import striate  # noqa: E402
from harness.throttle import throttled_drives  # noqa: E402

OUT = HERE / "docs/cli.md"

HEAD = """# The command line

`striate` looks at checkpoints, checks, repairs and converts them, measures a node's drives and plans what they
have to hold. `python -m striate` is the same. `--help` after a command says everything about it, `--json` makes it
print JSON, and `striate --install-completion` teaches the shell its words.

A CHECKPOINT is a file, any member of a checkpoint on several drives, or a name in a volume: that of `--volume FILE`,
of the environment variable `STRIATE_VOLUME`, or of the drives given by `--drive`.

Exit status: 0 fine, 1 failed (or: they differ, the drives do not do), 2 wrong usage, 3 damaged but recoverable, 4 data
lost. Results go to standard output, progress, warnings and errors to standard error.

What follows was printed by `scripts/cli_doc.py`, on three drives on loop devices that are capped at 200 MB/s.
"""

SECTIONS: list[tuple[str, str, list[str]]] = [
    (
        "ls",
        "What checkpoints are there? In directories, or in the volume.",
        ["striate ls ckpt", "striate ls --volume volume.toml"],
    ),
    (
        "inspect",
        "What is in one? Nothing is unpickled and no tensor is read.",
        [
            "striate inspect ckpt/step-100.safetensors",
            "striate inspect run/step-200 --volume volume.toml --depth 1",
        ],
    ),
    (
        "verify",
        "Is every byte what was written? Check blocks and copies are read too.",
        [
            "striate verify ckpt/step-100.safetensors",
            "DAMAGE",
            "striate verify run/step-200 --volume volume.toml",
        ],
    ),
    ("repair", "Restores missing and damaged members.", ["striate repair --volume volume.toml"]),
    (
        "diff",
        "Which tensors differ, and by how much?",
        ["striate diff ckpt/step-100.safetensors ckpt/step-110.safetensors"],
    ),
    (
        "export",
        "One file for other programs, in little memory whatever the size.",
        [
            "striate export run/step-200 model.pt --volume volume.toml",
            "striate export ckpt/step-100.safetensors model.safetensors",
        ],
    ),
    (
        "convert",
        "And the other way: from torch.save, safetensors (also sharded) and DCP. `import` is the same.",
        [
            "striate convert model.pt ckpt/imported.safetensors",
            "striate convert model.pt imported --volume volume.toml",
        ],
    ),
    (
        "doctor",
        "What stands in the way on this node, why it matters, and what to do.",
        ["striate doctor nvme0 nvme1 nvme2"],
    ),
    (
        "bench",
        "Measures the drives alone and together, every layout on them, and finds the best setting. It asks for the "
        "size if there is no `--size`. The plot:\n\n![bandwidth, layouts, CPU and time line](images/bench.png)",
        ["striate bench nvme0 nvme1 nvme2 --size 256MiB --peers --plot bench.png --toml best.toml"],
    ),
    (
        "plan",
        "The arithmetic: how large, how fast, how long the drives last, and what to change.",
        [
            "striate plan --params 70B --optimizer-dtype bf16 --interval 30min",
            "striate plan --params 70B --optimizer-dtype bf16 --drives 4 --drive-write 700MB/s --drive-capacity 3.84TB "
            "--dwpd 1 --layout parity",
        ],
    ),
]


def training_state(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 512)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def run(command: str, environment: dict[str, str]) -> str:
    """What a person sees of it: standard output and standard error as they come."""
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(
        words,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    status = f"\n(exit status {done.returncode})" if done.returncode else ""
    return f"$ {command}\n{text}{status}"


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(20000)
        byte = file.read(1)[0]
        file.seek(20000)
        file.write(bytes([byte ^ 1]))


def main() -> None:
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONPATH": str(Path(striate.__file__).parents[1]),
    }
    parts = [HEAD]
    with contextlib.ExitStack() as stack:
        drives = stack.enter_context(throttled_drives(3, 700 << 20, 200_000_000))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.chdir(folder)
        for number, drive in enumerate(drives):
            os.symlink(drive.path, folder / f"nvme{number}")
        Path("volume.toml").write_text(
            'drives = ["nvme0", "nvme1", "nvme2"]\nlayout = "parity"\nchunk_bytes = 65536\n'
        )
        Path("ckpt").mkdir()
        for step in (100, 110):
            striate.save(training_state(step), f"ckpt/step-{step}.safetensors")
        striate.Volume.from_file("volume.toml").save(training_state(200), "run/step-200")
        drives[0].enter()
        for name, what, commands in SECTIONS:
            parts.append(f"\n## {name}\n\n{what}\n")
            for command in commands:
                if command == "DAMAGE":
                    damage(folder / "nvme1/run/step-200")
                    parts.append("\nOne byte of the member on nvme1 is changed:\n")
                    continue
                told = run(command, environment)
                told = told.replace(str(folder), "/node")
                for number, drive in enumerate(drives):
                    told = told.replace(str(drive.path), f"/node/nvme{number}")
                told = re.sub(r"/tmp/\S*?\.img( \(deleted\))?", "/images/drive.img", told)
                parts.append(f"\n```text\n{told}\n```\n")
        plot = folder / "bench.png"
        (HERE / "docs/images/bench.png").write_bytes(plot.read_bytes())
        os.chdir(HERE)
        # Out of the capped cgroup again, so that it can be removed.
        for root in ("/sys/fs/cgroup/blkio/cgroup.procs", "/sys/fs/cgroup/cgroup.procs"):
            with contextlib.suppress(OSError):
                Path(root).write_text(str(os.getpid()))
    OUT.write_text("".join(parts))
    print(f"wrote {OUT.relative_to(HERE)}")


if __name__ == "__main__":
    main()
