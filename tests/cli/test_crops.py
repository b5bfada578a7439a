"""``panscan crops``: its table, its JSON and its pictures against the planner."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops
from tests.conftest import Panscan, documented, noise

from panscan import PanAndScan, Request
from panscan.cli.main import run
from panscan.images.draw import draw_views
from panscan.images.files import Page, open_image
from panscan.images.views import ViewPlan, plan_views
from panscan.model.checkpoint import load_reader

CASES: list[tuple[tuple[int, int], list[str], PanAndScan]] = [
    ((260, 800), [], PanAndScan()),
    ((300, 300), [], PanAndScan()),
    ((1290, 500), ["--max-num-crops", "2"], PanAndScan(max_num_crops=2)),
    ((700, 100), ["--min_crop_size", "50", "--grid_max_crops", "9"], PanAndScan(min_crop_size=50, max_num_crops=9)),
    ((260, 800), ["--min-ratio-to-activate", "3.5"], PanAndScan(min_ratio_to_activate=3.5)),
    ((260, 800), ["--do-pan-and-scan", "false"], PanAndScan(enabled=False)),
    ((700, 1500), ["--preset", "document"], PanAndScan(True, 448, 10, 1.6)),
    ((700, 1500), ["--preset", "document", "--min-crop-size", "900"], PanAndScan(True, 900, 10, 1.6)),
]


def facts(panscan: Panscan, *arguments: str) -> list[dict[str, Any]]:
    """What ``panscan crops --json`` prints."""
    return documented("crops", panscan("crops", *arguments, "--json").out)


def table(printed: str) -> list[list[str]]:
    """Rows of the printed table, without its heading."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def made(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "made").iterdir())


def rows_of(plan: ViewPlan) -> list[list[str]]:
    tokens = plan.image_tokens // len(plan.views)
    names = ["whole", *(f"crop {number}" for number in range(1, len(plan.views)))]
    return [[name, *map(str, (*view.box, *view.size, tokens))] for name, view in zip(names, plan.views, strict=True)]


@pytest.mark.parametrize(("size", "flags", "settings"), CASES, ids=lambda value: str(value)[:40])
def test_table_json_and_picture_are_the_planners(
    folder: Path, panscan: Panscan, size: tuple[int, int], flags: list[str], settings: PanAndScan
) -> None:
    noise(*size).save(folder / "doc.png")
    plan = plan_views(*size, settings)
    printed = panscan("crops doc.png", *flags)
    assert table(printed.out) == rows_of(plan)
    [first, *_] = printed.out.splitlines()
    assert first.startswith(f"doc.png: {size[0]} x {size[1]} px, {len(plan.views)} view")
    assert "; as the released Gemma 3 counts: " in first
    assert first.endswith(f"{plan.image_tokens} image tokens, about {plan.prompt_tokens} prompt tokens")
    assert "doc-views.png" in printed.err
    with Image.open(folder / "doc-views.png") as picture:
        due = draw_views(open_image(Page("doc.png")), plan, caption="doc.png", estimated=True)
        assert ImageChops.difference(picture.convert("RGB"), due.convert("RGB")).getbbox() is None
    [image_facts] = facts(panscan, "doc.png", *flags)
    assert image_facts == {
        "image": "doc.png",
        "width": size[0],
        "height": size[1],
        "views": [{"kind": view.kind, "box": list(view.box)} for view in plan.views],
        "crops": plan.crops,
        "image_tokens": 256 * len(plan.views),
        "prompt_tokens": plan.prompt_tokens,
        "prompt_tokens_estimated": True,
    }


def test_json_draws_only_when_told_where(folder: Path, panscan: Panscan) -> None:
    noise(300, 300).save(folder / "doc.png")
    facts(panscan, "doc.png")
    assert [path.name for path in folder.iterdir()] == ["doc.png"]
    facts(panscan, "doc.png", "-o", "made/picture.png")
    assert (folder / "made" / "picture.png").exists()


def test_a_named_model_counts_with_its_own_tokenizer(folder: Path, panscan: Panscan) -> None:
    noise(260, 800).save(folder / "tall.png")
    noise(300, 300).save(folder / "square.png")
    prompts = load_reader("tiny").prompts
    bare = len(prompts.write(Request(prompt="What is it?"), []).ids)
    for crop_facts in facts(panscan, "tall.png", "square.png", "--model", "tiny"):
        request = Request(prompt="What is it?", images=[crop_facts["image"]])
        tokens = len(prompts.write(request, [crop_facts["crops"]]).ids)
        assert crop_facts["prompt_tokens"] == tokens - bare
        assert crop_facts["image_tokens"] == 64 * len(crop_facts["views"])
        assert not crop_facts["prompt_tokens_estimated"]
    printed = panscan("crops tall.png --model tiny").out
    assert "4 views; as tiny counts: " in printed and "about" not in printed
    assert [row[-1] for row in table(printed)] == ["64"] * 4


def test_a_text_model_has_no_views(folder: Path, panscan: Panscan, text_checkpoint: Path) -> None:
    noise(300, 300).save(folder / "doc.png")
    assert "reads text only" in panscan("crops doc.png --model", str(text_checkpoint), code=2).err


def test_pages_have_a_table_and_a_picture_each(folder: Path, panscan: Panscan) -> None:
    pages = [noise(300, 300), noise(300, 800), noise(800, 300)]
    pages[0].save(folder / "scan.v2.tiff", save_all=True, append_images=pages[1:])
    crop_facts = facts(panscan, "scan.v2.tiff", "-o", "made")
    assert [crop["image"] for crop in crop_facts] == [f"scan.v2.tiff#page={number}" for number in (1, 2, 3)]
    assert [(crop["width"], crop["height"]) for crop in crop_facts] == [page.size for page in pages]
    assert made(folder) == [f"scan-v2-tiff-page{number}-views.png" for number in (1, 2, 3)]
    assert run(["crops", "scan.v2.tiff#page=2"]) == 0
    assert (folder / "scan-v2-tiff-page2-views.png").exists()


def test_pictures_of_equal_names_do_not_replace_each_other(folder: Path) -> None:
    for place in ("one/doc.png", "two/doc.png", "two/doc.jpg"):
        (folder / place).parent.mkdir(exist_ok=True)
        noise(300, 300).save(folder / place)
    assert run(["crops", "one/doc.png", "two/doc.png", "two/doc.jpg", "-o", "made"]) == 0
    assert made(folder) == ["doc-2-views.png", "doc-3-views.png", "doc-views.png"]


def test_an_image_is_never_replaced_by_its_picture(folder: Path, panscan: Panscan) -> None:
    noise(300, 300).save(folder / "doc.png")
    noise(300, 300, 1).save(folder / "doc-views.png")
    before = [(folder / name).read_bytes() for name in ("doc.png", "doc-views.png")]
    assert "doc.png/x.png could not be written: " in panscan("crops doc.png -o doc.png/x.png", code=3).err
    assert run(["crops", "doc.png", "doc-views.png"]) == 0
    assert [(folder / name).read_bytes() for name in ("doc.png", "doc-views.png")] == before
    assert (folder / "doc-2-views.png").exists()


def test_what_cannot_be_read_is_left_out(folder: Path, panscan: Panscan) -> None:
    noise(300, 300).save(folder / "good.png")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:3000])
    (folder / "text.png").write_text("no picture")
    printed = panscan("crops text.png cut.png good.png --json")
    assert [row["image"] for row in json.loads(printed.out)] == ["good.png"]
    assert [line.split(":")[1].strip() for line in printed.err.splitlines()] == ["text.png", "cut.png"]


def test_names_are_printed_as_they_are(folder: Path, panscan: Panscan) -> None:
    """Paths hold what rich takes for markup and emoji, and are longer than a terminal is wide."""
    name = "scans [b]/:a:[/x]/" + "long " * 20 + "doc.png"
    (folder / name).parent.mkdir(parents=True)
    noise(300, 300).save(folder / name)
    printed = panscan("crops", name, "-o", "[made]")
    assert printed.out.startswith(f"{name}: 300 x 300 px")
    assert printed.err == f"picture: [made]/{Path(name).stem}-views.png\n"


# ``panscan attention``: its picture, its JSON and its errors.


def test_a_picture_and_the_cells_that_flash_attention_lacks(folder: Path, panscan: Panscan) -> None:
    noise(260, 800, 3).save("doc.png")
    line = "attention doc.png -p What? --model tiny --attn_impl flash_attention_2"
    printed = panscan(line)
    with Image.open(folder / "attention.png") as picture:
        assert picture.format == "PNG" and picture.width > 700
    assert "flash_attention_2 lacks" in printed.out
    assert "picture: attention.png" in printed.err
    facts = documented("attention", panscan(line, "--json").out)
    views = [segment for segment in facts["segments"] if segment["image"] is not None]
    assert [segment["label"] for segment in views] == ["whole", "crop 1", "crop 2", "crop 3"]
    lost = sum((segment["end"] - segment["start"]) * (segment["end"] - segment["start"] - 1) // 2 for segment in views)
    assert facts["implementations"][1]["differences"][0]["missing"] == lost
    assert facts["picture"] is None


def test_a_prompt_without_images_is_causal(folder: Path, panscan: Panscan) -> None:
    facts = json.loads(panscan("attention -p Hi --model tiny --attention flash_attention_2 --json").out)
    [group] = facts["implementations"]
    assert group["names"] == ["eager", "flash_attention_2"]
    assert group["differences"][0]["reference"] == facts["tokens"] * (facts["tokens"] + 1) // 2
