"""The benchmark of embeddings: its gate lets only equal vectors pass; its texts stay the same."""

import numpy as np

from benchmarks.bench_embeddings.measuring import gate, texts_of

VECTORS = np.array([[0.6, 0.8], [1.0, 0.0]], dtype=np.float32)


def test_equal_vectors_pass_the_gate():
    nearly = VECTORS + np.float32(1e-6)
    assert gate(VECTORS, nearly, "float32") is None
    assert gate(VECTORS, VECTORS, "bfloat16") is None


def test_other_vectors_do_not():
    off = VECTORS + np.float32(1e-4)
    assert gate(VECTORS, off, "float32") == "a number differs by 1.0e-04"
    assert gate(VECTORS, off, "bfloat16") is None
    assert gate(VECTORS, VECTORS[::-1], "bfloat16") == "a vector is off by 0.400"
    assert gate(VECTORS, VECTORS * np.float32("nan"), "float32") is not None
    assert gate(VECTORS, VECTORS * np.float32("nan"), "bfloat16") is not None


def test_texts_are_the_same_each_time_and_of_mixed_lengths():
    lengths = [len(text.split()) for text in texts_of(200)]
    assert texts_of(200) == texts_of(200)
    assert min(lengths) >= 4 and max(lengths) > 150 and sorted(lengths)[100] < 60
