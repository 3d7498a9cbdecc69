"""verl's task runner, in this process and with its slow beginnings side by side.

verl 0.9.1 runs it as a Ray actor, which costs another process that imports everything, and starts TransferQueue, the
trainer's worker and the rollout server in turn.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.logging_utils import configure_verl_logging

from bebop.rl.rollout import early


class Runner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's runner with another order of `run`."""

    def run(self, config: DictConfig) -> None:
        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        self.config = config
        if config.trainer.device == "cpu" and config.trainer.n_gpus_per_node == 1:
            early.start(config)
        with ThreadPoolExecutor(1) as pool:
            queue = pool.submit(tq.init, config.transfer_queue)
            try:
                self.trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
                self.trainer.queue_ready = queue.result
                self.trainer.init()
                self.trainer.phase("starting the agent loop")
                self.init_agent_loop_manager()
                self.trainer.fit(self.agent_loop_manager)
            finally:
                if tracking := getattr(self.trainer, "logger", None):
                    tracking.finish()
                if queue.exception() is None:
                    tq.close()


class InThisProcess:
    """What verl's `run_ppo` needs of a Ray actor class: `.remote().run.remote(config)`."""

    @classmethod
    def remote(cls) -> InThisProcess:
        return cls()

    @property
    def run(self) -> _Run:
        return _Run()


class _Run:
    def remote(self, config: DictConfig) -> ray.ObjectRef:
        return ray.put(Runner().run(config))
