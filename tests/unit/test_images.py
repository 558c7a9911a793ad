"""Rows with images: what the reader makes of them, and the pixels that server and trainer get."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.vision.make_data import main
from examples.vision.make_model import IMAGE, PARTS
from tests.integration.vision_kit import draw
from vime.config import DataConfig, validate
from vime.data.examples import Examples
from vime.data.images import content_part, read, reference
from vime.data.prompts import Prompts
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError
from vime.model import CHARS, _char_tokenizer
from vime.sample import Sample

PAD = 3 + len(CHARS)  # the image token


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = tmp_path / "model"
    _char_tokenizer([IMAGE], PARTS).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"image_token_id": PAD}))
    return Tokenizer(folder)


def first(tmp_path: Path, tokenizer: Tokenizer, *rows: dict[str, Any], **data: Any) -> Sample:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return Prompts(DataConfig(prompts=str(path), shuffle=False, **data), str(path), tokenizer, 2, 0, 50).next(1)[0][0]


def uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def test_every_way_to_write_an_image(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = draw(tmp_path / "img/a.png", (8, 6), 0)
    text = {"type": "text", "text": "ab"}
    images: list[Any] = [
        {"type": "image", "image": "img/a.png"}, {"type": "image", "path": str(file)}, {"type": "image_url", "image_url": {"url": "img/a.png"}},
        {"type": "image_url", "image_url": {"url": uri(file)}}, {"type": "image", "image": f"file://{file}"},
    ]  # fmt: skip
    for part in images:
        s = first(tmp_path, tokenizer, {"prompt": [{"role": "user", "content": [part, text]}]})
        assert s.prompt == "<bos><image>ab>" and s.tokens[:2] == [1, PAD] and s.multimodal_inputs["token_ids"] == s.tokens
        assert [i["sha256"] for i in s.images] == [reference(str(file), tmp_path)["sha256"]]
    back = Sample.from_dict(json.loads(json.dumps(s.to_dict())))
    assert back == s


def test_examples_with_images_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    draw(tmp_path / "a.png", (8, 6), 0)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x<image>", "images": "a.png", "response": "y"}))
    data = {"prompts": str(tmp_path / "a.jsonl"), "image_key": "images"}
    with pytest.raises(VimeError, match="it has images: examples are of text only"):
        Examples(validate({"model": "m", "data": data, "train": {"objective": "sft"}}, "t"), tokenizer)


def test_a_column_of_images(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Marks in the text say where they go; without marks they come first. Parquet files of Hugging Face's datasets hold bytes."""
    a, b = (draw(tmp_path / f"{n}.png", (8, 6), i) for i, n in enumerate("ab"))
    s = first(tmp_path, tokenizer, {"prompt": "x<image>y<image>", "images": ["b.png", "a.png"]}, image_key="images")
    assert s.prompt == "<bos>x<image>y<image>>" and [i["image"] for i in s.images] == [str(b), str(a)]
    s = first(tmp_path, tokenizer, {"prompt": "xy", "images": "a.png"}, image_key="images")
    assert s.prompt == "<bos><image>xy>" and [i["image"] for i in s.images] == [str(a)]
    s = first(tmp_path, tokenizer, {"prompt": "x<image>y"}, image_key="images")
    assert s.images == [] and s.multimodal_inputs is None
    pq.write_table(pa.table({"prompt": ["x<image>"], "images": [[{"bytes": a.read_bytes(), "path": "gone.png"}]]}), tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    group = Prompts(DataConfig(prompts=path, image_key="images"), path, tokenizer, 1, 0, 50).row(0, 1)
    assert group[0].images[0]["sha256"] == reference(str(a), tmp_path)["sha256"]


def part(image: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [{"type": "image", "image": image}]}]}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (part("gone.png"), r"a.jsonl:2: image '.*gone.png': no such file"),
        (part("text.png"), r"a.jsonl:2: image '.*text.png': not an image"),
        (part("cut.png"), r"a.jsonl:2: image '.*cut.png': not an image"),
        (part("data:image/png;base64,!!"), r"a.jsonl:2: image 'data:image/png;base64,!!': not an image"),
        (part("https://x.org/a.png"), r"a.jsonl:2: image 'https://x.org/a.png' is on the network"),
        (part(7), r"a.jsonl:2: an image must be a path or a data: URI, this is 7"),
        (part(None), r"a.jsonl:2: an image part without an image"),
        ({"prompt": "<image>a<image>", "images": ["a.png"]}, r"a.jsonl:2: an image part without an image"),
        ({"prompt": "<image>", "images": ["a.png", "a.png"]}, r"a.jsonl:2: 1 images under 'images' \(data.image_key\) have no place"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "video"}]}]}, r"a.jsonl:2: a content part must be of"),
    ],
)
def test_bad_rows_are_named_before_the_start(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], fault: str) -> None:
    file = draw(tmp_path / "a.png", (8, 6), 0)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(file.read_bytes()[:60])
    with pytest.raises(VimeError, match=fault):
        first(tmp_path, tokenizer, part("a.png"), row, image_key="images")


def test_models_and_templates_without_images(tmp_path: Path, tokenizer: Tokenizer) -> None:
    draw(tmp_path / "a.png", (8, 6), 0)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}>"
    with pytest.raises(VimeError, match=r"a.jsonl:1: the chat template renders 0 image tokens \(id 47\) for 1 images"):
        first(tmp_path, tokenizer, part("a.png"))
    tokenizer.image_token = None
    with pytest.raises(VimeError, match=r"a.jsonl:1: it has 1 images, and the model takes none"):
        first(tmp_path, tokenizer, part("a.png"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_server_and_trainer_get_the_same_pixels(tmp_path: Path, mode: str) -> None:
    file = tmp_path / f"a.{'tiff' if mode == 'CMYK' else 'png'}"
    Image.open(draw(tmp_path / "rgba.png", (9, 7), 3, "RGBA")).convert(mode).save(file)
    ref = reference(file.name, tmp_path)
    pixels = read(ref)[1]
    _, _, data = content_part(ref)["url"].partition(",")
    sent = Image.open(io.BytesIO(base64.b64decode(data)))
    assert pixels.mode == sent.mode == "RGB" and np.array_equal(np.asarray(pixels), np.asarray(sent))


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(draw(tmp_path / "a.png", (9, 7), 3)).save(tmp_path / "a.jpg", exif=exif)
    assert read(reference("a.jpg", tmp_path))[1].size == (7, 9)


def test_an_image_that_changes_during_the_run_is_an_error(tmp_path: Path) -> None:
    ref = reference(str(draw(tmp_path / "a.png", (9, 7), 3)), tmp_path)
    draw(tmp_path / "a.png", (9, 7), 4)
    with pytest.raises(VimeError, match=r"a.png has changed since the run began"):
        read(ref)
    (tmp_path / "a.png").unlink()
    with pytest.raises(VimeError, match=r"a.png: No such file"):
        read(ref)


def test_the_example(tmp_path: Path, tokenizer: Tokenizer) -> None:
    main(tmp_path)
    prompts = Prompts(DataConfig(prompts="-"), f"{tmp_path}/eval.jsonl", tokenizer, 1, 0, 50)
    assert len(prompts) == 64 and {prompts.row(i, 1)[0].label for i in range(64)} == set("rgby")
    assert all(s.prompt == "<bos><image>which colour?>" and len(s.images) == 1 for s in (prompts.row(i, 1)[0] for i in range(64)))
