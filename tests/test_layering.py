"""The floors of the design hold in the tree, and the checker that says so can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layering import source_files, violations

ROOT = Path(__file__).parents[1]


def test_the_tree_keeps_to_its_floors():
    """Catches an import or include that goes up, an environment read, a long file, a character not ASCII."""
    assert len(source_files(ROOT)) > 20, "the checker found no sources to check"
    assert not violations(ROOT), "\n" + "\n".join(violations(ROOT))


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


GOOD = {
    "python/interlace/__init__.py": "from . import functional\n",
    "python/interlace/config.py": "import os\nTIMEOUT = os.environ.get('INTERLACE_TIMEOUT')\n",
    "python/interlace/ops.py": "from ._native import load\nfrom interlace import config\n",
    "python/interlace/_native.py": "import interlace._C\nimport torch\n",
    "python/interlace/functional/__init__.py": "from .linear import linear\n",
    "python/interlace/functional/linear.py": "from .. import ops\nfrom ..errors import CollectiveAborted\n",
    "csrc/core/signal.h": "#include <cstdint>\n",
    "csrc/runtime/group.cpp": '#include "core/signal.h"\n',
    "csrc/ops.cpp": '#include <torch/csrc/stable/library.h>\n#include "core/signal.h"\n',
}


def test_a_clean_tree_has_no_violation(tmp_path):
    """Without this the seeded violations below could be reported for the wrong reason."""
    for name, text in GOOD.items():
        write(tmp_path, name, text)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("python/interlace/ops.py", "from .functional import linear\n", "ops (floor 6) imports functional"),
        ("python/interlace/ops.py", "from interlace.modules.mlp import ParallelMLP\n", "imports modules"),
        ("python/interlace/ops.py", "def late():\n    import interlace.cli\n", "imports cli (floor 14)"),
        ("python/interlace/ops.py", "import interlace\n", "imports the package itself"),
        ("python/interlace/ops.py", "from interlace import all_reduce\n", "imports the package itself"),
        ("python/interlace/functional/linear.py", "from ..modules import mlp\n", "imports modules (floor 8)"),
        ("python/interlace/utils.py", "", "has no floor"),
        ("python/interlace/ops.py", "import os\nprint(os.environ['HOME'])\n", ":2: reads the environment"),
        ("python/interlace/ops.py", "import os\nprint(os.getenv('HOME'))\n", ":2: reads the environment"),
        ("csrc/runtime/group.cpp", 'auto x = std::getenv("HOME");\n', "reads the environment"),
        ("csrc/core/signal.h", '#include "runtime/group.h"\n', "core must not include runtime"),
        ("csrc/core/signal.h", "#include <cuda_runtime.h>\n", "core must not include CUDA"),
        ("csrc/runtime/group.cpp", "#include <torch/csrc/stable/tensor.h>\n", "must not include torch"),
        ("csrc/ops.cpp", "#include <ATen/ATen.h>\n", "outside torch's stable ABI"),
        ("csrc/ops.cpp", "#include <torch/library.h>\n", "outside torch's stable ABI"),
        ("csrc/runtime/group.cpp", '#include "../core/signal.h"\n', "not with .."),
        ("csrc/runtime/group.cpp", '#include "cpu/gemm.h"\n', "runtime must not include cpu"),
        ("csrc/helpers/x.h", "", "its folder has no floor"),
        ("python/interlace/ops.py", "x = 1\n" * 401, "longer than 400 lines"),
        ("csrc/core/signal.h", "// \N{GREEK SMALL LETTER ALPHA}\n", ":1: not ASCII"),
    ],
)
def test_a_seeded_violation_is_reported(tmp_path, name, text, message):
    """A checker that passes everything would pass the real tree too."""
    for good_name, good_text in GOOD.items():
        write(tmp_path, good_name, good_text)
    write(tmp_path, name, text)
    found = violations(tmp_path)
    assert any(line.startswith(f"{name}:") and message in line for line in found), found
