"""The typefaces of training, and those that training never sees: all from packages of the ``training`` extra."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from panscan.core import SettingError
from panscan.images.ink import AILERON, Face

_FILES: dict[str, tuple[str, str, str | None]] = {
    # name: package, regular file, bold file
    "DejaVu Sans": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSans.ttf", "mpl-data/fonts/ttf/DejaVuSans-Bold.ttf"),
    "DejaVu Serif": ("matplotlib", "mpl-data/fonts/ttf/DejaVuSerif.ttf", "mpl-data/fonts/ttf/DejaVuSerif-Bold.ttf"),
    "DejaVu Sans Mono": (
        "matplotlib",
        "mpl-data/fonts/ttf/DejaVuSansMono.ttf",
        "mpl-data/fonts/ttf/DejaVuSansMono-Bold.ttf",
    ),
    "STIX": ("matplotlib", "mpl-data/fonts/ttf/STIXGeneral.ttf", "mpl-data/fonts/ttf/STIXGeneralBol.ttf"),
    "Source Serif": (
        "font_source_serif_pro",
        "files/SourceSerifPro-Regular.ttf",
        "files/SourceSerifPro-Bold.ttf",
    ),
    "Source Serif Italic": ("font_source_serif_pro", "files/SourceSerifPro-It.ttf", "files/SourceSerifPro-BoldIt.ttf"),
    "Manrope": ("font_manrope", "files/Manrope-Regular.ttf", "files/Manrope-Bold.ttf"),
    "Hanken Grotesk": ("font_hanken_grotesk", "files/HankenGrotesk-Regular.otf", "files/HankenGrotesk-Bold.otf"),
    "Fjalla One": ("font_fjallaone", "files/FjallaOne-Regular.ttf", None),
    "EB Garamond": ("rendercv_fonts", "EB Garamond/EBGaramond-Regular.ttf", "EB Garamond/EBGaramond-Bold.ttf"),
    "Fontin": ("rendercv_fonts", "Fontin/Fontin-Regular.otf", "Fontin/Fontin-Bold.otf"),
    "Gentium": (
        "rendercv_fonts",
        "Gentium Book Plus/GentiumBookPlus-Regular.ttf",
        "Gentium Book Plus/GentiumBookPlus-Bold.ttf",
    ),
    "Mukta": ("rendercv_fonts", "Mukta/Mukta-Regular.ttf", "Mukta/Mukta-Bold.ttf"),
    "Noto Sans": ("rendercv_fonts", "Noto Sans/NotoSans-Regular.ttf", "Noto Sans/NotoSans-Bold.ttf"),
    "Open Sans": ("rendercv_fonts", "Open Sans/OpenSans-Regular.ttf", "Open Sans/OpenSans-Bold.ttf"),
    "Open Sans Italic": ("rendercv_fonts", "Open Sans/OpenSans-Italic.ttf", "Open Sans/OpenSans-BoldItalic.ttf"),
    "Open Sauce": (
        "rendercv_fonts",
        "Open Sauce Sans/OpenSauceSans-Regular.ttf",
        "Open Sauce Sans/OpenSauceSans-Bold.ttf",
    ),
    "Poppins": ("rendercv_fonts", "Poppins/Poppins-Regular.ttf", "Poppins/Poppins-Bold.ttf"),
    "Raleway": ("rendercv_fonts", "Raleway/Raleway-Regular.ttf", "Raleway/Raleway-Bold.ttf"),
    "Roboto": ("rendercv_fonts", "Roboto/Roboto-Regular.ttf", "Roboto/Roboto-Bold.ttf"),
    "Source Sans": ("rendercv_fonts", "Source Sans 3/SourceSans3-Regular.ttf", "Source Sans 3/SourceSans3-Bold.ttf"),
    "Ubuntu": ("rendercv_fonts", "Ubuntu/Ubuntu-Regular.ttf", "Ubuntu/Ubuntu-Bold.ttf"),
    "XCharter": ("rendercv_fonts", "XCharter/XCharter-Regular.otf", "XCharter/XCharter-Bold.otf"),
    "XCharter Italic": ("rendercv_fonts", "XCharter/XCharter-Italic.otf", "XCharter/XCharter-BoldItalic.otf"),
}

_HELD_OUT: dict[str, tuple[str, str, str | None]] = {
    "Lato": ("rendercv_fonts", "Lato/Lato-Regular.ttf", "Lato/Lato-Bold.ttf"),
    "Caladea": ("font_caladea", "files/Caladea-Regular.ttf", "files/Caladea-Bold.ttf"),
    "Red Hat Display": ("font_rhd", "files/RedHatDisplay-Regular.ttf", "files/RedHatDisplay-Bold.ttf"),
}
"""Two sans serifs and a serif."""


def _faces(files: dict[str, tuple[str, str, str | None]]) -> tuple[Face, ...]:
    faces = []
    for name, (package, regular, bold) in files.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SettingError(f'the typeface {name} comes with {package}: pip install -e ".[training]"')
        place = Path(spec.submodule_search_locations[0])
        faces.append(Face(name, str(place / regular), str(place / bold) if bold else None))
    return tuple(faces)


@cache
def training_faces() -> tuple[Face, ...]:
    """Every typeface of training: Pillow's own, which the sample documents have, counts three times.

    Raises:
        SettingError: a package of fonts is missing.
    """
    return (AILERON, AILERON, AILERON, *_faces(_FILES))


@cache
def held_out_faces() -> tuple[Face, ...]:
    """The typefaces that training never sees.

    Raises:
        SettingError: a package of fonts is missing.
    """
    return _faces(_HELD_OUT)
