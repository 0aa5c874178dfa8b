"""A batch file that was made for another server, with a model that is not here."""

import json

from quire import InvalidRequest
from quire.batch import run_batch
from quire.testing.in_memory import FakeQuire


def test_a_file_for_another_server_tells_why_it_fails_and_runs_with_a_model_of_here(tmp_path):
    source, url = tmp_path / "in.jsonl", "/v1/completions"
    bodies = [{"prompt": f"{row}+1=", "model": "gpt-4o-mini"} for row in range(4)]
    lines = [{"custom_id": f"row-{n}", "url": url, "body": body} for n, body in enumerate(bodies)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def answer(request):
        if request.body["model"] != "here":
            raise InvalidRequest("body.model", "is not the model of this queue")
        return "fine"

    with FakeQuire(answer=answer) as fake:
        refused = run_batch(fake.client(), source, tmp_path / "out.jsonl")
        assert refused.reasons == {"invalid_request: body.model: is not the model of this queue": 4}
        ran = run_batch(fake.client(), source, tmp_path / "out.jsonl", resume=True, model="here")
    assert (ran.completed, ran.failed, ran.reasons) == (4, 0, {})
