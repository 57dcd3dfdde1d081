"""`dreamgym buffer`: fill a replay buffer, look into it, search it, tidy it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import batched
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import screen
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.errors import ConfigError, DataError
from dreamgym.replay.buffer import BufferStats, ReplayBuffer
from dreamgym.replay.embed import make_embedder
from dreamgym.replay.log import records
from dreamgym.replay.offline import read_trajectories, shards
from dreamgym.types import Demonstration, RetrievalFilter, Source, Trajectory
