"""The process that decodes pictures for `picture_decoder`, which runs this module with `python -m`.

Reads questions from its standard input: one line of JSON with the bounds, then the bytes of a file.
Answers each with one line of JSON, then the pixels. A picture beyond a bound ends this process, see
`bounded`. End of file, or the end of the parent's thread, ends it as well.
"""

import json
import os
import sys
import time
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps

from service.worker.bounded.inside import bounded, resident_bytes, set_up_process

#: The formats of Pillow's that are tried: those that a door lets through.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
#: What is behind transparent pixels.
BACKGROUND = (255, 255, 255)


def main() -> None:
    """Answer until the end of the input."""
    set_up_process()
    # Standard output becomes standard error, so that output of a library cannot mix with answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # The limit is ours, below.
    Image.MAX_IMAGE_PIXELS = None
    Image.init()
    before = resident_bytes()
    while line := sys.stdin.buffer.readline():
        job = json.loads(line)
        answer, pixels = _decode(sys.stdin.buffer.read(job["num_bytes"]), job)
        # Freed memory may stay mapped, and the limit would not count it. A new process starts
        # without it.
        answer["must_restart"] = resident_bytes() - before > job["memory_bytes"] // 2
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.write(pixels)
        answers.flush()


def _decode(data: bytes, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The answer, and the pixels in RGB; none with a refusal."""
    size, pixels, refusal = (0, 0), b"", ""
    began = time.process_time()
    try:
        with (
            bounded(job["cpu_seconds"], job["memory_bytes"]),
            Image.open(BytesIO(data), formats=FORMATS) as image,
        ):
            if image.width * image.height > job["max_pixels"]:
                refusal = f"has more than {job['max_pixels']} pixels"
            else:
                made = _as_rgb(image)
                size, pixels = made.size, made.tobytes()
    except MemoryError:
        # Python's code reached the limit before a library did. End in the way a library does.
        os.abort()
    except Exception:  # noqa: BLE001 - Pillow raises a dozen types for damaged files.
        refusal = "cannot be decoded"
    answer = {"refusal": refusal, "width": size[0], "height": size[1]}
    return answer | {"cpu_seconds": time.process_time() - began}, pixels


def _as_rgb(image: Image.Image) -> Image.Image:
    """The first frame upright, with 8 bits for each of red, green and blue, on the background."""
    # As a copy, since an image of several frames gives its next one to whoever seeks.
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        # 16 bits of grey: the upper 8.
        upright = upright.convert("I").point(lambda value: value / 256).convert("L")
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        behind = Image.new("RGBA", upright.size, (*BACKGROUND, 255))
        upright = Image.alpha_composite(behind, upright)
    return upright.convert("RGB")


if __name__ == "__main__":
    main()
