"""A damaged compile cache costs time, never a start."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from v4graph.errors import CacheError
from v4graph.program import compile_cache
from v4graph.program.compile_cache import MANIFEST, CompileCache, user_fault
from v4graph.program.compiler import Compiler

ROOT = Path(__file__).parents[2]
KINDS = (".so", ".cpp", ".py", ".h", ".gch", "graph")


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "flipped": flip,
    "foreign": lambda content: b"\x00not a file of this cache\xff" * 7,
}


def popen(base: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHIND", "TRITON"))}
    environment |= {"XDG_CACHE_HOME": str(base), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.compile_one"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(base: Path) -> tuple[str, str]:
    """Output and warnings of a start that must succeed."""
    process = popen(base)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


def kind(path: Path) -> str:
    return "graph" if path.suffix not in KINDS else path.suffix


def files(directory: Path) -> list[Path]:
    """What the manifest lists."""
    return [directory / name for name in sorted(json.loads((directory / MANIFEST).read_text()))]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that two processes filled at once, and what they wrote."""
    base = tmp_path_factory.mktemp("cache")
    both = [popen(base) for _ in range(2)]
    (out, err), (other, other_err) = (process.communicate(timeout=600) for process in both)
    assert (both[0].returncode, both[1].returncode) == (0, 0), err + other_err
    assert out == other
    assert err == other_err == ""
    return base, out


@pytest.fixture
def copy(cold: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that cache, in the place where a process of its own would look."""
    shutil.copytree(cold[0], tmp_path, dirs_exist_ok=True)
    return tmp_path / "v4graph" / "inductor"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], CompileCache]:
    """Open a cache in this process, as a start would; torch is put back afterwards."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return CompileCache


def test_every_kind_is_there_and_listed(cold: tuple[Path, str]) -> None:
    directory = cold[0] / "v4graph" / "inductor"
    assert {kind(path) for path in files(directory)} == set(KINDS)
    found = [p for p in directory.rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert sorted(files(directory)) == sorted(p for p in found if p.name != MANIFEST)


@pytest.mark.parametrize("turn", [0, 2])
def test_a_start_survives_damage_of_every_kind(
    copy: Path, cold: tuple[Path, str], turn: int
) -> None:
    """Two starts: the first files of each kind have met every damage then."""
    damages = list(DAMAGES.values())
    num_damaged = 0
    for one in KINDS:
        if one == ".gch" and turn:
            continue  # slow to compile again; `test_damage_is_removed` damages it every way
        for i, path in enumerate([p for p in files(copy) if kind(p) == one][:2]):
            path.write_bytes(damages[(i + turn) % len(damages)](path.read_bytes()))
            num_damaged += 1
    out, err = start(copy.parents[1])
    assert out == cold[1]
    assert f"removed {num_damaged} of " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_removed(
    copy: Path,
    opened: Callable[[Path], CompileCache],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    paths = files(copy)
    for path in paths[::2]:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    opened(copy)
    assert [p for p in paths if p.exists()] == paths[1::2]
    assert len(caplog.records) == 1
    opened(copy)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_trusted_nowhere(
    copy: Path, opened: Callable[[Path], CompileCache], damage: str
) -> None:
    paths = files(copy)
    manifest = copy / MANIFEST
    before = manifest.read_bytes()
    manifest.write_bytes(DAMAGES[damage](before))
    opened(copy)
    left = [p for p in paths if p.exists()]
    assert len(left) <= (len(paths) - 1 if damage == "flipped" else 0)


def test_unlisted_files_stay_while_others_compile(
    tmp_path: Path, opened: Callable[[Path], CompileCache]
) -> None:
    first = opened(tmp_path)
    first.acquire()
    new = tmp_path / "unfinished.so"
    new.write_bytes(b"half")
    opened(tmp_path)
    assert new.exists()
    new.write_bytes(b"whole")
    first.release()
    opened(tmp_path)
    assert new.exists()


def test_files_of_a_killed_process_go(
    tmp_path: Path, opened: Callable[[Path], CompileCache], caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path)
    (tmp_path / "unfinished.so").write_bytes(b"half")
    opened(tmp_path)
    assert not (tmp_path / "unfinished.so").exists()
    assert "left unfinished (unfinished.so)" in caplog.text


def test_stamps_go_with_any_file(tmp_path: Path, opened: Callable[[Path], CompileCache]) -> None:
    cache = opened(tmp_path)
    cache.acquire()
    (tmp_path / "a.so").write_bytes(b"a")
    (tmp_path / "set.compiled").touch()
    cache.release()
    opened(tmp_path)
    assert (tmp_path / "set.compiled").exists()
    (tmp_path / "a.so").unlink()
    opened(tmp_path)
    assert not (tmp_path / "set.compiled").exists()


def test_a_fault_like_damage_is_tried_again_in_an_empty_cache(
    tmp_path: Path,
    opened: Callable[[Path], CompileCache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("torch._inductor.utils.clear_caches", lambda: None)
    cache = opened(tmp_path)
    cache.acquire()
    (tmp_path / "a.so").write_bytes(b"a")
    cache.record()
    places: list[Path] = []

    def build() -> str:
        places.append(cache.directory)
        if len(places) == 1:
            raise OSError("a.so: invalid ELF header")
        return "built"

    assert cache.compile(build) == "built"
    assert places[0] == tmp_path
    assert list(places[1].iterdir()) == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(places[1])
    assert "invalid ELF header; trying once more" in caplog.text
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.slow
def test_damage_that_the_manifest_lists_is_compiled_in_an_empty_cache(
    copy: Path, cold: tuple[Path, str]
) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    for path in files(copy):
        if path.suffix == ".so":
            path.write_bytes(b"no library")
            digest = hashlib.sha256(b"no library").hexdigest()
            manifest[str(path.relative_to(copy))] = [len(b"no library"), digest]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    out, err = start(copy.parents[1])
    assert out == cold[1]
    assert "trying once more in an empty cache" in err
    assert not (copy / MANIFEST).exists()


def test_a_place_that_cannot_be_written_is_told(
    tmp_path: Path, opened: Callable[[Path], CompileCache]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"file.inductor: cannot be written .*TORCHINDUCTOR"):
        opened(tmp_path / "file" / "inductor")


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "ro")])
def test_a_full_disk_while_compiling_is_told(
    tmp_path: Path,
    opened: Callable[[Path], CompileCache],
    monkeypatch: pytest.MonkeyPatch,
    fault: OSError,
) -> None:
    cache = opened(tmp_path)
    monkeypatch.setattr(compile_cache, "_current", cache)
    monkeypatch.setattr(CompileCache, "_aim_headers", lambda self: None)

    def refuse(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    region = Compiler().region("r", lambda x: x + 1, 1)
    with pytest.raises(RuntimeError) as caught:
        region(torch.zeros(1))
    assert isinstance(user_fault(caught.value), CacheError)


def test_a_fault_of_the_program_is_not_tried_again(
    tmp_path: Path, opened: Callable[[Path], CompileCache]
) -> None:
    tries: list[int] = []

    def build() -> None:
        tries.append(1)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        opened(tmp_path).compile(build)
    assert tries == [1]
