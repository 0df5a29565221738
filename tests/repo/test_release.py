"""Wheel and sdist: what is in them, one version, and what the wheel does where only it is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from langchain_card import __version__
from tests.support import ROOT

DATA = {
    "": ("py.typed",),
    "serve/page": ("*.html", "*.css", "*.js", "*.svg"),
    "bench/data": ("**/*.json", "**/*.jsonl"),
}
"""What the wheel holds that is no code."""
OTHERS = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")


def run(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints; nothing of this process's own paths reaches it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHON"] = sys.executable  # for .ci/smoke
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project: Path, folder: Path, kind: str) -> Path:
    """Builds a `wheel` or an `sdist`."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=project)
    (built,) = folder.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "langchain_card"
    patterns = [f"{place}/{pattern}".lstrip("/") for place, endings in DATA.items() for pattern in endings]
    files = {path for pattern in ("**/*.py", *patterns) for path in package.glob(pattern)}
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    expected |= {f"langchain_card-{__version__}.dist-info/{name}" for name in OTHERS}
    assert {f"langchain_card/{name}" for name in ("py.typed", "serve/page/index.html")} < expected
    names = zipfile.ZipFile(wheel).namelist()
    assert set(names) == expected
    assert not [name for name in names if re.search(r"/(tests|docs|test_\w+\.py|conftest\.py)(/|$)", name)]


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (project,) = tmp_path.iterdir()
    assert build(project, tmp_path / "dist", "wheel").read_bytes() == wheel.read_bytes()


def test_the_sdist_is_what_a_checkout_has(sdist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    tracked = set(run("git", "ls-files").splitlines())
    new = set(run("git", "ls-files", "--others", "--exclude-standard").splitlines())
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive} - {"PKG-INFO"}
    assert {name for name in tracked if (ROOT / name).exists()} <= names <= tracked | new


def test_there_is_one_version(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"langchain_card-{__version__}.dist-info/METADATA").decode()
    headings = re.findall(r"^## \[([^]]+)\](?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    said = run(sys.executable, "-c", "from langchain_card.cli import main; main(['--version'])", cwd=ROOT)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert Parser().parsestr(metadata)["Version"] == __version__
    assert released[0] == __version__
    assert said == f"langchain-card {__version__}\n"


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Folders, not what their own .pth files name: an editable install of the checkout stays unseen.
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(seen))
    said = run(python, "-I", "-W", "ignore", ROOT / "tests" / "repo" / "smoke.py", cwd=tmp_path)
    say(f"{said}An installed wheel: {time.monotonic() - began:.0f} s")


@pytest.mark.pair
@pytest.mark.timeout(1200)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path, say: Callable[[str], None]) -> None:
    """91 to 203 s on two cores, idle and busy, with packages that need no download."""
    began = time.monotonic()
    say(f"{run(ROOT / '.ci' / 'smoke', wheel, cwd=tmp_path)}An empty environment: {time.monotonic() - began:.0f} s")
