"""The model families whose MTP heads bebop reads, trains and writes: a table of names and conventions.

| family      | vLLM 0.31's module (model_executor/models) | hidden state in    | at later depths    | position 0 |
|-------------|--------------------------------------------|--------------------|--------------------|------------|
| mimo        | mimo_mtp.py                                | before final norm  | after head's norm  | zeroed     |
| qwen3_next  | qwen3_next_mtp.py                          | after final norm   | after head's norm  | kept       |
| qwen3_5     | qwen3_5_mtp.py, dense and MoE              | after final norm   | after head's norm  | kept       |
| deepseek_v3 | deepseek_mtp.py                            | after final norm   | after head's norm  | zeroed     |
| glm4_moe    | glm4_moe_mtp.py (GLM-4.5 to 4.7)           | after final norm   | before head's norm | zeroed     |
| decoder     | bebop's own (bebop.engines.vllm_engine)    | after final norm   | after head's norm  | kept       |

"Position 0": whether the token embedding at position 0 is zeroed. MiMo's projection reads the hidden state, then the
embedding; all others read the embedding first. In every family, embeddings and lm_head are the policy's own: vLLM
shares them with the head even if a checkpoint contains copies (`shared_head.head`, `embed_tokens`). vLLM serves only
layer 0, applied K times. So those copies and further layers are kept unchanged and never trained.

`decoder` is for policies that were published without heads: fresh heads in Qwen3-Next's layout, around a decoder layer
of the policy's own class. vLLM serves such a directory if bebop is installed.

MiMo's model_type is `mimo` as published, and `qwen2` in bebop's own layout (bebop.policies.layout); both have Qwen2's
decoder. Qwen3 can take that layout too, with `architectures: [MiMoForCausalLM]`, `qk_norm: true` and zero biases of q,
k and v. A vLLM without bebop serves it if num_attention_heads * head_dim = hidden_size.

A new family is a new row of `FAMILIES`. All families use the head in bebop.mtp.head.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.errors import BadInput
from bebop.registry import Registry

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # config keys that claim MTP layers
READ_AS = {"mimo": "qwen2"}  # model types without their own decoder in transformers (bebop.mtp.mimo)


@dataclass(frozen=True)
class Family:
    """Names and conventions of one family. {n} in a name stands for num_hidden_layers."""

    name: str
    classes: Mapping[str, str]  # `model_type` of the decoder's config -> Class of transformers' ClassDecoderLayer etc.
    parts: Mapping[str, str]  # part of the head -> its name after the prefix; "" takes what no other part takes
    prefix: str = "mtp."  # of layer 0's tensors
    count_key: str = "num_nextn_predict_layers"  # config key that claims MTP layers
    shared: tuple[str, ...] = ()  # copies of the policy's own tensors, which the engine ignores
    architecture: str | None = None  # if in config.json's `architectures`, this is the family, whatever the model_type
    served_by_bebop: bool = False  # vLLM serves it with bebop's two classes, around the policy's own decoder layer
    rotary: str = "RotaryEmbedding"
    zero_at_start: bool = False
    chains_normed: bool = True
    hidden_first: bool = False  # the projection reads the hidden state, then the embedding
    before_norm: bool = False  # depth 1 reads the hidden state before the backbone's final norm
    biased: tuple[str, ...] = ()  # model types without biases of q, k and v, although the engine's classes have them

    @property
    def heads(self) -> str:
        """What the name of any MTP tensor begins with."""
        return re.split(r"\d|\{n\}", self.prefix)[0]

    @property
    def number(self) -> str:
        """Regular expression of the number of an MTP tensor's layer, which counts from {n} where the prefix does."""
        layer = f"{self.prefix}{self.parts['layer']}".rstrip(".")
        return rf"{re.escape(layer.rpartition('.')[0])}\.(\d+)\."

    def first(self, config: Any) -> str:
        """Prefix of layer 0's tensors. config: the decoder's, from transformers or from config.json."""
        return self.prefix.format(n=_value(config, "num_hidden_layers"))

    def layers(self, names: Iterable[str], config: Any) -> set[int]:
        """Numbers, from 0, of the MTP layers to which tensors of these names belong."""
        offset = _value(config, "num_hidden_layers") if "{n}" in self.prefix else 0
        found = (re.match(self.number, name) for name in names if self.is_head(name, config))
        return {int(match[1]) - offset for match in found if match}

    def is_head(self, name: str, config: Any) -> bool:
        """Whether a checkpoint's tensor belongs to any MTP layer."""
        if "{n}" not in self.prefix:
            return name.startswith(self.heads)
        found = re.match(self.number, name)
        return found is not None and int(found[1]) >= _value(config, "num_hidden_layers")

    def roots(self, names: Iterable[str], config: Any) -> set[str]:
        """Prefixes of the MTP tensors among `names`: each begins with one of them, and no other tensor does."""
        heads = (name for name in names if self.is_head(name, config))
        return {re.match(self.number, name)[0] for name in heads} if "{n}" in self.prefix else {self.heads}

    def zero_biases(self, names: Iterable[str], config: Any) -> list[str]:
        """Biases that a checkpoint with these tensors must contain as zeros, although transformers' decoder has none.

        The engine's class has them and gives no error if they are missing: they would be uninitialised memory.
        """
        if _value(config, "model_type") not in self.biased:
            return []
        found = (re.fullmatch(r"(.*\bself_attn\.[qkv]_proj)\.weight", name) for name in names)
        return [f"{match[1]}.bias" for match in found if match]

    def projection(self, config: Any) -> str:
        """Name of layer 0's projection of hidden state and embedding, which no layer lacks."""
        return f"{self.first(config)}{self.parts['proj']}.weight"

    def load_class(self, model_type: str, suffix: str) -> type:
        """transformers' class `<Class><suffix>` of a model type of this family."""
        name = READ_AS.get(model_type, model_type).removesuffix("_text")
        return getattr(
            importlib.import_module(f"transformers.models.{name}.modeling_{name}"), self.classes[model_type] + suffix
        )


_QWEN = {
    "hidden_norm": "pre_fc_norm_hidden",
    "token_norm": "pre_fc_norm_embedding",
    "proj": "fc",
    "layer": "layers.0",
    "norm": "norm",
}
_NEXTN = {
    "hidden_norm": "hnorm",
    "token_norm": "enorm",
    "proj": "eh_proj",
    "norm": "shared_head.norm",
    "layer": "",
}
_NUMBERED: dict[str, Any] = {  # the numbers of the head's layers follow the decoder's
    "prefix": "model.layers.{n}.",
    "parts": _NEXTN,
    "shared": ("shared_head.head.weight", "embed_tokens.weight"),
    "zero_at_start": True,
}
MIMO = Family(
    name="mimo",
    classes={"qwen2": "Qwen2", "mimo": "Qwen2", "qwen3": "Qwen3"},
    architecture="MiMoForCausalLM",
    prefix="model.mtp_layers.0.",
    parts={
        "hidden_norm": "hidden_layernorm",
        "token_norm": "token_layernorm",
        "proj": "input_proj",
        "norm": "final_layernorm",
        "layer": "",
    },
    zero_at_start=True,
    hidden_first=True,
    before_norm=True,
    biased=("qwen3",),
)
DECODER = Family(
    name="decoder",
    served_by_bebop=True,
    classes={"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"},
    parts=_QWEN,
)
FAMILIES: Registry[Family] = Registry("family", key="model.path")
for _family in (
    DECODER,  # before MIMO, which takes only some Qwen3 policies: those marked by their architecture
    MIMO,
    Family(name="qwen3_next", classes={"qwen3_next": "Qwen3Next"}, parts=_QWEN),
    Family(
        name="qwen3_5",
        classes={"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"},
        count_key="mtp_num_hidden_layers",
        parts=_QWEN,
        rotary="TextRotaryEmbedding",
    ),
    Family(name="deepseek_v3", classes={"deepseek_v3": "DeepseekV3"}, **_NUMBERED),
    Family(name="glm4_moe", classes={"glm4_moe": "Glm4Moe"}, chains_normed=False, **_NUMBERED),
):
    FAMILIES.register(_family.name, _family)


def families() -> list[Family]:
    """All registered families, in the order of their registration."""
    return [FAMILIES[name] for name in FAMILIES]


def served_by_bebop() -> dict[str, str]:
    """model_type -> Class of every policy that vLLM serves with bebop's classes (bebop.engines.vllm_engine)."""
    return {kind: name for family in families() if family.served_by_bebop for kind, name in family.classes.items()}


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder: `text_config` of a vision-language model."""
    return config.get("text_config") or config


def mixes_linear_attention(config: Mapping[str, Any]) -> bool:
    """Whether a config.json's decoder has gated delta nets (Qwen3-Next, Qwen3.5). By default every fourth layer is full
    attention."""
    part = decoder_config(config)
    kinds = part.get("layer_types")
    return "linear_attention" in kinds if kinds else "linear_num_value_heads" in part


def known_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, or None."""
    named = config.get("architectures") or []
    model_type = decoder_config(config).get("model_type")
    known = families()
    marked = [family for family in known if family.architecture in named]
    return next((family for family in (*marked, *known) if model_type in family.classes), None)


def family_of(config: Mapping[str, Any], where: Path | str = "config.json") -> Family:
    """The family of a config.json. Raises ValueError for an unknown one, with the known ones and how to add another."""
    family = known_family(config)
    if family is None:
        known = ", ".join(f"{each.name} ({'/'.join(each.classes)})" for each in families())
        raise BadInput(
            f"{where}: no MTP heads are known for model_type={decoder_config(config).get('model_type')}; expected one "
            f"of {known}; register another one in FAMILIES, see docs/extending.md"
        )
    return family


def claimed_layers(config: Mapping[str, Any]) -> int:
    """Number of MTP layers that a config.json claims."""
    part = decoder_config(config)
    return next((int(part[key]) for key in COUNT_KEYS if part.get(key)), 0)


def is_head_name(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor of a checkpoint with this config.json belongs to an MTP layer; False for unknown families."""
    family = known_family(config)
    return family is not None and family.is_head(name, decoder_config(config))


def _value(config: Any, key: str) -> Any:
    return config[key] if isinstance(config, Mapping) else getattr(config, key)
