"""The release script refuses what is not ready, and packages with too much or too little in them."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

import cudatma
from tools.dev import release

VERSION = cudatma.__version__
WHEEL = f"cudatma-{VERSION}-py3-none-any.whl"


def wheel(folder: Path, *names: str, name: str = WHEEL) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for each in ("cudatma/__init__.py", f"cudatma-{VERSION}.dist-info/METADATA", *names):
            archive.writestr(each, "")
    return folder / name


def sdist(folder: Path, *names: str) -> Path:
    with tarfile.open(folder / "cudatma.tar.gz", "w:gz") as archive:
        for name in ("PKG-INFO", "setup.cfg", "cudatma.egg-info/SOURCES.txt", *names):
            archive.addfile(tarfile.TarInfo(f"cudatma-{VERSION}/{name}"), io.BytesIO())
    return folder / "cudatma.tar.gz"


@pytest.mark.parametrize(
    ("changelog", "version"),
    [
        ("# Changelog\n\n## Unreleased\n\n- a\n\n## 1.0.0\n\n- b\n", "Unreleased"),
        ("# Changelog\n\n## Unreleased\n\n## [1.1.0] - 2026-12-01\n\n- a\n\n## 1.0.0\n\n- b\n", "1.1.0"),
        ("# Changelog\n", ""),
    ],
)
def test_the_version_of_a_changelog_is_the_first_with_entries(changelog: str, version: str) -> None:
    assert release.changelog_version(changelog) == version


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What git says of a checkout whose CHANGELOG has this version first."""
    said: list[str] = []
    (tmp_path / "CHANGELOG.md").write_text(f"## {VERSION}\n\n- all\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "git", lambda *_: said)
    return said


def test_a_clean_checkout_is_ready(checkout: list[str]) -> None:
    release.check_checkout()


def test_changes_are_refused(checkout: list[str]) -> None:
    checkout.append("?? new.py")
    with pytest.raises(release.ReleaseError, match=r"has uncommitted changes.*new\.py"):
        release.check_checkout()


def test_a_changelog_of_another_version_is_refused(checkout: list[str]) -> None:
    (release.ROOT / "CHANGELOG.md").write_text("## Unreleased\n\n- all\n")
    with pytest.raises(release.ReleaseError, match=rf"version is {re.escape(VERSION)}.* is Unreleased"):
        release.check_checkout()
    assert release.main([]) == 1


def test_a_wheel_of_the_package_passes(tmp_path: Path) -> None:
    release.check_wheel(wheel(tmp_path))


@pytest.mark.parametrize("name", ["tests/test_a.py", "cudatma/tools/dev/release.py"])
def test_a_wheel_with_more_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match=f"contains {name}"):
        release.check_wheel(wheel(tmp_path, name))


def test_a_wheel_for_one_platform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match="not a pure wheel"):
        release.check_wheel(wheel(tmp_path, name=f"cudatma-{VERSION}-cp312-cp312-linux_x86_64.whl"))


def test_a_large_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "WHEEL_BYTES", 10)
    with pytest.raises(release.ReleaseError, match="bytes, allowed: 10"):
        release.check_size(wheel(tmp_path))


def zlib_deflate(data: bytes) -> bytes:
    return zlib.compress(data, 9)[2:-4]


def test_a_repacked_wheel_has_the_same_files_and_neither_dates_nor_a_umask(tmp_path: Path) -> None:
    contents = {f"cudatma/{n}.py": f"import n{n}\n".encode() * n * 50 for n in range(20)}
    for year in (2025, 2026):
        with zipfile.ZipFile(tmp_path / f"{year}.whl", "w") as archive:
            for name, data in contents.items():
                info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
                info.external_attr = (0o644 if year == 2025 else 0o600) << 16
                archive.writestr(info, data)
        release.repack(tmp_path / f"{year}.whl", zlib_deflate)
    assert (tmp_path / "2025.whl").read_bytes() == (tmp_path / "2026.whl").read_bytes()
    with zipfile.ZipFile(tmp_path / "2025.whl") as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == contents
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}
        assert sum(info.compress_size for info in archive.infolist()) < 20 * 60


def test_an_sdist_has_what_git_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "git", lambda *_: [".gitignore", "README.md"])
    release.check_sdist(sdist(tmp_path, "README.md"))
    with pytest.raises(release.ReleaseError, match=r"lacks README\.md"):
        release.check_sdist(sdist(tmp_path))
    with pytest.raises(release.ReleaseError, match=r"contains notes\.txt"):
        release.check_sdist(sdist(tmp_path, "README.md", "notes.txt"))
