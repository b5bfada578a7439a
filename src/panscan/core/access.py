"""Which servers this process may fetch documents from, and for how long: options of a command, or its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from panscan.core.option import SECONDS

ALLOW_PRIVATE = "PANSCAN_ALLOW_PRIVATE_URLS"
"""Environment variable that allows non-public addresses."""
STORAGE_TIMEOUT = "PANSCAN_STORAGE_TIMEOUT"
"""Environment variable with the seconds for one object of a store, retries included."""


@dataclass(frozen=True, slots=True)
class RemoteAccess:
    """What fetches may do.

    Args:
        private_urls: whether non-public addresses are allowed.
        storage_timeout: seconds for one object of a store; None: the default.
    """

    private_urls: bool = False
    storage_timeout: float | None = None

    def environment(self) -> dict[str, str]:
        """Return variables that give a child process this access."""
        timeout = {} if self.storage_timeout is None else {STORAGE_TIMEOUT: repr(self.storage_timeout)}
        return {ALLOW_PRIVATE: str(int(self.private_urls)), **timeout}


_chosen = RemoteAccess()


def set_remote_access(access: RemoteAccess) -> None:
    """Set what the options of a command allow, from now on and in all threads."""
    global _chosen
    _chosen = access


def remote_access() -> RemoteAccess:
    """Return what the options allow, and what the environment allows where the options say nothing.

    Raises:
        SettingError: the environment's timeout is no number, or out of range.
    """
    private = os.environ.get(ALLOW_PRIVATE, "").lower() in ("1", "true", "yes", "on")
    timeout, text = _chosen.storage_timeout, os.environ.get(STORAGE_TIMEOUT)
    if timeout is None and text:
        timeout = SECONDS.parse(STORAGE_TIMEOUT, text)
    return RemoteAccess(_chosen.private_urls or private, timeout)
