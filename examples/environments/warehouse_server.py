"""A small MCP server: a warehouse whose shelves are looked up and shipped from. Needs the extra `mcp`.

    python examples/environments/warehouse_tasks.py > tasks.jsonl
    dreamgym play --env "mcp:python examples/environments/warehouse_server.py" \\
        --set environment.options.tasks=tasks.jsonl \\
        --set environment.options.check=examples/environments/warehouse_tasks.py:shipped

With a port it serves http://127.0.0.1:PORT/mcp instead of its standard input.
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("warehouse", instructions="Shelves have numbers; ask where an item is before you ship it.")
shelves: dict[int, str] = {}


@server.tool()
def put(item: str, shelf: int) -> str:
    """Put an item on a shelf."""
    shelves[shelf] = item
    return f"{item} is on shelf {shelf}."


@server.tool()
def find(item: str) -> str:
    """Tell the shelf of an item."""
    found = [str(shelf) for shelf, name in shelves.items() if name == item]
    return f"{item} is on shelf {found[0]}." if found else f"There is no {item}."


@server.tool()
def ship(shelf: int) -> str:
    """Ship what is on a shelf. It cannot be taken back."""
    return f"Shipped {shelves.pop(shelf)}." if shelf in shelves else f"Shelf {shelf} is empty."


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
