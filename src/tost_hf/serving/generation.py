# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Generation that keeps to the model's positions, ends when its client has gone, and fails alone."""

import asyncio
import logging
import threading
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.utils import GenerateManager, GenerationState
from transformers.generation import GenerationMode


BUILT_IN_MODES = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
}  # transformers takes the code of the others from repositories
MAX_TOKENS = 2**16  # of prompt and answer, where the model sets no limit: the memory of the server does
DEFAULT_NEW_TOKENS = 1024  # as transformers' server
MAX_BEAMS = 8
MIN_TEMPERATURE = 1e-3  # below, logits overflow
logger = logging.getLogger(__name__)


class GenerationFailed(RuntimeError):
    """The model, not the request, is to blame."""


class BoundedGenerationState(GenerationState):
    """Hands out one `BoundedGeneration` per model."""

    def __init__(self, continuous_batching: bool = False, **options):
        if continuous_batching:
            raise ValueError("--continuous-batching needs attention with pages of keys and values, which ToST does not have.")
        super().__init__(**options)
        self._managers: dict[str, BoundedGeneration] = {}

    def get_manager(self, model_id: str, use_cb: bool = False) -> "BoundedGeneration":
        if model_id not in self._managers:
            self._managers[model_id] = BoundedGeneration()
        return self._managers[model_id]


class BoundedGeneration(GenerateManager):
    """Generates for one request at a time, on a thread of its own.

    Both methods raise ValueError for a request that does not fit the model, before it computes anything.
    """

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **options):
        fit_to_model(model, inputs["input_ids"], gen_config)
        if (gen_config.num_beams or 1) > 1:
            raise ValueError("Beams (num_beams) are chosen at the very end, so their answer cannot be streamed.")
        guarded = cast(PreTrainedModel, _GuardedModel(model))
        return super().generate_streaming(guarded, processor, inputs, gen_config, *args, **options)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **options):
        fit_to_model(model, inputs["input_ids"], gen_config)
        guarded = _GuardedModel(model)
        answer = super().generate_non_streaming(
            cast(PreTrainedModel, guarded), processor, inputs, gen_config, *args, **options
        )
        work = asyncio.ensure_future(answer)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits any more
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            guarded.client_gone.set()
            raise


def fit_to_model(model: PreTrainedModel, input_ids: torch.Tensor, gen_config: GenerationConfig) -> None:
    """Caps what is generated (in place) by the positions that a prompt (1, T) leaves.

    Raises:
        ValueError: nothing can be generated after this prompt, or not in this way.
    """
    config, tokens = model.config.get_text_config(), input_ids.shape[-1]
    if tokens == 0:
        raise ValueError("The prompt is empty: write at least one token.")
    positions = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    if tokens >= positions:
        raise ValueError(f"The prompt has {tokens} tokens; there are {positions} positions for prompt and answer.")
    if int(input_ids.max()) >= config.vocab_size:
        raise ValueError(f"The prompt has token {int(input_ids.max())}; the model knows {config.vocab_size} tokens.")
    _check_mode(gen_config)
    wanted = gen_config.max_new_tokens
    if wanted is None:
        wanted = DEFAULT_NEW_TOKENS if gen_config.max_length is None else gen_config.max_length - tokens
    if wanted < 1:
        raise ValueError(f"At least 1 token must be generated after the {tokens} of the prompt, got {wanted}.")
    gen_config.max_new_tokens, gen_config.max_length = min(wanted, positions - tokens), None


def _check_mode(gen_config: GenerationConfig) -> None:
    mode = gen_config.get_generation_mode()
    if mode not in BUILT_IN_MODES:
        raise ValueError(f"Generation by {mode.value} is not served, only greedy search, sampling and beams.")
    if (gen_config.num_beams or 1) > MAX_BEAMS or (gen_config.num_return_sequences or 1) > 1:
        raise ValueError(f"At most {MAX_BEAMS} beams (num_beams) and one answer (num_return_sequences) are served.")
    if gen_config.do_sample and gen_config.temperature is not None and gen_config.temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {gen_config.temperature}.")


class _GuardedModel:
    """A model as one request sees it: it stops when `client_gone` is set, and its errors are one line."""

    def __init__(self, model: Any):
        self.model, self.client_gone = model, threading.Event()

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def generate(self, **inputs) -> torch.Tensor:
        """As the model's.

        Raises:
            ValueError: the request is to blame.
            GenerationFailed: the model is to blame.
        """
        if self.client_gone.is_set():  # while it waited for its turn
            return inputs["input_ids"]
        inputs["logits_processor"] = LogitsProcessorList([_FiniteLogits()])
        inputs["stopping_criteria"] = StoppingCriteriaList([_ClientGone(self.client_gone)])
        try:
            return self.model.generate(**inputs)
        except ValueError as error:
            raise ValueError(one_line(error)) from error
        except Exception as error:
            if type(error).__module__.startswith("transformers.cli."):  # the server's own sign to stop
                raise
            logger.error("A generation failed.", exc_info=True)
            raise GenerationFailed(f"The generation failed: {type(error).__name__}: {one_line(error)}") from error


class _ClientGone(StoppingCriteria):
    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full(input_ids.shape[:1], self.event.is_set(), device=input_ids.device, dtype=torch.bool)


class _FiniteLogits(LogitsProcessor):
    """Sampling from logits that are not finite ends, on a GPU, the whole process."""

    def __call__(self, input_ids, scores) -> torch.Tensor:
        if not torch.isfinite(scores.max(dim=-1).values).all():  # -inf is a token ruled out; not all may be
            raise FloatingPointError("the model's logits are not finite numbers; check its weights with `tost-hf verify`.")
        return scores


def one_line(message: object) -> str:
    """As a sentence for a client: short, and plain enough to be put between quotes in a stream, which transformers does."""
    text = " ".join(str(message).split()).replace("\\", "/").replace('"', "'")
    return text[:500].encode("utf-8", "replace").decode()
