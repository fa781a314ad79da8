"""The host half of the CUDA library builds, links, registers its ops and refuses bad calls, without a GPU.

A CPU build of torch lacks three functions of the library's C interface; stand-ins for them let everything else be the
real thing: kernels compiled by nvcc, the toolkit's runtime, torch's dispatcher.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import emulation
from tests.device.toolkit import find_tool, toolkit_folder

NVCC = find_tool("nvcc")
TOOLKIT = toolkit_folder()
pytestmark = pytest.mark.skipif(
    NVCC is None or TOOLKIT is None, reason="needs nvcc and the CUDA toolkit's headers"
)

TIMEOUT_SECONDS = 240
TORCH = Path(torch.__file__).parent

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

CALLS = r"""
import sys
import torch

torch.ops.load_library(sys.argv[1])
ops = torch.ops.interlace
assert ops._device_segment_bytes(1024) == 2304 + 4096 * 9 * 4 + 2 * 1024
assert "Tensor(a!)[] outs" in str(ops._device_one_shot_all_reduce.default._schema)


def refuses(text, segments, pages, first_rank=0, timeout=1.0):
    try:
        ops._device_barrier(segments, pages, first_rank, timeout, 0)
    except RuntimeError as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"accepted: {text}")


refuses("expected 1 to 8 segments, one per rank; got 9", [128] * 9, [64])
refuses("ranks 2 to 2 are not in a group of 2", [128, 256], [64], first_rank=2)
refuses("timeout must be positive", [128, 256], [64], timeout=0.0)
refuses("the segment of rank 1 must be aligned to 128 bytes", [128, 200], [64])
refuses("the host page of rank 0 must be pinned memory", [128, 256], [60])
print("all calls refused")
"""


def _execute(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """interlace_cuda.so for one architecture, with the stand-ins."""
    folder = tmp_path_factory.mktemp("cuda_host")
    objects = []
    for source in sorted((emulation.CSRC / "cuda" / "kernels").glob("*.cu")):
        objects.append(str(folder / f"{source.stem}.o"))
        options = (
            "-std=c++20",
            "--expt-relaxed-constexpr",
            "-arch=sm_90a",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
        )
        _execute(str(NVCC), *options, f"-I{emulation.CSRC}", "-c", str(source), "-o", objects[-1])
    stand_ins = folder / "stand_ins.cpp"
    stand_ins.write_text(STAND_INS)
    library = folder / "interlace_cuda.so"
    _execute(
        *(
            "g++",
            "-std=c++20",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
        ),
        *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA", f"-I{emulation.CSRC}"),
        *("-isystem", str(TORCH / "include"), "-isystem", str(TOOLKIT / "include"), str(stand_ins)),
        *(str(source) for source in sorted((emulation.CSRC / "cuda" / "host").glob("*.cpp"))),
        *(*objects, f"-L{TOOLKIT / 'lib64'}", "-lcudart", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
        *(f"-Wl,-rpath,{TOOLKIT / 'lib64'}", "-Wl,-z,defs", "-o", str(library)),
    )
    return library


def test_the_library_links_registers_and_refuses_bad_calls(library: Path) -> None:
    """Would catch: a symbol outside the stable ABI, a schema that does not parse, a launch with bad addresses."""
    assert "all calls refused" in _execute(sys.executable, "-c", CALLS, str(library))
