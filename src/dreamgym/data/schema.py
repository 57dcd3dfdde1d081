"""The schema of stored tasks, transitions and trajectories: JSON rows, and the types they stand for.

A trajectory's row holds the start state and then the outcome of each action, so no state is stored twice.
Rows are validated here, once and strictly (unknown keys, wrong types and non-finite numbers are refused).
Optional values that equal their default are left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from dreamgym import types
from dreamgym.errors import DataError

SCHEMA_VERSION = 1

M = TypeVar("M", bound=BaseModel)


def _finite(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        json.dumps(values, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite_number", "Input should hold finite numbers only") from None
    return values


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TaskRow(_Row):
    """What the agent had to do."""

    id: str = Field(min_length=1, description="unique within its environment")
    instruction: str = Field(description="what the agent was asked to do")
    environment: str = Field(min_length=1, description="name of the environment")
    split: str = Field("train", description="which part of the environment's tasks it belongs to")
    family: str = Field("", description="kind of task; results are also reported per family")
    origin: Literal["seed", "generated"] = Field("seed", description="given, or written by a task generator")
    parameters: Annotated[dict[str, JsonValue], AfterValidator(_finite)] = Field(
        default_factory=dict, description="what the environment needs to rebuild the task"
    )


class StateRow(_Row):
    """What the agent saw."""

    text: str = Field(description="the state, as text")
    admissible_actions: list[str] | None = Field(
        None, description="every action that has an effect here; null where unknown"
    )


class OutcomeRow(_Row):
    """The result of the action."""

    next_state: StateRow = Field(description="the state after the action")
    reward: float = Field(description="reward of this turn")
    terminated: bool = Field(False, description="ended by the environment's own rules")
    truncated: bool = Field(False, description="cut off by a limit of the caller")
    success: bool = Field(False, description="the task was solved by this turn")
    reasoning: str | None = Field(None, description="the experience model's explanation")
    confidence: float | None = Field(None, description="the experience model's confidence")
    reward_source: str = Field("environment", description="environment, model, judge, sheet or unknown")


class TurnRow(_Row):
    """One action and its outcome."""

    action: str = Field(description="what the agent did")
    thought: str | None = Field(None, description="what it wrote before its action")
    outcome: OutcomeRow = Field(description="the result of the action")


class TransitionRow(TurnRow):
    """A turn with the state before it."""

    state: StateRow = Field(description="the state before the action")


class ProvenanceRow(_Row):
    """Where the experience comes from."""

    source: Literal["real", "synthetic"] = Field(description="real environment or experience model")
    policy: str = Field(description="name of the policy that acted")
    policy_version: int = Field(0, description="updates the policy had seen")
    experience_model: str | None = Field(None, description="the experience model that predicted it")
    recorded_at: float = Field(0.0, description="seconds since the epoch")


class SheetRow(_Row):
    """The hidden facts of the episode, as they were at its start."""

    facts: list[list[str]] = Field(description="each a predicate and its arguments")


class TrajectoryRow(_Row):
    """The record of one episode."""

    schema_version: Literal[1] = Field(description="version of this table")
    id: str = Field(min_length=1, description="unique among all trajectories")
    task: TaskRow = Field(description="what the agent had to do")
    start: StateRow = Field(description="the first state")
    turns: list[TurnRow] = Field(description="actions and outcomes, oldest first")
    provenance: ProvenanceRow = Field(description="where the experience comes from")
    seed: int = Field(0, description="seed of the episode")
    sheet: SheetRow | None = Field(None, description="hidden facts, where the environment has them")
    given: int = Field(0, ge=0, description="first turns that the policy did not choose")


def decode_trajectory(line: str | bytes) -> types.Trajectory:
    """Read one row.

    Raises:
        DataError: it is not a row; the message names what was expected and what was found.
    """
    return _trajectory(_parse(TrajectoryRow, line))


def encode_transition(transition: types.Transition) -> str:
    """One transition with its state, for stores that hold single turns. Raises `DataError`."""
    row = {"state": _state_row(transition.state), **_turn_row(transition)}
    return dump_json(row, what=f"transition {shorten(transition.action)}")


def decode_transition(line: str | bytes) -> types.Transition:
    """Read a row of `encode_transition`. Raises `DataError`."""
    row = _parse(TransitionRow, line)
    return _transition(_state(row.state), row)


def _parse(model: type[M], line: str | bytes) -> M:
    try:
        # Parsing and validating in one pass takes a third of the time of two passes.
        return model.model_validate_json(line.encode() if isinstance(line, str) else line)
    except UnicodeEncodeError as error:
        raise DataError(f"expected Unicode text, got {error}") from None
    except ValidationError as error:
        raise DataError(explain(error)) from None


def trajectory_from_row(value: Any) -> types.Trajectory:
    """The trajectory that parsed JSON stands for, or `DataError`."""
    return _trajectory(check(TrajectoryRow, value))


def _trajectory(row: TrajectoryRow) -> types.Trajectory:
    _check_ends([turn.outcome.terminated or turn.outcome.truncated for turn in row.turns])
    start = _state(row.start)
    return types.Trajectory(
        id=row.id,
        task=types.Task(**dict(row.task)),
        start=start,
        transitions=_transitions(start, row.turns),
        provenance=types.Provenance(**dict(row.provenance)),
        seed=row.seed,
        sheet=None if row.sheet is None else types.WorldSheet(facts=tuple(map(tuple, row.sheet.facts))),
        given=min(row.given, len(row.turns)),
    )


def encode_trajectory(trajectory: types.Trajectory) -> str:
    """Write one row, without the line break. Equal trajectories give equal text.

    Raises:
        DataError: a turn does not start in the state after the previous one, turns follow the end of the
            episode, a number is not finite, or a text cannot be written as UTF-8.
    """
    return dump_json(row_of(trajectory), what=f"trajectory {trajectory.id!r}")


def row_of(trajectory: types.Trajectory) -> dict[str, Any]:
    """The row as nested values, ready for JSON."""
    _check_chain(trajectory)
    row: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": trajectory.id,
        "task": _without_defaults(TaskRow, trajectory.task),
        "start": _state_row(trajectory.start),
        "turns": [_turn_row(transition) for transition in trajectory.transitions],
        "provenance": _without_defaults(ProvenanceRow, trajectory.provenance),
    }
    if trajectory.seed:
        row["seed"] = trajectory.seed
    if trajectory.sheet is not None:
        row["sheet"] = {"facts": trajectory.sheet.facts}
    if trajectory.given:
        row["given"] = trajectory.given
    return row


def dump_json(value: Any, *, what: str, sort_keys: bool = False) -> str:
    """Compact JSON that any strict reader takes back: finite numbers, whole Unicode.

    >>> dump_json({"b": 1.5, "a": "é"}, what="example", sort_keys=True)
    '{"a":"é","b":1.5}'
    """
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys
        )
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{what}: expected finite numbers and whole Unicode text, got {error}") from None
    return text


def parse_json(line: str | bytes) -> Any:
    """Any JSON value, or `DataError`; nesting is bounded, so hostile text cannot exhaust the stack."""
    try:
        return from_json(line, allow_inf_nan=False)
    except (ValueError, RecursionError, TypeError) as error:  # TypeError: a text with lone surrogates
        raise DataError(f"expected JSON, got {shorten(line)} ({error})") from None


def check(model: type[M], value: Any) -> M:
    """Validate parsed JSON against a model of its format, or raise `DataError`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise DataError(explain(error)) from None


def explain(error: ValidationError, limit: int = 3) -> str:
    """The first few problems of one row, each as expected and got."""
    problems = error.errors(include_url=False, include_context=False)
    shown = [_explain_one(problem) for problem in problems[:limit]]
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(shown) + more


def shorten(value: object, limit: int = 80) -> str:
    """How a value from outside is quoted in a message.

    >>> shorten("x" * 100, limit=4)
    "'xxxx'… (100 long)"
    >>> shorten({"role": "user"})
    "an object with keys 'role'"
    """
    if isinstance(value, dict) and value:
        return "an object with keys " + ", ".join(shorten(key, 30) for key in list(value)[:8])
    if isinstance(value, list) and value:
        return f"a list of {len(value)}"
    if isinstance(value, str | bytes) and len(value) > limit:
        return f"{value[:limit]!r}… ({len(value)} long)"
    return repr(value)[: 8 * limit]


def _explain_one(problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "the row"
    if problem["type"] == "json_invalid":
        why = problem["msg"].removeprefix("Invalid JSON: ")
        return f"expected JSON, got {shorten(problem['input'])} ({why})"
    if problem["type"] == "missing":
        return f"expected a key {where!r}, got none"
    if problem["type"] == "extra_forbidden":
        return f"expected no key {where!r}, got {shorten(problem['input'])}"
    expected = problem["msg"].removeprefix("Input should be ").removeprefix("Input should ")
    return f"expected {where} to be {expected}, got {shorten(problem['input'])}"


def _state(row: StateRow) -> types.State:
    admissible = row.admissible_actions
    return types.State(text=row.text, admissible_actions=None if admissible is None else tuple(admissible))


def _transitions(state: types.State, turns: Sequence[TurnRow]) -> tuple[types.Transition, ...]:
    made = []
    for turn in turns:
        made.append(_transition(state, turn))
        state = made[-1].outcome.next_state
    return tuple(made)


def _transition(state: types.State, turn: TurnRow) -> types.Transition:
    values = dict(turn.outcome)
    values["next_state"] = _state(turn.outcome.next_state)
    outcome = types.Outcome(**values)
    return types.Transition(state=state, action=turn.action, outcome=outcome, thought=turn.thought)


def _state_row(state: types.State) -> dict[str, Any]:
    if state.admissible_actions is None:
        return {"text": state.text}
    return {"text": state.text, "admissible_actions": state.admissible_actions}


def _turn_row(transition: types.Transition) -> dict[str, Any]:
    outcome = _without_defaults(OutcomeRow, transition.outcome)
    outcome["next_state"] = _state_row(transition.outcome.next_state)
    thought = {} if transition.thought is None else {"thought": transition.thought}
    return {"action": transition.action, **thought, "outcome": outcome}


@functools.cache
def _defaults(model: type[_Row]) -> list[tuple[str, Any]]:
    """(key, default) of a model; `...` for a required key."""
    return [
        (name, ... if info.is_required() else info.get_default(call_default_factory=True, validated_data={}))
        for name, info in model.model_fields.items()
    ]


def _without_defaults(model: type[_Row], value: object) -> dict[str, Any]:
    row = {}
    for name, default in _defaults(model):
        given = getattr(value, name)
        if given != default:
            row[name] = dict(given) if isinstance(given, Mapping) else given
    return row


def _check_chain(trajectory: types.Trajectory) -> None:
    state = trajectory.start
    for position, transition in enumerate(trajectory.transitions):
        # Identity first: a recorded episode shares its state objects, and comparing long texts costs.
        if transition.state is not state and transition.state != state:
            raise DataError(
                f"trajectory {trajectory.id!r}: expected turn {position} to start in the state before it, "
                f"{shorten(state.text)}, got {shorten(transition.state.text)}"
            )
        state = transition.outcome.next_state
    _check_ends([transition.outcome.over for transition in trajectory.transitions])


def _check_ends(over: Sequence[bool]) -> None:
    if any(over[:-1]):
        position = over.index(True)
        raise DataError(
            f"expected the episode to end with its last turn, got an end at turn {position} of {len(over)}"
        )
