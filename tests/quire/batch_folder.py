"""What the tests of batches arrange: lines, files, and answers that wait."""

import json

from quire.batch.batch import run_batch


def ask(custom_id, prompt="x", **body):
    body = {"prompt": prompt, "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


class Folder:
    """The files of one batch."""

    def __init__(self, path):
        self.input, self.output = path / "in.jsonl", path / "out.jsonl"
        self.errors = path / "errors.jsonl"

    def write(self, *lines):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("\n".join(texts) + "\n")

    def run(self, broker, **options):
        return run_batch(broker, self.input, self.output, errors_path=self.errors, **options)

    @property
    def results(self):
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    @property
    def failures(self):
        return [json.loads(line) for line in self.errors.read_text().splitlines()]

    @property
    def texts(self):
        return {line["custom_id"]: text_in(line["response"]["body"]) for line in self.results}

    @property
    def codes(self):
        return {line["custom_id"]: line["error"]["code"] for line in self.failures}


def text_in(body):
    (choice,) = body["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def waiting_for(release):
    """Answers those whose prompt is `slow` only after the event."""

    def answer(request):
        yield "be"
        if request.body["prompt"] == "slow":
            release.wait(20)
        yield "gun"

    return answer
