"""The artifact cache: entries are complete, private and limited in size, and locks end with their process."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import in_threads

from cudatma.build.cache import Cache, canonical, default_root, digest, size_limit_bytes
from cudatma.errors import ArgumentError, ArgumentTypeError, CacheError

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER = "a" * 64, "b" * 64
FILES = {"kernel.cu": b"source", "kernel.cubin": b"\x7fELF\x00", "config.json": b"{}"}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "root")


def run_python(code: str, *args: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


# --- keys


class Mode(Enum):
    FAST = 1


@dataclass(frozen=True, slots=True)
class Config:
    tile: int
    mode: Mode = Mode.FAST
    names: frozenset[str] = frozenset("abcdefg")
    dtype: Any = None


def test_canonical_is_json_of_everything_a_config_holds() -> None:
    value = {
        "config": Config(3, dtype=np.dtype(ml_dtypes.bfloat16)),
        "n": np.int32(4),
        "bytes": b"x",
        "list": (1, 2.5, None),
    }
    text = json.dumps(canonical(value), sort_keys=True)
    assert '"tile": 3' in text
    assert '"Mode.FAST"' in text
    assert '"bfloat16"' in text
    assert '"n": 4' in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('1a", \u00e9', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("1a\u00e9", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, json_values)
def test_digest_tells_values_apart(a: Any, b: Any) -> None:
    assert (digest({"x": a}) == digest({"x": b})) == (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (1, 1.0), ("1", 1), (Config(1), Config(2)), ({"a"}, ["a"]), (b"a", "a"), (None, "null")]
)
def test_digest_tells_types_apart(a: Any, b: Any) -> None:
    assert digest({"x": a}) != digest({"x": b})


def test_digest_is_the_same_in_every_process() -> None:
    code = "from cudatma.build.cache import digest; print(digest({'x': frozenset('abcdefg'), 'y': {'b': 1, 'a': 2}}))"
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        found.add(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip())
    assert found == {digest({"y": {"a": 2, "b": 1}, "x": frozenset("gfedcba")})}


@pytest.mark.parametrize("value", [object(), {1: 2}, lambda: 0, 1j])
def test_what_has_no_stable_text_is_no_key(value: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        digest({"x": value})


# --- entries


file_names = st.builds("{}.{}".format, st.text("az", min_size=1, max_size=5), st.text("pt", min_size=1, max_size=3))


@given(st.dictionaries(file_names, st.binary(max_size=99), max_size=4))
def test_what_is_put_is_got(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    cache = Cache(tmp_path_factory.mktemp("cache") / "root")
    assert cache.get(KEY) is None
    put = cache.put(KEY, files)
    got = Cache(cache.root).get(KEY)
    assert got is not None
    assert dict(got.files) == dict(put.files) == files
    assert got.folder is not None
    assert {p.name: p.read_bytes() for p in got.folder.iterdir() if p.name != "manifest.json"} == files


def spoil_truncate(entry: Path) -> None:
    (entry / "kernel.cubin").write_bytes(b"\x7fE")


def spoil_flip(entry: Path) -> None:
    (entry / "kernel.cubin").write_bytes(b"\x7fELG\x00")


def spoil_remove(entry: Path) -> None:
    (entry / "kernel.cu").unlink()


def spoil_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def spoil_manifest_type(entry: Path) -> None:
    (entry / "manifest.json").write_text("[1]")


def spoil_manifest_depth(entry: Path) -> None:
    (entry / "manifest.json").write_text("[" * 100_000)


def spoil_pipe(entry: Path) -> None:
    (entry / "kernel.cu").unlink()
    os.mkfifo(entry / "kernel.cu")


def spoil_device(entry: Path) -> None:
    (entry / "manifest.json").unlink()
    (entry / "manifest.json").symlink_to("/dev/zero")


def spoil_path(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"bytes": 0, "sha256": ""}
    (entry / "manifest.json").write_text(json.dumps(manifest))


def spoil_all(entry: Path) -> None:
    for path in entry.iterdir():
        path.unlink()


def spoil_folder(entry: Path) -> None:
    spoil_all(entry)
    entry.rmdir()
    entry.write_text("not a folder")


@pytest.mark.parametrize("spoil", [v for k, v in sorted(globals().items()) if k.startswith("spoil_")])
def test_a_damaged_entry_is_a_miss_and_is_replaced(cache: Cache, spoil: Any) -> None:
    spoil(cache.put(KEY, FILES).folder)
    assert cache.get(KEY) is None
    cache.put(KEY, FILES)
    got = cache.get(KEY)
    assert got is not None
    assert dict(got.files) == FILES
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_whole_entry_stays(cache: Cache) -> None:
    cache.put(KEY, FILES)
    cache.put(KEY, {"kernel.cu": b"later"})
    got = cache.get(KEY)
    assert got is not None
    assert dict(got.files) == FILES


@pytest.mark.parametrize("key", ["", "A" * 64, "a" * 63, "../" + "a" * 61, None])
def test_keys_are_digests(cache: Cache, key: Any) -> None:
    for call in (cache.get, cache.lock, lambda k: cache.put(k, FILES)):
        with pytest.raises(ArgumentError, match="key"):
            call(key).__enter__()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "manifest.json"])
def test_file_names_are_plain(cache: Cache, name: str) -> None:
    with pytest.raises(ArgumentError, match="files"):
        cache.put(KEY, {name: b""})


def test_failures_are_kept_and_few(cache: Cache) -> None:
    kept = [cache.keep_failure(f"{i:064x}", {"log.txt": b"no"}) for i in range(20)]
    left = sorted(path.name for path in (cache.root / "failed").iterdir())
    assert len(left) == 16
    assert kept[-1] is not None
    assert (kept[-1] / "log.txt").read_bytes() == b"no"


def test_facts(cache: Cache) -> None:
    assert cache.recall(KEY) is None
    cache.remember(KEY, [13, 0])
    assert Cache(cache.root).recall(KEY) == [13, 0]


# --- the folder


def test_the_folder_is_private(cache: Cache) -> None:
    cache.put(KEY, FILES)
    for folder in (cache.root, *(path for path in cache.root.rglob("*") if path.is_dir())):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("part", ["", "entries"])
def test_a_folder_that_others_write_to_is_refused(cache: Cache, mode: int, part: str) -> None:
    (cache.root / part).chmod(mode)
    with pytest.raises(CacheError, match="writable by other users"):
        Cache(cache.root)


@pytest.mark.parametrize(
    ("mode", "refused"), [(0o777, True), (0o722, True), (0o757, True), (0o1777, False), (0o755, False)]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path, mode: int, refused: bool, depth: int) -> None:
    """A user who may write to a parent folder could replace the cache folder."""
    root = tmp_path / "a" / "b" / "cache"
    root.parents[depth - 1].mkdir(parents=True)
    root.parents[depth - 1].chmod(mode)
    if not refused:
        assert Cache(root).folder == root
        return
    with pytest.raises(CacheError, match=f"{root.parents[depth - 1]}, which contains .* is writable by other users"):
        Cache(root)


def test_the_parents_of_what_a_link_leads_to_count(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "mine" / "cache").mkdir(parents=True, mode=0o700)
    shared.chmod(0o777)
    (tmp_path / "root_link").symlink_to(shared / "mine" / "cache")
    (tmp_path / "link").symlink_to("shared/mine")
    for root in (tmp_path / "root_link", tmp_path / "link" / "cache"):
        with pytest.raises(CacheError, match=f"{shared}, which contains"):
            Cache(root)
    shared.chmod(0o755)
    assert Cache(tmp_path / "link" / "cache").folder is not None


@pytest.mark.parametrize("target", ["shared/mine", "hop"])
def test_the_parents_of_what_a_link_inside_the_cache_leads_to_count(cache: Cache, tmp_path: Path, target: str) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True, mode=0o700)
    shared.chmod(0o777)
    (tmp_path / "hop").symlink_to(shared / "mine")
    (cache.root / "entries").rmdir()
    (cache.root / "entries").symlink_to(tmp_path / target)
    with pytest.raises(CacheError, match=f"{shared}, which contains"):
        Cache(cache.root)
    shared.chmod(0o755)
    assert Cache(cache.root).folder is not None
    (shared / "mine").chmod(0o777)
    with pytest.raises(CacheError, match="entries is writable by other users"):
        Cache(cache.root)


def test_a_parent_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result((*found[:4], 12345, *found[5:])) if path == tmp_path / "theirs" else found

    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(CacheError, match=r"theirs, which contains .* belongs to user 12345"):
        Cache(tmp_path / "theirs" / "cache")


def test_a_group_of_ones_own_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A umask of 002 leads to such folders on systems where every user has a private group."""
    parent = tmp_path / "home"
    parent.mkdir()
    parent.chmod(0o775)
    members: list[str] = []
    own = type("Group", (), {"gr_name": pwd.getpwuid(os.geteuid()).pw_name, "gr_mem": members})
    monkeypatch.setattr(grp, "getgrgid", lambda group: own)
    assert Cache(parent / "cache").folder is not None
    members.append("somebody")
    with pytest.raises(CacheError, match=r"home, which contains .*mode 0775"):
        Cache(parent / "cache")


def test_parents_that_were_missing_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Cache(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_another_users_folder_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(CacheError, match="belongs to user"):
        Cache(cache.root)


def test_an_unwritable_folder_becomes_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="only in memory"):
        cache = Cache(tmp_path / "file" / "cache")
    assert cache.folder is None
    assert cache.get(KEY) is None
    put = cache.put(KEY, FILES)
    assert put.folder is None
    assert cache.get(KEY) == put
    assert cache.keep_failure(KEY, FILES) is None
    cache.remember(KEY, 1)
    assert cache.recall(KEY) is None
    with cache.lock(KEY):
        pass


def test_a_full_disk_does_not_fail_a_put(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert cache.put(KEY, FILES).folder is None
    got = cache.get(KEY)
    assert got is not None
    assert dict(got.files) == FILES


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDATMA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_root() == Path("/elsewhere/cudatma")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root() == Path("/home/somebody/.cache/cudatma")
    monkeypatch.setenv("CUDATMA_CACHE_DIR", "/mine")
    assert default_root() == Path("/mine")
    monkeypatch.setenv("CUDATMA_CACHE_DIR", "mine")
    with pytest.raises(CacheError, match="absolute"):
        default_root()


def test_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDATMA_CACHE_SIZE_MB", raising=False)
    assert size_limit_bytes() == 1024 * 10**6
    monkeypatch.setenv("CUDATMA_CACHE_SIZE_MB", "3")
    assert size_limit_bytes() == 3_000_000
    for wrong in ("-1", "3.5", "many"):
        monkeypatch.setenv("CUDATMA_CACHE_SIZE_MB", wrong)
        with pytest.raises(CacheError, match="SIZE_MB"):
            size_limit_bytes()


def test_pruning_discards_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "root", limit_bytes=10_500)
    keys = [f"{i:064x}" for i in range(10)]
    for age, key in enumerate(keys[:9]):
        folder = cache.put(key, {"kernel.cubin": bytes(1000)}).folder
        assert folder is not None
        os.utime(folder, (1000 + age, 1000 + age))
    assert cache.get(keys[0]) is not None  # used now, so no longer the oldest
    cache.put(keys[9], {"kernel.cubin": bytes(1000)})
    left = [key for key in keys if cache.get(key) is not None]
    assert keys[0] in left
    assert keys[9] in left
    assert keys[1] not in left
    gone = [key for key in keys if key not in left]
    assert gone == keys[1 : 1 + len(gone)]
    assert sum(p.stat().st_size for p in (cache.root / "entries").rglob("*") if p.is_file()) <= 10_500


def test_a_new_entry_survives_a_limit_it_exceeds(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "root", limit_bytes=0)
    cache.put(KEY, FILES)
    cache.put(OTHER, FILES)
    assert cache.get(KEY) is None
    assert cache.get(OTHER) is not None


def test_what_killed_processes_left_is_cleared(cache: Cache) -> None:
    old, new = cache.root / "tmp" / "old", cache.root / "tmp" / "new"
    for path in (old, new):
        path.mkdir()
        (path / "part").write_bytes(b"x")
    os.utime(old, (1000, 1000))
    cache.put(KEY, FILES)
    assert not old.exists()
    assert new.exists()


# --- many processes

_WRITER = """
import sys, warnings
from cudatma.build.cache import Cache
warnings.simplefilter("error")
cache = Cache(sys.argv[1], limit_bytes=3000)
for turn in range(30):
    key = f"{turn % 5:064x}"
    got = cache.get(key)
    want = {"a": bytes([turn % 5]) * 500, "b": bytes([turn % 5]) * 300}
    assert got is None or dict(got.files) == want
    cache.put(key, want)
"""


def test_many_writers_and_readers_meet_no_half_entry(tmp_path: Path) -> None:
    workers = [run_python(_WRITER, tmp_path / "root") for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert list((tmp_path / "root" / "tmp").iterdir()) == []


def test_an_entry_that_goes_away_right_after_a_failed_rename_is_stored(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process stored the key and then pruned it, so the rename fails because of an entry that no longer
    exists."""
    rename, failures = Path.rename, []

    def taken_once(self: Path, target: Path) -> Path:
        if not failures:
            failures.append(target)
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", taken_once)
    cache.put(KEY, FILES)
    assert len(failures) == 1
    stored = cache.get(KEY)
    assert stored is not None
    assert dict(stored.files) == FILES
    assert cache.folder is not None


def test_a_lock_admits_one_at_a_time(cache: Cache) -> None:
    inside, most = 0, 0

    def work(_: int) -> None:
        nonlocal inside, most
        for _ in range(10):
            with cache.lock(KEY):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    in_threads(4, work)
    assert most == 1
    assert list((cache.root / "locks").iterdir()) == []


def test_a_lock_that_stays_held_is_an_error(cache: Cache) -> None:
    with (
        cache.lock(KEY),
        cache.lock(OTHER),
        pytest.raises(CacheError, match="locked by another"),
        cache.lock(KEY, timeout_s=0.02),
    ):
        pass


_FORKER = """
import os, sys, time
from cudatma.build.cache import Cache
with Cache(sys.argv[1]).lock("a" * 64):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def test_a_child_of_a_killed_holder_holds_no_lock(cache: Cache) -> None:
    holder = run_python(_FORKER, cache.root)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with cache.lock(KEY, timeout_s=5):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_without_file_locks_the_block_still_runs(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("cudatma.build.files.fcntl.flock", unsupported)
    ran = False
    with cache.lock(KEY):
        ran = True
    assert ran
