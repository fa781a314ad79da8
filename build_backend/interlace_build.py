"""PEP 517 backend: setuptools, plus torch as a build requirement only when the target environment has none.

Listing torch under build-system.requires would make pip fetch a second torch (gigabytes) into every isolated build
and compile against that one. The op libraries use torch's stable ABI, so any torch >= 2.11 is good to build with:
the installed one is used as it is, and never replaced.
"""

from __future__ import annotations

from typing import Any

import toolchain
from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist, prepare_metadata_for_build_wheel

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

prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Setuptools' own requirements, and torch when there is none to build against."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """As for a wheel."""
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Check the toolchain before setuptools starts, so that what is missing is the last line on the screen."""
    toolchain.require_all()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """As build_wheel, with the libraries placed in the source tree."""
    toolchain.require_all()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _torch_requirement() -> list[str]:
    toolchain.require_compiler()  # before gigabytes are fetched for a build that cannot start
    return [] if toolchain.find_torch() else ["torch>=2.11"]
