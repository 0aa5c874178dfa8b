"""Prints what came of some pictures from end to end; exits with 1 if a token or an end is wrong."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import transformers

from quire import LocalRedis
from tests.pictures.batch import BatchScore, score_of_batches
from tests.pictures.run import ENGINES, Score, score_of
from tests.service.picture_models import MODELS


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=20)
    parser.add_argument("--family", choices=MODELS, default="smolvlm")
    parser.add_argument("--engine", choices=ENGINES, default="native")
    parser.add_argument("--batch", type=int, help="the memory of a batch of so many lines")
    given = parser.parse_args()
    if given.engine == "vllm" and (given.batch is not None or find_spec("vllm") is None):
        parser.error("--engine vllm needs the environment of `make env-vllm`, and no --batch")
    transformers.logging.disable_progress_bar()
    score: Score | BatchScore
    if given.batch is not None:
        score = score_of_batches(given.family, given.batch)
        text = json.dumps(asdict(score) | {"growth": score.growth})
    else:
        with LocalRedis.start() as redis:
            score = score_of(given.family, given.pictures, redis_url=redis.url, engine=given.engine)
        text = json.dumps(asdict(score))
    print(text)
    if path := os.environ.get("PICTURES_JSON"):
        Path(path).write_text(text + "\n")
    return int(not score.is_good)


if __name__ == "__main__":
    sys.exit(main())
