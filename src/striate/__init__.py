"""striate: checkpoints for PyTorch, at the speed of the drives.

Everything a person needs is re-exported here. Names are resolved at first use
(PEP 562), so that ``python -m striate.rescue`` works where neither torch nor
the compiled engine can be imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from striate.engines import DriveUse
    from striate.errors import (
        CorruptCheckpoint,
        DataLost,
        DriveAccess,
        DriveError,
        DriveFull,
        DriveGone,
        DriveHung,
        DriveMedia,
        EngineFallback,
        EngineUnavailable,
        FormatError,
        LoadMismatch,
        MissingMember,
        NotEnoughMemory,
        StriateError,
        StriateWarning,
        UnsafePickle,
        UnsupportedFormat,
        VolumeMismatch,
        VolumeWarning,
    )
    from striate.repair import MemberHealth, Repaired, VolumeReport
    from striate.scrub import Damage, VerifyReport
    from striate.torch_api import (
        CheckpointInfo,
        LoadResult,
        MemberInfo,
        SaveResult,
        TensorInfo,
        info,
        load,
        load_into,
        load_tensors,
        save,
        verify,
    )
    from striate.transaction import MemberReport
    from striate.volume import CheckpointEntry, Volume

__version__ = "0.1.0"

_HOMES = {
    "striate.errors": (
        "CorruptCheckpoint",
        "DataLost",
        "DriveAccess",
        "DriveError",
        "DriveFull",
        "DriveGone",
        "DriveHung",
        "DriveMedia",
        "EngineFallback",
        "EngineUnavailable",
        "FormatError",
        "LoadMismatch",
        "MissingMember",
        "NotEnoughMemory",
        "StriateError",
        "StriateWarning",
        "UnsafePickle",
        "UnsupportedFormat",
        "VolumeMismatch",
        "VolumeWarning",
    ),
    "striate.engines": ("DriveUse",),
    "striate.repair": ("MemberHealth", "Repaired", "VolumeReport"),
    "striate.scrub": ("Damage", "VerifyReport"),
    "striate.torch_api": (
        "CheckpointInfo",
        "LoadResult",
        "MemberInfo",
        "SaveResult",
        "TensorInfo",
        "info",
        "load",
        "load_into",
        "load_tensors",
        "save",
        "verify",
    ),
    "striate.transaction": ("MemberReport",),
    "striate.volume": ("CheckpointEntry", "Volume"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointEntry",
    "CheckpointInfo",
    "CorruptCheckpoint",
    "Damage",
    "DataLost",
    "DriveAccess",
    "DriveError",
    "DriveFull",
    "DriveGone",
    "DriveHung",
    "DriveMedia",
    "DriveUse",
    "EngineFallback",
    "EngineUnavailable",
    "FormatError",
    "LoadMismatch",
    "LoadResult",
    "MemberHealth",
    "MemberInfo",
    "MemberReport",
    "MissingMember",
    "NotEnoughMemory",
    "Repaired",
    "SaveResult",
    "StriateError",
    "StriateWarning",
    "TensorInfo",
    "UnsafePickle",
    "UnsupportedFormat",
    "VerifyReport",
    "Volume",
    "VolumeMismatch",
    "VolumeReport",
    "VolumeWarning",
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
