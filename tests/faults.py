"""Real bubblewrap sandboxes that fail on purpose, behind Harbor's own interface; each class has one fault.

Named by `environment_type="faults:Class"`: what a cloud backend does when it is slow, cut off or down.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

from harbor.environments.base import ExecResult

from harbor_trl.environments.bubblewrap import BubblewrapEnvironment


class CloudEnvironment(BubblewrapEnvironment):
    """A sandbox of a backend that cannot be asked whether it is up, nor to bound a command: all goes through `exec`."""

    bounded_exec = None  # type: ignore[assignment]

    @staticmethod
    def type() -> str:
        return "cloud"


class StartFails(CloudEnvironment):
    async def start(self, force_build: bool) -> None:
        raise RuntimeError("no machine could be had")


class StartsThreeOfFour(BubblewrapEnvironment):
    """Every fourth sandbox of this backend does not start."""

    started: ClassVar[itertools.count] = itertools.count()

    async def start(self, force_build: bool) -> None:
        if next(self.started) % 4 == 3:
            raise RuntimeError("no machine could be had")
        await super().start(force_build)


class StartHangs(CloudEnvironment):
    async def start(self, force_build: bool) -> None:
        await asyncio.sleep(3600)


class StartsTogether(CloudEnvironment):
    """No sandbox is up before `parties` of them have begun to start."""

    parties: ClassVar[int] = 4
    begun: ClassVar[int] = 0

    async def start(self, force_build: bool) -> None:
        type(self).begun += 1
        while type(self).begun < self.parties:
            await asyncio.sleep(0.01)
        await super().start(force_build)


class VerifiesTogether(CloudEnvironment):
    """No verifier gets its tests before `parties` of them have begun."""

    parties: ClassVar[int] = 4
    begun: ClassVar[int] = 0

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if target_dir == "/tests":
            type(self).begun += 1
            while type(self).begun < self.parties:
                await asyncio.sleep(0.01)
        await super().upload_dir(source_dir, target_dir)


class TestsUploadFails(CloudEnvironment):
    __test__ = False  # not a test class

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if target_dir == "/tests":
            raise ConnectionError("the sandbox is gone")
        await super().upload_dir(source_dir, target_dir)


class GoesDown(CloudEnvironment):
    """Once `down` is set, no sandbox of this backend answers."""

    down: ClassVar[threading.Event] = threading.Event()

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        if self.down.is_set():
            raise ConnectionError("connection refused")
        return await super().exec(*args, **kwargs)


class StopsSlowly(CloudEnvironment):
    """Stopping waits until `may_stop` is set."""

    may_stop: ClassVar[threading.Event] = threading.Event()
    stopped: ClassVar[int] = 0

    async def stop(self, delete: bool) -> None:
        while not self.may_stop.is_set():
            await asyncio.sleep(0.01)
        await super().stop(delete)
        type(self).stopped += 1


class StopsAnswering(CloudEnvironment):
    """Once `silent` is set, a command never returns."""

    silent: ClassVar[threading.Event] = threading.Event()

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        if self.silent.is_set():
            await asyncio.sleep(3600)
        return await super().exec(*args, **kwargs)


class EndsByItself(CloudEnvironment):
    """Once `ended` is set, it says of every command what Docker says of a container whose ENTRYPOINT has ended."""

    ended: ClassVar[threading.Event] = threading.Event()

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        if self.ended.is_set():
            return ExecResult(stdout="Error response from daemon: container 3f2a is not running\n", return_code=1)
        return await super().exec(*args, **kwargs)


class DropsCopies(CloudEnvironment):
    """Builds its image without the build context, so that COPY leaves nothing."""

    def __init__(self, environment_dir: Path, *args: Any, **kwargs: Any) -> None:
        self._without_context = tempfile.TemporaryDirectory()
        lines = (environment_dir / "Dockerfile").read_text().splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith("COPY"))
        Path(self._without_context.name, "Dockerfile").write_text(kept)
        super().__init__(Path(self._without_context.name), *args, **kwargs)
