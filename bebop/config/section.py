"""The base of every config section: frozen, strict about types, without unknown keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FilePath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """A section. The comment above a field says what the key means; docs/config.md is made from these comments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
