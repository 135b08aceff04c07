import pytest
import torch
import transformers
from tests.unit.tiny import LATENT_ATTENTION

from hearth.errors import ConfigError
from hearth.inference.backend import SampleRequest
from hearth.models.loading import LoadedModel

SMALL = {"vocab_size": 264, "initializer_range": 0.1, "eos_token_id": 257, "pad_token_id": 256}
SMALL |= {"bos_token_id": None}
BODY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture
def build():
    """A small random model of any architecture."""

    def make(config_name: str, *, attention: str = "sdpa", **options) -> LoadedModel:
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(**SMALL, **options)
        config._attn_implementation = attention
        module = transformers.AutoModelForCausalLM.from_config(config).eval()
        return LoadedModel(
            module, config_name, config_name, torch.float32, torch.device("cpu"), (257,), 264, 256
        )

    return make


KINDS = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gemma2 with soft caps": (
        "Gemma2Config",
        BODY | {"head_dim": 16, "sliding_window": 512, "attention": "eager"},
    ),
    "one key head": ("LlamaConfig", BODY | {"num_key_value_heads": 1}),
    "scaled logits": ("GraniteConfig", BODY | {"logits_scaling": 3.0}),
    "mistral with a wide window": ("MistralConfig", BODY | {"sliding_window": 256, "head_dim": 16}),
    "mixture of experts": (
        "Qwen3MoeConfig",
        BODY
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "latent attention": ("DeepseekV3Config", BODY | LATENT_ATTENTION | {"num_experts_per_tok": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), KINDS.values(), ids=KINDS.keys())
def test_any_causal_lm_with_plain_attention_is_sampled_as_it_computes(
    start, build, plain_logprobs, name, options
):
    engine = start(build(name, **options), max_seq_len=256)
    prompts = [[1, 2, 3], list(range(40)), [7] * 70]

    futures = [
        engine.submit(SampleRequest(prompt=p, seed=1, max_tokens=20, prompt_logprobs=True))
        for p in prompts
    ]

    for prompt, future in zip(prompts, futures, strict=True):
        sampled = future.result()
        expected = plain_logprobs(build(name, **options), prompt + sampled.token_ids)
        got = [*sampled.prompt_logprobs[1:], *sampled.logprobs]
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= 1e-5


REFUSED = {
    "short window": (
        "MistralConfig",
        BODY | {"sliding_window": 64},
        "max_seq_len must be <= 64 for 'MistralConfig', got 256",
    ),
    "some layers with a short window": (
        "Gemma2Config",
        BODY | {"head_dim": 16, "sliding_window": 32, "attention": "eager"},
        "max_seq_len must be <= 32",
    ),
    "state space": (
        "MambaConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "attention": "eager"},
        "model must have attention layers only, got 'MambaConfig'",
    ),
    "positions by a bias from the padding mask": (
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "attention": "eager"},
        "model must run with the engine's KV cache, got 'BloomConfig'",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_keeps_more_than_keys_and_values_is_refused(
    start, build, name, options, message
):
    with pytest.raises(ConfigError, match=message):
        start(build(name, **options), max_seq_len=256)


def test_a_short_window_serves_sequences_that_fit_it(start, build):
    engine = start(build("MistralConfig", **BODY, sliding_window=64), max_seq_len=64)

    sampled = engine.submit(SampleRequest(prompt=[1] * 50, max_tokens=20, ignore_eos=True)).result()

    assert len(sampled.token_ids) == 14
