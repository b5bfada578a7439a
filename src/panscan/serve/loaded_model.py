"""A loaded engine as the engine process and the replicas use it."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from panscan.core import Request, Stats
from panscan.engine.detokenizer import token_bytes
from panscan.engine.engine import Engine
from panscan.model.inputs import count_prompt
from panscan.serve.client import ModelInfo, TokenCounts
from panscan.settings import Settings


def open_model(settings: Settings) -> LoadedModel:
    """Load the engine, in a process that does nothing else.

    What is there afterwards is exempt from garbage collection. With PyTorch and Transformers loaded, a full collection
    visits several hundred thousand objects, and stops all threads for a tenth of a second or more.

    Raises:
        PanscanError: see :meth:`Engine.from_settings`.
    """
    from panscan.model.runtime import quiet_libraries

    quiet_libraries()
    model = LoadedModel(Engine.from_settings(settings))
    gc.collect()
    gc.freeze()
    return model


class LoadedModel:
    """An engine, with the properties and counts that the server asks for. Thread-safe.

    ``engine.stats()`` waits for the current step, so the call blocks while the engine hangs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        reader = engine.loaded.reader
        self.info = ModelInfo(
            max_model_len=reader.prompts.context or 0,
            cost=reader.prompts.cost() if reader.reads_images else None,
            dtype=str(engine.loaded.dtype).removeprefix("torch."),
            max_concurrency=engine.options.max_num_seqs,
            vocabulary=reader.prompts.token_ids,
        )

    def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt."""
        ids, image_tokens, views = count_prompt(request, self.engine.loaded.reader)
        return TokenCounts(tuple(ids), image_tokens, views)

    def stats(self) -> Stats:
        """Return statistics after the engine's current step, for which the call waits."""
        return self.engine.stats()

    def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; empty for special tokens."""
        return [token_bytes(self.engine.loaded.reader.tokenizer, token) for token in ids]
