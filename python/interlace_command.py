"""Entry point of the `interlace` command. Outside the package on purpose: `interlace doctor` must run, and say why,
when the package itself cannot be imported because its native part was not built or does not load; and `interlace
plan` must answer before torch, which the package's face imports, has finished loading.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

WITHOUT_FACE = frozenset({"plan"})  # commands that need neither torch nor the native part


def main() -> None:
    """Run the command line; without the package's face where that is not needed or fails to import."""
    if sys.argv[1:2] and sys.argv[1] in WITHOUT_FACE:
        _leave_out_face()
    else:
        try:
            importlib.import_module("interlace")
        except Exception:  # a half-built package can fail in any way; the doctor finds out which
            _leave_out_face()
    importlib.import_module("interlace.cli").main()


def _leave_out_face() -> None:
    """Leave the package importable by its files, with an __init__ that has not been run."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "interlace"]:
        del sys.modules[name]
    spec = importlib.util.find_spec("interlace")
    if spec is None:
        raise SystemExit("interlace is not installed in this environment: pip install .")
    sys.modules["interlace"] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    main()
