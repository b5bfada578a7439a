"""Text that comes token by token: the tokenizer's own decoding, and the place where ``generate()`` stops."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.small_models import TOKENIZER
from training.tokenizer import MARKS, VOCABULARY_SIZE

from panscan.engine.detokenizer import Detokenizer

WORD = TOKENIZER.convert_tokens_to_ids("▁the")
BROKEN = "\N{REPLACEMENT CHARACTER}"


def decoded(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def of_bytes(content: bytes) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in content])


def pushed(ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[Detokenizer, list[str], int]:
    """An answer read up to its stop text, its pieces, and how many tokens that took."""
    text = Detokenizer(TOKENIZER, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    taken = len(pieces)
    pieces.append(text.finish())
    return text, pieces, taken


marks = st.sampled_from(range(len(MARKS)))
anything = st.integers(0, VOCABULARY_SIZE + 40)
loose_bytes = st.binary(min_size=1, max_size=4).map(of_bytes)
characters = st.text(min_size=1, max_size=4).map(lambda text: of_bytes(text.encode()))
words = st.text("▁ abt\nöß漢🙂", min_size=1, max_size=8).map(
    lambda text: TOKENIZER.encode(text, add_special_tokens=False)
)
answers = st.lists(loose_bytes | characters | words | marks.map(lambda i: [i]) | anything.map(lambda i: [i])).map(
    lambda parts: [token for part in parts for token in part]
)


@settings(max_examples=400)
@given(answers)
@example(of_bytes(b"B\xf0"))  # whole until the second byte
@example([*of_bytes("漢".encode())[:2], MARKS.index("<pad>"), *of_bytes("漢".encode())[2:]])
@example([*of_bytes(b"a"), VOCABULARY_SIZE + 1, *of_bytes(b"\xff")])
def test_pieces_put_together_are_the_decoded_text(ids: list[int]) -> None:
    """So nothing that is shown changes later. Behind a whole word, all is shown."""
    text, pieces, _ = pushed(ids)
    assert "".join(pieces) == text.text == decoded(ids)
    assert not text.stopped
    assert text.finish() == ""
    _, pieces, _ = pushed([*ids, WORD])
    assert "".join(pieces[:-1]) == decoded([*ids, WORD])


short = st.text("abt \n漢ö", min_size=1, max_size=3)


@settings(max_examples=400)
@given(answers, st.lists(short, min_size=1, max_size=3))
@example(of_bytes("a漢b".encode()), ["漢", "b"])
@example(of_bytes(b"aab") + of_bytes(b"\xff"), ["ab"])
@example([*TOKENIZER.convert_tokens_to_ids(["a"]), *of_bytes(b"b\xff")], ["ab"])
@example(TOKENIZER.encode("total amount", add_special_tokens=False), ["amo", "al amount"])
def test_an_answer_ends_before_its_first_stop_text(ids: list[int], stop: list[str]) -> None:
    """The text is the decoded one cut, at the first token after which the decoded text holds a stop text."""
    ends = (count for count in range(1, len(ids) + 1) if any(mark in decoded(ids[:count]) for mark in stop))
    end = next(ends, None)
    text, pieces, taken = pushed(ids, stop)
    assert text.stopped == (end is not None)
    complete = decoded(ids[:end])
    assert taken == (len(ids) if end is None else end)
    cut = min((complete.index(mark) for mark in stop if mark in complete), default=len(complete))
    assert "".join(pieces) == text.text == complete[:cut]


def test_no_more_is_held_back_than_may_become_a_stop_text() -> None:
    ids = TOKENIZER.convert_tokens_to_ids(list("xabyabc"))
    text = Detokenizer(TOKENIZER, ["abc"])
    assert [text.push(token) for token in ids] == ["x", "", "", "aby", "", "", ""]
    assert (text.stopped, text.text, text.push(ids[0]), text.finish()) == (True, "xaby", "", "")


def test_broken_characters_are_a_stop_text_only_when_they_stay() -> None:
    accented = of_bytes("é".encode())
    assert pushed([*accented, *TOKENIZER.convert_tokens_to_ids(["x"])], [BROKEN])[0].text == "éx"
    text, _, taken = pushed([*TOKENIZER.convert_tokens_to_ids(["x"]), accented[0]], [BROKEN])
    assert (text.text, text.stopped, taken) == ("x", True, 2)
