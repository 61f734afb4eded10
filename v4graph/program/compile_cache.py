"""The directory of compiled programs: checked before torch reads it, listed after torch wrote it.

A manifest holds size and SHA-256 of every file. A file that differs from it, or that a killed
process left unlisted, is removed with one warning, so that torch compiles it again.

Two locks: `manifest.lock` is held while the directory is read and listed; `users.lock` is shared by
processes that compile, since files that they have not listed yet must not be removed.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import json
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from v4graph.errors import CacheError, V4GraphError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STAMP_SUFFIX = ".compiled"
"""Of files that say which programs the directory holds; they go when any other file does."""
_OWN = Path("v4graph", "inductor")
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_UNWRITABLE_TEXTS = ("No space left on device", "Read-only file system", "Disk quota exceeded")
_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_DAMAGE = (
    OSError,
    EOFError,
    SyntaxError,
    ImportError,
    AttributeError,  # a library without its symbols
    UnicodeError,
    json.JSONDecodeError,
    pickle.UnpicklingError,
)
_T = TypeVar("_T")
_Entry = tuple[int, str]
"""Size in bytes and SHA-256."""
_current: CompileCache | None = None


def compile_cache() -> CompileCache:
    """The process's cache, verified at its first use.

    Under TORCHINDUCTOR_CACHE_DIR, else XDG_CACHE_HOME, else ~/.cache, in a directory of its own:
    files that it does not list are removed.

    Raises:
        CacheError: the directory cannot be written.
    """
    global _current
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if _current is None or chosen != str(_current.directory):
        if chosen:
            base = Path(chosen).absolute()
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        # A child process finds the variable as this process has set it.
        _current = CompileCache(base if base.parts[-2:] == _OWN.parts else base / _OWN)
    return _current


class CompileCache:
    """One verified directory, to which torch's caches point."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._is_spare = False
        self._num_users = 0
        self._users: int | None = None
        self._verified: frozenset[str] = frozenset()
        self._hashes: dict[str, tuple[tuple[int, int, int], _Entry]] = {}
        with self._writing():
            directory.mkdir(parents=True, exist_ok=True)
        self._aim()
        self._verify()
        atexit.register(self._record_late)

    def acquire(self) -> None:
        """Begin to compile: until `release`, others remove no file that is not listed yet."""
        self._num_users += 1
        if self._users is None:
            with self._writing():
                self._users = self._open("users.lock")
                _flock(self._users, fcntl.LOCK_SH)

    def release(self) -> None:
        """End of compiling; lists what was compiled."""
        self.record()
        self._num_users -= 1
        if self._num_users == 0 and self._users is not None:
            os.close(self._users)
            self._users = None

    def compile(self, build: Callable[[], _T]) -> _T:
        """`build()`, and once more in an empty directory if it failed as a damaged cache does.

        Raises:
            CacheError: a file could not be written.
        """
        self._aim_headers()
        try:
            return build()
        except (*_DAMAGE, RuntimeError) as fault:
            if text := _unwritable(fault):
                raise self._error(text) from fault
            if self._is_spare or not _is_damage(fault):
                raise
            self._move(fault)
        return build()

    def record(self) -> None:
        """List every file written since the directory was verified.

        Raises:
            CacheError: the manifest could not be written.
        """
        if self._is_spare:
            return
        # Files that others list meanwhile are hashed again: they may not have been whole.
        with self._writing(), self._locked():
            listed = self._read()
            found = self._files()
            listed |= {name: self._hash(name) for name in found if name not in self._verified}
            self._write({name: entry for name, entry in listed.items() if name in found})

    def _verify(self) -> None:
        with self._writing(), self._locked():
            users = self._open("users.lock")
            alone = _flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listed = self._read()
            found = self._files()
            with ThreadPoolExecutor(2) as pool:
                hashed = pool.map(self._try_hash, sorted(set(listed) & set(found)))
                whole = {name for name, entry in hashed if entry == listed[name]}
            bad = {name for name in found if name not in whole and (alone or name in listed)}
            stamps = {name for name in found if name.endswith(STAMP_SUFFIX)}
            for name in bad | (stamps if bad or set(listed) - set(found) else set()):
                (self.directory / name).unlink(missing_ok=True)
                whole.discard(name)
            if whole != set(listed):
                self._write({name: listed[name] for name in whole})
            self._verified = frozenset(whole)
            os.close(users)
        if bad:
            logger.warning(
                "warning: compile cache %s: removed %d of %d files, damaged or left unfinished "
                "(%s); they are compiled again",
                self.directory,
                len(bad),
                len(found),
                ", ".join(sorted(bad)[:3]) + (", ..." if len(bad) > 3 else ""),
            )

    def _move(self, fault: BaseException) -> None:
        logger.warning(
            "warning: compile cache %s: compiling failed with %s; trying once more in an empty "
            "cache",
            self.directory,
            str(fault).strip().partition("\n")[0] or type(fault).__name__,
        )
        from torch._inductor.utils import clear_caches

        with suppress(OSError):  # without its manifest the next start trusts nothing in it
            (self.directory / MANIFEST).unlink()
        with self._writing():
            self.directory = Path(tempfile.mkdtemp(prefix="v4graph-")) / _OWN
            self.directory.mkdir(parents=True)
        atexit.register(shutil.rmtree, self.directory.parents[1], ignore_errors=True)
        self._is_spare = True
        self._aim()
        self._aim_headers()
        clear_caches()
        _forget_instruction_sets()

    def _record_late(self) -> None:
        # Kernels compiled while serving; but a compilation that was cut short stays unlisted.
        if self._num_users == 0 and self.directory.is_dir():
            with suppress(CacheError):
                self.record()

    def _aim(self) -> None:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        triton = os.environ.get("TRITON_CACHE_DIR")
        if not triton or triton == f"{before}/triton":
            os.environ["TRITON_CACHE_DIR"] = f"{self.directory}/triton"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.directory)

    def _aim_headers(self) -> None:
        # Torch keeps these outside its cache directory, where nobody checks them.
        from torch._inductor import codecache

        headers = str(self.directory / "precompiled_headers")
        if getattr(codecache, "_HEADER_DIR", headers) != headers:
            codecache._HEADER_DIR = headers
            codecache._HEADER_LOCK_DIR = f"{headers}/locks"
            codecache._precompile_header.cache_clear()

    def _files(self) -> list[str]:
        """Relative names of all files but locks, which have no content."""
        names = []
        for folder, _, files in os.walk(self.directory):
            inside = Path(folder).relative_to(self.directory)
            names += [str(inside / f) for f in files if f != MANIFEST and not f.endswith(".lock")]
        return names

    def _hash(self, name: str) -> _Entry:
        path = self.directory / name
        stat = path.stat()
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        known = self._hashes.get(name)
        if known is None or known[0] != state:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known = self._hashes[name] = (state, (stat.st_size, digest))
        return known[1]

    def _try_hash(self, name: str) -> tuple[str, _Entry | None]:
        try:
            return name, self._hash(name)
        except OSError:
            return name, None

    def _read(self) -> dict[str, _Entry]:
        """The manifest; a damaged one lists nothing."""
        try:
            content: Any = json.loads((self.directory / MANIFEST).read_bytes())
            return {str(name): (int(size), str(digest)) for name, (size, digest) in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write(self, entries: dict[str, _Entry]) -> None:
        partial = self.directory / f"{MANIFEST}.{os.getpid()}"
        try:
            partial.write_text(json.dumps(entries))
            partial.replace(self.directory / MANIFEST)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise

    def _open(self, name: str) -> int:
        return os.open(self.directory / name, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._open("manifest.lock")
        try:
            _flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error

    def _error(self, text: str) -> CacheError:
        return CacheError(
            f"compile cache {self.directory}: cannot be written ({text}); expected a directory "
            "with free space: make room, or choose another with TORCHINDUCTOR_CACHE_DIR"
        )


def user_fault(fault: BaseException) -> V4GraphError | None:
    """The fault of ours that torch has wrapped in its own, if there is one."""
    return next((f for f in _chain(fault) if isinstance(f, V4GraphError)), None)


def _chain(fault: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    pending = [fault]
    while pending:
        fault = pending.pop()
        if fault is not None and id(fault) not in seen:
            seen.add(id(fault))
            yield fault
            inner = getattr(fault, "inner_exception", None)
            pending += [fault.__context__, fault.__cause__, inner]


def _is_damage(fault: BaseException) -> bool:
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    faults = list(_chain(fault))
    if any(isinstance(f, (V4GraphError, InvalidCxxCompiler)) for f in faults):
        return False
    return any(isinstance(f, (*_DAMAGE, CppCompileError)) for f in faults)


def _unwritable(fault: BaseException) -> str | None:
    for f in _chain(fault):
        if isinstance(f, OSError) and f.errno in _UNWRITABLE:
            return f.strerror or str(f)
        for text in _UNWRITABLE_TEXTS:
            if text in str(f):  # the C++ compiler's own words
                return text
    return None


def _forget_instruction_sets() -> None:
    """Torch probes them with libraries from the cache: damaged ones count as missing sets."""
    from torch._inductor import cpu_vec_isa

    pending: list[Any] = [cpu_vec_isa.VecISA]
    holders: list[Any] = [cpu_vec_isa]
    while pending:
        holders.append(pending.pop())
        pending += holders[-1].__subclasses__()
    for holder in holders:
        for member in list(vars(holder).values()):
            if hasattr(member, "cache_clear"):
                member.cache_clear()


def _flock(file: int, how: int) -> bool:
    """Lock; False where another process holds it, or where the file system has no locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    return True
