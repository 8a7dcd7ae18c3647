"""liburing itself, for probing the kernel, for tests and for the raw ceiling of benchmarks. Re-exports only.

striate's own I/O does not pass through here: the engine (``striate._engine``) has its own rings. That is the point:
what this package measures and checks is independent of the engine.
"""

from .probe import Features, Limits, OpProbe, available, features, liburing_version, limits, probe
from .ring import Completion, Ring

__all__ = [
    "Completion",
    "Features",
    "Limits",
    "OpProbe",
    "Ring",
    "available",
    "features",
    "liburing_version",
    "limits",
    "probe",
]
