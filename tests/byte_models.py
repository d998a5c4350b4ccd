"""Small byte-level language models to evaluate, and their arguments."""

import evaluate_lm
from conftest import randomize, small_config
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tost_hf import ToSTForCausalLM


EOS = "<|endoftext|>"
EOS_ID = 0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and end-of-text."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([""], vocab_size=257, special_tokens=[EOS], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=EOS, eos_token=EOS)


def make_model(**changes) -> ToSTForCausalLM:
    fields = {"vocab_size": 257, "max_position_embeddings": 32, "bos_token_id": EOS_ID, "eos_token_id": EOS_ID}
    return randomize(ToSTForCausalLM(small_config(**(fields | changes)))).eval()


def make_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=EOS_ID, eos_token_id=EOS_ID
    )
    return GPT2LMHeadModel(config).eval()


def make_args(tasks=("text",), **changes) -> evaluate_lm.LMEvaluationArguments:
    return evaluate_lm.LMEvaluationArguments(model="unused", tasks=list(tasks), datasets=["text=unused"], **changes)


def values(measurements) -> dict[str, float]:
    return {measurement.metric_type: measurement.value for measurement in measurements}
