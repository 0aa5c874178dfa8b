"""Pictures of chats: the pixels and the tokens that transformers' own processor makes."""

import gc

import numpy as np
import pytest

from engine.errors import ModelRefused
from quire.errors import InvalidRequest
from service.worker.model import pictures
from service.worker.model.pictures import CPU_PICTURE_PIXELS, DecodedPicture, PictureProcessor
from service.worker.model.served import load_model
from service.worker.model.text import ModelTokenizer
from tests.service.builders import make_settings
from tests.service.picture_models import MODELS, library_processor, tokenizer

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra pictures")

pytestmark = pytest.mark.usefixtures("frozen_again")

#: Wider than high, of one tile, and higher than wide.
SIZES = ((40, 70), (16, 16), (100, 30))
PICTURE = {"type": "image", "sha256": "00"}
TEXT = {"type": "text", "text": " Which? "}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = MODELS[name].save(tmp_path_factory.mktemp(name))
        return folders[name]

    return folder


def decoded(*sizes) -> list[DecodedPicture]:
    """Pictures of noise."""
    return [
        DecodedPicture.of(
            bytes([index] * 32),
            width=width,
            height=height,
            rgb=np.random.default_rng(index).bytes(3 * width * height),
            field=f"body.messages.1.content.{index}",
        )
        for index, (height, width) in enumerate(sizes)
    ]


def chat_of(*parts) -> list[dict]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]


def prompt_of(folder, chat) -> list[int]:
    return ModelTokenizer.load(str(folder)).encode_chat(chat, created_ms=0).token_ids


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES], ids=["one", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_pixels_are_those_of_transformers(name, sizes, folder_of):
    folder, given = folder_of(name), decoded(*sizes)
    processor = PictureProcessor.load(str(folder), tokenizer())
    chat = chat_of(TEXT, *[PICTURE for _ in sizes], TEXT)
    found = processor.expand(prompt_of(folder, chat), given, most=2048)
    library = library_processor(name, folder)
    parts = [TEXT, *[{"type": "image"} for _ in sizes], TEXT]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    text = (
        MODELS[name]
        .wrapped()
        .apply_chat_template(
            [system, {"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
    )
    expected = library(
        text=[text],
        images=[[one.rgb for one in given]],
        return_tensors="np",
        input_data_format="channels_last",
    )
    assert found.token_ids == expected["input_ids"][0].tolist()
    for key in found.pictures[0].pixels:
        if key == "batch_num_images":
            continue
        values = [one.pixels[key] for one in found.pictures]
        own = np.concatenate(values, 1 if name in ("smolvlm", "idefics3") else 0)
        assert np.array_equal(own, expected[key])


@pytest.mark.parametrize(
    ("name", "few"),
    [
        *(("qwen2_5_vl", 6_000), ("qwen3_vl", 6_000), ("llava_onevision", 300)),
        *(("smolvlm", 33 * 33), ("idefics3", 33 * 33)),
    ],
)
def test_a_picture_beyond_the_limit_costs_less_as_transformers_would_make_it(name, few, folder_of):
    folder, (given,) = folder_of(name), decoded((120, 200))
    prompt = prompt_of(folder, chat_of(PICTURE))
    made = {}
    for most in (None, 50_000, few):
        processor = PictureProcessor.load(str(folder), tokenizer(), max_pixels=most)
        (one,) = processor.expand(prompt, [given], most=2048).pictures
        made[most] = one
    assert made[None].length == made[50_000].length > made[few].length
    rgb = given.rgb
    library = library_processor(name, folder)
    if name == "llava_onevision":
        rgb = np.asarray(Image.fromarray(rgb).resize((16, 10), Image.Resampling.BICUBIC))
    elif name in ("smolvlm", "idefics3"):
        # Two tiles of 16 pixels on a side.
        library.image_processor.size.longest_edge = 32
    else:
        library.image_processor.size.longest_edge = few
    expected = library.image_processor(
        images=[[rgb]], return_tensors="np", input_data_format="channels_last"
    )
    for key, values in made[few].pixels.items():
        assert np.array_equal(values, expected[key])


@pytest.mark.parametrize("most", [1, 16**2, 33**2, 40**2, 48**2, 64**2])
@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_a_picture_has_no_more_tiles_than_the_limit_and_one_that_shows_it_whole(
    name, most, folder_of
):
    """Of every form, in one tile at least; 16 pixels are the side of a tile."""
    folder = folder_of(name)
    processor = PictureProcessor.load(str(folder), tokenizer(), max_pixels=most)
    prompt, counts = prompt_of(folder, chat_of(PICTURE)), []
    for given in decoded((100, 100), (120, 200), (200, 7), (63, 64), (1, 1), (33, 500)):
        (made,) = processor.expand(prompt, [given], most=2048).pictures
        counts.append(made.pixels["pixel_values"].shape[1])
    within = max(1, most // 16**2)
    assert max(counts) <= within + (within > 1)
    # That of a square is the largest square within the limit.
    side = max(1, int(most**0.5) // 16)
    assert counts[0] == side**2 + (side > 1)


@pytest.mark.parametrize("most", [None, 6_000, 50_000])
@pytest.mark.parametrize("name", MODELS)
def test_no_picture_makes_more_pixels_than_the_largest(name, most, folder_of):
    folder = folder_of(name)
    processor = PictureProcessor.load(str(folder), tokenizer(), max_pixels=most)
    largest = nbytes_of(processor.largest())
    prompt, seen = prompt_of(folder, chat_of(PICTURE)), []
    for given in decoded((100, 100), (120, 200), (300, 90), (1, 1), (28, 5600)):
        (made,) = processor.expand(prompt, [given], most=2048).pictures
        seen.append(nbytes_of(made.pixels))
    # None is much smaller than the largest that was seen, either.
    assert max(seen) <= largest <= 1.3 * max(seen)


def nbytes_of(pixels) -> int:
    return sum(values.nbytes for values in pixels.values())


@pytest.mark.parametrize("name", MODELS)
def test_each_picture_has_its_place_and_its_digest(name, folder_of):
    folder, given = folder_of(name), decoded(*SIZES)
    processor = PictureProcessor.load(str(folder), tokenizer())
    chat = chat_of(PICTURE, TEXT, PICTURE, PICTURE)
    token_ids, made = processor.expand(prompt_of(folder, chat), given, most=2048)
    placeholder = MODELS[name].config.image_token_id
    assert [one.digest for one in made] == [one.digest for one in given]
    outside = list(token_ids)
    for one in reversed(made):
        own = token_ids[one.start : one.end]
        assert own[0] == placeholder or name in ("smolvlm", "idefics3")
        assert own.count(placeholder) >= len(own) // 2
        del outside[one.start : one.end]
    assert placeholder not in outside


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sides", [(201, 1), (2, 401)])
def test_a_line_is_refused_by_the_field_of_its_picture(sides, name, folder_of):
    folder = folder_of(name)
    processor = PictureProcessor.load(str(folder), tokenizer())
    prompt = prompt_of(folder, chat_of(PICTURE, PICTURE))
    assert processor.expand(prompt, decoded((200, 1), (2, 400)), most=2048).pictures
    with pytest.raises(InvalidRequest, match="more than 200 times as long") as refusal:
        processor.expand(prompt, decoded(SIZES[1], sides), most=2048)
    assert refusal.value.field == "body.messages.1.content.1"


def test_what_the_models_own_processor_refuses_is_refused_by_its_field(folder_of):
    folder = folder_of("llava")
    processor = PictureProcessor.load(str(folder), tokenizer())

    def refuse(**_):
        raise ValueError("no such picture")

    processor._image_processor = refuse
    with pytest.raises(InvalidRequest, match="for the model: no such picture") as refusal:
        processor.expand(prompt_of(folder, chat_of(PICTURE)), decoded(SIZES[0]), most=2048)
    assert refusal.value.field == "body.messages.1.content.0"


def test_the_name_of_a_placeholder_in_a_text_is_text(folder_of):
    """Only the template writes placeholders, so a caller cannot move a picture."""
    folder = folder_of("smolvlm")
    chat = chat_of({"type": "text", "text": "<image><global-img>"}, PICTURE)
    processor = PictureProcessor.load(str(folder), tokenizer())
    found = processor.expand(prompt_of(folder, chat), decoded(SIZES[0]), most=2048)
    assert "<image><global-img>" in tokenizer().decode(
        found.token_ids[: found.pictures[0].start], skip_special_tokens=False
    )


def test_a_text_is_not_lost_in_a_template_that_reads_parts_only(folder_of):
    """As SmolVLM's: in a content that is a text it finds no parts, and writes nothing."""
    for content in ("Hello there.", [{"type": "text", "text": "Hello there."}]):
        chat = [{"role": "user", "content": content}]
        ids = prompt_of(folder_of("smolvlm"), chat)
        assert tokenizer().decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nHello there.<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_template_that_writes_no_picture_refuses_the_chat(folder_of):
    processor = PictureProcessor.load(str(folder_of("llava")), tokenizer())
    with pytest.raises(InvalidRequest, match="writes 0 of 1 pictures") as refusal:
        processor.expand([1, 2, 3], decoded(SIZES[0]), most=2048)
    assert refusal.value.field == "body.messages"


def test_pictures_that_do_not_fit_into_the_context_are_not_prepared(folder_of):
    """A prompt of many pictures costs what those that fit cost."""
    folder = folder_of("smolvlm")
    processor = PictureProcessor.load(str(folder), tokenizer())
    prepared = []
    image_processor = processor._image_processor
    processor._image_processor = Counting(image_processor, prepared)
    chat = chat_of(*[PICTURE] * 32)
    with pytest.raises(InvalidRequest, match="more than 200 tokens with its 2 pictures"):
        processor.expand(prompt_of(folder, chat), decoded(*[SIZES[1]] * 32), most=200)
    assert len(prepared) == 2
    gc.collect()
    assert processor.num_held_bytes == 0


class Counting:
    """An image processor that counts its calls."""

    do_image_splitting = True

    def __init__(self, image_processor, calls):
        self._image_processor, self._calls = image_processor, calls

    def __call__(self, **options):
        self._calls.append(options)
        return self._image_processor(**options)


def test_pixels_are_counted_until_their_request_has_ended(folder_of, monkeypatch):
    folder = folder_of("llava")
    processor = PictureProcessor.load(str(folder), tokenizer())
    prompt = prompt_of(folder, chat_of(PICTURE))
    monkeypatch.setattr(pictures, "MAX_HELD_BYTES", 5000)
    first = processor.expand(prompt, decoded(SIZES[0]), most=2048)
    assert processor.num_held_bytes == 3 * 16 * 16 * 4 and processor.has_room
    second = processor.expand(prompt, decoded(SIZES[0]), most=2048)
    assert not processor.has_room
    del first
    gc.collect()
    assert processor.num_held_bytes == 3 * 16 * 16 * 4 and processor.has_room
    assert second.pictures


def test_a_worker_reads_pictures_only_if_that_is_set(folder_of):
    fields = {"device": "cpu", "num_blocks": 16, "model": str(folder_of("smolvlm"))}
    text = load_model(make_settings("redis://nowhere", "queue", **fields))
    seeing = load_model(make_settings("redis://nowhere", "queue", **fields, pictures=True))
    assert text.pictures is None and not text.engine.config.reads_pictures
    assert seeing.pictures is not None and seeing.engine.config.reads_pictures
    assert text.fingerprint != seeing.fingerprint


@pytest.mark.parametrize(("given", "most"), [(None, CPU_PICTURE_PIXELS), (70_000, 70_000)])
def test_a_worker_on_a_cpu_limits_pictures_unless_its_setting_says_how(given, most, folder_of):
    fields = {"device": "cpu", "num_blocks": 16, "model": str(folder_of("llava_onevision"))}
    served = load_model(
        make_settings("redis://nowhere", "queue", **fields, pictures=True, max_picture_pixels=given)
    )
    assert served.pictures is not None and served.pictures.max_pixels == most
    assert served.fingerprint.endswith(f"-{most}px")


def test_a_model_that_reads_no_pictures_is_refused_where_they_are_set():
    settings = make_settings("redis://nowhere", "queue", device="cpu", num_blocks=16, pictures=True)
    with pytest.raises(ModelRefused, match="pictures of this type of model are not read"):
        load_model(settings)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "config.json"])
def test_a_folder_without_what_prepares_pictures_is_refused(file, tmp_path):
    folder = MODELS["llava"].save(tmp_path)
    (folder / file).unlink()
    with pytest.raises(ModelRefused, match=f"^the pictures of {folder} cannot be prepared"):
        PictureProcessor.load(str(folder), tokenizer())
