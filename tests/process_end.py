"""A process with two live sandboxes that ends in the way it is told: `process_end.py HOW ENVIRONMENT TASK TRIALS`."""

from __future__ import annotations

import os
import sys
import time

from harbor_trl import HarborBashEnv
from harbor_trl.engine import engine
from harbor_trl.options import RolloutOptions


def main() -> None:
    how, environment_type, task, trials = sys.argv[1:]
    envs = [HarborBashEnv(environment_type, options=RolloutOptions(trials_dir=trials)) for _ in range(2)]
    for env in envs:
        env.reset(task_dir=task)
    if how != "starting":
        for env in envs:
            # The mark is what the test looks for in the host's process list.
            env.bash(f"bash -c 'exec -a {engine().run_id} sleep 300' >/dev/null 2>&1 & sleep 0.1")
            env.bash("true")
    print(engine().run_id, flush=True)
    if how == "raise":
        raise ValueError("the user's own mistake")
    if how == "fork":
        child = os.fork()
        if child == 0:
            assert envs[0].reward == 0.0  # the parent's rollout is not the child's
            envs[0].reset(task_dir=task)
            assert "child" in envs[0].bash("echo child")
            sys.exit(0)  # a normal end: the child's own sandbox goes, the parent's stay
        assert os.waitpid(child, 0)[1] == 0
        assert "parent" in envs[1].bash("echo parent")
    if how == "wait":
        time.sleep(300)


if __name__ == "__main__":
    main()
