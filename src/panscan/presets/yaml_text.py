"""The text of YAML files that users write: settings, grids and scenarios."""

from __future__ import annotations

from pathlib import Path

from panscan.core import SettingError

__all__ = ["read_yaml_text"]

_MAX_BYTES = 65_536  # a preset has a few hundred, and a grid file is typed by hand


def read_yaml_text(path: Path, where: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Args:
        path: of the file.
        where: start of error messages: the path, and the option that named it.

    Raises:
        SettingError: it cannot be read, is not a regular file, is not UTF-8, or is larger than 65,536 bytes.
    """
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
            raise SettingError(f"{where}: not a regular file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise SettingError(f"{where}: larger than {_MAX_BYTES:,} bytes")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
