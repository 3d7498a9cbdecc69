"""Names of cached things: every declared input is in them, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from bebop.backbone.hidden_states import HiddenInputs
from bebop.config import Data, Loss, Model, RolloutSection, Sft, SftConfig, Task, TinyModel
from bebop.errors import BadInput
from bebop.evaluate.stage import SampleInputs
from bebop.mtp.content import PolicyContent
from bebop.policies.mapped import CopyInputs, LinkedInputs
from bebop.policies.tiny import TinyInputs
from bebop.records import Sampling
from bebop.sft.training import HeadInputs
from bebop.sft.training_sequences import TextInputs, text_inputs
from bebop.store.caches import UNNAMED, Content, Keys, Stamps, cached, name_of, unnamed


@dataclass(frozen=True)
class Cake:
    flour: Content
    eggs: int
    oven: str = unnamed(default="left")


def test_a_declared_input_changes_the_name_and_another_does_not(tmp_path):
    flour, baked = tmp_path / "flour", []
    flour.write_text("wheat")

    def bake(cake, folder):
        baked.append(cake)
        (folder / "cake").write_text(f"{cake.eggs}")

    cake = Cake(Content(flour), 3)
    first = cached("cake", cake, bake, tmp_path)
    assert first == cached("cake", dataclasses.replace(cake, oven="right"), bake, tmp_path) and len(baked) == 1
    assert cached("cake", dataclasses.replace(cake, eggs=4), bake, tmp_path) != first
    moved = Content(Path(shutil.copy(flour, tmp_path / "elsewhere")))
    assert name_of(dataclasses.replace(cake, flour=moved)) == name_of(cake)
    flour.write_text("grain")  # as many bytes
    assert cached("cake", cake, bake, tmp_path) != first


def test_a_bare_path_is_no_input(tmp_path):
    with pytest.raises(BadInput, match="does not say what lies there"):
        name_of({"file": tmp_path})


def _file(folder: Path, text: str) -> Path:
    path = folder / text
    path.write_text(text)
    return path


def _folder(folder: Path, text: str) -> Path:
    (folder / text).mkdir()
    _file(folder / text, "a")
    return folder / text


def _variants(tmp_path: Path, policy: Path) -> dict[type, tuple[dict, dict]]:
    """Of each kind of inputs: values, and another value for every field."""
    other = shutil.copytree(policy, tmp_path / "policy")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    policies = PolicyContent(policy), PolicyContent(other)
    files = Content(_file(tmp_path, "a.py")), Content(_file(tmp_path, "b.py"))
    stamps = Stamps(_folder(tmp_path, "c")), Stamps(_folder(tmp_path, "d"))
    models = Keys(Model(name="tiny"), but=("tiny",)), Keys(Model(name="tiny", mtp_init="random"), but=("tiny",))
    rollouts = Keys(RolloutSection(), but=()), Keys(RolloutSection(rule="block"), but=())
    text = {
        "policy": policies,
        "file": files,
        "file_name": ("a", "b"),
        "tasks": ([Task(name="chain_sum")], [Task(name="chain_sum", instruction="x")]),
        "plugins": ([], [files[1]]),
        "engine": ("vllm", "torch"),
        "dtype": ("float32", "bfloat16"),
        "versions": ({"vllm": "0.31"}, {"vllm": "0.32"}),
    }
    counts = (
        "num_prompts",
        "num_heldout",
        "max_prompt_tokens",
        "max_response_tokens",
        "max_model_len",
        "top_k",
        "seed",
    )
    text |= {name: (64, 65) for name in (*counts, "max_num_seqs", "version")}
    text |= {name: (0.5, 0.75) for name in ("temperature", "top_p", "kv_cache_gib", "gpu_memory_utilization")}
    tiny = {"tiny": (TinyModel(), TinyModel(num_layers=3)), "dtype": text["dtype"], "seed": (0, 1), "version": (0, 1)}
    tiny |= {"mtp_init": ("last_layer", "random"), "versions": text["versions"], "progress": (True, False)}
    copy = {"source": stamps, "origin": ("a", "b"), "config": (None, {"a": 1}), "model": models, "seed": (0, 1)}
    copy |= {"versions": text["versions"], "version": (0, 1)}
    sample = {"policy": ("a", "b"), "sampling": (Sampling(), Sampling(top_p=0.9)), "rollout": rollouts}
    sample |= {"dtype": text["dtype"], "seed": (0, 1), "versions": text["versions"]}
    kinds = {
        TextInputs: text,
        TinyInputs: tiny,
        CopyInputs: copy,
        LinkedInputs: {"source": stamps, "changed": ({}, {"a": {}}), "version": (0, 1)},
        SampleInputs: sample,
        HiddenInputs: {"ids": ([[1]], [[2]]), "policy": ("a", "b"), "versions": text["versions"]},
        HeadInputs: {"policy": policies, "text": ("a", "b"), "seed": (0, 1), "config": ({"a": 1}, {"a": 2})},
    }
    return {
        kind: ({name: pair[0] for name, pair in of.items()}, {name: pair[1] for name, pair in of.items()})
        for kind, of in kinds.items()
    }


def test_every_input_of_every_cache_is_in_its_name(tmp_path, tiny_random):
    for kind, (values, others) in _variants(tmp_path, tiny_random).items():
        assert values.keys() == {field.name for field in dataclasses.fields(kind)}
        base = name_of(kind(**values))
        for field in dataclasses.fields(kind):
            changed = name_of(kind(**values | {field.name: others[field.name]}))
            assert (changed == base) == bool(field.metadata.get(UNNAMED)), f"{kind.__name__}.{field.name}"


@pytest.fixture
def policy(tmp_path, tiny_random):
    return shutil.copytree(tiny_random, tmp_path / "policy")


def _config(policy: Path, **sections) -> SftConfig:
    made = {"data": Data(tasks=[Task(name="chain_sum")]), "loss": Loss(), "sft": Sft(), "rollout": RolloutSection()}
    return SftConfig(model=Model(name="hf", path=policy), **made | sections)


def _edit(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_sampled_text_is_made_anew_where_another_text_would_come(tmp_path, policy):
    plugin = _file(tmp_path, "my_tasks.py")

    def name(**sections):
        return name_of(text_inputs(_config(policy, **sections), policy))

    first = name(plugins=[str(plugin)])
    names = [
        first,
        name(),
        name(rollout=RolloutSection(max_model_len=1024)),
        name(rollout=RolloutSection(engine="torch")),
    ]
    plugin.write_text("# other tasks")
    names.append(name(plugins=[str(plugin)]))
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text() + "{# #}")
    names.append(name())
    _edit(policy / "generation_config.json", eos_token_id=[1, 2])
    names.append(name())
    _edit(policy / "config.json", rope_theta=5e5)  # the same tensors, another model
    names.append(name())
    assert len(set(names)) == len(names)


def test_sampled_text_is_used_again_whatever_is_trained_on_it(policy):
    first = name_of(text_inputs(_config(policy), policy))
    (policy / "README.md").write_text("a card")
    (policy / "bebop.json").write_text("{}")
    others = [
        _config(policy, sft=Sft(lr=1e-5, depth=4)),
        _config(policy, loss=Loss(name="kl")),
        _config(policy, rollout=RolloutSection(num_speculative_tokens=2, max_num_seqs=8, kv_cache_gib=2.0)),
    ]
    assert {name_of(text_inputs(config, policy)) for config in others} == {first}
