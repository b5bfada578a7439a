"""The tokenizer and chat template of the bundled models: Gemma 3's structure and names over 1,024 tokens."""

from __future__ import annotations

import string
from collections import Counter
from functools import cache
from itertools import pairwise

from tokenizers import AddedToken
from transformers import GemmaTokenizer, GenerationConfig

VOCABULARY_SIZE = 1024

MARKS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
"""Gemma's special tokens; the position is the id. The first five stand where Gemma has them."""

END_MARKS = ("<eos>", "<end_of_turn>")
"""Special tokens that end an answer."""

_NEWLINES = tuple("\n" * count for count in range(1, 5))
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
_SPACE = "▁"
_LATIN = "ÀÁÂÄÅÆÇÈÉÊËÍÎÑÓÔÖØÙÚÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüÿ"
_SIGNS = "€£¥§©®°±²³µ·½×÷–—‘’“”„•…™"
_CHARACTERS = (
    "\t"
    + _SPACE
    + string.punctuation
    + string.digits
    + string.ascii_uppercase
    + string.ascii_lowercase
    + _LATIN
    + _SIGNS
)

_WORD_LIST = """
the of and to in is on at by for from with without as it its this that these those there here are was were be been
has have had not no yes or if but than then so such all any each every some more most other another only also
which what when where who how many much why can could will would shall should may must do does did done
a an I we you he she they them their our your his her my me us one two three four five six seven eight nine ten
Here Is The What Which When Where Who How Why Are Does Do List Give Name Read Find Describe Explain Compare Summarize
Count Show Tell Write Answer Please Page Total Date Amount Invoice Number Table Figure Chart Title Tax Due Yes No None
original image crops help see better picture photo view page pages line lines row rows column columns cell table
tables figure figures chart charts graph axis legend label labels title caption header footer section paragraph
text word words letter letters number numbers value values percent rate ratio sum total subtotal average maximum
minimum highest lowest largest smallest first second third last next previous left right top bottom middle center
above below between inside outside red green blue black white grey yellow orange color dark light large small
date day days week month months year years time hour hours minute today January February March April May June July
August September October November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday
invoice receipt contract order report letter form statement bill account bank payment paid price cost costs amount
balance due tax discount currency dollar dollars euro euros cash card credit debit item items quantity unit units
product products store shop customer customers client supplier company name address street city state country phone
email signature signed party parties agreement clause term terms condition conditions notice period law court
document documents screen screenshot window button menu link file error message user password settings search open
close save delete start stop new old high low long short good best same different equal increase decrease change
growth loss profit revenue sales market share data source result results test model question answer describe explain
compare summarize list find read write show tell give count people person man woman child house car road water food
work world group public service system program plan project team manager office member school student health care
"""

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- set prefix = '' -%}
{%- set turns = messages -%}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set said = messages[0]['content'] -%}
    {%- set prefix = (said if said is string else said[0]['text']) + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n' }}
    {{- prefix if loop.first else '' }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {%- if part['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
"""Gemma 3's turns: the system message opens the first user turn, the assistant is called ``model``, text is trimmed."""


def build_tokenizer(size: int = VOCABULARY_SIZE) -> GemmaTokenizer:
    """A byte-fallback BPE tokenizer, the same on every machine.

    Any text without U+2581 reads back as it was; U+2581 stands for the space, as in Gemma's own tokenizer, and
    reads back as one. Prompts begin with ``<bos>``, padding is on the left.

    Args:
        size: of the vocabulary: marks, bytes and characters, then words and pieces of words until it is full. With 0
            there are none: every character is a token.
    """
    tokens, merges = _learn_vocabulary(size)
    tokenizer = GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=list(merges),
        add_bos_token=True,
        model_max_length=32768,
        padding_side="left",
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in _NEWLINES])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def generation_config(tokenizer: GemmaTokenizer) -> GenerationConfig:
    """Greedy, ends at ``<eos>`` or ``<end_of_turn>``, and never writes another special token.

    A random model would: an ``<image_soft_token>`` that is fed back makes Transformers look for an image.
    """
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(END_MARKS)),
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=tokenizer.convert_tokens_to_ids([mark for mark in MARKS if mark not in END_MARKS]),
        do_sample=False,
    )


@cache
def _learn_vocabulary(size: int) -> tuple[dict[str, None], list[tuple[str, str]]]:
    """Return the tokens, and the byte-pair merges of the built-in words that fill the vocabulary up to ``size``.

    Earlier words count more, as in real text. Written out because trainers differ in how they break ties.
    """
    tokens = dict.fromkeys((*MARKS, *_NEWLINES, *_BYTES, *_CHARACTERS))
    words = [
        (list(form), 10_000 // (10 + rank))
        for rank, word in enumerate(_WORD_LIST.split())
        for form in ((_SPACE + word, word) if word[0].isupper() else (_SPACE + word,))
    ]
    merges: list[tuple[str, str]] = []
    while len(tokens) < size:
        counts: Counter[tuple[str, str]] = Counter()
        for word, weight in words:
            for pair in pairwise(word):
                counts[pair] += weight
        left, right = best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        tokens[left + right] = None
        words = [(_merged(word, left, right), weight) if left in word else (word, weight) for word, weight in words]
    return tokens, merges


def _merged(word: list[str], left: str, right: str) -> list[str]:
    """``word`` with every ``left``, ``right`` in a row made one piece, from the left."""
    pieces: list[str] = []
    for piece in word:
        if pieces and pieces[-1] == left and piece == right:
            pieces[-1] = left + right
        else:
            pieces.append(piece)
    return pieces
