"""The fields that chat and text completions share: sampling, and all spellings of structured output."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from panscan.core import Sampling, SettingError
from panscan.core.foreign import JsonObject
from panscan.core.option import shorten
from panscan.core.sampling import FILTERS
from panscan.serve.body import Body, FieldError

PARAMS = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "template_kwargs": "chat_template_kwargs",
    **{name: name for name in ("messages", "tools", "tool_choice", "logit_bias", "prompt")},
    **dict.fromkeys(("regex", "choice", "grammar"), "structured_outputs"),
}
"""Fields of a body by the name that begins an error of the engine."""
Unused = Annotated[str | None, Meta(description="Accepted for compatibility; not used or stored.")]
"""A field that has no effect."""

Prompt = str | list[int]
"""A prompt of a text completion: a text, or token ids."""
Name = Annotated[str, Meta(max_length=1024)]
Structure = dict[str, Any]
"""Constraints on an answer, as fields of :class:`panscan.core.Sampling`."""
_Text = Annotated[str, Meta(min_length=1)]
_Schema = JsonObject | bool | _Text
_Choice = Annotated[list[_Text], Meta(min_length=1, max_length=4096)]


class _JsonSchema(Body):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: JsonObject | bool
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Body):
    """The format of the answer: any text, any JSON object, or JSON that matches a schema.

    ``schema`` is llama.cpp's spelling; ``value`` that of Hugging Face's inference server, as are two types.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: _JsonSchema | None = None
    schema: JsonObject | bool | None = None
    value: JsonObject | bool | str | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.json_schema, self.schema, self.value) if value is not None]
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type 'json_schema' require each other")
        if len(given) > 1 or (self.type == "text" and given):
            raise ValueError("give one of json_schema, schema and value, and none for text")
        if isinstance(self.value, str) != (self.type == "regex") or (self.type == "json" and not given):
            raise ValueError("value must be a text for type 'regex', and a JSON schema for other types")

    @property
    def structure(self) -> Structure:
        """The format as fields of :class:`panscan.core.Sampling`."""
        if self.type in ("text", "regex"):
            return _structure(regex=self.value if isinstance(self.value, str) else None)
        given = (self.schema, self.value, None if self.json_schema is None else self.json_schema.schema)
        return _structure(next((schema for schema in given if schema is not None), {"type": "object"}))


class StructuredOutputs(Body):
    """vLLM's constraints on the answer."""

    NEUTRAL: ClassVar = {
        "disable_any_whitespace": (True, False),
        "disable_additional_properties": (True, False),
        "disable_fallback": (True, False),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json: _Schema | None = None
    regex: _Text | None = None
    choice: _Choice | None = None
    grammar: _Text | None = None
    json_object: bool = False

    @property
    def structure(self) -> Structure:
        """The constraints as fields of :class:`panscan.core.Sampling`."""
        schema = {"type": "object"} if self.json_object and self.json is None else self.json
        return _structure(schema, self.regex, self.choice, self.grammar)


def _structure(
    schema: JsonObject | bool | str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Structure:
    """Return the constraints that are given as fields of :class:`panscan.core.Sampling`."""
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
    values = {"json_schema": text, "regex": regex, "choice": choice and tuple(choice), "grammar": grammar}
    return {name: value for name, value in values.items() if value is not None}


class _StreamOptions(Body):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False

    def __post_init__(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats requires include_usage: true")


TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]


class SamplingFields(Body):
    """The fields that chat and text completions share. Those of :class:`panscan.core.Sampling` have its names."""

    NEUTRAL: ClassVar = {
        "best_of": (1,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "suffix": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "min_tokens": (0,),
        "bad_words": ([],),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "priority": (0,),
    }

    model: Name | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=16)] | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    ignore_eos: bool = False
    prompt_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choice | None = None
    guided_grammar: _Text | None = None
    user: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    request_id: Unused = None
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=128)] | None,  # OpenAI's API allows 16 names
        Meta(description="Accepted for compatibility; not used or stored."),
    ] = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs requires stream: false")

    is_chat: ClassVar = False

    @property
    def echoed(self) -> list[Prompt] | None:
        """The prompts that the response repeats; None if it repeats none."""
        return None

    @property
    def only_echo(self) -> bool:
        """Whether the answer is the prompt alone; the engine computes one token more, which is dropped."""
        return False

    @property
    def output_tokens(self) -> int | None:
        """Maximum number of output tokens; None: as many as the server allows."""
        return self.max_tokens

    @property
    def structure(self) -> Structure:
        """The constraint on the answer as a field of :class:`panscan.core.Sampling`; empty if there is none.

        Raises:
            FieldError: there are several.
        """
        given: dict[str, Structure] = {}
        if self.response_format is not None:
            given["response_format"] = self.response_format.structure
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.structure
        for param, name in _GUIDED.items():
            if (value := getattr(self, param)) is not None:
                given[param] = _structure(**{name: value})
        fields = [(param, item) for param, structure in given.items() for item in structure.items()]
        if len(fields) > 1:
            (first, (one, _)), (second, (other, _)), *_ = fields
            names = f"{first}.{one} and {other}" if first == second else f"{first} and {second}"
            raise FieldError(f"{names} exclude each other: give one of them", second)
        return dict(item for _, item in fields)

    @property
    def logprobs_per_token(self) -> int | None:
        """Number of log-probabilities per token besides its own; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def logprobs_per_prompt_token(self) -> int | None:
        """The same for tokens of the prompt."""
        return self.prompt_logprobs

    def sampling(self, defaults: Sampling) -> Sampling:
        """Return the sampling parameters.

        With temperature 0 the filters cannot change the token, so they are checked and dropped.

        Args:
            defaults: parameters that the request lacks, and the maximum number of output tokens.

        Raises:
            FieldError: a value is out of its range.
        """
        most = defaults.max_new_tokens
        tokens = most if self.output_tokens is None else self.output_tokens
        limit = "max_tokens" if self.max_tokens == self.output_tokens else "max_completion_tokens"
        if tokens > most:
            raise FieldError(f"{limit}: at most {most}, got {shorten(tokens)}", limit)
        chosen = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        chosen |= {name: None for name, off in FILTERS.items() if chosen.get(name) in off}
        chosen |= {
            "max_new_tokens": tokens,
            "logprobs": self.logprobs_per_token,
            "prompt_logprobs": self.logprobs_per_prompt_token,
            "logit_bias": self.logit_bias or None,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            **self.structure,
        }
        try:
            if chosen.get("temperature", defaults.temperature) == 0:
                replace(defaults, temperature=1.0, **{name: chosen[name] for name in FILTERS if name in chosen})
                chosen |= dict.fromkeys(FILTERS)
            return replace(defaults, **chosen)
        except SettingError as error:  # with the name of the request's field
            name = str(error).split(" ", 1)[0].rstrip(":")
            param = limit if name == "max_new_tokens" else PARAMS.get(name, name)
            message = param + str(error).removeprefix(name) if param == limit else str(error)
            raise FieldError(message, param if param in self.__struct_fields__ else None) from error


_SHARED = tuple(item.name for item in fields(Sampling) if item.name in SamplingFields.__struct_fields__)
_GUIDED = {"guided_json": "schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, with the parameter of :func:`_structure` that each gives."""
