"""An MCP server with the tool `convert_time` of `mcp-server-time`, which is not installed for the tests.

`integrations/mcp` plays the original.
"""

import datetime
from zoneinfo import ZoneInfo

from mcp.server.mcpserver import MCPServer

server = MCPServer("time")


@server.tool()
def convert_time(source_timezone: str, time: str, target_timezone: str) -> str:
    """Convert time between timezones."""
    asked = datetime.time.fromisoformat(time).replace(tzinfo=ZoneInfo(source_timezone))
    moment = datetime.datetime.combine(datetime.date(2026, 1, 1), asked)
    return f"{time} in {source_timezone} is {moment.astimezone(ZoneInfo(target_timezone)):%H:%M}."


if __name__ == "__main__":
    server.run()
