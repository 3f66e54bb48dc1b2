"""A tiny random Llama on the CPU: the real engine over the real runner, and a plain numpy model to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.source import open_model
from jaxserve.config import CacheConfig, Config, DeviceFacts, ModelConfig, RuntimeConfig, ScheduleConfig, resolve
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.loop import Engine
from jaxserve.models.decoder import parameter_shapes
from jaxserve.models.families import model_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.request import EngineStats, EventBatch, Finish, Logprobs, TokenRequest
from jaxserve.runtime.runner import StepRunner
from jaxserve.runtime.start import start_runner

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
VOCAB = 120  # ids of the imagined tokenizer: the head has 8 rows of padding


@dataclass
class Result:
    """What one sequence got back."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    error: str = ""
    steps: list[int] = field(default_factory=list)  # the event batch that each token came in
    cached_tokens: int = -1


class TinyServer:
    """The engine and its runner, stepped by hand."""

    def __init__(
        self,
        num_pages: int = 64,
        cache_fill: float = float("nan"),
        checkpoint: Path | None = None,
        mesh: tuple[int, int, int] = (1, 1, 1),
        compile_cache: Path | None = None,
        lower_processes: int | None = None,
        dtype: str = "auto",
        seqs: int = 4,
        deterministic: bool = False,
        prefix_cache: bool = True,
        **config: Any,
    ) -> None:
        """Random weights of CONFIG with `config` changed, or a checkpoint; `mesh`: tensor, expert, data."""
        source = open_model(checkpoint) if checkpoint else None
        self.spec: ModelSpec = model_spec(source.config if source else CONFIG | config)
        budget = max(64, 2 * seqs)
        tensor, expert, data = mesh
        wanted = Config(
            ModelConfig("tiny", random_weights=True, seed=1, dtype=dtype),
            cache=CacheConfig(num_pages=num_pages, prefix_cache=prefix_cache),
            schedule=ScheduleConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
            runtime=RuntimeConfig(
                device="cpu",
                compile_cache_dir=str(compile_cache or ""),
                decode_buckets=(2, seqs),
                mixed_buckets=(32, budget) if deterministic else (budget,),
                tensor_parallel_size=tensor,
                expert_parallel_size=expert,
                data_parallel_size=data,
                lower_processes=lower_processes,
                deterministic=deterministic,
            ),
        )
        self.config, _ = resolve(wanted, DeviceFacts("cpu", "cpu", 8, self.spec.max_len, "float32"))
        self.buckets = Buckets.from_config(self.config.runtime, self.config.schedule)
        load, vocab = (source.load, self.spec.vocab_size) if source else (None, VOCAB)
        started = start_runner(self.spec, self.config, self.buckets.all(), load, vocab, lambda _: None, cache_fill)
        self.runner: StepRunner = started.runner
        self.shape = started.shape
        self.handles = 0
        self.stats = EngineStats()  # of the last run

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters by name, float64."""
        names = parameter_shapes(self.spec)
        return {name: np.asarray(leaf, np.float64) for name, leaf in zip(names, self.runner.leaves, strict=True)}

    def run(
        self, requests: Sequence[TokenRequest], max_steps: int = 2000, at_steps: Sequence[int] = ()
    ) -> list[Result]:
        """All of them at once, or each `at_steps`, to their ends; pages and slots are back afterwards."""
        results = {request.handle: Result() for request in requests}
        batches = 0

        def emit(batch: EventBatch) -> None:
            nonlocal batches
            batches += 1
            take(batch, results, batches)

        configs = (self.config.schedule, self.config.runtime)
        engine = Engine(*configs, self.shape, self.runner, emit, cache=self.config.cache)
        waiting = sorted(zip(at_steps or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
        for step in range(max_steps):
            while waiting and waiting[0][0] <= step:
                engine.submit([waiting.pop(0)[1]])
            if not engine.step() and engine.is_idle and not waiting:
                break
        self.stats = stats = engine.stats()
        assert (stats.live_pages, stats.running_requests) == (0, 0)
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        assert all(result.finish is not Finish.NONE for result in results.values())
        return [results[request.handle] for request in requests]

    def request(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> TokenRequest:
        """A TokenRequest with a fresh handle."""
        self.handles += 1
        return TokenRequest(self.handles, np.asarray(prompt, np.int32), max_tokens, **({"temperature": 0.0} | fields))


def take(batch: EventBatch, results: dict[int, Result], number: int) -> None:
    """Sort one batch's rows into the results."""
    for row, handle in enumerate(batch.handles.tolist()):
        result = results[handle]
        assert result.finish is Finish.NONE, "a row after the last one"
        if batch.token_ids[row] >= 0:
            result.token_ids.append(int(batch.token_ids[row]))
            result.steps.append(number)
        if row in batch.logprobs:
            result.logprobs.append(batch.logprobs[row])
        if handle in batch.prompt_logprobs:
            result.prompt_logprobs.append(batch.prompt_logprobs[handle])
        result.cached_tokens = batch.cached_tokens.get(handle, result.cached_tokens)
        result.finish = Finish(int(batch.finishes[row]))
        result.error = batch.errors.get(handle, result.error)


def reference_logits(spec: ModelSpec, weights: dict[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits of every position, float64 [tokens, V], by the plainest reading of the architecture."""
    attention = spec.attention
    x = weights["embed.weight"][list(tokens)]
    positions = np.arange(len(tokens))
    for i in range(spec.num_layers):
        layer = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"layers.{i}.")}
        h = norm(x, layer["attention_norm.scale"], spec.rms_eps)
        qkv = np.einsum("td,ngod->tngo", h, layer["attention.qkv"])
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        q, k = turn(q, positions, attention.rope.theta), turn(k, positions, attention.rope.theta)
        scores = np.einsum("tngo,sno->tngs", q, k) / np.sqrt(attention.head_dim)
        scores = np.where(positions[None, None, None] <= positions[:, None, None, None], scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("tngs,sno->tngo", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("tngo,dngo->td", mixed, layer["attention.out"])
        h = norm(x, layer["mlp_norm.scale"], spec.rms_eps)
        gate, up = h @ layer["mlp.gate_up"][0].T, h @ layer["mlp.gate_up"][1].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down"].T
    x = norm(x, weights["norm.scale"], spec.rms_eps)
    return x @ weights["embed.weight" if spec.tie_embeddings else "head.weight"].T


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def turn(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Half-split RoPE over the last dimension of [tokens, ..., E]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    angle = angle.reshape(len(positions), *(1,) * (x.ndim - 2), half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), -1)


def greedy(spec: ModelSpec, weights: dict[str, np.ndarray], prompt: Sequence[int], count: int) -> list[int]:
    """The reference's own greedy continuation."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(spec, weights, tokens)[-1, :VOCAB].argmax()))
    return tokens[len(prompt) :]
