"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Version of the installed distribution; a plain source tree has none."""
    try:
        return version("v4graph")
    except PackageNotFoundError:
        return "0+source"
