"""One binary for all processors: code for a newer instruction set must not leak into what older ones run."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86-64 CPU and compiler")
@pytest.mark.parametrize("level", sorted(FLAGS))
def test_inline_functions_of_an_instruction_set_are_its_own(level, tmp_path):
    """The linker keeps one copy of an inline function for the whole library: if that copy was compiled with AVX-512,
    the generic path dies of an illegal instruction, on the machines of users only.
    """
    files = sorted((ROOT / "csrc/cpu").glob(f"*_{level}.cpp"))
    assert files, f"no *_{level}.cpp in csrc/cpu"
    for source in files:
        output = tmp_path / f"{source.stem}.o"
        flags = ("-std=gnu++20", "-O1", "-w", "-fPIC", "-mf16c", "-mfma", *FLAGS[level])
        subprocess.run(
            ("g++", *flags, f"-I{ROOT / 'csrc'}", "-c", source, "-o", output), check=True, timeout=300
        )
        symbols = subprocess.run(("nm", "-C", output), capture_output=True, text=True, check=True).stdout
        shared = [
            line for line in symbols.splitlines() if line[17:18] in "WVu" and f"isa_{level}" not in line
        ]
        assert not shared, f"{source.name} shares these with the rest of the library:\n" + "\n".join(shared)
        assert f"isa_{level}" in symbols
