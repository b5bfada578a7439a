"""A loaded model, with its adapters, as the engine process and the replicas use it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from panscan.core import Request, Stats, UnsupportedError
from panscan.engine.detokenizer import token_bytes
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.model.adapters import adapted_tensors
from panscan.model.inputs import count_prompt
from panscan.model.load import load_for, takes_adapters, with_adapters_of
from panscan.model.runtime import apply_attention, quiet_libraries
from panscan.model.support import require_supported
from panscan.serve.client import ModelInfo, TokenCounts
from panscan.settings import Settings

_NONE: Mapping[str, str] = MappingProxyType({})


def open_model(settings: Settings, adapters: Mapping[str, str] = _NONE) -> LoadedModel:
    """Load the engines, in a process that does nothing else.

    What is there afterwards is exempt from garbage collection. With PyTorch and Transformers loaded, a full collection
    visits several hundred thousand objects, and stops all threads for a tenth of a second or more.

    Args:
        settings: settings of the model and its runner.
        adapters: names of other models, which are the same with adapters, by their names in the API.

    Raises:
        PanscanError: see :meth:`Engine.from_settings`.
        UnsupportedError: there is too little memory for all models, or the settings allow only one.
    """
    quiet_libraries()
    first, *others = _open_engines(settings, adapters) if adapters else [Engine.from_settings(settings)]
    model = LoadedModel(first, dict(zip(adapters, others, strict=True)))
    gc.collect()
    gc.freeze()
    return model


def _open_engines(settings: Settings, adapters: Mapping[str, str]) -> list[Engine]:
    """Return an engine of a model and of each model with adapters. They share the tensors that the adapters keep.

    Raises: as :func:`open_model`.
    """
    settings = replace(settings, runner="engine")
    require_supported(settings)
    wanted = [replace(settings, model=model) for model in adapters.values()]
    if not all(takes_adapters(settings, other) for other in wanted):
        raise UnsupportedError(
            "--adapter NAME=ADAPTER: several models need one device and weights of this process: leave out"
            " --tensor-parallel-size, --device-map, --random-weights, --quantize-head, --quantize-vision and"
            " --quantization bnb-..., or the names"
        )
    for other in wanted:  # a bad adapter is refused before the base is loaded
        adapted_tensors(other.model, other.revision)
    base = load_for(settings)
    apply_attention(base.model, settings.attention)
    loaded = [base, *(with_adapters_of(base, other) for other in wanted)]
    engines: list[Engine] = []
    try:
        for number, (model, chosen) in enumerate(zip(loaded, [settings, *wanted], strict=True)):
            options = replace(EngineOptions.of(chosen), memory_sharers=len(loaded), memory_holders=number)
            engines.append(Engine(model, options, chosen))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines


class LoadedModel:
    """Engines of a model and of the same with adapters, with the properties and counts that the server asks for.

    Thread-safe. ``engine.stats()`` waits for the current step, so the call blocks while the engine hangs.

    Args:
        engine: engine of the model.
        adapters: those of the model with adapters, by their names in the API.
    """

    def __init__(self, engine: Engine, adapters: Mapping[str, Engine] = MappingProxyType({})) -> None:
        self.engine, self._adapters = engine, adapters
        reader = engine.loaded.reader
        self.info = ModelInfo(
            max_model_len=reader.prompts.context or 0,
            cost=reader.prompts.cost() if reader.reads_images else None,
            dtype=str(engine.loaded.dtype).removeprefix("torch."),
            max_concurrency=engine.options.max_num_seqs * (1 + len(adapters)),
            vocabulary=reader.prompts.token_ids,
        )

    def engine_of(self, model: str | None) -> Engine:
        """Return the engine of a model by its name in the API."""
        return self._adapters.get(model or "", self.engine)

    def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt."""
        ids, image_tokens, views = count_prompt(request, self.engine.loaded.reader)
        return TokenCounts(tuple(ids), image_tokens, views)

    def stats(self) -> dict[str, Stats]:
        """Return the statistics of each engine after its current step, for which the call waits."""
        return {name: engine.stats() for name, engine in {"0": self.engine, **self._adapters}.items()}

    def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; empty for special tokens."""
        return [token_bytes(self.engine.loaded.reader.tokenizer, token) for token in ids]
