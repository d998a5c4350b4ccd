"""Preemption, sampling and prefix caching; tests that the patches of vLLM are still needed."""

import importlib

import pytest
from conftest import generate_reference, generate_with_vllm, make_prompts
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tost_hf import ToSTForCausalLM
from tost_hf.vllm import verification


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_resume(folders, engine, prefix_caching):
    prompts = make_prompts(16, max_length=300)
    expected = generate_reference(ToSTForCausalLM.from_pretrained(folders / "hybrid"), prompts, max_new_tokens=80)
    options = {"num_gpu_blocks_override": 24, "enable_prefix_caching": prefix_caching, "disable_log_stats": False}
    llm = engine(folders / "hybrid", **options)
    assert generate_with_vllm(llm, prompts, max_new_tokens=80) == expected
    assert next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0


def make_sampling_params(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, top_p=0.9, seed=100 + i, max_tokens=24, ignore_eos=True) for i in range(count)]


def test_seeded_sampling_does_not_depend_on_the_batch(folders, engine):
    prompts, sampling = make_prompts(12, max_length=200), make_sampling_params(12)
    llm = engine(folders / "conv_token", max_num_batched_tokens=64, enable_prefix_caching=False)
    outputs = generate_with_vllm(llm, prompts, sampling)
    assert outputs == [generate_with_vllm(llm, [prompt], options)[0] for prompt, options in zip(prompts, sampling)]
    assert len({token for tokens in outputs for token in tokens}) > 50


EVERY_512 = {"max_num_batched_tokens": 512, "prefix_cache_retention_interval": 512}
PREFIXES = {  # minimal cached tokens of three prompts with a common prefix, and of the first one again
    "conv_token": ("conv_token", {}, (0, 0, 0, 640)),
    "conv_token, every 512 tokens": ("conv_token", EVERY_512, (0, 512, 512, 512)),
    "hybrid": ("hybrid", {}, (0, 0, 256, 256)),
    "window": ("window", {}, (0, 0, 0, 640)),
    "window, every 512 tokens": ("window", EVERY_512, (0, 512, 512, 512)),
}


@pytest.mark.parametrize("kind, options, min_cached_tokens", PREFIXES.values(), ids=PREFIXES)
def test_prefix_caching(folders, engine, kind, options, min_cached_tokens):
    prefix = make_prompts(13)[-1]
    prompts = [[*prefix, *[i] * 60] for i in (7, 8, 9, 7)]
    expected = generate_reference(ToSTForCausalLM.from_pretrained(folders / kind), prompts)
    llm = engine(folders / kind, **options)
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = [llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0] for p in prompts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens >= count for output, count in zip(outputs, min_cached_tokens)), outputs


@pytest.mark.parametrize("kind, grows", [("window", False), ("hybrid", True)])
def test_blocks_of_a_sequence(folders, engine, kind, grows):
    """With sliding windows in place of full attention a sequence has as many blocks after 1,900 tokens as after 300."""
    llm = engine(folders / kind, max_model_len=2048, max_num_batched_tokens=256, enable_prefix_caching=False)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    used, num_blocks = {}, pool.get_num_free_blocks()
    for length in (300, 1900):
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.llm_engine.add_request(str(length), {"prompt_token_ids": [7] * length}, sampling)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            used[length] = num_blocks - pool.get_num_free_blocks() or used[length]  # none after the last step
    assert (used[1900] > used[300] + 2) == grows, used


# Patches: if one of these tests fails, vLLM no longer needs the patch


def test_seeded_chunked_prefill_still_needs_a_patch(folders, engine, monkeypatch):
    for name in ("_sample", "_bookkeeping_sync"):
        monkeypatch.setattr(CPUModelRunner, name, getattr(CPUModelRunner, name)._before_tost_hf)
    llm = engine(folders / "conv_token", max_num_batched_tokens=64)
    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        generate_with_vllm(llm, [[5] * 200], make_sampling_params(1))


def test_block_sizes_still_need_a_patch(folders, monkeypatch):
    def block_sizes():
        config = EngineArgs(model=str(folders / "conv_token"), max_model_len=1024).create_engine_config()
        current_platform.check_and_update_config(config)  # vLLM calls it after starting the engine
        return config.cache_config.block_size, config.cache_config.mamba_block_size

    assert block_sizes() == (32, 32)
    monkeypatch.setattr(verification, "set_block_size", lambda config: None)
    assert block_sizes() == (128, 16)


def test_imported_llvmlite_still_needs_a_patch(folders, engine, monkeypatch):
    importlib.import_module("llvmlite.binding.ffi")
    monkeypatch.setattr(dispatcher, "_rebind_kernels", dispatcher._rebind_kernels._before_tost_hf)
    with pytest.raises(AttributeError, match="no attribute 'get'"):
        engine(folders / "conv_token")
