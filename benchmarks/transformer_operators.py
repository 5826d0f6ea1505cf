"""Operators of GPT-like models with unfused attention, as lists of work, on one of several ranks.

Each operator reads its inputs from memory and writes its output there, as eager PyTorch does.
Tensor parallelism is Megatron's: heads, the feed-forward width and the vocabulary are divided.
The names are those of ``data/gpu_operator_latency.csv``. Nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from hap.cluster.work import Work

Passes = tuple[list[Work], list[Work]]
"""The work of an operator's forward and of its backward."""

LAYER = (
    "enc-1st-layernorm", "enc-attention-qkv", "enc-attention-score", "enc-attention-softmax",
    "enc-attention-dropout", "enc-attention-context", "enc-attention-dense",
    "enc-post-attention-dropout", "enc-2nd-layernorm", "enc-MLP-GEMM-1", "enc-MLP-gelu",
    "enc-MLP-GEMM-2", "enc-post-MLP-dropout",
)  # fmt: skip
"""The operators of one layer."""

DROPOUTS = ("enc-attention-dropout", "enc-post-attention-dropout", "enc-post-MLP-dropout")
EMBEDDING, NORM, HEAD = "encoder-embedding", "final-layernorm", "gpt-post-process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The sizes of a model, of a microbatch, and of a rank's part.

    ``products``: the dtype at which matrices are multiplied: ``tfloat32`` multiplies float32.
    """

    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    products: str
    tensor_parallel: int = 1

    @property
    def dtype(self) -> str:
        return "float32" if self.products == "tfloat32" else self.products

    @property
    def e(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer on a rank: matrices with their biases, and two norms."""
        h, f, t = self.hidden, self.ffn, self.tensor_parallel
        return (4 * h * h + 2 * h * f + 3 * h + f) / t + 6 * h

    @property
    def embedding_parameters(self) -> float:
        return self.vocabulary * self.hidden / self.tensor_parallel

    @property
    def position_parameters(self) -> float:
        """Parameters of the learned positions, which every rank holds whole."""
        return float(self.sequence * self.hidden)

    def operators(self) -> dict[str, Passes]:
        """Return the operators of one layer, of the embedding and of the head, by name."""
        h, f, t = self.hidden, self.ffn // self.tensor_parallel, self.tensor_parallel
        own, wide = h // t, self.tokens * h
        vocabulary = self.vocabulary // t
        norm = ([self._moved(2 * wide)], [self._moved(3 * wide), self._moved(2 * wide)])
        dropout = (
            [self._memory(wide * (2 * self.e + 1)), self._moved(3 * wide)],
            [self._memory(wide * (2 * self.e + 1))],
        )
        logits = self.tokens * vocabulary
        return {
            EMBEDDING: ([self._moved(2 * wide), self._moved(3 * wide)],
                        [self._moved(2 * wide), self._moved(2 * vocabulary * h)]),
            "enc-1st-layernorm": norm,
            "enc-attention-qkv": self._linear(h, 3 * own),
            "enc-attention-score": self._scores(),
            "enc-attention-softmax": self._softmax(),
            "enc-attention-dropout": (
                [self._memory(self._score_count * (2 * self.e + 1))],
                [self._memory(self._score_count * (2 * self.e + 1))],
            ),
            "enc-attention-context": self._scores(),
            "enc-attention-dense": self._linear(own, h),
            "enc-post-attention-dropout": dropout,
            "enc-2nd-layernorm": norm,
            "enc-MLP-GEMM-1": self._linear(h, f),
            "enc-MLP-gelu": ([self._moved(2 * self.tokens * f)], [self._moved(3 * self.tokens * f)]),
            "enc-MLP-GEMM-2": self._linear(f, h),
            "enc-post-MLP-dropout": dropout,
            NORM: norm,
            # The product; then float32 logits: largest, difference, exponential, sum, quotient.
            HEAD: (
                [*self._linear(h, vocabulary)[0], *[self._memory(8 * logits)] * 3,
                 *[self._memory(4 * logits)] * 2],
                [self._memory(8 * logits)] * 2 + self._linear(h, vocabulary)[1],
            ),
        }  # fmt: skip

    def unmeasured(self) -> Passes:
        """Return a layer's kernels that the table of operators lacks.

        These are the copies of queries, keys, values and the merged heads, and in the backward the
        sums of four biases' gradients and the sums into the stored gradients of 12 parameters.
        """
        h, f, t = self.hidden, self.ffn, self.tensor_parallel
        copies = [self._moved(2 * self.tokens * h / t)] * 4
        biases = [self._moved(self.tokens * n) for n in (3 * h / t, h, f / t, h)]
        sizes = [3 * h * h / t, h * h / t, h * f / t, f * h / t, 3 * h / t, h, f / t, h, *[h] * 4]
        return copies, [*copies, *biases, *(self._memory(12 * n) for n in sizes)]

    def residual(self) -> Passes:
        """Return a product's bias and the residual, which remain of a dropout that is off."""
        wide = self.tokens * self.hidden
        return [self._moved(2 * wide), self._moved(3 * wide)], [self._moved(wide)]

    def saved_bytes(self, *, dropout: bool) -> float:
        """Return the bytes of activations that one layer's backward needs, on a rank."""
        wide, t = self.tokens * self.hidden, self.tensor_parallel
        inner = self.tokens * (4 * self.hidden + 2 * self.ffn) / t  # q, k, v, context; gelu
        saved = self.e * (4 * wide + inner + self._score_count)  # inputs, outputs of the norms
        return saved + dropout * (2 * wide + self._score_count * (1 + self.e))

    @property
    def head_saved_bytes(self) -> float:
        """Bytes of float32 logits at the head's peak: logits, their softmax, and the gradient."""
        return 3 * 4 * self.tokens * self.vocabulary / self.tensor_parallel

    @property
    def boundary_bytes(self) -> float:
        """Bytes of a microbatch's activations between two stages."""
        return float(self.e * self.tokens * self.hidden)

    @property
    def _score_count(self) -> float:
        return self.batch * self.heads * self.sequence**2 / self.tensor_parallel

    def _memory(self, count: float) -> Work:
        return Work("memory", self.dtype, 0.0, float(count))

    def _moved(self, elements: float) -> Work:
        return self._memory(self.e * elements)

    def _linear(self, k: int, n: int) -> Passes:
        m = self.tokens
        product = Work(
            "matmul", self.products, 2.0 * m * k * n, float(self.e * (m * k + k * n + m * n))
        )
        return [product], [product, product]

    def _scores(self) -> Passes:
        count, s = self.batch * self.heads / self.tensor_parallel, self.sequence
        d = self.hidden // self.heads
        product = Work(
            "matmul", self.products, 2.0 * count * s * s * d, self.e * count * (2 * s * d + s * s)
        )
        return [product], [product, product]

    def _softmax(self) -> Passes:
        """Half precision has one kernel for scale, mask and softmax; float32 has three."""
        count = self._score_count
        if self.e == 2:
            return [self._moved(2 * count)], [self._moved(3 * count)]
        one, more = self._moved(2 * count), self._memory(count * 9)
        return [one, more, one], [self._moved(3 * count), more, one]
