"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in every process that it starts.

It must be cheap, and must never break a vLLM that is used without bebop. A fix that does not fit the installed version
is skipped with one log line; then only bebop's own engine refuses to start (`fixes.require`). `BEBOP_ENGINE_FIXES=0`
switches the fixes off.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("bebop.engines")


def register() -> None:
    """Register bebop's policies with vLLM, and apply the needed fixes. Safe to call any number of times.

    The policies are those of family `decoder` (registration.py), and MiMo as published: bebop.mtp registers its config
    with transformers, so that vLLM need not run the checkpoint's own code.
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
