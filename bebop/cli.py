"""The command line: parse, validate, dispatch. Nothing heavy is imported before the config has passed.

Exit codes: 0 done, 1 the command ran and failed (doctor found a fault, a stage broke), 2 the input cannot run.
"""

from __future__ import annotations

import importlib
import itertools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bebop.config import COMMANDS, Run, check, defaults
from bebop.config.overrides import CONFIGS, RECIPES, Arguments, parse
from bebop.errors import BebopError, ConfigError, LoggerError

# command -> module with run(config, run_dir)
STAGES = {
    "sft": "bebop.sft",
    "grpo": "bebop.rl",
    "demo": "bebop.demo",
    "eval": "bebop.evaluate",
    "bench": "bebop.bench",
    "doctor": "bebop.doctor",
    "report": "bebop.monitor.report",
    "monitor": "bebop.monitor.command",
}
# keys in which a resumed run may differ from the run that began in its folder
RESUMABLE = ("run_dir", "logger", "grpo.steps")


def main(argv: list[str] | None = None) -> int:
    """Console script `bebop COMMAND [overrides]`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("help", "-h", "--help"):
        print(f"usage: bebop {{{'|'.join(COMMANDS)}}} [hydra overrides] [-m] [--cfg job] [--dry-run]")
        return 0
    command = words.pop(0)
    # On SIGTERM a run ends the processes that it started, as it does on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if command not in COMMANDS:
            raise ConfigError(f"unknown command {command!r}; there are {', '.join(COMMANDS)}")
        arguments = parse(command, words)
        if arguments.multirun:
            return _multirun(command, arguments)
        values = compose(command, arguments)
        if arguments.show:
            print(_yaml(values), end="")
            return 0
        config = check(command, values)
        if arguments.dry_run:
            print(_yaml(config.model_dump(mode="json")), end="")
            return 0
        return _run(command, config)
    except ConfigError as error:
        print(f"bebop: error: {error}", file=sys.stderr)
        return 2
    except BebopError as error:
        print(f"bebop: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "starts again" if command == "bench" else "resumes it"
        print(f"bebop: stopped; the same command with the same run_dir {again}", file=sys.stderr)
        return 130


def compose(command: str, arguments: Arguments) -> dict[str, Any]:
    """The whole config: the schema's defaults, then configs/<command>.yaml with its groups, then the overrides.

    hydra gets the defaults as the config schema/<command>, so that it knows every key although the files hold only
    differences.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    store = ConfigStore.instance()
    store.store(command, defaults(COMMANDS[command]), group="schema", package="_global_")
    for recipe in RECIPES.glob("*/recipe.yaml"):  # not by hydra's search path, whose grammar refuses many folders
        values = OmegaConf.to_container(OmegaConf.load(recipe))
        store.store("recipe", values, group=f"recipes/{recipe.parent.name}", package="_global_")
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra_compose(command, overrides=arguments.overrides)
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: missing; set {error.full_key}=<value>") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if arguments.verl:
        values["grpo"]["verl_overrides"] = [*values["grpo"]["verl_overrides"], *arguments.verl]
    return values


def _yaml(values: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(values)


def _run(command: str, config: Run) -> int:
    from bebop.store.files import disk_fault
    from bebop.store.run_folder import begin, new_folder
    from bebop.store.wandb import check_wandb

    if command == "report":
        run_dir = Path(config.run)
        if not (run_dir / "metrics.jsonl").is_file():
            raise ConfigError(f"run={run_dir}: no metrics.jsonl there; give the folder of a run")
        print(importlib.import_module(STAGES[command]).write_report(run_dir))
        return 0
    if command == "monitor" and config.action != "import":
        if not Path(config.run).is_dir():
            raise ConfigError(f"run={config.run}: no such folder; give the folder of a run")
        importlib.import_module(STAGES[command]).run(config, Path(config.run))
        return 0
    if "logger" in type(config).model_fields:
        try:
            check_wandb(config.logger.wandb)
        except LoggerError as error:
            raise ConfigError(str(error)) from None
    run_dir = (config.run_dir or new_folder(command)).resolve()
    with begin(run_dir, command, config.model_dump(mode="json"), free=RESUMABLE):
        try:
            result = importlib.import_module(STAGES[command]).run(config, run_dir)
        except BebopError:
            raise
        except Exception as error:
            if fault := disk_fault(error, run_dir):
                raise fault from error
            raise
    print(run_dir, flush=True)
    return result if isinstance(result, int) else 0


def _multirun(command: str, arguments: Arguments) -> int:
    """Run each job of the sweep in its own process and folder; returns the worst exit code."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from bebop.store.run_folder import new_folder, sweep_folder

    parsed = OverridesParser.create().parse_overrides(arguments.overrides)
    swept = {o.key_or_group for o in parsed if o.is_sweep_override()}
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line]
        for o in parsed
        if o.key_or_group != "run_dir"
    ]
    given = [str(o.value()) for o in parsed if o.key_or_group == "run_dir"]
    if "run_dir" in swept:
        raise ConfigError("run_dir: got several folders, expected one; each job of a sweep has a folder in it")
    jobs = [list(job) for job in itertools.product(*choices)]
    for job in jobs:
        # Configs are checked for every job before the first one starts.
        values = compose(command, Arguments(job, arguments.verl))
        check(command, values)
        if arguments.show or arguments.dry_run:
            print(f"# {' '.join(job)}\n{_yaml(values)}", end="")
    if arguments.show or arguments.dry_run:
        return 0
    base = Path(given[-1]) if given else new_folder(command)
    worst, folders = 0, []
    for number, job in enumerate(jobs):
        print(f"bebop: job {number + 1} of {len(jobs)}: {' '.join(job)}", file=sys.stderr)
        folders.append(sweep_folder(base, number, [word for word in job if word.split("=")[0] in swept]))
        words = [*job, *(f"verl.{word}" for word in arguments.verl), f"run_dir={folders[-1]}"]
        code = subprocess.run([sys.executable, "-m", "bebop.cli", command, *words], check=False).returncode
        worst = max(worst, abs(code))
    if command == "sft" and not worst:
        from bebop.sft.compare import compare

        print(compare(folders, base))
    print(base, flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
