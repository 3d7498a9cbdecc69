"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in every process that it starts.

It must stay cheap and must never break a vLLM that has nothing to do with bebop: what does not fit the installed
version is left alone with one log line, and bebop's own engine refuses to start instead (`fixes.require`).
`BEBOP_ENGINE_FIXES=0` switches the fixes off.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("bebop.engines")


def register() -> None:
    """Let vLLM serve bebop's policies, and apply the fixes that it needs here. Safe to call any number of times.

    The policies are those of family `decoder` (registration.py), and MiMo as published, whose config transformers
    learns from bebop.mtp; without that, vLLM would take the checkpoint's own code to read it.
    """
    import bebop.mtp.mimo  # noqa: F401
    from bebop.engines.vllm_engine import fixes, registration
    from bebop.engines.vllm_engine.environment import enter_engine_process

    enter_engine_process()
    fixes.apply_all()
    try:
        registration.register()
    except (ImportError, AttributeError) as error:
        logger.warning("bebop leaves vLLM as it is, MTP heads of Llama, Qwen3 and the like are not served: %s", error)
