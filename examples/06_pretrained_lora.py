"""Train a pretrained Hugging Face model with LoRA in a dream.

Minutes: 30 and more, depending on the model. GPU: no for small models (up to about 0.5 billion parameters),
yes for larger ones. Needs `pip install "dreamgym[models,lora]"`.
"""

import asyncio
import os

import dreamgym as dg

RUN = os.environ.get("RUN", "runs/quickstart/experience")
MODEL = os.environ.get("MODEL", "hf:HuggingFaceTB/SmolLM2-135M-Instruct")  # or hf:PATH
HORIZON = int(os.environ.get("HORIZON", "30"))
STEPS = int(os.environ.get("STEPS", "20"))


async def main() -> None:
    dream = dg.Dream.load(RUN, horizon=HORIZON)
    agent = dg.Agent.load(MODEL, lora=16, max_tokens=16)
    agent.warm_start(dream.trajectories, steps=STEPS)
    learner, tasks = dg.GRPO(agent, learning_rate=1e-4), dg.TaskPool(await dream.tasks())
    for step in range(STEPS):
        groups = await dg.rollout(agent, dream, tasks.sample(4), group_size=4)
        print(step, learner.update(groups)["return_mean"])
        tasks.record(groups)
    agent.save("runs/lora-agent")  # merged: any tool that reads Hugging Face models opens it
    await agent.aclose()
    await dream.aclose()


asyncio.run(main())
