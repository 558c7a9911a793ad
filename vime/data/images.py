"""Images of prompts: references to files or data: URIs, checked before the start and read where their pixels are needed."""

import base64
import hashlib
import io
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from PIL import Image, ImageOps, UnidentifiedImageError

from vime.errors import VimeError

ORIENTATION = 0x0112  # EXIF: how a camera was held


def reference(value: Any, folder: Path) -> dict[str, str]:
    """{"image": absolute path or data: URI, "sha256": of the file's bytes} of an image as data files give it: a path (relative to
    `folder`), a data: URI, an OpenAI part's {"url": ...}, or {"bytes": ..., "path": ...}, which is how Hugging Face's datasets store one.

    Raises: ValueError for a missing file, for what is no image, and for an address on the network.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("url") or value.get("path")
    if isinstance(value, bytes):
        value = "data:image;base64," + base64.b64encode(value).decode()
    if not isinstance(value, str) or not value:
        raise ValueError(f"an image must be a path or a data: URI, this is {value!r:.60}")
    if value.startswith(("http://", "https://")):
        raise ValueError(f"image {value[:80]!r} is on the network: download it, images are files or data: URIs")
    image = value if value.startswith("data:") else str((folder / value.removeprefix("file://")).absolute())
    try:
        raw = _bytes(image)
        with Image.open(io.BytesIO(raw)) as opened:
            opened.verify()
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as e:  # Pillow's broken PNGs are SyntaxErrors
        said = "no such file" if isinstance(e, FileNotFoundError) else f"not an image ({type(e).__name__})"
        raise ValueError(f"image {image[:200]!r}: {said}") from e
    return {"image": image, "sha256": hashlib.sha256(raw).hexdigest()}


def _bytes(image: str) -> bytes:
    if not image.startswith("data:"):
        return Path(image).read_bytes()
    with urlopen(image) as f:
        return bytes(f.read())


def read(ref: dict[str, str]) -> tuple[bytes, Image.Image]:
    """The image's bytes, as a file that every reader decodes to the same pixels (upright, RGB, no transparency), and these pixels.

    Raises: VimeError where the file is gone or has changed since the start: what was sampled is not what would be trained.
    """
    shown = ref["image"][:200]
    try:
        raw = _bytes(ref["image"])
    except OSError as e:
        raise VimeError(f"image {shown}: {e.strerror or e}", "every host of the run needs the images under the same path") from e
    if hashlib.sha256(raw).hexdigest() != ref["sha256"]:
        raise VimeError(f"image {shown} has changed since the run began", "resume with the images it began with, or start a new run")
    image: Image.Image = Image.open(io.BytesIO(raw))
    if image.mode == "RGB" and image.getexif().get(ORIENTATION, 1) == 1 and "transparency" not in image.info:
        image.load()
        return raw, image
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:  # on white
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    buffer, image = io.BytesIO(), image.convert("RGB")
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue(), image


def content_part(ref: dict[str, str]) -> dict[str, str]:
    """The image as vLLM's token-in, token-out endpoint takes it."""
    return {"type": "image_url", "url": "data:image/png;base64," + base64.b64encode(read(ref)[0]).decode()}
