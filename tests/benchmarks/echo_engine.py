"""A child that is no engine: it counts up from the last prompt token, and ends when told to."""

import os
from pathlib import Path

from benchmarks.peers.child import drive, serve

#: A prompt of this one token ends the process, as an engine that crashes would.
CRASH = 13


class EchoEngine:
    """Every step gives one token to each request that is not complete."""

    def __init__(self, model: Path, dtype: str, workspace: Path) -> None:
        print("libraries print to standard output, and nothing breaks")
        self.facts = {"version": "1", "model": model.name, "dtype": dtype, "pid": os.getpid()}
        self._left = {}

    def run(self, requests):
        return drive(requests, add=self._add, has_work=lambda: bool(self._left), step=self._step)

    def write_logits(self, tokens, to):
        to.write_bytes(bytes(tokens))

    def _add(self, index, request):
        if request.prompt == [CRASH]:
            os._exit(1)
        self._left[index] = [request.prompt[-1] + 1 + n for n in range(request.num_output_tokens)]

    def _step(self):
        for index in list(self._left):
            yield index, [self._left[index].pop(0)]
            if not self._left[index]:
                del self._left[index]


if __name__ == "__main__":
    serve(EchoEngine)
