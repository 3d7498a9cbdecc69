"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in every process that it starts.

It must stay cheap and must never break a vLLM that has nothing to do with bebop: what does not fit the installed
version is left alone with one log line, and bebop's own engine refuses to start instead (`fixes.require`).
`BEBOP_ENGINE_FIXES=0` switches the fixes off.
"""

from __future__ import annotations


def register() -> None:
    """Apply the fixes that the installed vLLM and platform need. Safe to call any number of times.

    And let transformers know the config of MiMo as published, which vLLM has the model of, but would take the
    checkpoint's own code to read.
    """
    import bebop.mtp.mimo_config  # noqa: F401
    from bebop.engines.vllm_engine import fixes
    from bebop.engines.vllm_engine.environment import enter_engine_process

    enter_engine_process()
    fixes.apply_all()
