"""The built-in tokenizer: any text reads back, marks and turns are Gemma's."""

from hashlib import sha256
from typing import Any

import pytest
from jinja2 import TemplateError
from tests.small_models import TOKENIZER
from training.tokenizer import VOCABULARY_SIZE


def test_the_vocabulary_is_the_same_everywhere() -> None:
    """The tiny model's weights belong to these ids."""
    vocabulary = " ".join(sorted(TOKENIZER.get_vocab(), key=TOKENIZER.get_vocab().__getitem__))
    assert sha256(vocabulary.encode()).hexdigest()[:16] == "5e4d96cb39d79e1a"


def test_marks_are_single_tokens_in_gemmas_places() -> None:
    assert len(TOKENIZER) == VOCABULARY_SIZE
    assert TOKENIZER.convert_tokens_to_ids(["<pad>", "<eos>", "<bos>", "<unk>"]) == [0, 1, 2, 3]
    assert TOKENIZER("<start_of_image>Hi")["input_ids"][:2] == [2, TOKENIZER.boi_token_id]
    assert TOKENIZER("\n" * 6, add_special_tokens=False).tokens() == ["\n" * 4, "\n" * 2]
    assert TOKENIZER.decode(TOKENIZER("<end_of_turn>Hi\n")["input_ids"], skip_special_tokens=True) == "Hi\n"


def turns(*messages: tuple[str, Any], **options: Any) -> str:
    said = [{"role": role, "content": content} for role, content in messages]
    return TOKENIZER.apply_chat_template(said, tokenize=False, **options)


def test_turns_are_gemmas() -> None:
    picture = [{"type": "image"}, {"type": "text", "text": " What? "}]
    assert turns(("user", picture), add_generation_prompt=True) == (
        "<bos><start_of_turn>user\n<start_of_image>What?<end_of_turn>\n<start_of_turn>model\n"
    )
    brief = "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert turns(("system", system), ("user", " Hi\n"), ("assistant", "Yes ")) == brief


HI = ("user", "Hi")


@pytest.mark.parametrize("messages", [[("assistant", "Yes")], [HI, HI], [HI, ("system", "No"), HI, HI], [("user", 3)]])
def test_turns_out_of_order_are_refused(messages: list[tuple[str, Any]]) -> None:
    with pytest.raises(TemplateError):
        turns(*messages)
