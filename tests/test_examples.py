"""The examples: short scripts without helper modules, each with a picture; a resumed run equals an unbroken one."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from insum_nn.datasets import voxel_sample

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MAX_LINES = 120
MAX_PICTURE_BYTES = 100_000


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports an example by name, as its neighbours do: from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_examples_are_short_scripts_with_a_picture_each():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert scripts
    assert [s.name for s in scripts if s.name.startswith("_")] == [], "what is shared is in the package"
    lengths = {s.name: s.read_text(encoding="utf-8").count("\n") for s in scripts}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [s.name for s in scripts if f"]({s.name})" not in readme] == [], "README.md says what each is for"
    pictures = {EXAMPLES / path for path in re.findall(r'src="([^"]+)"', readme)}
    assert pictures == set((EXAMPLES / "images").iterdir())
    assert {p.stem for p in pictures} == {s.stem for s in scripts if s.stem != "demo"}
    assert {p.name: p.stat().st_size for p in pictures if p.stat().st_size > MAX_PICTURE_BYTES} == {}


def test_every_example_runs_on_every_change(example):
    """`.ci/run` names some, and among them the demo, which runs others by their `main`; one is run by tests here."""
    scripts = {script.stem: script.read_text(encoding="utf-8") for script in EXAMPLES.glob("*.py")}
    named = re.findall(r'EXAMPLES="([^"]+)"', (EXAMPLES.parent / ".ci" / "run").read_text(encoding="utf-8"))
    by_demo = [module.__name__ for module in example("demo").EXAMPLES.values()]
    assert sorted([*named[0].split(), *by_demo, "segment_room"]) == sorted(scripts)
    assert [n for n, text in scripts.items() if not text.endswith('\n\nif __name__ == "__main__":\n    main()\n')] == []


class Interrupted(Exception):
    """Stands for a run that is killed."""


@pytest.mark.parametrize(
    ("name", "checkpoint", "arguments"),
    [
        ("train_s3dis", "minkunet.pt", ["--epochs", "4", "--voxel-size", "0.2", "--width", "0.125"]),
        ("train_forces", "nequip.pt", ["--train", "6", "--test", "2", "--features", "2", "--epochs", "4"]),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one(example, monkeypatch, tmp_path, capsys, name, checkpoint, arguments):
    if name == "train_forces":
        pytest.importorskip("e3nn")
        pytest.importorskip("ase")
    module = example(name)
    if name == "train_forces":
        # What follows the training is not resumed: two steps of it are enough.
        run = module.VelocityVerlet.run
        monkeypatch.setattr(module.VelocityVerlet, "run", lambda self, steps: run(self, 2))
    arguments = ["--size", "tiny", *arguments]
    module.main([*arguments, "--out", str(tmp_path / "unbroken")])
    # A line an epoch, without a terminal too.
    lines = re.findall(r"^epoch (\d) of 4: .*\d", capsys.readouterr().out, re.MULTILINE)
    assert lines == ["1", "2", "3", "4"]
    with pytest.raises(FileNotFoundError, match=checkpoint):
        module.main([*arguments, "--out", str(tmp_path / "empty"), "--resume"])
    epochs = 0
    train = module.train

    def interrupted(*given: Any) -> Any:
        nonlocal epochs
        epochs += 1
        if epochs == 3:
            raise Interrupted
        return train(*given)

    monkeypatch.setattr(module, "train", interrupted)
    with pytest.raises(Interrupted):
        module.main([*arguments, "--out", str(tmp_path / "broken")])
    torch.manual_seed(999)
    module.main([*arguments, "--out", str(tmp_path / "broken"), "--resume"])
    assert epochs == 5, "two epochs, the interrupted one, and the two that were left"
    got, expected = (torch.load(tmp_path / folder / checkpoint) for folder in ("broken", "unbroken"))
    assert got.keys() == expected.keys()
    for key in {"losses", "history"} & expected.keys():
        assert got[key] == expected[key]
    for key, value in expected["model"].items():
        assert torch.equal(got["model"][key], value), key


def test_a_room_is_labelled_by_a_checkpoint(example, monkeypatch, tmp_path, capsys):
    """`segment_room.py` reads what `train_s3dis.py` has written, and a file of points; a generated room by default."""
    open3d_free = tmp_path / "room.txt"
    out = str(tmp_path)
    train = example("train_s3dis")
    train.main(["--size", "tiny", "--epochs", "1", "--voxel-size", "0.2", "--width", "0.125", "--out", out])
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.rand(500, 3, generator=generator), torch.randint(256, (500, 3), generator=generator)], 1)
    open3d_free.write_text("\n".join(" ".join(f"{value:g}" for value in row) for row in rows.tolist()))
    module = example("segment_room")
    model, voxel_size = module.load_model(tmp_path / "minkunet.pt", "cpu")
    assert voxel_size == 0.2
    module.main(["--checkpoint", f"{out}/minkunet.pt", "--root", out, "--room", "room.txt", "--out", f"{out}/labels"])
    header = (tmp_path / "labels" / "segment_room.ply").read_bytes()[:400]
    assert b"element vertex 500" in header
    assert (tmp_path / "labels" / "segment_room.png").stat().st_size > 10_000
    # A room without points of a class, as a batch of one, gives a class for each point.
    room = module.read_room(open3d_free)
    labelled = list(train.test(model, [voxel_sample(room, voxel_size)], "cpu"))
    assert labelled[0][1].shape == (500,)

    def trained(words: list[str]) -> None:
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir()
        shutil.copy(tmp_path / "minkunet.pt", folder)

    # Where there is no checkpoint it is trained, as above and by the demo.
    monkeypatch.setattr(module.train_s3dis, "main", trained)
    module.main(["--size", "tiny", "--out", f"{out}/generated"])
    assert "point accuracy" in capsys.readouterr().out
    assert b"element vertex 20000" in (tmp_path / "generated" / "segment_room.ply").read_bytes()[:400]


def test_molecules_without_cells_are_learned(example, monkeypatch, tmp_path):
    """Their stress is undefined: neither energies and forces nor the weights may become NaN by it."""
    pytest.importorskip("e3nn")
    pytest.importorskip("ase")
    from ase.build import molecule
    from ase.calculators.emt import EMT
    from ase.io import write

    frames = []
    for seed in range(4):
        frames.append(molecule("H2O"))
        frames[-1].rattle(0.05, seed=seed)
        frames[-1].calc = EMT()
        frames[-1].get_forces()
    write(tmp_path / "water.xyz", frames, format="extxyz")
    module = example("train_forces")
    run = module.VelocityVerlet.run
    monkeypatch.setattr(module.VelocityVerlet, "run", lambda self, steps: run(self, 2))
    arguments = ["--size", "tiny", "--root", f"{tmp_path}/water.xyz", "--out", str(tmp_path)]
    model, *_ = module.main([*arguments, "--train", "3", "--test", "1", "--features", "2", "--epochs", "2"])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_demo_s_table(example):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("sklearn")
    pytest.importorskip("e3nn")
    pytest.importorskip("ase")
    table = example("demo").table
    assert table([("a", "number"), ("long\nx", "1")]) == "a     number\nlong  1\nx"
