"""Train in a dream with TRL's own `GRPOTrainer`; the real environment judges the result.

Minutes: 30 and more, depending on the model. GPU: no for small models, yes for larger ones.
Needs `pip install "dreamgym[models]" trl`. Other trainers: `dreamgym serve`, and the adapters of the guide.
"""

import asyncio
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import dreamgym as dg
from dreamgym.integrations.trl import Rollouts

RUN = os.environ.get("RUN", "runs/quickstart/experience")
MODEL = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")  # or a directory
HORIZON = int(os.environ.get("HORIZON", "30"))
STEPS = int(os.environ.get("STEPS", "20"))
TASKS = int(os.environ.get("TASKS", "4"))
EPISODES = int(os.environ.get("EPISODES", "50"))
GROUP = 4
GPU = torch.cuda.is_available()


async def main() -> None:
    print(dg.__name__, "serves the dream of", RUN)
    rollouts = Rollouts(RUN, max_turns=HORIZON, turn_tokens=16)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        reward_funcs=rollouts.reward,
        args=GRPOConfig(
            output_dir="runs/trl",
            num_generations=GROUP,
            per_device_train_batch_size=TASKS * GROUP,
            max_steps=STEPS,
            learning_rate=1e-5,
            beta=0.0,
            use_cpu=not GPU,
            bf16=GPU,
            gradient_checkpointing=GPU,
            save_strategy="no",
            report_to=[],
        ),
    )
    trainer.train()
    print("reward in the dream, step by step:", [round(each["reward"], 2) for each in rollouts.log])

    # One word changes: the same tasks' real environment, of which no step was used to train.
    real = Rollouts(RUN, mode="real", max_turns=HORIZON, turn_tokens=16)
    trainer.num_generations = 1
    rewards = real(real.dataset(EPISODES, split="test")["prompt"], trainer)["env_reward"]
    print(f"real success: {sum(reward > 0 for reward in rewards)} of {len(rewards)} episodes")


asyncio.run(main())
