"""Build the wheel and the sdist, check their contents, and test both in clean environments.

`make release` runs this script. zopfli (from the extra "release") compresses the wheel again, which makes it 3% smaller
than zlib. The script fails if the checkout has uncommitted changes, or if the first section with entries in the
CHANGELOG is for another version. With --packages, which `make packages` and CI pass, the script accepts any checkout
and creates no environments.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cudatma

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
WHEEL_BYTES = 1_500_000
#: Files that are only in the repository or only in the sdist, and folders that a wheel must not contain.
ONLY_IN_GIT = {".gitignore"}
ONLY_IN_SDIST = re.compile(r"PKG-INFO|setup\.cfg|cudatma\.egg-info/.*|")
NOT_IN_WHEEL = ("cudatma/tools/dev/", "cudatma/ptx_templates/probes/")
#: Tests that show within a minute that an unpacked sdist is complete.
SDIST_TESTS = ["tests/tools/test_packaging.py", "tests/build/test_render.py", "tests/golden/test_golden_sources.py"]


class ReleaseError(Exception):
    """Reason why the release cannot be built."""


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Run a command without this checkout in its environment. Raise ReleaseError if it fails."""
    print("+", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if subprocess.run([str(word) for word in command], cwd=folder, env=environment, check=False).returncode:
        raise ReleaseError(f"failed: {' '.join(map(str, command))}")


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changelog_version(changelog: str) -> str:
    """Return the title of the first section that has entries."""
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        title, _, entries = section.partition("\n")
        if entries.strip():
            return title.partition(" ")[0].strip("[]")
    return ""


def check_checkout() -> None:
    """Raise ReleaseError unless everything is committed and the CHANGELOG describes this version."""
    if changes := git("status", "--porcelain"):
        raise ReleaseError(f"the checkout has uncommitted changes (commit them first): {', '.join(changes)}")
    described = changelog_version((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if described != cudatma.__version__:
        raise ReleaseError(
            f"the version is {cudatma.__version__} (cudatma/__init__.py), but the first section of CHANGELOG.md with "
            f"entries is {described or 'missing'}"
        )


def build() -> tuple[Path, Path]:
    """Build the sdist in dist/, and build the wheel from the sdist. Return wheel and sdist."""
    for old in DIST.glob("cudatma-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    repack(wheel)
    return wheel, sdist


def zopfli_deflate(data: bytes) -> bytes:
    """Return the data as a deflate stream, without zlib's header and checksum."""
    from zopfli.zlib import compress

    return bytes(compress(data)[2:-4])


def repack(wheel: Path, deflate: Callable[[bytes], bytes] = zopfli_deflate) -> None:
    """Compress the files of a wheel again and drop their dates, so that equal contents give equal bytes."""
    with zipfile.ZipFile(wheel) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    with ProcessPoolExecutor() as pool:
        streams = list(pool.map(deflate, [data for _, data in members], chunksize=8))
    with wheel.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for (old, _), stream in zip(members, streams, strict=True):
            new = zipfile.ZipInfo(old.filename)  # dated 1980-01-01
            new.external_attr = 0o100644 << 16  # independent of the umask; no file of a wheel is executable
            archive.writestr(new, stream)  # store the stream unchanged, because the code below sets the headers
            new.compress_type, new.file_size, new.CRC = zipfile.ZIP_DEFLATED, old.file_size, old.CRC
            file.seek(new.header_offset)
            file.write(new.FileHeader())


def check_wheel(wheel: Path) -> None:
    """Raise ReleaseError unless the wheel is pure Python and contains only the package."""
    if wheel.name != f"cudatma-{cudatma.__version__}-py3-none-any.whl":
        raise ReleaseError(f"{wheel.name}: not a pure wheel of version {cudatma.__version__}")
    names = zipfile.ZipFile(wheel).namelist()
    own = ("cudatma/", f"cudatma-{cudatma.__version__}.dist-info/")
    if foreign := [name for name in names if not name.startswith(own) or name.startswith(NOT_IN_WHEEL)]:
        raise ReleaseError(f"{wheel.name} contains {', '.join(foreign[:5])}")


def check_size(wheel: Path) -> None:
    """Raise ReleaseError unless the repacked wheel is small."""
    if wheel.stat().st_size > WHEEL_BYTES:
        raise ReleaseError(f"{wheel.name}: {wheel.stat().st_size} bytes, allowed: {WHEEL_BYTES}")


def check_sdist(sdist: Path) -> None:
    """Raise ReleaseError unless the sdist has the files of the repository and no others."""
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    known = {*git("ls-files", "--cached", "--others", "--exclude-standard")}
    if missing := sorted(known - packed - ONLY_IN_GIT):
        raise ReleaseError(f"{sdist.name} lacks {', '.join(missing[:5])}; see MANIFEST.in")
    if foreign := sorted(name for name in packed - known if not ONLY_IN_SDIST.fullmatch(name)):
        raise ReleaseError(f"{sdist.name} contains {', '.join(foreign[:5])}, missing in the repository")


def clean_environment(folder: Path, requirement: str) -> Path:
    """Create an environment with only one package, and return the folder of its commands."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement)
    return folder / "bin"


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel as a user does, and run the demo's GEMM on the emulator."""
    commands = clean_environment(folder / "wheel", f"{wheel}[cuda13]")
    run(commands / "cudatma", "version", folder=folder)
    run(commands / "cudatma", "demo", "--backend", "emulator", "--out", folder / "demo", folder=folder)


def try_sdist(sdist: Path, folder: Path, python: Path) -> None:
    """Unpack the sdist and run some of its tests."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(python, "-m", "pytest", "-q", *SDIST_TESTS, folder=folder / sdist.name.removesuffix(".tar.gz"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/dev/release.py", description=__doc__)
    parser.add_argument("--packages", action="store_true", help="accept any checkout and create no environments")
    options = parser.parse_args(argv)
    try:
        if not options.packages:
            check_checkout()
        wheel, sdist = build()
        check_wheel(wheel)
        check_size(wheel)
        check_sdist(sdist)
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        with tempfile.TemporaryDirectory() as name:
            python, folder = Path(sys.executable), Path(name)
            if not options.packages:
                try_wheel(wheel, folder)
                python = clean_environment(folder / "sdist", f"{sdist}[cuda13,dev]") / "python"
            try_sdist(sdist, folder, python)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for package in (wheel, sdist):
        print(f"{package.relative_to(ROOT)}  {package.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
