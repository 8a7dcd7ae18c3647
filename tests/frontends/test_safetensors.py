"""The tools of the safetensors world open what we save, with no converter and nothing they do not expect."""

from __future__ import annotations

import importlib.util
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors.torch import load_file, load_model

import striate
from support.same import same


class Tied(torch.nn.Module):
    """Input and output embedding are one, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight


def test_plain_dict_is_exactly_the_same_for_safetensors(target: Path, flat: Any, engine: Any) -> None:
    striate.save(flat, target, engine=engine)
    loaded = load_file(target)
    assert set(loaded) == set(flat)
    for name, tensor in flat.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    with safetensors.safe_open(target, "pt") as f:
        assert f.metadata()["format"] == "pt"
        assert torch.equal(f.get_slice("embed.weight")[3:5], flat["embed.weight"][3:5])


def test_what_torch_load_gave_is_as_readable_as_what_was_never_saved(target: Path, nested: Any) -> None:
    """torch.load leaves an empty dict of hooks at each tensor, which is nothing that has to come back."""
    file = io.BytesIO()
    torch.save(nested, file)
    file.seek(0)
    again = torch.load(file)
    striate.save(nested, target)
    wanted = striate.info(target)
    striate.save(again, target)
    found = striate.info(target)
    assert [(t.name, t.dtype, t.shape) for t in found.tensors] == [
        (t.name, t.dtype, t.shape) for t in wanted.tensors
    ]
    assert found.ties == wanted.ties
    same(striate.load(target), nested)


def test_state_dict_of_a_module_loads_strictly(target: Path, engine: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Conv2d(1, 2, 3))
    state = module.state_dict()
    assert type(state) is OrderedDict and state._metadata  # type: ignore[attr-defined]
    result = striate.save(state, target, engine=engine)
    assert result.opaque_count == 0
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Conv2d(1, 2, 3))
    loaded = load_file(target)
    assert set(loaded) == set(state)
    assert not other.load_state_dict(loaded, strict=True).missing_keys
    same(dict(other.state_dict()), dict(state))
    again = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Conv2d(1, 2, 3))
    load_model(again, target)
    same(dict(again.state_dict()), dict(state))


def test_nested_state_has_its_tensors_under_dotted_names(target: Path, nested: Any) -> None:
    result = striate.save(nested, target)
    loaded = load_file(target)
    assert torch.equal(loaded["model.encoder"], nested["model"]["encoder"])
    assert torch.equal(loaded["model.norm"], nested["model"]["norm"])
    assert torch.equal(loaded["optimizer.state.0.exp_avg"], nested["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(loaded["optimizer.state.0.step"], torch.tensor(3.0))
    # Views and complex128 are not misread: they are not there under a name of theirs.
    named = {name for name in loaded if not name.startswith("__striate__.")}
    assert named <= {
        "model.encoder",
        "model.norm",
        "optimizer.state.0.exp_avg",
        "optimizer.state.0.step",
        "parameter",
        "leaf",
    }
    assert len(loaded) == result.tensors_count


def test_tied_names_are_resolved_by_load_model(target: Path, engine: Any) -> None:
    torch.manual_seed(5)
    module = Tied()
    striate.save(module.state_dict(), target, engine=engine)
    assert "head.weight" not in load_file(target)
    assert striate.info(target).ties == {"head.weight": "embed.weight"}
    other = Tied()
    missing, unexpected = load_model(other, target)
    assert not missing and not unexpected
    assert other.head.weight is other.embed.weight
    same(dict(other.state_dict()), dict(module.state_dict()))
    loaded = striate.load(target)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()


def test_what_safetensors_save_model_ties_we_tie(target: Path) -> None:
    module = Tied()
    safetensors.torch.save_model(module, str(target))
    ((other, kept),) = striate.info(target).ties.items()
    assert {other, kept} == {"embed.weight", "head.weight"}
    found = striate.load_tensors(target, [other, kept])
    assert (
        torch.equal(found[other], module.embed.weight) and found[other].data_ptr() == found[kept].data_ptr()
    )


def test_names_that_clash_or_are_reserved_hide_nothing(target: Path) -> None:
    state = {
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "__metadata__": torch.tensor([3]),
        "__striate__.t.0": torch.tensor([4]),
        1: torch.tensor([5]),
        "1": torch.tensor([6]),
        "\ud800": torch.tensor([7]),
    }
    striate.save(state, target)
    loaded = load_file(target)
    assert loaded["a.b"].item() == 1
    assert loaded["1"].item() == 5
    assert sorted(tensor.item() for tensor in loaded.values()) == [1, 2, 3, 4, 5, 6, 7]
    same(striate.load(target), state)


def test_header_is_as_safetensors_demands(target: Path, flat: Any, nested: Any) -> None:
    for state in (flat, nested, {}, {"odd": torch.zeros(3, dtype=torch.uint8), "even": torch.zeros(4)}):
        striate.save(state, target)
        raw = target.read_bytes()
        # serde, with its own idea of JSON, of order and of holes.
        assert len(safetensors.deserialize(raw)) == len(striate.info(target).tensors)
        assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0


def test_every_tensor_is_aligned_for_its_dtype(target: Path) -> None:
    state = {
        f"t{n}": torch.zeros(n, dtype=d) for n, d in enumerate((torch.uint8, torch.float64, torch.int16) * 9)
    }
    state["big"] = torch.zeros(8192)
    striate.save(state, target)
    for tensor in striate.info(target).tensors:
        if tensor.nbytes:
            # The data begins on a page; within it, storages stand at multiples of their own power of two.
            assert tensor.offset % min(tensor.nbytes & -tensor.nbytes, 4096) == 0, tensor
            assert tensor.offset % 4096 == 0 or tensor.name != "big"


def test_torch_load_itself_opens_a_path_ending_in_safetensors(target: Path, flat: Any) -> None:
    """torch looks at the suffix and calls safetensors; which releases do so is theirs to say."""
    import torch.serialization

    source = Path(torch.serialization.__file__).read_text()
    if ".safetensors" not in source:
        pytest.skip(f"torch {torch.__version__} does not open safetensors files")
    striate.save(flat, target)
    loaded = torch.load(target)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in flat.items()) and len(loaded) == len(
        flat
    )


def test_transformers_loads_a_model_saved_with_striate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (requirements/test.txt has it)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    import transformers.utils

    if not transformers.utils.is_torch_available():
        pytest.skip(f"transformers {transformers.__version__} does not take torch {torch.__version__}")
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(6)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model = BertForMaskedLM(config).eval()
    config.save_pretrained(tmp_path / "model")
    striate.save(model.state_dict(), tmp_path / "model" / "model.safetensors")
    loaded, report = BertForMaskedLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    # The decoder's weight is tied: transformers ties it again itself.
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert not report["missing_keys"]
    same(dict(loaded.state_dict()), dict(model.state_dict()))
    words = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(words).logits, model(words).logits)
