"""The shared nouns and the exception tree. Imports nothing else of panscan, and no tensor library.

PanscanError                    exit code 1
├── SettingError                2   an option, key or value is wrong
│   └── ContextLengthError          a prompt longer than the context
├── InputError                  3   something the user gave could not be used
│   ├── ImageError                  a document or picture
│   │   └── StorageError                an object store failed or refused
│   ├── DatasetError                questions, prompts
│   ├── ModelError                  a checkpoint: unknown, gated, incomplete
│   ├── RecordsError                a run directory
│   └── EndpointError               an endpoint: unreachable, or an unusable response
├── EngineError                 1   the engine stopped, or was closed
│   └── QueueFullError              more requests than may wait
└── UnsupportedError            4   fine in itself, but not on this machine
"""

from __future__ import annotations

from panscan.core.errors import (
    ContextLengthError,
    DatasetError,
    DemonstrationModelWarning,
    EndpointError,
    EngineError,
    ImageError,
    InputError,
    ModelError,
    PanscanError,
    PanscanWarning,
    QueueFullError,
    RecordsError,
    SettingError,
    StorageError,
    UnsupportedError,
)
from panscan.core.model_names import BUNDLED, canonical_model, same_model, split_adapters, with_adapters
from panscan.core.process import (
    from_perf_counter,
    hold_lock,
    now,
    record_waits,
    recorded_wait,
)
from panscan.core.request import Message, PanAndScan, Request, View
from panscan.core.result import FinishReason, Result, Stamps, Stats, TokenEvent, TokenLogprobs
from panscan.core.sampling import Sampling
from panscan.core.streams import Stream
from panscan.core.text import escape_controls
from panscan.core.tools import ToolCall, ToolCallDelta

__all__ = [
    "BUNDLED",
    "ContextLengthError",
    "DatasetError",
    "DemonstrationModelWarning",
    "EndpointError",
    "EngineError",
    "FinishReason",
    "ImageError",
    "InputError",
    "Message",
    "ModelError",
    "PanAndScan",
    "PanscanError",
    "PanscanWarning",
    "QueueFullError",
    "RecordsError",
    "Request",
    "Result",
    "Sampling",
    "SettingError",
    "Stamps",
    "Stats",
    "StorageError",
    "Stream",
    "TokenEvent",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "UnsupportedError",
    "View",
    "canonical_model",
    "escape_controls",
    "from_perf_counter",
    "hold_lock",
    "now",
    "record_waits",
    "recorded_wait",
    "same_model",
    "split_adapters",
    "with_adapters",
]
