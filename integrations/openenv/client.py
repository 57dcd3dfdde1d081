"""Play one task in the dream and in reality with OpenEnv's own client: `python client.py URL`."""

import asyncio
import sys

from openenv import GenericEnvClient


async def main(url: str) -> None:
    # --8<-- [start:play]
    async with GenericEnvClient(base_url=url, message_timeout_s=120) as env:
        for mode in ("dream", "real"):
            result = await env.reset(index=3, mode=mode)  # the fourth task of the split
            while not result.done:
                print(mode, result.observation["text"])
                result = await env.step({"text": "open door"})  # your policy's action
            state = await env.state()
            print(mode, "reward", result.reward, "success", state["success"], "failure", state["failure"])
    # --8<-- [end:play]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
