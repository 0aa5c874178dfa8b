"""Prepares the pictures of a chat: pixels for the model's encoder, and tokens for its prompt.

Knows no request, no queue and no image format: a picture comes decoded. The model's own image
processor of transformers makes the pixels, in its form without torchvision, and transformers' own
class says which tokens stand for them. Everything else that these classes need is in the config of
the model.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.errors import ModelRefused
from engine.picture import Picture
from quire.errors import InvalidRequest

#: The most bytes of pixels that requests of a worker hold together, before it claims no others.
MAX_HELD_BYTES = 1 << 30

#: The most pixels of a picture on a CPU, unless a setting says otherwise: 1,024 patches of
#: Qwen2-VL. One step encodes a whole picture, so more could stall a small machine for minutes.
CPU_PICTURE_PIXELS = 1024 * 14 * 14

#: The most that one side of a picture may be longer than the other, as Qwen's processors have it.
#: Those that bring the shorter side to a size would make gigabytes of a long line.
MAX_ASPECT_RATIO = 200

#: What an image processor returns for the text of a prompt only.
_FOR_TEXT = frozenset({"rows", "cols"})


@dataclass(frozen=True, slots=True)
class DecodedPicture:
    """A picture as it comes in.

    Args:
        digest: SHA-256 of the bytes as they were sent.
        rgb: [height, width, 3], in uint8.
        field: the request's field, for a refusal.
    """

    digest: bytes
    rgb: NDArray[np.uint8]
    field: str

    @classmethod
    def of(
        cls, digest: bytes, *, width: int, height: int, rgb: bytes, field: str
    ) -> "DecodedPicture":
        """One whose pixels are bytes, row after row."""
        return cls(digest, np.frombuffer(rgb, dtype=np.uint8).reshape(height, width, 3), field)


class Expanded(NamedTuple):
    """The tokens of a prompt with all placeholders, and its pictures."""

    token_ids: list[int]
    pictures: tuple[Picture, ...]


class PictureProcessor:
    """What one model makes of pictures, before its encoder.

    Args:
        image_processor: that of the model, as transformers loads it.
        writer: transformers' processor of the model's type; only `replace_image_token` is used.
        tokenizer: the model's.
        placeholder: the token id that stands for an output of the encoder.
        max_pixels: the encoder gets no picture of more, or the least that its type can have.
    """

    def __init__(
        self,
        image_processor: Any,
        writer: Any,
        tokenizer: Tokenizer,
        *,
        placeholder: int,
        max_pixels: int | None = None,
    ) -> None:
        self._image_processor = image_processor
        self.max_pixels = max_pixels
        if max_pixels is not None:
            _limit(image_processor, max_pixels)
        self._writer = writer
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        #: Bytes of pixels that are alive in this process.
        self.num_held_bytes = 0

    @classmethod
    def load(
        cls, source: str, tokenizer: Tokenizer, *, max_pixels: int | None = None
    ) -> "PictureProcessor":
        """The processor of a model whose pictures the engine reads.

        `max_pixels` is that of the constructor.

        Raises:
            ModelRefused: a file or a library is missing, or the tokenizer lacks a token.
        """
        # Imported here, because it takes a second and also imports torch.
        library: Any = import_module("transformers")
        try:
            config = library.AutoConfig.from_pretrained(source, trust_remote_code=False)
            image_processor = library.AutoImageProcessor.from_pretrained(
                source, backend="pil", trust_remote_code=False
            )
            writer = _writer_of(config, image_processor, tokenizer)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            message = f"the pictures of {source} cannot be prepared: {reason}"
            raise ModelRefused(message) from error
        placeholder = int(config.image_token_id)
        return cls(
            image_processor, writer, tokenizer, placeholder=placeholder, max_pixels=max_pixels
        )

    @property
    def has_room(self) -> bool:
        """Whether requests with more pictures may come."""
        return self.num_held_bytes < MAX_HELD_BYTES

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[DecodedPicture], *, most: int
    ) -> Expanded:
        """The prompt with the tokens of its pictures, of which the template has written one each.

        The time is linear in the pixels, and pixels are made only of pictures that fit.

        Raises:
            InvalidRequest: the prompt has another number of pictures, or more than `most` tokens;
                or the model's processor takes no picture of such sides.
        """
        found = list(token_ids)
        places = [index for index, one in enumerate(found) if one == self._placeholder]
        if len(places) != len(pictures):
            message = (
                f"the model's chat template writes {len(places)} of {len(pictures)} pictures: it "
                "takes none in such a message"
            )
            raise InvalidRequest("body.messages", message)
        expanded: list[int] = []
        made: list[Picture] = []
        end = 0
        for place, picture in zip(places, pictures, strict=True):
            expanded += found[end:place]
            pixels, own = self._prepared(picture, num_pictures=len(pictures))
            made.append(Picture(picture.digest, len(expanded), len(own), pixels))
            expanded += own
            end = place + 1
            if len(expanded) > most:
                message = f"the prompt has more than {most} tokens with its {len(made)} pictures"
                raise InvalidRequest("body.messages", message)
        return Expanded(expanded + found[end:], tuple(made))

    def largest(self) -> Mapping[str, Any]:
        """The pixels of a picture of which the encoder gets as much as of any other, or more."""
        made = [self._blank(*sides) for sides in self._largest_sides()]
        return max(made, key=lambda pixels: sum(array.nbytes for array in pixels.values()))

    def _largest_sides(self) -> Iterator[Sequence[int]]:
        """Heights and widths, of which one makes the largest picture."""
        processor = self._image_processor
        if _has_patches(processor):
            yield max(_within(processor.image_grid_pinpoints, self.max_pixels), key=prod)
        elif _has_any_size(processor):
            side = processor.patch_size * processor.merge_size
            rows, columns = _fullest(processor.size.longest_edge, side)
            yield rows * side, columns * side
            # The processor keeps a row of it, also where that is beyond a small limit.
            yield side, MAX_ASPECT_RATIO * side
        else:
            side = processor.size.longest_edge or 1
            yield side, side

    def _blank(self, height: int, width: int) -> Mapping[str, Any]:
        rgb = np.zeros((height, width, 3), dtype=np.uint8)
        pixels, _ = self._prepared(DecodedPicture(b"", rgb, ""), num_pictures=1)
        return pixels

    def _prepared(
        self, picture: DecodedPicture, *, num_pictures: int
    ) -> tuple[Mapping[str, Any], list[int]]:
        """The pixels of one picture of a prompt that has `num_pictures`, and its tokens."""
        _must_have_fit_sides(picture)
        # Some types divide a picture into patches only if it is alone in its prompt: they see two.
        has_patches = _has_patches(self._image_processor)
        is_beside = num_pictures > 1 and has_patches
        rgb = picture.rgb
        if has_patches and not is_beside and self.max_pixels is not None:
            # The smaller the picture, the fewer patches are made of it.
            rgb = _scaled(rgb, self._image_processor.image_grid_pinpoints, self.max_pixels)
        options = {"return_row_col_info": True} if _has_tiles(self._image_processor) else {}
        try:
            inputs: dict[str, Any] = dict(
                self._image_processor(
                    images=[[rgb] * (1 + is_beside)],
                    return_tensors="np",
                    input_data_format="channels_last",
                    **options,
                )
            )
        except ValueError as error:
            message = f"cannot be prepared for the model: {error}"[:300]
            raise InvalidRequest(picture.field, message) from error
        if is_beside:
            inputs = {name: values[:1] for name, values in inputs.items()}
            inputs["batch_num_images"] = np.array([num_pictures])
        text = self._writer.replace_image_token(inputs, 0)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        pixels = _Pixels({name: inputs[name] for name in inputs.keys() - _FOR_TEXT})
        self._hold(pixels)
        return pixels, token_ids

    def _hold(self, pixels: "_Pixels") -> None:
        """Count the bytes until the last request that has them is gone."""
        size = sum(array.nbytes for array in pixels.values())
        self.num_held_bytes += size
        weakref.finalize(pixels, self._release, size)

    def _release(self, size: int) -> None:
        self.num_held_bytes -= size


def limit_on(device: str, asked: int | None) -> int | None:
    """The most pixels of a picture, if a setting asks for so many; None for the model's own."""
    return CPU_PICTURE_PIXELS if asked is None and device == "cpu" else asked


def fingerprint_with(pictures: PictureProcessor | None, fingerprint: str) -> str:
    """The fingerprint of a worker; another limit makes other pixels of the same picture."""
    if pictures is None or pictures.max_pixels is None:
        return fingerprint
    return f"{fingerprint}-{pictures.max_pixels}px"


class _Pixels(dict[str, Any]):
    """Arrays by name; unlike a plain dict, one may wait for its end."""

    __slots__ = ("__weakref__",)


def _must_have_fit_sides(picture: DecodedPicture) -> None:
    shorter, longer = sorted(picture.rgb.shape[:2])
    if longer > MAX_ASPECT_RATIO * shorter:
        message = f"has a side that is more than {MAX_ASPECT_RATIO} times as long as the other one"
        raise InvalidRequest(picture.field, message)


def _scaled(
    rgb: NDArray[np.uint8], pinpoints: Sequence[Sequence[int]], max_pixels: int
) -> NDArray[np.uint8]:
    """The picture, scaled down if of `pinpoints` one of more than `max_pixels` were chosen for it.

    It then fills the best one of those within the limit, or the smallest one of all, so this one is
    chosen for it. A function of its arguments alone: another worker makes the same.
    """
    # Imported here, because only workers that read pictures need these.
    library: Any = import_module("transformers.image_processing_utils")
    height, width, _ = rgb.shape
    few = _within(pinpoints, max_pixels)
    chosen = library.select_best_resolution((height, width), pinpoints)
    if prod(chosen) <= max(map(prod, few)):
        return rgb
    target = library.select_best_resolution((height, width), few)
    new_height, new_width = library.get_patch_output_size(rgb, target, "channels_last")
    image: Any = import_module("PIL.Image")
    smaller = image.fromarray(rgb).resize((new_width, new_height), image.Resampling.BICUBIC)
    return np.asarray(smaller, dtype=np.uint8)


def _fullest(max_pixels: int, side: int) -> tuple[int, int]:
    """The rows and columns of most squares of a side that a picture of so many pixels may have."""
    most = max(1, max_pixels // side**2)
    rows = (one for one in range(1, isqrt(most) + 1) if most // one <= MAX_ASPECT_RATIO * one)
    return max(((one, most // one) for one in rows), key=prod)


def _within(pinpoints: Sequence[Sequence[int]], max_pixels: int | None) -> Sequence[Sequence[int]]:
    """Those of at most `max_pixels`; the smallest one if there is none, all without a limit."""
    if max_pixels is None:
        return pinpoints
    return [one for one in pinpoints if prod(one) <= max_pixels] or [min(pinpoints, key=prod)]


def _limit(image_processor: Any, max_pixels: int) -> None:
    """Let a processor that scales pictures itself make no more pixels, or the least that it can."""
    size = image_processor.size
    if _has_any_size(image_processor):
        # The name says something else: it is a number of pixels.
        size.longest_edge = min(size.longest_edge, max_pixels)
    elif _has_tiles(image_processor):
        # The tiles of a square within the limit: no picture of that length has more.
        tile = image_processor.max_image_size["longest_edge"]
        size.longest_edge = min(size.longest_edge, max(1, isqrt(max_pixels) // tile) * tile)


def _has_any_size(image_processor: Any) -> bool:
    """Whether pictures keep their size within limits in pixels, as Qwen's."""
    return hasattr(image_processor, "merge_size")


def _has_patches(image_processor: Any) -> bool:
    """Whether a picture is divided into the patches of one of several sizes."""
    return hasattr(image_processor, "image_grid_pinpoints")


def _has_tiles(image_processor: Any) -> bool:
    return hasattr(image_processor, "do_image_splitting")


def _writer_of(config: Any, image_processor: Any, tokenizer: Tokenizer) -> Any:
    """Transformers' processor of this type, with the fields that its texts are made of.

    Its constructor is not called: it would demand libraries for videos.
    """
    names: Any = import_module("transformers.models.auto.processing_auto")
    kind = getattr(import_module("transformers"), names.PROCESSOR_MAPPING_NAMES[config.model_type])
    writer = kind.__new__(kind)
    writer.image_token = tokenizer.id_to_token(int(config.image_token_id))
    writer.image_processor = image_processor
    vars(writer).update(_fields_of(config))
    for text in _texts_of(writer):
        if len(tokenizer.encode(text, add_special_tokens=False).ids) != 1:
            raise ValueError(f"the tokenizer has no token {text}")
    return writer


def _fields_of(config: Any) -> Mapping[str, Any]:
    """What transformers' processor of this type reads of itself, from the model's own config."""
    vision = config.vision_config
    if config.model_type in ("idefics3", "smolvlm"):
        size = vision.image_size // vision.patch_size
        return {
            "image_seq_len": size**2 // config.scale_factor**2,
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "global_image_tag": "<global-img>",
        }
    if config.model_type == "llava":
        return {
            "patch_size": vision.patch_size,
            # CLIP's first output is of the whole picture.
            "num_additional_image_tokens": int(vision.model_type == "clip_vision_model"),
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }
    if config.model_type == "llava_onevision":
        return {
            "num_image_tokens": (vision.image_size // vision.patch_size) ** 2,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "vision_aspect_ratio": config.vision_aspect_ratio,
        }
    return {}


def _texts_of(writer: Any) -> Iterator[str]:
    """The texts in its expansions that must be tokens of their own."""
    yield writer.image_token
    if hasattr(writer, "fake_image_token"):
        yield from (writer.fake_image_token, writer.global_image_token)
