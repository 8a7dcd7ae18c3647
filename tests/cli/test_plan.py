"""plan: known values, models that are read, drives that are measured, and nonsense that is refused in a sentence."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli, require_narrow
from safetensors.torch import save_file


def test_known_values(cli: Cli) -> None:
    ran = cli("plan", "--params", "70e9")
    assert ran.code == 0 and "weights 140 GB" in ran.out
    require_narrow(ran.out)
    assert cli("plan", "--params", "70B", "--json").json["checkpoint"]["weights"] == 140e9
    assert cli("plan", "--params", "70B", "--json").json["total"] > 400e9
    found = cli("plan", "--size", "400GB", "--interval", "30min", "--json").json
    assert found["written_per_hour"] == 800e9 and found["written_per_day"] == 19.2e12
    assert round(found["bandwidth_needed"] / 1e9, 2) == 2.22
    text = cli("plan", "--size", "400GB").out
    assert "800 GB/h, 19.2 TB/day" in text and "2.22 GB/s" in text


def test_drives_that_do_and_drives_that_do_not(cli: Cli) -> None:
    words = [
        "plan",
        "--size",
        "400GB",
        "--drives",
        4,
        "--drive-capacity",
        "3.84TB",
        "--dwpd",
        3,
        "--layout",
        "parity",
    ]
    ran = cli(*words, "--drive-write", "2.5GB/s")
    assert ran.code == 0 and "parity 3+1" in ran.out and "What to change" not in ran.out
    require_narrow(ran.out)
    ran = cli(*words, "--drive-write", "500MB/s")
    assert ran.code == 1 and "NOT ENOUGH" in ran.out and "What to change" in ran.out
    require_narrow(ran.out)
    assert cli(*words, "--drive-write", "500MB/s", "--json").json["fits"] is False


def test_a_model_is_measured_by_its_file(cli: Cli, tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1000, 3, dtype=torch.bfloat16), "b": torch.zeros(10)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = cli("plan", "--model", tmp_path / "model.safetensors", "--json").json["checkpoint"]
    assert (found["parameters"], found["weights"]) == (3010, 6040) and found["moments"] == 3010 * 8
    save_file({"c": torch.zeros(5)}, tmp_path / "more.safetensors")
    assert cli("plan", "--model", tmp_path, "--json").json["checkpoint"]["parameters"] == 3015
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "c": "more.safetensors"}}))
    assert cli("plan", "--model", index, "--json").json["checkpoint"]["parameters"] == 3015


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # Llama 2 7B and Mistral 7B as their model cards have them: 6.74e9 and 7.24e9.
        (
            {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "intermediate_size": 11008,
                "vocab_size": 32000,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "hidden_act": "silu",
            },
            6.74,
        ),
        (
            {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "intermediate_size": 14336,
                "vocab_size": 32000,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "hidden_act": "silu",
            },
            7.24,
        ),
        # GPT-2: 0.124e9.
        (
            {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "tie_word_embeddings": True},
            0.124,
        ),
        # all-MiniLM-L6-v2 says nothing of ties; its weights are 0.0227e9.
        (
            {
                "hidden_size": 384,
                "num_hidden_layers": 6,
                "intermediate_size": 1536,
                "vocab_size": 30522,
                "num_attention_heads": 12,
                "hidden_act": "gelu",
            },
            0.0225,
        ),
    ],
)
def test_a_config_gives_an_estimate_that_is_said_to_be_one(
    cli: Cli, tmp_path: Path, config: dict[str, object], billions: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = cli("plan", "--model", tmp_path, "--json").json
    assert found["checkpoint"]["parameters"] / 1e9 == pytest.approx(billions, rel=0.02)
    assert "estimated" in found["notes"][0]


def test_what_bench_measured_is_taken(cli: Cli, tmp_path: Path) -> None:
    measured = {
        "drives": [{"path": "/a", "write_mib_per_s": 1000.0}, {"path": "/b", "write_mib_per_s": 1000.0}],
        "together": {"write_mib_per_s": 1600.0},
        "best": {"layout": "mirror", "copies": 2, "parity": None},
    }
    (tmp_path / "bench.json").write_text(json.dumps(measured))
    found = cli("plan", "--size", "100GiB", "--bench", tmp_path / "bench.json", "--json").json
    assert found["layout"]["name"] == "mirror" and found["drives"]["count"] == 2
    # Two copies of it, over drives that do 1600 MiB/s together.
    assert found["save_s"] == pytest.approx(2 * 100 * 1024 / 1600)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "--params"),
        (("--params", "1", "--size", "1GB"), 2, "one of the three"),
        (("--params", "many"), 2, "many"),
        (("--params", "-5"), 2, "-5"),
        (("--params", "0"), 2, "above 0"),
        (("--params", "1e999"), 2, "makes no sense"),
        (("--params", "nan"), 2, "nan"),
        (("--size", "4 parsecs"), 2, "parsecs"),
        (("--params", "7B", "--dtype", "int3"), 2, "int3"),
        (("--params", "7B", "--optimizer", "hope"), 2, "hope"),
        (("--params", "7B", "--interval", "soon"), 2, "soon"),
        (("--params", "7B", "--fraction", "1.5"), 2, "no share"),
        (("--params", "7B", "--fraction", "nan"), 2, "no share"),
        (("--params", "7B", "--compression", "0"), 2, "no share"),
        (("--params", "7B", "--drives", "0"), 2, "drives"),
        (("--params", "7B", "--keep", "0"), 2, "keep"),
        (("--params", "7B", "--drive-write", "1GB/s"), 2, "--drives"),
        (("--params", "7B", "--drives", "2", "--dwpd", "1"), 2, "--drive-capacity"),
        (("--params", "7B", "--drives", "2", "--dwpd", "-1", "--drive-capacity", "1TB"), 2, "above 0"),
        (
            ("--params", "7B", "--drives", "2", "--dwpd", "1", "--tbw", "1PB", "--drive-capacity", "1TB"),
            2,
            "one of the two",
        ),
        (("--params", "7B", "--drives", "2", "--layout", "parity"), 2, "not possible"),
        (("--params", "7B", "--drives", "2", "--layout", "mirror", "--copies", "3"), 2, "not possible"),
        (("--params", "7B", "--drives", "3", "--layout", "raid7"), 2, "raid7"),
        (("--params", "7B", "--archive-every", "1d"), 2, "both or neither"),
        (("--model", "nowhere"), 1, "nowhere"),
        (("--model", "text"), 1, "no JSON"),
        (("--model", "list.json"), 1, "no JSON"),
        (("--model", "empty.json"), 1, "hidden_size"),
        (("--model", "huge.safetensors"), 1, "no safetensors"),
        (("--model", "short.safetensors"), 1, "no safetensors"),
        (("--model", "odd.safetensors"), 1, "no safetensors"),
        (("--model", "x.index.json"), 1, "no index"),
        (("--params", "7B", "--bench", "nowhere"), 1, "nowhere"),
        (("--params", "7B", "--bench", "text"), 1, "bench --json"),
        (("--params", "7B", "--bench", "list.json"), 1, "bench --json"),
        (("--params", "7B", "--bench", "empty.json"), 1, "bench --json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_nonsense_is_refused_in_a_sentence(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "text").write_text("not what it should be")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "x.index.json").write_text('{"weight_map": {"a": "../x"}}')
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": "no"}}'
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    monkeypatch.chdir(tmp_path)
    ran = cli("plan", *words)
    assert ran.code == code, ran.err
    assert said in "".join(ran.err.split("\n")).replace("│", "") or said in " ".join(
        ran.err.replace("│", " ").split()
    )


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['striate', 'plan', '--params', '7B']\n"
        "from striate.cli.app import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
