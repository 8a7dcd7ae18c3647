"""striate: checkpoints for PyTorch, at the speed of the drives.

Everything a person needs is re-exported here. Names are resolved at first use
(PEP 562), so that ``python -m striate.rescue`` works where neither torch nor
the compiled engine can be imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from striate.errors import (
        CorruptCheckpoint,
        DriveAccess,
        DriveError,
        DriveFull,
        DriveGone,
        DriveMedia,
        EngineFallback,
        EngineUnavailable,
        FormatError,
        LoadMismatch,
        NotEnoughMemory,
        StriateError,
        StriateWarning,
        UnsafePickle,
        UnsupportedFormat,
    )
    from striate.scrub import Damage, VerifyReport
    from striate.torch_api import (
        CheckpointInfo,
        SaveResult,
        TensorInfo,
        info,
        load,
        load_into,
        load_tensors,
        save,
        verify,
    )

__version__ = "0.1.0"

_HOMES = {
    "striate.errors": (
        "CorruptCheckpoint",
        "DriveAccess",
        "DriveError",
        "DriveFull",
        "DriveGone",
        "DriveMedia",
        "EngineFallback",
        "EngineUnavailable",
        "FormatError",
        "LoadMismatch",
        "NotEnoughMemory",
        "StriateError",
        "StriateWarning",
        "UnsafePickle",
        "UnsupportedFormat",
    ),
    "striate.scrub": ("Damage", "VerifyReport"),
    "striate.torch_api": (
        "CheckpointInfo",
        "SaveResult",
        "TensorInfo",
        "info",
        "load",
        "load_into",
        "load_tensors",
        "save",
        "verify",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointInfo",
    "CorruptCheckpoint",
    "Damage",
    "DriveAccess",
    "DriveError",
    "DriveFull",
    "DriveGone",
    "DriveMedia",
    "EngineFallback",
    "EngineUnavailable",
    "FormatError",
    "LoadMismatch",
    "NotEnoughMemory",
    "SaveResult",
    "StriateError",
    "StriateWarning",
    "TensorInfo",
    "UnsafePickle",
    "UnsupportedFormat",
    "VerifyReport",
    "__version__",
    "info",
    "load",
    "load_into",
    "load_tensors",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'striate' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
