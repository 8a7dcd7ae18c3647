"""The states that are saved: built without torch's thread pool, each byte different from its neighbours'."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

State = dict[str, torch.Tensor]

POOL_BYTES = 32 << 20
HIDDEN_CHOICES = (2048, 1024, 512, 256, 128, 64)


@dataclass(frozen=True)
class Spec:
    """Enough of a tensor to allocate its like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def specs_of(state: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def bytes_of(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def transformer(size_bytes: int) -> State:
    """bf16 weights of a decoder: one embedding, then layers until there are at least `size_bytes`, then the last norm.

    The hidden size falls with `size_bytes`, so that even a smoke run has several layers of large and small tensors.
    """
    hidden = next((h for h in HIDDEN_CHOICES if 8 * _layer_values(h) * 2 <= size_bytes), HIDDEN_CHOICES[-1])
    make = _Weights()
    state = {"model.embed_tokens.weight": make(16 * hidden, hidden)}
    total, layer = state["model.embed_tokens.weight"].nbytes, 0
    while total < size_bytes:
        prefix = f"model.layers.{layer}."
        added = {prefix + name: make(*shape) for name, shape in _layer_shapes(hidden).items()}
        state |= added
        total, layer = total + bytes_of(added), layer + 1
    state["model.norm.weight"] = make(hidden)
    return state


def _layer_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    wide = hidden * 11 // 4
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (hidden // 4, hidden),
        "self_attn.v_proj.weight": (hidden // 4, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }


def _layer_values(hidden: int) -> int:
    return sum(int(np.prod(shape)) for shape in _layer_shapes(hidden).values())


class _Weights:
    """Gaussian bf16 from one pool, each tensor from another place of it: a misplaced tensor then differs."""

    def __init__(self) -> None:
        floats = np.random.default_rng(7).standard_normal(POOL_BYTES // 2, dtype=np.float32) * np.float32(
            0.02
        )
        # bf16 is the upper half of a float32.
        self._pool = (floats.view(np.uint32) >> 16).astype(np.uint16)
        self._start = 0

    def __call__(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        values = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        filled = 0
        while filled < len(values):
            piece = self._pool[self._start : self._start + len(values) - filled]
            values[filled : filled + len(piece)] = piece
            filled += len(piece)
            # A stride prime to the pool's length, so that a period never lines up with a chunk.
            self._start = (self._start + 1_000_003) % (len(self._pool) - 4099)
        return tensor


def assert_equal(loaded: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise AssertionError unless names, dtypes, shapes and every byte are equal."""
    if set(loaded) != set(saved):
        raise AssertionError(f"names differ: {sorted(set(loaded) ^ set(saved))[:5]}")
    for name, tensor in saved.items():
        found = loaded[name]
        if found.dtype != tensor.dtype or found.shape != tensor.shape:
            raise AssertionError(
                f"{name}: {found.dtype} {tuple(found.shape)}, saved {tensor.dtype} {tuple(tensor.shape)}"
            )
        if not np.array_equal(_raw(found), _raw(tensor)):
            raise AssertionError(f"{name}: bytes differ from what was saved")


def _raw(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    # As bytes: a NaN is equal to itself here, and -0.0 is not 0.0.
    raw: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        tensor.detach().reshape(-1).view(torch.uint8).numpy()
    )
    return raw
