"""Runs `python -m benchmarks.bench_embeddings`."""

import sys

from benchmarks.bench_embeddings.measuring import main

sys.exit(main())
