"""Warnings that point at the line of the caller, not at a line of ours."""

from __future__ import annotations

import os
import sys
import warnings

from striate.errors import StriateWarning

__all__ = ["callers_level", "warn"]


def callers_level() -> int:
    """The stacklevel, for the function that asks, of the line outside this package that called into it."""
    package = os.path.dirname(__file__) + os.sep
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(package) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def warn(message: str, category: type[StriateWarning]) -> None:
    warnings.warn(message, category, stacklevel=callers_level())
