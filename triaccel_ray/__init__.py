"""Precision, learning rate and batch size of PyTorch training under one control loop."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_HOMES = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
"""Public name -> module that defines it, read from the stub that type checkers use."""
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that settings and decisions are available without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Returns all names, including public ones that are not imported yet, for editors and notebooks."""
    return sorted({*globals(), *_HOMES})
