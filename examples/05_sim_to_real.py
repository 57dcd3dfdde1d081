"""Sim-to-real: train a policy from the dream further in the real environment, within a budget of steps.

Minutes: 5 (after `make quickstart`, which trains the policy). GPU: no.
"""

import asyncio
import os

import dreamgym as dg

AGENT = os.environ.get("AGENT", "runs/quickstart/agent")
OUT = os.environ.get("OUT", "runs/sim-to-real")
REAL_STEPS = int(os.environ.get("REAL_STEPS", "2000"))
EPISODES = int(os.environ.get("EPISODES", "100"))
ENVIRONMENT = dg.make("textworld", family="cooking", ingredients=1, rooms=1, foods="train")


async def main() -> None:
    summary = await dg.train(sim_to_real=AGENT, real_steps=REAL_STEPS, out=OUT)
    print(summary["ended"])
    for policy in (AGENT, OUT):
        async with dg.Agent.load(policy) as agent:
            print(policy, await dg.evaluate(agent, ENVIRONMENT, split="test", episodes=EPISODES))


asyncio.run(main())
