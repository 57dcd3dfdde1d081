"""Train an agent in a dream with your own loop: rollouts, GRPO updates, task pool, fresh experience.

Minutes: 15 (after `make quickstart`, which fine-tunes the experience model). GPU: no.
"""

import asyncio
import os

import dreamgym as dg

RUN = os.environ.get("RUN", "runs/quickstart/experience")
MODEL = os.environ.get("MODEL", "tiny")  # from scratch; or hf:NAME_OR_PATH
STEPS = int(os.environ.get("STEPS", "40"))
WARM_START = int(os.environ.get("WARM_START", "45"))
TASKS = int(os.environ.get("TASKS", "12"))
HORIZON = int(os.environ.get("HORIZON", "30"))
EPISODES = int(os.environ.get("EPISODES", "150"))


async def main() -> None:
    # --8<-- [start:loop]
    dream = dg.Dream.load(RUN, horizon=HORIZON)  # experience model, tasks, grader, replay buffer
    agent = dg.Agent.load(MODEL, data=dream.trajectories, max_tokens=16)  # from scratch
    agent.warm_start(dream.trajectories, steps=WARM_START)  # imitate the recorded successes
    learner = dg.GRPO(agent, learning_rate=2e-4)
    tasks = dg.TaskPool(await dream.tasks())
    for step in range(STEPS):
        groups = await dg.rollout(agent, dream, tasks.sample(TASKS), group_size=8)
        print(step, learner.update(groups)["return_mean"])
        tasks.record(groups)  # reward entropy of each task
        await dream.remember(groups)  # fresh transitions become demonstrations
    real = dg.make(dream.config.environment.name, **dream.config.environment.options)
    print(await dg.evaluate(agent, real, split="test", episodes=EPISODES))
    # --8<-- [end:loop]
    agent.save("runs/my-agent")
    await agent.aclose()
    await dream.aclose()
    await real.aclose()


asyncio.run(main())
