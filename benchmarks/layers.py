"""Operators of one transformer layer, forward and backward, as lists of work.

Written from the layers' definitions (unfused PyTorch): each operator reads its inputs from
memory and writes its output there. ``e`` is the size of the matrix products' dtype; under
autocast (float16) norms, softmax and ``pow`` run in float32, and a float32 input of a product
is cast first (6 bytes: 4 read, 2 written). Nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from hap.cluster.work import Work

HEADS = {  # missing in the table: from the published scripts that measured it
    "llama_tiny": 32,
    "llama_3b": 32,
    "llama_7b": 32,
    "llama_13b": 40,
    "gpt_1.3b": 128,
    "gpt_2.7b": 80,
    "gpt_6.7b": 128,
    "bert_large": 16,
    "bert_xlarge": 24,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's sizes at one batch size."""

    family: str  # 'llama' | 'gpt' | 'bert'
    hidden: int
    ffn: int
    heads: int
    batch: int
    seq: int
    dtype: str  # 'float32', or 'float16' under autocast
    fused_attention: bool = True  # llama only: gpt and bert write the scores to memory

    @property
    def e(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def amp(self) -> int:
        """1 under autocast, else 0: multiplies the bytes of casts."""
        return int(self.dtype != "float32")

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of each matrix."""
        h, f = self.hidden, self.ffn
        if self.family == "llama":
            return [(h, h)] * 4 + [(h, f)] * 2 + [(f, h)]
        if self.family == "gpt":
            return [(h, 3 * h), (h, h), (h, f), (f, h)]
        return [(h, h)] * 4 + [(h, f), (f, h)]

    def forward(self) -> list[Work]:
        works = [self._matmul(self.tokens, k, n) for k, n in self.linears]
        return works + self._attention(1) + self._elementwise(*self._forward_bytes())

    def backward(self) -> list[Work]:
        """Return both gradients of each product, and the sum into the stored float32 gradients."""
        works = [self._matmul(self.tokens, n, k) for k, n in self.linears]
        works += [self._matmul(k, self.tokens, n) for k, n in self.linears]
        # A weight's gradient: cast to float32 under autocast, then read, read, write.
        works += [self._memory(k * n * (6 * self.amp + 12)) for k, n in self.linears]
        return works + self._attention(2) + self._elementwise(*self._backward_bytes())

    def _matmul(self, m: int, k: int, n: int, count: int = 1) -> Work:
        return Work(
            "matmul", self.dtype, 2.0 * count * m * k * n, count * self.e * (m * k + k * n + m * n)
        )

    def _memory(self, count: float) -> Work:
        return Work("memory", "float32", 0.0, count)

    def _attention(self, times: int) -> list[Work]:
        """Return products of attention; the backward has two for each of the forward's."""
        s, d, count = self.seq, self.hidden // self.heads, self.batch * self.heads
        if self.family == "llama" and self.fused_attention:
            # Dense count (including the masked half); recomputation makes it 5 : 2.
            flops = 4.0 * count * s * s * d * (2.5 if times == 2 else 1)
            return [
                Work(
                    "attention", self.dtype, flops, 4.0 * times * self.tokens * self.hidden * self.e
                )
            ]
        return [self._matmul(s, d, s, count), self._matmul(s, s, d, count)] * times

    def _elementwise(self, hidden: list[int], ffn: list[int], scores: list[int]) -> list[Work]:
        """Return one memory-bound operator per entry, with that number of bytes per element."""
        sizes = (
            (hidden, self.tokens * self.hidden),
            (ffn, self.tokens * self.ffn),
            (scores, self.tokens * self.seq * self.heads),
        )
        return [self._memory(count * n) for each, n in sizes for count in each]

    def _forward_bytes(self) -> tuple[list[int], list[int], list[int]]:
        """Return bytes per element of the (hidden, ffn, scores) sized operators."""
        e, cast = self.e, [6] * self.amp
        if self.family == "llama":
            # to float32, pow, mean, scale, back, weight
            norm = [*cast, 8, 4, 8, *cast, e + 4]
            rotary = [2 * e, e, 2 * e, 2 * e, 3 * e] * 2
            hidden = [*norm, 3 * e] * 2 + rotary + cast * 5 + [2 * e]
            scores = [] if self.fused_attention else [2 * e, e + 4, *cast]
            return hidden, [2 * e, 3 * e], scores
        # copies of q, k, v and merged heads; residual, dropout and norm twice; casts into products
        hidden = [2 * e] * 4 + [3 * e, 2 * e + 1, *cast, 8] * 2 + cast * 2
        if self.family == "bert":
            return hidden + cast * 2, [2 * e], [2 * e, e + 4, 9, *cast]
        gelu = [2 * e, *cast, 8, 8, e + 8, 8, 8, 8, e + 8, *cast]  # tanh form, spelled out
        # scale, times mask, plus mask, softmax, dropout with its one-byte mask
        return hidden, gelu, [2 * e, e + 4, 8, 8, 9, *cast]

    def _backward_bytes(self) -> tuple[list[int], list[int], list[int]]:
        e, cast = self.e, [6] * self.amp
        if self.family == "llama":
            # weight's gradient twice, scale, its sum, pow (twice), sum of branches
            norm = [e + 8, 12, *cast, 12, 8, 8, 12, *cast]
            rotary = [2 * e, 2 * e, e, 2 * e, 3 * e] * 2
            branches = [12] * 3
            hidden = [*norm, 3 * e] * 2 + rotary + branches + cast * 5 + [2 * e]
            scores = [] if self.fused_attention else [*cast, 12, 2 * e]
            return hidden, [3 * e, 3 * e, 3 * e], scores
        # norm: gradient of the input, then of its weights
        hidden = [2 * e] * 5 + [12, 8, *cast, 2 * e + 1, 3 * e] * 2 + cast * 2
        if self.family == "bert":
            return hidden + cast * 2 + [12] * 3, [3 * e, e], [*cast, 9, 12, *cast, 2 * e]
        gelu = [*cast, e + 8, e + 8, 12, 8, 12, 8, 8, 12, 12, *cast, 2 * e, 3 * e]
        return hidden, gelu, [*cast, 9, 12, 8, *cast, 2 * e]
