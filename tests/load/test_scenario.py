"""Scenarios, traces and option values; what a level sends, and which of its images are reused."""

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
from tests.records.load_runs import load_request
from tests.records.synthetic import records_of

from panscan.core import SettingError
from panscan.load.content import Content, RequestMix, mix_of_scenario
from panscan.load.options import LoadOptions, Trace, gamma_arrivals, parse_goodput, read_trace
from panscan.load.scenario import load_scenario, scenario_names
from panscan.load.search import RateSearch, Trial, undisturbed
from panscan.load.variants import VariantImage
from panscan.records.goodput import Goodput
from panscan.settings import options_of
from panscan.workload.requests import Source, load_workload


def test_every_bundled_scenario_can_be_drawn() -> None:
    for name in scenario_names():
        scenario = load_scenario(name)
        assert scenario.description
        for entry in scenario.documents:
            document = entry.draw(0, 0, scenario.columns)
            assert document.image.size == (entry.width, entry.height) and document.questions


def test_a_scenario_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "documents: {kind: form, width: 500, height: 700}\nprompts: What?\nrequest_rate: [0.5, inf]\n"
        "max_concurrency: 4\ngoodput: {ttft: 500}\nignore_eos: true\n"
    )
    scenario = load_scenario(str(path))
    assert (scenario.name, scenario.prompts, scenario.ignore_eos) == ("mine", ("What?",), True)
    assert (scenario.request_rate, scenario.max_concurrency, scenario.goodput) == ((0.5, None), (4,), {"ttft": 500.0})
    assert scenario.documents[0].name == "form-500x700"


WRONG_SCENARIOS = [
    ("documnets: []", "unknown field `documnets` .did you mean 'documents'"),
    ("- 1", "expected lines of 'name: value'"),
    ("name: mine", "unknown field `name`; a scenario has the name of its file"),
    ("documents: []", r"length >= 1 - at `\$.documents`"),
    ("num_prompts: 1.5", r"Expected `int | null`, got `float` - at `\$.num_prompts`"),
    ("variety: 0", r"Expected `int` >= 1 - at `\$.variety`"),
    ("request_rate: []", r"length >= 1 - at `\$.request_rate`"),
    ("prompts: [' ']", r"matching regex .* at `\$.prompts\[0\]`"),
    ("documents: [{kind: poem, width: 100, height: 100}]", "documents 1: unknown kind 'poem'"),
    ("documents: [{kind: form, width: 100, height: 100, x: 1}]", r"unknown field `x` - at `\$.documents\[0\]`"),
    ("prompts: What?", "prompts need documents"),
    ("num_prompts: " + ":".join(["59"] * 999) + ".5", "not YAML: int too large to convert to float"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_SCENARIOS)
def test_a_wrong_scenario_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=f"--scenario .*{message}"):
        load_scenario(str(path))


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "output_length": 5, "input_length": 9, "hash_ids": [1]} for at in (1000, 1500, 3000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = LoadOptions(trace=read_trace(path), trace_speedup=2.0, num_prompts=3)
    [level] = options.levels
    assert (level.cell, level.rate, options.arrival_name) == ("trace", None, "trace")
    assert options.arrivals(level, 3) == [0.0, 0.25, 1.0]


WRONG_TRACES = [
    ("", "0 requests"),
    ("[1]", "line 1: Expected `object`, got `array`"),
    ('{"timestamp": -1}', r"line 1: Expected `float` >= 0.0 - at `\$.timestamp`"),
    ('{"timestamp": 1, "tokens": 3}', "line 1: Object contains unknown field `tokens`"),
    ('{"timestamp": 1, "output_length": 0}', r"line 1: Expected `int` >= 1 - at `\$.output_length`"),
    ('{"timestamp": 2}\n{"timestamp": 1}', "not ascending"),
    ('{"timestamp": 1, "output_length": 1}\n{"timestamp": 2}', "output_length is missing in 1 lines"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TRACES)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SettingError, match=message):
        read_trace(path)


def test_levels_have_the_names_and_arrivals_of_their_options() -> None:
    mixed = LoadOptions(rates=(2.0, None), max_concurrencies=(None, 8), num_prompts=4)
    assert [level.cell for level in mixed.levels] == ["rate-2", "rate-inf", "rate-2-concurrency-8", "concurrency-8"]
    assert [None if (at := mixed.arrivals(level, 2)) is None else len(at) for level in mixed.levels] == [2, 2, 2, None]
    assert mixed.arrivals(mixed.levels[1], 3) == [0.0, 0.0, 0.0]
    constant = LoadOptions(rates=(4.0,), arrival="constant")
    assert constant.arrivals(constant.levels[0], 4) == [0.0, 0.25, 0.5, 0.75]
    assert LoadOptions(max_concurrencies=(1, 2)).arrival_name == "closed"
    assert LoadOptions().arrival_name == "burst"
    assert LoadOptions(rates=(1.0,), burstiness=0.5).arrival_name == "gamma"
    assert LoadOptions(goodput={"ttft": 2000.0, "tpot": 50.0}).search_seconds == 22.0
    assert LoadOptions(goodput={"tpot": 50.0}).search_seconds == 10.0


def test_option_values_are_parsed() -> None:
    options = options_of("load")
    assert options["rates"].convert("1, 2.5,inf,1") == (1.0, 2.5, None)
    assert parse_goodput(["ttft:500 tpot:50", "e2el:2000"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 2000.0}
    assert options["metric_percentiles"].convert("99.9,50") == (99.9, 50.0)
    assert options["percentile_metrics"].convert("itl,ttft") == ("itl", "ttft")
    with pytest.raises(SettingError, match="--request-rate: 101 values: give at most 100"):
        options["rates"].convert("1," * 100 + "1")


def trial(rate: float, attainment: float, *, limited: bool = False) -> Trial:
    return Trial(rate, Goodput(200, round(200 * attainment), {}), limited)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.7, 57.0, 4000.0])
def test_the_search_encloses_a_known_capacity(capacity: float) -> None:
    search = RateSearch(start=2.0, most=20)
    while (rate := search.next_rate()) is not None:
        search.trials.append(trial(rate, 1.0 if rate <= capacity else 0.5))
    best = search.best()
    assert best is not None and best.rate <= capacity <= best.rate * 1.11
    above = min(tried.rate for tried in search.trials if tried.rate > capacity)
    assert len(search.trials) <= 17 and search.note.endswith(f"at {best.rate:g} req/s, not at {above:g} req/s")


def missed(rate: float, apart: int) -> Trial:
    """A trial whose requests all miss the limits, also ``apart`` of them that no other disturbs."""
    return Trial(rate, Goodput(64, 0, {}), undisturbed=Goodput(apart, 0, {}))


ENDS = [
    ([trial(1.0, 1.0), trial(2.0, 0.4, limited=True)], 0, "client became the limit"),
    ([missed(4.0, 4), missed(2.0, 30)], None, "out of reach"),  # four are too few to tell
    ([trial(2.0**-n, 0.0) for n in range(9)], None, "at no measured rate"),
]


@pytest.mark.parametrize(("trials", "best", "note"), ENDS)
def test_the_search_ends_without_a_capacity(trials: list[Trial], best: int | None, note: str) -> None:
    search = RateSearch(start=trials[0].rate)
    for measured in trials:
        assert search.next_rate() == measured.rate
        search.trials.append(measured)
    assert search.next_rate() is None and note in search.note
    assert search.best() == (None if best is None else trials[best])


def test_undisturbed_requests_overlap_no_other_even_in_the_queue_of_the_client() -> None:
    times = [(0.0, 0.0, 0.5), (1.0, 0.0, 0.5), (1.2, 0.3, 0.5), (3.0, 0.0, 0.5)]  # arrival, wait, TTFT
    records = [
        load_request("c", n, due, queued + ttft, 0.0, chunks=1, queued=queued)
        for n, (due, queued, ttft) in enumerate(times)
    ]
    for record in records:
        record["stamps"]["end"] = record["stamps"]["tokens"][-1]
    assert [request.request for request in undisturbed(records_of(records))] == ["q0", "q3"]
    assert undisturbed([]) == []


def test_the_search_passes_a_rate_that_misses_by_chance() -> None:
    search = RateSearch(start=2.0)
    for measured in (Trial(2.0, Goodput(64, 60, {})), trial(4.0, 1.0), trial(8.0, 0.5)):
        assert search.next_rate() == measured.rate  # after 93.75%: the interval holds 95%
        search.trials.append(measured)
    assert search.best() == search.trials[1]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_intervals_have_the_rate_and_the_variation_of_their_burstiness(burstiness: float) -> None:
    times = gamma_arrivals(8.0, 4000, burstiness, seed=3)
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(500.0)
    intervals = np.diff([0.0, *times])
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.08)


def test_random_arrivals_depend_on_the_seed_and_scale_with_the_rate() -> None:
    slow, fast = gamma_arrivals(2.0, 20, seed=1), gamma_arrivals(8.0, 20, seed=1)
    assert slow == gamma_arrivals(2.0, 20, seed=1) != gamma_arrivals(2.0, 20, seed=2)
    assert slow == pytest.approx([4 * time for time in fast])
    burst = gamma_arrivals(2.0, 10, 1e-9)
    assert burst == sorted(burst) and burst[-1] == pytest.approx(5.0)


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
    requests = []
    for request in content.requests(count):
        body = json.loads(b"".join(request.chat.body))
        image, text = body["messages"][0]["content"]
        media, _, data = image["image_url"]["url"].partition(";base64,")
        requests.append((media, text["text"], body["max_tokens"], base64.b64decode(data, validate=True)))
    return requests


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
    files = [base64.b64decode(b"".join(pieces), validate=True) for pieces in parts]
    decoded = [np.asarray(Image.open(BytesIO(file)).convert("RGB")).astype(int) for file in files]
    assert len(set(files)) == 4 and all(image.shape == (size[1], size[0], 3) for image in decoded)
    assert all(pieces[1] is parts[0][1] for pieces in parts)
    edge = 16 if jpeg else 1
    for image in decoded[1:]:
        assert (image[edge:] == decoded[0][edge:]).all()
        change = abs(image[:edge] - decoded[0][:edge])
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
    assert [request[:3] for request in first] == [request[:3] for request in second[:20]]
    assert len({request[3] for request in first + second}) == 50
    assert {request[0] for request in first} == {"data:image/png", "data:image/jpeg"}
    assert Counter(request[1] for request in first[:9]) == dict.fromkeys(QUESTIONS, 3)
    assert 4 <= min(request[2] for request in second) < max(request[2] for request in second) <= 64
    assert sent(Content(mix, options, "m", salt=7), 20) == first
    other_salt = sent(Content(mix, options, "m", salt=8), 20)
    assert first[0][3] not in {request[3] for request in other_salt}


@pytest.mark.parametrize(("share", "distinct"), [(0.0, 40), (0.25, 30), (0.75, 10), (1.0, 1)])
def test_the_wanted_share_of_images_is_reused(mix: RequestMix, share: float, distinct: int) -> None:
    requests = sent(Content(mix, LoadOptions(image_reuse=share), "m"), 40)
    assert len({request[3] for request in requests}) == distinct
    assert share in (0.0, 1.0) or len({request[1] for request in requests}) == len(QUESTIONS)


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
