"""The fast path: one decoder for Llama-like families, in C++ on a CPU, in Triton on a GPU."""
