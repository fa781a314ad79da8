"""The host half of the CUDA library builds, links, registers its ops and refuses bad calls, without a GPU.

A CPU build of torch lacks three functions of the library's C interface; stand-ins for them let everything else be the
real thing: kernels compiled by nvcc, the toolkit's runtime, torch's dispatcher. What needs no torch is run against a
runtime that only writes down what it is asked (cuda_host_parts.cpp).
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.device import emulation, machine_code
from tests.device.machine_code import built_objects, execute
from tests.device.toolkit import find_tool, toolkit_folder

NVCC = find_tool("nvcc")
TOOLKIT = toolkit_folder()
pytestmark = [
    pytest.mark.timeout(machine_code.TIMEOUT_SECONDS),  # the first test compiles all kernels
    pytest.mark.skipif(NVCC is None or TOOLKIT is None, reason="needs nvcc and the CUDA toolkit's headers"),
]

TORCH = Path(torch.__file__).parent
HOST = emulation.CSRC / "cuda" / "host"
HERE = Path(__file__).parent

STAND_INS = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
extern "C" {
int aoti_torch_get_current_cuda_stream(int32_t, void** stream) { *stream = nullptr; return 0; }
void torch_c10_cuda_check_msg(int32_t error, const char*, const char*, uint32_t, bool, char** text) {
  *text = nullptr;
  if (error == 0) return;
  *text = static_cast<char*>(std::malloc(64));
  std::snprintf(*text, 64, "CUDA error %d", error);
}
void torch_c10_cuda_free_error_msg(char* text) { std::free(text); }
}
"""

WARNINGS = ("-Wall", "-Wextra", "-Werror")


def compiled(source: Path, folder: Path) -> Path:
    """Object file of a source of the host half, with every warning an error."""
    output = folder / f"{source.stem}.o"
    execute(
        *("g++", "-std=c++20", "-O0", *WARNINGS, "-fPIC", "-fvisibility=hidden", "-c", str(source)),
        *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA", f"-I{emulation.CSRC}"),
        *("-isystem", str(TORCH / "include"), "-isystem", str(Path(str(TOOLKIT)) / "include")),
        *("-o", str(output)),
    )
    return output


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """interlace_cuda.so with the stand-ins; a symbol that nothing defines fails the link."""
    folder = tmp_path_factory.mktemp("cuda_host")
    stand_ins = folder / "stand_ins.cpp"
    stand_ins.write_text(STAND_INS)
    sources = [stand_ins, *sorted(HOST.glob("*.cpp"))]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: compiled(source, folder), sources))
    library = folder / "interlace_cuda.so"
    runtime = Path(str(TOOLKIT)) / "lib64"
    execute(
        *("g++", "-shared", *map(str, objects), *map(str, built_objects().values())),
        *(f"-L{runtime}", "-lcudart", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
        *(f"-Wl,-rpath,{runtime}", "-Wl,-z,defs", "-o", str(library)),
    )
    return library


def test_the_library_links_registers_and_refuses_bad_calls(library: Path) -> None:
    """Would catch: a symbol outside the stable ABI, a schema that does not parse, a launch with bad operands."""
    printed = execute(sys.executable, str(HERE / "cuda_host_calls.py"), str(library))
    assert "all bad calls refused" in printed


def test_what_a_gpu_will_run_is_rehearsed(library: Path) -> None:
    """Would catch: a wrong call, shape or expectation in the parts of `make test-gpu`, or a part that cannot fail."""
    printed = execute(sys.executable, "-m", "tests.device.gpu.rehearsal", str(library), OMP_NUM_THREADS="1")
    assert "faults noticed" in printed


def test_parts_without_torch_keep_their_promises(tmp_path: Path) -> None:
    """Would catch: a copy to the wrong place or before the barrier, a stale tensor map, blocks that do not fit."""
    program = tmp_path / "parts"
    parts = [HOST / f"{name}.cpp" for name in ("budget", "copy_engine", "failure", "tensor_map")]
    execute(
        *("g++", "-std=c++20", "-O0", *WARNINGS, f"-I{emulation.CSRC}"),
        *("-isystem", str(Path(str(TOOLKIT)) / "include"), str(HERE / "cuda_host_parts.cpp")),
        *(*map(str, parts), "-o", str(program)),
    )
    assert "ok" in execute(str(program))
