"""The fast path: the common decoder, in C++ on a CPU and in Triton on a GPU."""
