"""Sandboxes: Harbor environments that this package brings or improves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from harbor_trl.errors import SandboxUnavailableError
from harbor_trl.options import did_you_mean

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
        ValueError: `environment_kwargs` names a backend too.
    """
    fields = dict(environment_kwargs or {})
    if twice := fields.keys() & {"type", "import_path"}:
        raise ValueError(f"environment_kwargs has {min(twice)!r}: which backend it is, environment_type= says.")
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
            f"Unknown environment_type {environment_type!r}.{did_you_mean(environment_type, known)} Choose one of "
            f"{', '.join(known)}, or name a Harbor environment class as 'package.module:Class'."
        ) from None


#: The capabilities that a task can need.
_CAPABILITIES = (
    "gpus",
    "tpus",
    "windows",
    "docker_compose",
    "disable_internet",
    "network_allowlist",
    "dynamic_network_policy",
)


def missing_capabilities(environment_type: str) -> list[str]:
    """What a backend says it cannot do, without being started; empty where that depends on the task or the machine.

    Args:
        environment_type: As for `environment_for`.

    Returns:
        Names of Harbor's `EnvironmentCapabilities`, and `images`.

    Raises:
        SandboxUnavailableError: `environment_type` names nothing.
    """
    fields = environment_for(environment_type)
    if environment_type == "docker":
        # Docker runs Windows containers on Windows only; the rest depends on the engine.
        return [] if sys.platform == "win32" else ["windows"]
    from harbor.environments.factory import EnvironmentFactory

    try:
        cls = EnvironmentFactory.get_environment_class(fields.get("type"), fields.get("import_path"))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SandboxUnavailableError(f"environment_type {environment_type!r} cannot be loaded: {error}") from error
    try:
        capabilities = cls.capabilities.fget(object.__new__(cls))  # type: ignore[attr-defined]
    except Exception:
        # They depend on the task.
        return []
    missing = [name for name in _CAPABILITIES if not getattr(capabilities, name)]
    return [*missing, "images"] if environment_type == "bubblewrap" else missing
