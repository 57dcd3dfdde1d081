"""Play an episode that an experience model imagines: type actions, read its answers.

Minutes: 1 (after `make quickstart`, which fine-tunes the experience model). GPU: no.
"""

import asyncio
import os
import sys

import dreamgym as dg

RUN = os.environ.get("RUN", "runs/quickstart/experience")


async def main() -> None:
    async with dg.Dream.load(RUN) as dream:
        [task] = await dream.tasks(count=1)
        episode = dream.make(task)
        state = await episode.start()
        print(f"{task.instruction}\n\n{state.text}")
        for line in sys.stdin:
            outcome = await episode.step(line.strip())
            print(f"{outcome.next_state.text}\n  because: {outcome.reasoning}")
            if outcome.over:
                print("success" if outcome.success else "no success")
                break


asyncio.run(main())
