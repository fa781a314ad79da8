"""PEP 517 backend: setuptools, plus torch as a build requirement only when the target environment has none.

Listing torch under build-system.requires would make pip fetch a second torch (gigabytes) into every isolated
build and compile against that one. The op libraries use torch's stable ABI, so any torch >= 2.11 is good to
build with: the installed one is used as it is, and never replaced.

Every hook checks what it needs before setuptools starts, so that what is missing is one line, not a
traceback.
"""

from __future__ import annotations

from typing import Any

import toolchain

toolchain.require_setuptools()

from setuptools import build_meta  # noqa: E402  (after the check, which explains a missing or old setuptools)
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist  # noqa: E402

Settings = dict[str, Any] | None

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Setuptools' own requirements, and torch when there is none to build against."""
    return _torch_requirement() + build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """As for a wheel."""
    return _torch_requirement() + build_meta.get_requires_for_build_editable(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Without isolation the first hook pip calls: a build that cannot succeed ends before any download."""
    toolchain.require_all()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """As for a wheel."""
    toolchain.require_all()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the native libraries and pack the wheel."""
    toolchain.require_all()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the native libraries into the source tree."""
    toolchain.require_all()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _torch_requirement() -> list[str]:
    toolchain.require_compiler()  # before gigabytes are fetched for a build that cannot start
    return [] if toolchain.find_torch() else ["torch>=2.11"]
