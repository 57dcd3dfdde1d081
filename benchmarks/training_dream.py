"""A step in the dream, by stage, with replay buffers of several sizes: the third part of `training.py`.

The policy, the experience model and the replay buffer each work in threads of their own, which log what each
of them costs. The experience model reads demonstrations and writes 40 tokens by an untrained model; what is
then said comes from the rules of the world, so that all episodes are of full length. The demonstrations are
searched for transitions of the shipped household among others of it, all of real text.

All sizes are open at once and take steps in turn, since a machine that others use is not as fast in one
minute as in the next: only steps that follow each other can be compared.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.synthetic import EpisodeStart, SyntheticFactory
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.experience.reply_format import prompt as question
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.store import Record, records
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.testing import CorridorFactory
from dreamgym.training.run_dir import RunDir
from dreamgym.types import (
    CompletionRequest,
    Prediction,
    Provenance,
    RetrievalFilter,
    State,
    Task,
    Transition,
    WorldSheet,
)
from training import LEARNING, LENGTH, WARM_UP, Shape, graded, log, rolled_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """CPU seconds of a step."""

    policy: float = 0.0
    experience_model: float = 0.0
    buffer: float = 0.0
    update: float = 0.0
    checkpoint: float = 0.0
    rest: float = 0.0
    """Prompts, bookkeeping and the event loop."""

    @property
    def all(self) -> float:
        return float(sum(astuple(self)))


async def dreams(
    model: Callable[[], Any], tokenizer: Any, sizes: Sequence[int], steps: int
) -> dict[str, Any]:
    household, threads = Household(), Threads()
    found: dict[int, list[Stages]] = {size: [] for size in sizes}
    async with AsyncExitStack() as stack:
        dreams = {
            size: await Practice.start(stack, model, tokenizer, household, size, threads) for size in sizes
        }
        for number in range(WARM_UP + steps):
            for size in sizes if number % 2 == 0 else reversed(sizes):
                spent = await dreams[size].step(number)
                if number >= WARM_UP:
                    found[size].append(spent)
                    log(f"dream, {size} rows, step {number}", spent)
    return {
        "steps": steps,
        "sizes": {str(size): told(each, found[sizes[0]]) for size, each in found.items()},
    }


def told(steps: Sequence[Stages], fewest: Sequence[Stages]) -> dict[str, Any]:
    """Medians in milliseconds, and what steps cost compared with those of the smallest buffer beside them."""

    def ratio(which: Sequence[int]) -> float:
        return sum(steps[each].all for each in which) / sum(fewest[each].all for each in which)

    rng, every = random.Random(0), range(len(steps))
    again = sorted(ratio(rng.choices(every, k=len(steps))) for _ in range(2000))
    names = (*Stages.__dataclass_fields__, "all")
    return {
        **{name: round(1000 * statistics.median(getattr(step, name) for step in steps), 1) for name in names},
        "growth": {"ratio": round(ratio(every), 3), "interval": [round(again[50], 3), round(again[1949], 3)]},
    }


@dataclass(slots=True)
class Threads:
    """Whose threads are whose, by watching which ones come when a part is first used."""

    owners: dict[threading.Thread, str] = field(default_factory=dict)

    def claim(self, owner: str) -> None:
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                mine = "buffer" if thread.name.startswith("replay") else owner
                self.owners.setdefault(thread, mine)

    def spent(self) -> dict[str, float]:
        self.claim("rest")
        found = {"rest": time.process_time()}
        for thread, owner in self.owners.items():
            if owner != "rest" and thread.is_alive() and thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                spent = time.clock_gettime(clock)
                found[owner] = found.get(owner, 0.0) + spent
                found["rest"] -= spent
        return found


@dataclass(slots=True, kw_only=True)
class Practice:
    """A policy that learns in a dream of its own."""

    policy: LocalLanguageModel
    learner: GRPO
    factory: SyntheticFactory
    tasks: Sequence[Task]
    buffer: ReplayBuffer
    folder: RunDir
    threads: Threads

    @classmethod
    async def start(
        cls,
        stack: AsyncExitStack,
        model: Callable[[], Any],
        tokenizer: Any,
        household: Household,
        rows: int,
        threads: Threads,
    ) -> Practice:
        threads.claim("rest")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        buffer = stack.enter_context(ReplayBuffer.open(folder / "replay.sqlite", embedder=LexicalEmbedder()))
        await fill(buffer, household, rows)
        threads.claim("buffer")
        learning = model()
        served = {
            "policy": LocalLanguageModel(learning, tokenizer),
            "experience_model": LocalLanguageModel(model(), tokenizer),
        }
        for owner, each in served.items():
            stack.push_async_callback(each.aclose)
            await each.complete(CompletionRequest(prompt="task:", max_tokens=1))
            threads.claim(owner)
        inner = CorridorFactory(length=LENGTH, horizon=Shape().turns)
        tasks = await inner.tasks("train", Shape().tasks)
        dream = CostlyDream(served["experience_model"], buffer, inner, cycle(household.asked))
        factory = SyntheticFactory(
            dream, tasks, lambda task, seed: EpisodeStart(sheet=WorldSheet(facts=())), horizon=Shape().turns
        )
        return cls(
            policy=served["policy"],
            learner=GRPO(TrainableModel(learning, served["policy"].updating), LEARNING),
            factory=factory,
            tasks=tasks,
            buffer=buffer,
            folder=RunDir(folder),
            threads=threads,
        )

    async def step(self, number: int) -> Stages:
        before = self.threads.spent()
        report = await rolled_out(self.policy, self.factory, self.tasks, Shape(), number)
        began = time.thread_time()
        self.learner.update(report.groups)
        learnt = time.thread_time()
        self.folder.save("checkpoint.pt", self.learner.state_dict())
        saved = time.thread_time()
        fresh = [each for group in report.groups for each in group.trajectories]
        await self.buffer.add([row for each in fresh for row in records(each)])
        after = self.threads.spent()
        spent = {owner: after[owner] - before.get(owner, 0.0) for owner in after}
        return Stages(
            policy=spent["policy"],
            experience_model=spent["experience_model"],
            buffer=spent["buffer"],
            update=learnt - began,
            checkpoint=saved - learnt,
            rest=spent["rest"] - (saved - began),
        )


class CostlyDream:
    """Asks a real model about real demonstrations, and then answers by the rules of the corridor."""

    name = "costly dream"

    def __init__(
        self,
        served: LocalLanguageModel,
        buffer: ReplayBuffer,
        inner: CorridorFactory,
        asked: Iterator[Transition],
    ) -> None:
        self._served, self._buffer, self._inner, self._asked = served, buffer, inner, asked

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return await self._inner.make(task).start()

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        wanted, like = RetrievalFilter(environment=Household.ENVIRONMENT), next(self._asked)
        (shown,) = await self._buffer.search([(like.state.text, like.action)], k=4, filters=[wanted])
        asked = question(
            task, sheet, history, state.text, action, shown, settings=PromptSettings(actor="agent", history=1)
        )
        await self._served.complete(CompletionRequest(prompt=asked, max_tokens=40, temperature=1.0))
        corridor = self._inner.make(task)
        await corridor.start()
        for past in history:
            await corridor.step(past.action)
        outcome = graded(await corridor.step(action), "".join(past.action for past in history) + action)
        return Prediction(outcome=replace(outcome, truncated=False), sheet=sheet)


class Household:
    """The shipped household's transitions, with things renumbered as often as it takes to be enough."""

    ENVIRONMENT = "household"
    ASKED = 100

    def __init__(self) -> None:
        every = list(read_trajectories(builtin_dataset()))
        asked, stored = every[: self.ASKED], every[self.ASKED :]
        self._stored = [row.transition for each in stored for row in records(each)]
        self.asked = [row.transition for each in asked for row in records(each)]
        """Of episodes that are not stored."""

    def rows(self, count: int) -> Iterator[Record]:
        for number in range(count):
            copy, place = divmod(number, len(self._stored))
            recorded = self._stored[place]
            yield Record(
                transition=replace(
                    recorded,
                    state=replace(recorded.state, text=renumbered(recorded.state.text, copy)),
                    action=renumbered(recorded.action, copy),
                ),
                environment=self.ENVIRONMENT,
                task_id="filler",
                instruction="Tidy up.",
                trajectory_id=f"filler-{number // 25}",
                position=number % 25,
                trajectory_reward=0.0,
                provenance=Provenance(source="real", policy="filler", policy_version=0, recorded_at=0.0),
            )


def renumbered(text: str, by: int) -> str:
    """
    >>> renumbered("take mug 1 from shelf 3", 2)
    'take mug 3 from shelf 5'
    """
    return re.sub(r"\d+", lambda found: str(int(found[0]) + by), text) if by else text


async def fill(buffer: ReplayBuffer, household: Household, rows: int) -> None:
    filler = household.rows(rows)
    while batch := list(islice(filler, 5_000)):
        await buffer.add(batch)
