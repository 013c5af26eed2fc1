"""Sandboxes: Harbor environments that this package brings or improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harbor_trl.errors import SandboxUnavailableError

#: Environment types that are a class of this package.
OURS = {
    "bubblewrap": "harbor_trl.environments.bubblewrap:BubblewrapEnvironment",
    "docker": "harbor_trl.environments.docker:FastDockerEnvironment",
}


def environment_for(environment_type: str, environment_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of Harbor's `EnvironmentConfig` for a backend.

    Args:
        environment_type: `"docker"` (Harbor's own backend, made fast), `"bubblewrap"`, any other type that Harbor
            knows, or `"package.module:Class"` for a Harbor environment of your own.
        environment_kwargs: Its other fields: `env`, `override_cpus`, `kwargs` (options of that backend), ...

    Returns:
        `import_path` or `type`, and the others.

    Raises:
        SandboxUnavailableError: `environment_type` names nothing; the message lists what there is.
    """
    fields = dict(environment_kwargs or {})
    if environment_type in OURS:
        return {"import_path": OURS[environment_type], **fields}
    if ":" in environment_type:
        return {"import_path": environment_type, **fields}
    from harbor.models.environment_type import EnvironmentType

    try:
        return {"type": EnvironmentType(environment_type), **fields}
    except ValueError:
        known = sorted({*OURS, *(one.value for one in EnvironmentType)})
        raise SandboxUnavailableError(
            f"Unknown environment_type {environment_type!r}. Choose one of {', '.join(known)}, "
            "or name a Harbor environment class as 'package.module:Class'."
        ) from None
