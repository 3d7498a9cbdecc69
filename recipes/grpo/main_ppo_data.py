"""For main_ppo.sh: writes 12 prompts of chain_sum as prompts.parquet, and prints the folder of the tiny policy."""

import sys
from pathlib import Path

from bebop.config import Model, Task
from bebop.data.tokenizer import load_tokenizer
from bebop.policies import prepare_policy
from bebop.rl.prompts import prompts_that_fit, write_parquet

policy = prepare_policy(Model(name="tiny"), 0, max_model_len=160)
prompts, _ = prompts_that_fit([Task(name="chain_sum")], 12, 0, load_tokenizer(policy), max_tokens=96)
write_parquet(prompts, Path(sys.argv[1]) / "prompts.parquet")
print(policy)
