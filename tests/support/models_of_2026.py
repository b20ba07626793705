"""All models of 2026, beside the thirty of `tests.support.architectures`."""

from __future__ import annotations

from tests.support.architectures import Architecture
from tests.support.diffusion_of_2026 import DIFFUSION
from tests.support.language_of_2026 import LANGUAGE
from tests.support.seen_and_heard_of_2026 import SEEN_AND_HEARD

MODELS_OF_2026: dict[str, Architecture] = {**LANGUAGE, **SEEN_AND_HEARD, **DIFFUSION}
