"""What to verify, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from panscan.settings import Settings, VerifyTable, check_options, default_of


@dataclass(frozen=True)
class VerifyOptions(VerifyTable):
    """Options of a verification; the numbers are in the table of options.

    Args:
        url: URL of the endpoint.
        settings: checkpoint and pan-and-scan settings; the reference.
        served_model: the endpoint's name of the model; None: the only one that it lists.
        api_key: bearer token.
        timeout: seconds per request.
    """

    url: str
    settings: Settings
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = default_of("timeout", "verify")

    def __post_init__(self) -> None:
        check_options(self, "verify")
