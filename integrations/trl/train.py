"""TRL's GRPO trains a tiny model in a learned dream; the real environment judges it before and after.

    python integrations/trl/train.py OUT [SEED]        # a few minutes on a CPU

The dream is an experience model that is fine-tuned here from 300 random episodes of `safe.py`. The policy is
a language model of about 0.1 million parameters that has imitated the same episodes.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer

import dreamgym as dg
from dreamgym.evaluation.statistics import paired_difference, share_of_episodes
from dreamgym.integrations.conversation import Conversation, TokenizedEpisode
from dreamgym.integrations.in_process import close_environments
from dreamgym.integrations.trl import Rollouts
from dreamgym.models.tiny import make_model, make_tokenizer

SCALE = float(os.environ.get("SCALE", "1"))  # below 1: shorter, and worse
REAL = f"{Path(__file__).parent / 'safe.py'}:Safe"
TURNS, TOKENS, GROUP = 8, 6, 8


async def make_dream(out: Path, seed: int) -> None:
    await dg.collect(REAL, out / "data", episodes=300, policy="random", seed=seed)
    steps = max(2, int(250 * SCALE))
    await dg.fine_tune(
        out / "data", out / "experience", environment=REAL, model="nano", steps=steps, seed=seed
    )


def warm_start(model: torch.nn.Module, tokenizer: object, recorded: list[dg.Trajectory]) -> None:
    """Imitate recorded successes of random play."""
    written, optimizer = Conversation(tokenizer), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(max(2, int(200 * SCALE))):
        trajectory = recorded[step % len(recorded)]
        episode = TokenizedEpisode(prompt=written.first(trajectory.task.instruction, trajectory.start.text))
        for each in trajectory.transitions:
            reply = tokenizer.encode(f" {each.action}\n", add_special_tokens=False)
            episode.reply(reply, [0.0] * len(reply))
            episode.observe(written.then(each.outcome.next_state.text, reply))
        learnt = [token if own else -100 for token, own in zip(episode.tokens, episode.mask, strict=True)]
        labels = torch.tensor([[-100] * len(episode.prompt) + learnt])
        model(input_ids=torch.tensor([episode.everything]), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def real_successes(trainer: GRPOTrainer, out: Path, episodes: int) -> list[bool]:
    """Of one episode for each test task, in the real environment."""
    # --8<-- [start:evaluate]
    real = Rollouts(out / "experience", mode="real", max_turns=TURNS, turn_tokens=TOKENS, seed=1)
    tasks = real.dataset(episodes, split="test")["prompt"]
    # --8<-- [end:evaluate]
    size, trainer.num_generations = trainer.num_generations, 1
    found = real(tasks, trainer)["env_reward"]
    trainer.num_generations = size
    return [reward > 0 for reward in found]


def main(out: Path, seed: int = 0) -> None:
    asyncio.run(make_dream(out, seed))
    recorded = list(dg.read_trajectories(out / "data"))
    steps = [each for trajectory in recorded for each in trajectory.transitions]
    texts = [f"{each.state.text}\n> {each.action}\n{each.outcome.next_state.text}\n" for each in steps]
    tokenizer = make_tokenizer([*texts, f"Task: {recorded[0].task.instruction}"])
    torch.manual_seed(seed)
    model = make_model("nano", tokenizer, family="llama", seed=seed)
    warm_start(model, tokenizer, [each for each in recorded if each.success])

    # --8<-- [start:trainer]
    rollouts = Rollouts(
        out / "experience",
        out=out / "served",
        max_turns=TURNS,
        turn_tokens=TOKENS,
        seed=seed,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        reward_funcs=rollouts.reward,
        args=GRPOConfig(
            output_dir=str(out / "trl"),
            num_generations=GROUP,
            per_device_train_batch_size=8 * GROUP,
            max_steps=max(1, int(60 * SCALE)),
            learning_rate=1e-3,
            beta=0.0,
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
        ),
    )
    # --8<-- [end:trainer]
    episodes = max(8, int(200 * SCALE))
    before = real_successes(trainer, out, episodes)
    trainer.train()
    after = real_successes(trainer, out, episodes)
    found = {
        "seed": seed,
        "real_episodes": episodes,
        "before": share_of_episodes(before).to_dict(),
        "after": share_of_episodes(after).to_dict(),
        "difference": paired_difference(zip(after, before, strict=True)).to_dict(),
        "dream_reward": [round(each["reward"], 3) for each in rollouts.log],
        "recorded": rollouts.served.results.status(),
    }
    close_environments()
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
