"""What is served and what is refused, and that every refusal says why in one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.wide.loader import load_model
from tests.engine.model.builders import CONFIGS, EOS, VOCAB_SIZE, make_runner, save_model

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 2,
}

NEVER_SERVED = {
    "keys that an indexer chooses": (
        transformers.HYV4Config(
            **SMALL,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            index_head_dim=8,
            index_n_heads=2,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
        ),
        "passes 'indices' to its attention",
    ),
    "state space": (
        transformers.xLSTMConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, num_heads=2, num_hidden_layers=1
        ),
        "xlstm has a recurrent state of a kind that is not served",
    ),
    "attention of its own": (
        transformers.GPTNeoConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=64,
            eos_token_id=EOS,
            bos_token_id=0,
        ),
        "does not dispatch its attention through transformers' AttentionInterface",
    ),
    "both directions": (
        transformers.BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
        ),
        "tokens see something other than all earlier tokens",
    ),
    "a window that only the cache of transformers has": (
        transformers.MoshiConfig(**SMALL, head_dim=8, ffn_dim=32, sliding_window=16),
        "keeps only the last 16 .*set max_position_embeddings to at most 16",
    ),
    "chunked attention": (
        transformers.Llama4TextConfig(
            **SMALL,
            head_dim=8,
            intermediate_size_mlp=32,
            num_local_experts=2,
            attention_chunk_size=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "tokens see something other than all earlier tokens",
    ),
}


@pytest.mark.parametrize("kind", NEVER_SERVED)
def test_a_model_whose_features_would_be_dropped_is_refused(kind, tmp_path):
    config, reason = NEVER_SERVED[kind]
    save_model(config, tmp_path)
    with pytest.raises(ModelRefused, match=reason):
        make_runner(tmp_path)


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    transformers.T5Config().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match="t5 is an encoder-decoder model"):
        load_model(tmp_path)


def test_a_type_whose_attention_is_another_is_refused_for_it(tmp_path):
    transformers.DeepseekV4Config().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"^deepseek_v4 attends to compressed keys and values"):
        load_model(tmp_path)


def test_a_model_without_a_language_head_is_refused(tmp_path):
    transformers.ViTConfig().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match="vit is not a causal language model"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth"])
def test_pickled_weights_are_refused(name, tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    torch.save({}, tmp_path / name)
    with pytest.raises(ModelRefused, match=rf"pickled \({name}\).*convert them to safetensors"):
        load_model(tmp_path)


def test_a_folder_without_weights_or_config_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        load_model(tmp_path)
    CONFIGS["llama"].save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="has no weights in safetensors format"):
        load_model(tmp_path)


def write_config(folder, **fields) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({}, folder / "model.safetensors")


def test_code_that_comes_with_a_model_is_never_run(tmp_path):
    write_config(tmp_path, model_type="surprise", auto_map={"AutoConfig": "code.Config"})
    (tmp_path / "code.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ModelRefused, match="'surprise' has its own code, which is never run"):
        load_model(tmp_path)


def test_an_unknown_type_and_a_broken_config_are_refused(tmp_path):
    write_config(tmp_path, model_type="surprise")
    with pytest.raises(ModelRefused, match="has no type 'surprise'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["nobody", "nobody/nothing", "no.body/no-thing_1.0"])
def test_a_name_that_is_nowhere_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    expected = f"^there is no folder {name} in {tmp_path}, and the hub has given no model of "
    with pytest.raises(ModelRefused, match=rf"{expected}that name: .+"):
        load_model(name)


def no_hub(*_):
    raise AssertionError("a hub was asked for a folder")


@pytest.mark.parametrize("path", ["/nope/model", Path("/nope")], ids=str)
def test_a_folder_that_is_not_there_is_refused_as_a_folder(path, monkeypatch):
    monkeypatch.setattr("engine.model.wide.loader.cached_file", no_hub)
    with pytest.raises(ModelRefused, match=f"^there is no folder {path}$"):
        load_model(path)


MISTYPED = ["models/abcus", "abcus/", "./nope", "../nope", ".hidden", "~/models/abacus"]


@pytest.mark.parametrize("path", [*MISTYPED, "shelf/models/abacus", Path("nope")], ids=str)
def test_a_relative_folder_that_is_not_there_is_told_with_where_it_was_looked_for(
    path, tmp_path, monkeypatch
):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.model.wide.loader.cached_file", no_hub)
    with pytest.raises(ModelRefused) as refused:
        load_model(path)
    assert str(refused.value) == f"there is no folder {path} in {tmp_path}"


def test_a_file_is_refused_and_no_hub_asked_for_a_model_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelRefused, match=r"^model\.safetensors is a file; .* folder"):
        load_model("model.safetensors")


def test_weights_with_a_hole_are_refused_instead_of_filled_with_noise(model_folder, tmp_path):
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lack 1 tensors, model\.layers\.1\.mlp\.up_proj"):
        load_model(tmp_path)


def test_damaged_weights_are_refused(model_folder, tmp_path):
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelRefused, match=r"^model\.safetensors is damaged \(.+\): download or "):
        load_model(tmp_path)


def test_unknown_settings_are_refused_by_name(model_folder):
    with pytest.raises(ModelRefused, match="dtype 'int4' is not one of auto, float32"):
        make_runner(model_folder("llama"), dtype="int4")
    with pytest.raises(ModelRefused, match="attention backend 'flash' is not one of"):
        make_runner(model_folder("llama"), attention_backend="flash")


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused(model_folder):
    """Nothing in the config tells; the comparison with the model's own attention does."""
    loaded = load_model(model_folder("llama"))
    feed_forward = loaded.model.model.layers[0].mlp
    feed_forward.register_forward_hook(lambda module, args, output: output + output.roll(1, 1))
    with pytest.raises(ModelRefused, match="has other logits with paged attention"):
        probe(loaded.model, max_model_len=64)


def failing(message: str):
    def forward(*_):
        raise RuntimeError(message)

    return forward


def test_a_model_that_torch_cannot_compute_is_refused_with_torch_s_reason(model_folder):
    """Not every product is there for every type and size: experts' need whole vectors."""
    loaded = load_model(model_folder("llama"), dtype="bfloat16")
    loaded.model.model.layers[0].mlp.forward = failing("strides should be multiple of 16 bytes")
    expected = r"cannot be computed in torch\.bfloat16 on cpu: strides should be multiple of 16"
    with pytest.raises(ModelRefused, match=expected):
        probe(loaded.model, max_model_len=64)


def test_a_device_that_is_lost_while_a_model_is_probed_is_no_reason_to_refuse_it(model_folder):
    loaded = load_model(model_folder("llama"))
    loaded.model.model.layers[0].mlp.forward = failing("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="CUDA error"):
        probe(loaded.model, max_model_len=64)


def test_a_model_that_takes_no_positions_is_refused(tmp_path):
    config = transformers.BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, max_position_embeddings=64
    )
    save_model(config, tmp_path)
    with pytest.raises(ModelRefused, match=r"AttentionInterface|takes no position_ids"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", [None, None]),
        ("mistral", [13, 13]),
        ("gemma2", [13, None]),
        ("gpt2", [None, None]),
    ],
)
def test_the_probe_finds_every_layer_s_window(name, windows, model_folder):
    model = probe(load_model(model_folder(name)).model, max_model_len=256)
    assert [layer.sliding_window for layer in model.layers] == windows


def test_a_layer_that_contradicts_its_own_mask_is_refused(model_folder):
    loaded = load_model(model_folder("gemma2"))
    loaded.model.model.layers[0].self_attn.sliding_window = 5
    with pytest.raises(ModelRefused, match="has a window of 5 tokens in its options, and of 13"):
        probe(loaded.model, max_model_len=256)


def test_a_window_as_long_as_the_model_is_none(model_folder):
    model = probe(load_model(model_folder("mistral")).model, max_model_len=13)
    assert [layer.sliding_window for layer in model.layers] == [None, None]


def test_the_probe_finds_what_a_layer_keeps(model_folder):
    llama = probe(load_model(model_folder("llama")).model, max_model_len=256)
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in llama.layer_shapes] == [(2, 16, 16)] * 2
    deepseek = probe(load_model(model_folder("deepseek")).model, max_model_len=256)
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in deepseek.layer_shapes] == [
        (4, 24, 12)
    ] * 2


def test_end_tokens_come_from_the_generation_config_and_the_config(model_folder, tmp_path):
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    generation = transformers.GenerationConfig(eos_token_id=[5, 6])
    generation.save_pretrained(tmp_path)
    assert load_model(tmp_path).eos_token_ids == {EOS, 5, 6}


def test_an_end_token_below_zero_is_none(model_folder, tmp_path):
    """The sampler would ban the last token of the vocabulary in its place."""
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": -1}))
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).eos_token_ids == frozenset()


def test_the_fingerprint_follows_config_weights_and_dtype(model_folder, tmp_path):
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    first = load_model(tmp_path).fingerprint
    assert load_model(tmp_path).fingerprint == first
    assert load_model(tmp_path, dtype="bfloat16").fingerprint != first
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert load_model(tmp_path).fingerprint != first


def test_the_fingerprint_tells_weights_apart_that_take_as_many_bytes(tmp_path):
    """Another revision, or the same model trained further, differs in nothing but its numbers."""
    first, second = (
        load_model(save_model(CONFIGS["llama"], tmp_path / str(seed), seed=seed)).fingerprint
        for seed in range(2)
    )
    assert first != second


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_the_fingerprint_follows_what_else_decides_about_tokens(name, model_folder, tmp_path):
    """Whoever takes a request over makes its prompt's tokens anew."""
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{}")
    first = load_model(tmp_path).fingerprint
    (tmp_path / name).write_text('{"temperature": 0.5}')
    assert load_model(tmp_path).fingerprint != first


def test_the_fingerprint_follows_the_processor_that_torch_computes_for(model_folder, monkeypatch):
    first = load_model(model_folder("llama")).fingerprint
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert load_model(model_folder("llama")).fingerprint != first


def test_the_dtype_is_the_checkpoint_s_unless_one_is_asked_for(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIGS["llama"]).bfloat16().save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, dtype="float32").dtype == torch.float32


def test_frequencies_that_follow_the_longest_request_limit_the_length(tmp_path):
    factors = [1.0 + index for index in range(8)]
    config = transformers.LlamaConfig(
        **(SMALL | {"hidden_size": 64, "max_position_embeddings": 128}),
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8,
            "long_factor": factors,
            "factor": 4.0,
        },
    )
    save_model(config, tmp_path)
    assert load_model(tmp_path).max_model_len == 32


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_a_reason_to_refuse(tmp_path):
    folder = save_model(CONFIGS["llama"], tmp_path)
    with pytest.raises(ModelRefused, match="the weights cannot be moved to cuda"):
        load_model(folder, device="cuda")
