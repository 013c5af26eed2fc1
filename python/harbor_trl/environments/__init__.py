"""Sandboxes: Harbor environments that this package brings or improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harbor.models.trial.config import EnvironmentConfig


def environment_config(environment_type: str, environment_kwargs: Mapping[str, Any]) -> EnvironmentConfig:
    """Harbor's configuration of a sandbox backend."""
    from harbor.models.trial.config import EnvironmentConfig

    if ":" in environment_type:
        return EnvironmentConfig(import_path=environment_type, **environment_kwargs)
    return EnvironmentConfig(type=environment_type, **environment_kwargs)
