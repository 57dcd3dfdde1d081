"""Many sessions of OpenEnv's own client: `python load.py URL PLAN.json SESSIONS` plays the episodes of a plan
and prints one line of JSON for each second, then a summary."""

import asyncio
import json
import sys
import time
from pathlib import Path

from openenv import GenericEnvClient


async def main(url: str, plan: list[dict[str, object]], sessions: int) -> None:
    waiting = iter(plan)
    done = {"episodes": 0, "steps": 0, "successes": 0, "errors": 0}
    started = time.perf_counter()

    async def session() -> None:
        async with GenericEnvClient(base_url=url, message_timeout_s=300) as env:
            for episode in waiting:
                try:
                    result = await env.reset(**episode["reset"])
                    for action in episode["actions"]:
                        if result.done:
                            break
                        result = await env.step({"text": action})
                        done["steps"] += 1
                    done["successes"] += bool(result.done and result.reward)
                    done["episodes"] += 1
                except RuntimeError as error:
                    done["errors"] += 1
                    print(json.dumps({"error": str(error)}), flush=True)

    async def report() -> None:
        while True:
            await asyncio.sleep(1)
            print(json.dumps(done), flush=True)

    reporting = asyncio.create_task(report())
    await asyncio.gather(*(session() for _ in range(sessions)))
    reporting.cancel()
    print(json.dumps({**done, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    planned = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    asyncio.run(main(sys.argv[1], planned, int(sys.argv[3])))
