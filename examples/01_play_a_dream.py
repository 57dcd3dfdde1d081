"""Play an episode that an experience model imagines, and read why it answers so.

`dreamgym play --dream RUN` is the same from the keyboard.

Minutes: 1 (after `make quickstart`, which fine-tunes the experience model). GPU: no.
"""

import asyncio
import os

import dreamgym as dg

RUN = os.environ.get("RUN", "runs/quickstart/experience")
ACTIONS = os.environ.get("ACTIONS", "examine cookbook,open fridge,inventory")


async def main() -> None:
    async with dg.Dream.load(RUN) as dream:
        [task] = await dream.tasks(count=1)
        episode = dream.make(task)
        state = await episode.start()
        print(f"{task.instruction}\n\n{state.text}")
        for action in ACTIONS.split(","):
            outcome = await episode.step(action)
            print(f"\n> {action}\n{outcome.next_state.text}\n  because: {outcome.reasoning}")
            if outcome.over:
                print("success" if outcome.success else "no success")
                break


asyncio.run(main())
