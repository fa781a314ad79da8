"""Find the torch of the environment that the package is being installed into, without importing torch.

Run as a script with `python -E [folder]`, it prints `folder;version;cuda` (empty fields when there is none).
-E matters: pip isolates a build by way of PYTHONPATH; without that variable the interpreter sees the target
environment again.
"""

import importlib.util
import os
import sys


def find_torch() -> tuple[str, str, str]:
    """Return (folder, version, CUDA version) of the torch on sys.path; empty strings when there is none."""
    spec = importlib.util.find_spec("torch")
    return describe(os.path.dirname(spec.origin)) if spec and spec.origin else ("", "", "")


def describe(folder: str) -> tuple[str, str, str]:
    """Return (folder, version, CUDA version) of the torch package in a folder."""
    facts: dict[str, object] = {}
    # torch/version.py is plain assignments; importing torch itself would take seconds and needs its
    # dependencies
    with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
        exec(file.read(), facts)
    return folder, str(facts.get("__version__", "")), str(facts.get("cuda") or "")


if __name__ == "__main__":
    sys.stdout.write(";".join(describe(sys.argv[1]) if sys.argv[1:] else find_torch()) + "\n")
