"""The policy as Harbor sees it: an external agent that hands its sandbox over and waits until the rollout is over."""

from __future__ import annotations

from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.mcp_headers import MCPHeaderEnv
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from harbor_trl import _native
from harbor_trl.rollout import live_rollout


class PolicyAgent(BaseAgent):
    """Harbor's agent for a rollout whose turns the trainer drives.

    Args:
        rollout_id: Of a rollout in this process. An id, not the rollout: Harbor writes the agent's arguments to
            `config.json`. None for a trial that is never run.
    """

    # Harbor refuses a task that brings MCP servers, skills or a trajectory to an agent that does not declare them. The
    # policy's tools come from its harness alone, so such a task stays trainable without them, and the log says so.
    capabilities = AgentCapabilities(skills=True, mcp_servers=True, mcp_http_headers=True, load_atif_trajectory=True)

    def __init__(self, *args: Any, rollout_id: str | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if rollout_id is not None:
            self._rollout = live_rollout(rollout_id)
        for what, given in (
            ("MCP servers", self.mcp_servers),
            ("skills", self.skills_dir),
            ("a prior trajectory", self.load_trajectory),
        ):
            if given:
                self.logger.warning("The task brings %s; the policy does not see them.", what)

    @staticmethod
    @override
    def name() -> str:
        return "harbor-trl-policy"

    @override
    def version(self) -> str:
        return _native.__version__

    @property
    @override
    def mcp_header_env(self) -> MCPHeaderEnv:
        # No server is ever called, so a header's missing variable is no reason to refuse the task.
        return MCPHeaderEnv(refs={}, env={}, secrets=frozenset())

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        pass

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        await self._rollout.set_up(environment)

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await self._rollout.play(environment)

    @override
    async def load(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await self._rollout.play(environment)
