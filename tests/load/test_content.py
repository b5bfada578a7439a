"""What a level sends: the same work at every level, images that no cache knows, and the share that is reused."""

import base64
import json
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from tests.conftest import noise

from panscan.core import SettingError
from panscan.load.content import Content, RequestMix, mix_of_scenario
from panscan.load.options import LoadOptions, Trace
from panscan.load.scenario import load_scenario
from panscan.load.variants import VariantImage
from panscan.workload.requests import Source, load_workload

QUESTIONS = ("What is the total?", "Which shop?", "When?")


@pytest.fixture
def mix(tmp_path: Path) -> RequestMix:
    """Three documents (PNG, JPEG and a PDF page), each with three prompts."""
    noise(200, 300).save(tmp_path / "a.png")
    noise(320, 100, 1).save(tmp_path / "b.jpg", quality=80, subsampling=0)
    noise(90, 90, 2).save(tmp_path / "c.pdf")
    (tmp_path / "prompts.txt").write_text("\n".join(QUESTIONS))
    source = Source(images=(str(tmp_path),), prompts=str(tmp_path / "prompts.txt"))
    return RequestMix(load_workload(source, on_problem=lambda problem: pytest.fail(str(problem))).items)


def sent(content: Content, count: int) -> list[tuple[str, str, int, bytes]]:
    """Return (media type, prompt, tokens, image file) of each request of a level."""
    found = []
    for request in content.requests(count):
        body = json.loads(b"".join(request.chat.body))
        image, text = body["messages"][0]["content"]
        media, _, data = image["image_url"]["url"].partition(";base64,")
        found.append((media, text["text"], body["max_tokens"], base64.b64decode(data, validate=True)))
    return found


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (17, 2), (300, 17), (640, 480)])
@pytest.mark.parametrize("jpeg", [False, True])
def test_variants_differ_in_the_top_edge_only(size: tuple[int, int], jpeg: bool) -> None:
    image, source = noise(*size), None
    if jpeg:
        buffer = BytesIO()
        image.save(buffer, "JPEG", quality=70, subsampling=0)
        source = Image.open(buffer)
        image = source.convert("RGB")
    variants = VariantImage(image, source)
    parts = [variants.base64(number) for number in (0, 1, 2, 12345)]
    files = [base64.b64decode(b"".join(each), validate=True) for each in parts]
    decoded = [np.asarray(Image.open(BytesIO(file)).convert("RGB")).astype(int) for file in files]
    assert len(set(files)) == 4 and all(each.shape == (size[1], size[0], 3) for each in decoded)
    assert all(each[1] is parts[0][1] for each in parts)
    edge = 16 if jpeg else 1
    for each in decoded[1:]:
        assert (each[edge:] == decoded[0][edge:]).all()
        change = abs(each[:edge] - decoded[0][:edge])
        assert change.max() > 0 and (change.mean() if jpeg else change.max()) <= 28
    if jpeg:
        assert Image.open(BytesIO(files[0])).quantization == source.quantization  # type: ignore[attr-defined]
    else:
        assert (decoded[0][edge:] == np.asarray(image)[edge:]).all()


def test_a_variant_survives_the_resize_of_the_model() -> None:
    variants = VariantImage(noise(600, 1800))
    files = [base64.b64decode(b"".join(variants.base64(number))) for number in range(8)]
    assert len({Image.open(BytesIO(file)).resize((896, 896)).tobytes() for file in files}) == 8


def test_levels_send_the_same_work_and_no_image_twice(mix: RequestMix) -> None:
    options = LoadOptions(min_tokens=4, max_tokens=64)
    content = Content(mix, options, "m", salt=7)
    first, second = sent(content, 20), sent(content, 30)
    assert [each[:3] for each in first] == [each[:3] for each in second[:20]]
    assert len({each[3] for each in first + second}) == 50
    assert {each[0] for each in first} == {"data:image/png", "data:image/jpeg"}
    assert Counter(each[1] for each in first[:9]) == dict.fromkeys(QUESTIONS, 3)
    assert 4 <= min(each[2] for each in second) < max(each[2] for each in second) <= 64
    assert sent(Content(mix, options, "m", salt=7), 20) == first
    assert not {each[3] for each in sent(Content(mix, options, "m", salt=8), 20)} & {each[3] for each in first[:1]}


@pytest.mark.parametrize(("share", "distinct"), [(0.0, 40), (0.25, 30), (0.75, 10), (1.0, 1)])
def test_the_wanted_share_of_images_is_reused(mix: RequestMix, share: float, distinct: int) -> None:
    found = sent(Content(mix, LoadOptions(image_reuse=share), "m"), 40)
    assert len({each[3] for each in found}) == distinct
    assert share in (0.0, 1.0) or len({each[1] for each in found}) == len(QUESTIONS)


def test_a_trace_sets_the_lengths_again_and_again(mix: RequestMix) -> None:
    trace = Trace((0.0, 0.5, 0.5), (3, 1, 2))
    content = Content(mix, LoadOptions(trace=trace, num_prompts=3, num_warmups=5), "m")
    assert [tokens for _, _, tokens, _ in sent(content, 5)] == [3, 1, 2, 3, 1]


def test_too_large_a_load_is_refused_with_the_need(mix: RequestMix) -> None:
    with pytest.raises(SettingError, match=r"1 documents of .* exceed 0 MB: give smaller --images"):
        Content(mix, LoadOptions(), "m", most_bytes=1000).requests(2)
    content = Content(mix, LoadOptions(), "m", most_bytes=1_000_000)
    with pytest.raises(SettingError, match="exceed 1 MB: give smaller --images, or fewer --num-prompts"):
        content.requests(9999)


def test_the_mixed_pile_has_the_shares_of_its_sizes() -> None:
    scenario = replace(load_scenario("mixed-documents"), variety=1)
    mix = mix_of_scenario(scenario, 0, ["What?"])
    items = [request.item for request in Content(mix, LoadOptions(), "m").requests(400)]
    counts = Counter((item.documents[0].width, item.documents[0].height) for item in items)
    for entry in scenario.documents:
        assert counts[entry.width, entry.height] / 400 == pytest.approx(entry.share / 100, abs=0.07)
    assert len({item.documents[0].sha256 for item in items}) == scenario.variety * len(scenario.documents)
