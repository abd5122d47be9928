"""What a transformer of single operations costs beside transformers' Llama: bytes, kernels and the host's time.

    python -m benchmarks.single_operations     # a minute on one core

The model is one as Stanford's CS336 has its students write: matrices by einsum, softmax, activation, norm, rotary
embedding and cross-entropy of PyTorch's single operations (the course's own takes einops for the same). Bytes are those
that kernels other than matrix products read and write in fp32, as a straight line through eight sizes; the host's time
is CPU seconds of 12 layers of tensors of no size, the two models in turn. What is found is held by
`planner.speed.roofline.counts.SINGLE_SCORES` and its neighbours.
"""

import math
import resource
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select",
         "split", "unbind", "detach", "as_strided", "alias", "_reshape_alias", "lift_fresh", "empty",
         "new_empty_strided", "empty_like", "scalar_tensor", "arange"}  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm"}
SIZES = ((2, 16, 2, 8, 40, 30), (1, 64, 2, 8, 40, 30), (2, 16, 4, 8, 40, 30), (2, 16, 2, 8, 120, 30),
         (2, 16, 2, 8, 40, 200), (4, 16, 2, 8, 40, 30), (1, 48, 4, 8, 64, 70), (3, 32, 2, 16, 96, 90))  # fmt: skip
"""Sequences, tokens, heads, width of a head, of the MLP, vocabulary."""
LAYERS = 3
Step = tuple[nn.Module, Callable[[], Tensor]]


class Matrix(nn.Module):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    """RMSNorm of single operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of the last dimension, computed in fp32."""
        wide = x.to(torch.float32)
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, heads: int, head: int, inner: int) -> None:
        super().__init__()
        width = heads * head
        self.heads, self.first, self.second = heads, Norm(width), Norm(width)
        self.queries, self.keys, self.values, self.out = (Matrix(width, width) for _ in range(4))
        self.gate, self.up, self.down = Matrix(width, inner), Matrix(width, inner), Matrix(inner, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat((cos * one - sin * two, sin * one + cos * two), dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[sequences, tokens, width], and the rotation of each position."""
        normed, tokens = self.first(x), x.shape[1]
        q, k = (self._turned(self._split(of(normed)), cos, sin) for of in (self.queries, self.keys))
        places = torch.arange(tokens)
        mask = places[:, None] >= places[None, :]
        scores = torch.where(mask, q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), float("-inf"))
        powers = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
        seen = (powers / powers.sum(dim=-1, keepdim=True)) @ self._split(self.values(normed))
        x = x + self.out(seen.transpose(1, 2).flatten(2).contiguous())
        normed = self.second(x)
        gate = self.gate(normed)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(normed))


class Single(nn.Module):
    """The whole model."""

    def __init__(self, heads: int, head: int, inner: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, heads * head))
        self.layers = nn.ModuleList(Layer(heads, head, inner) for _ in range(layers))
        self.norm, self.head, self.size = Norm(heads * head), Matrix(heads * head, vocabulary), head

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of single operations."""
        angles = torch.outer(torch.arange(tokens.shape[1]), 1e4 ** -(torch.arange(0, self.size, 2) / self.size))
        cos, sin, x = angles.cos(), angles.sin(), self.table[tokens]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        logits = logits - logits.max(dim=-1, keepdim=True)[0]
        each = -(logits - torch.log(torch.exp(logits).sum(dim=-1, keepdim=True)))
        return each.gather(-1, labels.unsqueeze(-1)).mean()


def single(sequences: int, tokens: int, heads: int, head: int, inner: int, vocabulary: int, layers: int) -> Step:
    """The model of single operations and its loss."""
    model, data = Single(heads, head, inner, vocabulary, layers), torch.randint(0, vocabulary, (sequences, tokens))
    return model, lambda: model(data, data)


def llama(sequences: int, tokens: int, heads: int, head: int, inner: int, vocabulary: int, layers: int) -> Step:
    """transformers' Llama in eager attention with PyTorch's cross-entropy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=heads * head, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=vocabulary,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    data = torch.randint(0, vocabulary, (sequences, tokens))
    return model, lambda: nn.functional.cross_entropy(model(input_ids=data).logits.flatten(0, 1), data.flatten())


class Bytes(TorchDispatchMode):
    """What kernels other than matrix products read and write; expanded dimensions are read once."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name not in VIEWS and name not in PRODUCTS:
            read = [] if name in ("zeros", "new_zeros", "zeros_like") else tree_leaves((args, kwargs))
            self.total += sum(map(_stored, read[1:] if name == "copy_" else read)) + sum(map(_stored, tree_leaves(out)))
        return out


def _stored(one: Any) -> int:
    if not isinstance(one, Tensor):
        return 0
    return math.prod(size for size, step in zip(one.shape, one.stride(), strict=True) if step) * one.element_size()


def bytes_of(build: Callable[..., Step]) -> dict[str, tuple[float, float]]:
    """Bytes forward and backward by what they grow with, by least squares."""
    counted, seen = [], []
    for sequences, tokens, heads, head, inner, vocabulary in SIZES:
        _, loss = build(sequences, tokens, heads, head, inner, vocabulary, LAYERS)
        with Bytes() as forward:
            value = loss()
        with Bytes() as backward:
            value.backward()
        rows, width = sequences * tokens, heads * head
        weights = LAYERS * (4 * width**2 + 3 * width * inner) + vocabulary * width
        layers = [LAYERS * of for of in (rows * width, rows * inner, sequences * heads * tokens**2, tokens**2)]
        counted.append([*layers, rows * vocabulary, weights, rows * width])
        seen.append((forward.total, backward.total))
    found = np.linalg.lstsq(np.array(counted, float), np.array(seen, float), rcond=None)[0]
    names = ("hidden element", "inner element", "score", "mask", "logit", "weight", "outside the layers")
    return {name: (ahead, back) for name, (ahead, back) in zip(names, found.tolist(), strict=True)}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def host_ms(step: Step, rounds: int = 6) -> tuple[float, float]:
    """CPU milliseconds of a forward and of a backward, after one that warms up."""
    model, loss = step
    spent = []
    for _ in range(rounds + 1):
        start = _cpu_s()
        value = loss()
        middle = _cpu_s()
        value.backward()
        spent.append((middle - start, _cpu_s() - middle))
        model.zero_grad()
    forward, backward = zip(*spent[1:], strict=True)
    return 1e3 * statistics.mean(forward), 1e3 * statistics.mean(backward)


def _line(name: str, values: Iterable[float]) -> str:
    return f"{name:22}" + "".join(f"{value:10.1f}" for value in values)


def main() -> None:
    """Prints both models side by side."""
    torch.set_num_threads(1)
    ours, theirs = bytes_of(single), bytes_of(llama)
    print(_line("bytes of each", ()) + "    single forward, backward; Llama forward, backward")
    for name, pair in ours.items():
        print(_line(name, (*pair, *theirs[name])))
    models = [build(2, 8, 4, 8, 64, 50, 12) for build in (single, llama)]
    rounds = [[host_ms(one) for one in models] for _ in range(12)]
    for way, name in enumerate(("host forward, ms", "host backward, ms")):
        each = [statistics.median(found[one][way] for found in rounds) for one in (0, 1)]
        ratio = statistics.median(found[0][way] / found[1][way] for found in rounds)
        print(_line(name, (*each, ratio)))


if __name__ == "__main__":
    main()
