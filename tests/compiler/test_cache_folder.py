"""The private folder: only what its user alone can have written is read, and a write is whole or leaves nothing."""

from __future__ import annotations

import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from insum_nn.compiler.tuning import cache_folder as cache


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_swept", set())
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    yield tmp_path / "cache"
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) <= before, "a descriptor stays open"


def test_what_is_written_is_read(root: Path, tmp_path: Path):
    assert cache.read("plans", "a") is None
    assert cache.write("plans", "a", b"one")
    assert cache.write("plans", "a", b"two")
    assert cache.write("kernels", "a", b"three")
    assert cache.write(tmp_path / "elsewhere" / "else", "a", b"four")
    assert cache.read("plans", "a") == b"two"
    assert cache.read("kernels", "a") == b"three"
    assert (
        (tmp_path / "elsewhere" / "else" / "a").read_bytes() == cache.read(tmp_path / "elsewhere/else", "a") == b"four"
    )
    assert cache.own_folder("plans") == root / "plans"
    assert cache.own_folder(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    (when,) = cache.times("plans").values()
    assert when == (root / "plans" / "a").stat().st_mtime_ns
    cache.remove("plans", ["a", "missing"])
    assert cache.times("plans") == {}


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_folders_and_files_are_their_owners_alone(root: Path, mask: int):
    before = os.umask(mask)
    try:
        cache.write("plans", "a", b"")
        with cache.opened("locks", "b", make=True):
            pass
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "plans", root / "locks")] == [0o700] * 3
    assert [stat.S_IMODE(path.stat().st_mode) for path in root.glob("*/*")] == [0o600] * 2
    assert cache.read("plans", "a") == b""


def _of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.fstat

    def fstat(file: int) -> os.stat_result:
        found = plain(file)
        if not stat.S_ISREG(found.st_mode):
            return found
        return os.stat_result([found.st_uid + 1 if place == 4 else value for place, value in enumerate(found)])

    monkeypatch.setattr(os, "fstat", fstat)


def _writable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o664)


@pytest.mark.parametrize(
    ("plant", "why"), [(_of_another_user, "it belongs to user"), (_writable, "others may write to it")]
)
def test_a_file_that_another_may_have_written_is_not_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path, pytest.MonkeyPatch], None], why: str
):
    for name in "ab":
        cache.write("plans", name, b"x")
        plant(root / "plans" / name, monkeypatch)
    with pytest.warns(UserWarning, match=rf"plans/a is not used, because {why}.*Delete the folder") as caught:
        assert [cache.read("plans", name) for name in "ab"] == [None, None]
    assert len(caught) == 1, "one for each folder"
    with cache.located("plans", "a") as path:
        assert path is None
    monkeypatch.undo()
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", str(root))
    cache.write("plans", "a", b"y")
    assert cache.read("plans", "a") == b"y"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
@pytest.mark.parametrize("inner", [False, True])
def test_nothing_is_kept_in_a_folder_that_others_can_write(root: Path, mode: int, inner: bool):
    cache.write("plans", "a", b"x")
    (root / "plans" if inner else root).chmod(mode)
    with pytest.warns(UserWarning, match="is not used, because others may write to it") as caught:
        assert cache.own_folder("plans") is None
    assert len(caught) == 1
    assert "chmod" not in str(caught[0].message)
    assert not cache.write("plans", "b", b"x")
    assert cache.read("plans", "a") is None
    assert cache.times("plans") == {}
    cache.remove("plans", ["a"])
    assert [path.name for path in (root / "plans").iterdir()] == ["a"]


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _pipe(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, secret: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [_link, _pipe, _folder])
def test_what_is_no_file_is_not_read(root: Path, tmp_path: Path, plant: Callable[[Path, Path], None]):
    assert cache.own_folder("plans") is not None
    (tmp_path / "secret").write_text("planted")
    plant(root / "plans" / "a", tmp_path / "secret")
    assert cache.read("plans", "a") is None
    with cache.opened("plans", "a", make=True) as file:
        assert file is None


@pytest.mark.parametrize("exchanged", ["cache", "cache/plans", "cache/plans/a"])
@pytest.mark.parametrize("use", ["read", "located", "write"])
def test_a_folder_cannot_be_exchanged_after_its_check(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: str, use: str
):
    cache.write("plans", "a", b"own")
    planted = tmp_path / "planted" / "cache" / "plans"
    planted.mkdir(parents=True)
    (planted / "a").write_bytes(b"planted")
    checked: list[str] = []
    plain = os.fstat

    def fstat(file: int) -> os.stat_result:
        """Folders and file are checked in this order; each is exchanged as soon as it was."""
        checked.append("cache/plans/a"[: (5, 11, 13)[len(checked)]])
        if checked[-1] == exchanged:
            (tmp_path / exchanged).rename(tmp_path / "aside")
            (tmp_path / "planted" / exchanged).rename(tmp_path / exchanged)
        return plain(file)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fstat)
        if use == "read":
            assert cache.read("plans", "a") == b"own"
        elif use == "write":
            assert cache.write("plans", "a", b"new")
        else:
            with cache.located("plans", "a") as path:
                assert path is not None
                # Who can exchange a file in a folder of this user's alone is this user.
                assert Path(path).read_bytes() == (b"planted" if exchanged == "cache/plans/a" else b"own")
    if use == "write" and exchanged != "cache/plans/a":
        assert (tmp_path / exchanged / ("plans/a" if exchanged == "cache" else "a")).read_bytes() == b"planted"


def test_a_located_file_has_its_name(root: Path):
    """Libraries are told apart by their paths, and descriptors' numbers come again."""
    for name in ("a.so", "b.so"):
        cache.write("libraries", name, name.encode())
        with cache.located("libraries", name) as path:
            assert path is not None
            assert Path(path).name == name
            assert Path(path).read_text() == name
    with cache.located("libraries", "c.so") as path:
        assert path is None


def test_a_write_that_fails_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch):
    cache.write("plans", "a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a full disk: part of the file can be written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert not cache.write("plans", "a", bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.write("plans", "a", b"new")
    (root / "plans" / "b").mkdir()
    assert not cache.write("plans", "b", b"new")
    assert sorted(os.listdir(root / "plans")) == ["a", "b"]
    assert cache.read("plans", "a") == b"old"


def test_what_a_killed_process_left_is_deleted(root: Path):
    cache.write("plans", "a", b"")
    for name, age in (("old", 2), ("young", 0.5)):
        path = root / "plans" / f"{cache._TEMPORARY}{name}"
        path.write_text("")
        os.utime(path, (time.time() - age * 3600,) * 2)
    assert [*cache.times("plans")] == ["a"]
    cache._swept.clear()
    cache.write("plans", "b", b"")
    assert sorted(os.listdir(root / "plans")) == [f"{cache._TEMPORARY}young", "a", "b"]


def _no_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("INSUM_NN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)


def _file_in_the_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSUM_NN_CACHE_DIR", f"{__file__}/cache")


def _read_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)


def _no_descriptors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())


@pytest.mark.parametrize("lack", [_no_home, _file_in_the_way, _read_only, _no_descriptors])
def test_where_no_folder_can_be_nothing_is_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, lack: Callable[[Path, pytest.MonkeyPatch], None]
):
    lack(root, monkeypatch)
    assert cache.own_folder("plans") is None
    assert not cache.write("plans", "a", b"")
    assert cache.read("plans", "a") is None
    assert cache.times("plans") == {}
    with cache.opened("locks", "a", make=True) as file:
        assert file is None
    assert not root.exists()


def test_damage_is_recognised():
    whole = cache.sealed(b"some\nbytes")
    assert cache.unsealed(whole) == b"some\nbytes"
    assert cache.unsealed(cache.sealed(b"")) == b""
    damaged = [None, b"", b"\n", whole[:-1], whole + b"x", whole[1:], whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]]
    assert [cache.unsealed(each) for each in damaged] == [None] * len(damaged)
