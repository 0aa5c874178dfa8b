"""Pictures from the queue to the model: read, decoded, continued after a takeover, or refused."""

from io import BytesIO

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from quire.client.client import Client
from quire.errors import RequestFailed
from service.worker.model.served import load_model
from tests.quire.picture_files import END, png_header, sha256
from tests.service.builders import Queue, WorkerThread
from tests.service.picture_models import MODELS, library_processor

NUM_TOKENS = 12
PIXELS = np.random.default_rng(7).integers(0, 255, (40, 70, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return MODELS["smolvlm"].save(tmp_path_factory.mktemp("smolvlm"))


def file_of(pixels) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


GOOD = file_of(PIXELS)
#: A header that a door lets through, and nothing behind it.
DAMAGED = png_header(64, 64) + END


def asking(*pictures, **options):
    parts = [{"type": "image", "image": data} for data in pictures]
    message = {"role": "user", "content": [{"type": "text", "text": "What? "}, *parts]}
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "seed": 1, "ignore_eos": True}
    return {"messages": [message], "sampling": sampling, **options}


def serving(queue: Queue, folder) -> WorkerThread:
    settings = queue.settings(
        model=str(folder), pictures=True, device="cpu", dtype="float32", num_blocks=64
    )
    return WorkerThread(settings, load=load_model)


def expected_ids(folder) -> list[int]:
    """What transformers generates for the prompt with the good picture, by its own processor."""
    parts = [{"type": "text", "text": "What? "}, {"type": "image"}]
    prompt = (
        MODELS["smolvlm"]
        .wrapped()
        .apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
    )
    inputs = library_processor("smolvlm", folder)(
        text=[prompt], images=[[PIXELS]], return_tensors="pt", input_data_format="channels_last"
    )
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(
        **inputs, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS
    )
    return whole[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_picture_is_read_and_a_bad_one_is_refused_by_its_part(queue: Queue, folder):
    client = Client(queue.broker)
    good = client.submit(**asking(GOOD))
    twice = client.submit(**asking(GOOD, GOOD))
    damaged = client.submit(**asking(GOOD, DAMAGED))
    gone = client.submit(**asking(file_of(PIXELS[:9])))
    queue.connection.delete(queue.keys.picture(sha256(file_of(PIXELS[:9]))))
    with serving(queue, folder):
        found = good.result(timeout=120)
        assert list(found.token_ids) == expected_ids(folder)
        more = twice.result(timeout=60)
        assert more.usage.prompt_tokens > found.usage.prompt_tokens
        for handle, field, message in (
            (damaged, "body.messages.0.content.2", "cannot be decoded"),
            (gone, "body.messages.0.content.1", "has expired"),
        ):
            with pytest.raises(RequestFailed, match=message) as refused:
                handle.result(timeout=60)
            assert (refused.value.code, refused.value.field) == ("invalid_request", field)


def test_another_worker_continues_with_the_same_picture(queue: Queue, folder):
    client = Client(queue.broker)
    with serving(queue, folder):
        whole = client.submit(**asking(GOOD)).result(timeout=120)
    later = client.submit(**asking(GOOD), request_id="later")
    queue.publish_by_hand("later", whole.token_ids[:3], fingerprint=whole.fingerprint)
    with serving(queue, folder):
        end = later.result(timeout=120)
    assert end.token_ids == whole.token_ids
    assert end.usage.prompt_tokens == whole.usage.prompt_tokens
