"""Harnesses with one stateless shell tool."""

from __future__ import annotations

from harbor_trl.env import HarborEnv

_NO_COMMAND = "[nothing was run: `command` must be a text with a shell command in it, for example `ls -l`]"


class HarborBashEnv(HarborEnv):
    """One `bash` tool; the answer goes into `/workdir/answer.txt`, from where the task's verifier reads it."""

    PROMPT_SUFFIX = (
        "\n\nYou work in a Linux sandbox through one tool, `bash`: it runs a shell command and returns what it "
        "printed. Input files, if any, are in /home/user/input. To submit your answer, write it to "
        "/workdir/answer.txt with the tool, for example: echo -n 42 > /workdir/answer.txt. Only the file counts: an "
        "answer in your message is not read. Write the answer alone, and write it before you stop."
    )

    async def _setup(self) -> None:
        assert self._env is not None
        await self._env.exec("mkdir -p /workdir /home/user/input && chmod 777 /workdir", user="root")

    def bash(self, command: str) -> str:
        """
        Run a shell command in the sandbox and return what it printed (standard output and error). Each call is a new
        shell: variables and the working directory do not carry over, files and processes in the background do. Nobody
        can type into the command, and it is stopped after 180 seconds.

        Args:
            command: The shell command, for example `ls -l /home/user/input`.

        Returns:
            What the command printed.
        """
        return run_shell(self, command)


class HarborTerminalEnv(HarborEnv):
    """One `bash` tool in the task's own working directory, for suites whose verifiers look at what changed there."""

    PROMPT_SUFFIX = (
        "\n\nYou work in a Linux sandbox through one tool, `bash`: it runs a shell command in the task's working "
        "directory and returns what the command printed. Do the task there; when it is done, stop calling tools."
    )

    def bash(self, command: str) -> str:
        """
        Run a shell command in the sandbox, in the task's working directory, and return what it printed (standard output
        and error). Each call is a new shell: variables and `cd` do not carry over, files and processes in the
        background do. Nobody can type into the command, and it is stopped after 180 seconds.

        Args:
            command: The shell command, for example `ls -la`.

        Returns:
            What the command printed.
        """
        return run_shell(self, command)


def run_shell(env: HarborEnv, command: object, timeout: float = 180) -> str:
    """Run a command that a model wrote, which may be of any type: a text that it can act on comes back.

    Args:
        env: The harness.
        command: What the model wrote.
        timeout: Seconds after which it is killed.
    """
    if not isinstance(command, str) or not command.strip():
        return _NO_COMMAND
    return env._exec(command, timeout)
