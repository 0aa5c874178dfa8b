"""What a loaded runner says of its model and its pools, and how many blocks the host gets."""

import time

from tests.engine.model.builders import CONFIGS, EOS, VOCAB_SIZE, make_runner


def test_facts_are_those_of_the_folder_and_the_pool(model_folder):
    sizes = {"num_blocks": 9, "num_host_blocks": 2}
    runner = make_runner(model_folder("llama"), **sizes, now=time.perf_counter)
    facts = runner.config_facts
    assert facts.vocab_size == VOCAB_SIZE
    assert facts.max_model_len == CONFIGS["llama"].max_position_embeddings
    assert facts.eos_token_ids == {EOS}
    assert (facts.num_blocks, facts.num_host_blocks, facts.block_size) == (9, 2, 4)
    assert facts.tokenizer_source == model_folder("llama")
    assert (runner.kv_pool.num_blocks, runner.kv_pool.num_host_blocks) == (9, 2)
    assert facts.bytes_per_block == runner.kv_pool.bytes_per_block
    assert facts.block_copy_seconds > 0.0


def test_the_host_has_as_many_blocks_as_the_device_unless_all_requests_fit_there(model_folder):
    """256 positions in blocks of 4, twice: 128 blocks are as many as two requests can use."""
    wanted = {"num_host_blocks": None, "max_num_seqs": 2}
    few = make_runner(model_folder("llama"), num_blocks=127, **wanted).config_facts
    enough = make_runner(model_folder("llama"), num_blocks=128, **wanted).config_facts
    assert (few.num_host_blocks, enough.num_host_blocks) == (127, 0)
    assert enough.block_copy_seconds == 0.0


def test_the_blocks_of_the_host_take_no_more_than_their_share_of_its_memory(
    model_folder, monkeypatch
):
    size = make_runner(model_folder("llama"), num_blocks=9).config_facts.bytes_per_block
    monkeypatch.setattr(
        "engine.model.load.load_runner.free_memory_bytes", lambda device: (9 + 4 * 5) * size
    )
    runner = make_runner(model_folder("llama"), num_blocks=9, num_host_blocks=None)
    assert runner.config_facts.num_host_blocks == 5
