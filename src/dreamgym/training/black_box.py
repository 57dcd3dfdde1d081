"""The experience model of a black box: which facts its prompts show, and what is mined from its recordings.

`knowledge.json` in a run directory holds what the weights do not: kinds of action with persistent replies,
the refusal text, and the support score, which is fitted on held-out recordings after fine-tuning."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym.config import HF_PREFIX, Config
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import DataError, EpisodeFailedError
from dreamgym.experience.action_forms import ActionForms, action_forms
from dreamgym.experience.black_box import BlackBoxExperienceModel, BlackBoxKnowledge
from dreamgym.experience.dataset import held_out
from dreamgym.experience.exchangeable import exchangeable_words
from dreamgym.experience.known_replies import with_known_replies
from dreamgym.experience.recorded_outcomes import Determined, determined
from dreamgym.experience.recorded_patterns import (
    NoEffect,
    counter_forms,
    no_effect,
    persistent_kinds,
    place_forms,
    start_tells,
    success_forms,
)
from dreamgym.experience.shared_outcomes import SharedOutcomes, shared_outcomes
from dreamgym.experience.support import Evidence, Support, fit_support, kinds_seen
from dreamgym.files import write_text
from dreamgym.protocols import Retriever
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.types import Trajectory, WorldSheet

KNOWLEDGE = "knowledge.json"
_DEFAULTS: dict[str, Any] = {"history": 8, "text_limit": 400, "exchange_numbers": False}
"""Of `ExperienceConfig` where the settings say nothing: without a sheet, prompts show more of the past."""
_LEARNING_RATE = 1.5e-3
"""Of a model from scratch: at 3e-3, long prompts make the loss jump (docs/log.md)."""
_CALIBRATION = 400
"""Held-out transitions that the support score is fitted on."""
_COMPARED = 150
"""Of them, those on which predictions with and without reasoning are compared."""


def resolve_facts(config: Config, spec: EnvironmentSpec | None, recorded: Sequence[Trajectory]) -> Config:
    """The settings with ``experience.facts`` chosen, and the defaults that suit it."""
    chosen = config.experience
    if chosen.facts == "auto":
        rules = spec is not None and (spec.annotator is not None or spec.select_facts is not None)
        sheets = any(each.sheet is not None for each in recorded)
        chosen = chosen.model_copy(update={"facts": "sheet" if rules or sheets else "replies"})
    if chosen.facts == "replies":
        defaults = {k: v for k, v in _DEFAULTS.items() if k not in chosen.model_fields_set}
        if chosen.learning_rate is None and not chosen.model.startswith(HF_PREFIX):
            defaults["learning_rate"] = _LEARNING_RATE
        chosen = chosen.model_copy(update=defaults)
    return config.model_copy(update={"experience": chosen})


async def write_knowledge(
    config: Config, recorded: Sequence[Trajectory], folder: Path, *, retriever: Retriever | None
) -> None:
    """Mine the recordings and fit the support score of the fine-tuned model in `folder`."""
    from dreamgym.training.experience_loading import OWN_BUFFER

    mined = mine_knowledge(recorded)
    training = [each for each in recorded if not held_out(each.task.id, config.experience.validation)]
    knowledge = replace(mined, shared=shared_outcomes(training))  # else it would know the held-out replies
    with ExitStack() as stack:
        if retriever is None and (folder / OWN_BUFFER).exists():
            retriever = stack.enter_context(
                ReplayBuffer.open_configured(folder / OWN_BUFFER, config.replay, read_only=True)
            )
        compared: dict[str, float | None] = {}
        if config.experience.reasoning:
            for name, reasons in (("with", True), ("without", False)):
                tried = replace(knowledge, reasoning=reasons)
                few = await _predictions(config, recorded, folder, tried, retriever, limit=_COMPARED)
                compared[name] = _share(ok for _, ok in few)
            # The shorter reply wins a tie.
            helps = (compared["with"] or 0.0) > (compared["without"] or 0.0)
            knowledge = replace(knowledge, reasoning=helps)
        found = await _predictions(config, recorded, folder, knowledge, retriever, limit=_CALIBRATION)
    predicted = [(evidence, ok) for evidence, ok in found if isinstance(evidence, Evidence)]
    support = fit_support(predicted, knowledge.support.seen)
    scored = [
        (support.score(evidence) if isinstance(evidence, Evidence) else evidence, ok)
        for evidence, ok in found
    ]
    measured = {
        "held_out": len(found),
        "exact": _share(ok for _, ok in found),
        "recorded": _share(not isinstance(evidence, Evidence) for evidence, _ in found),
        "exact_predicted": _share(ok for _, ok in predicted),
        "exact_by_reasoning": compared,
        "supported": [_measure(scored, bound) for bound in (0.25, 0.5, 0.75, 0.9)],
    }
    save_knowledge(replace(knowledge, shared=mined.shared, support=support), folder, measured)


def mine_knowledge(recorded: Sequence[Trajectory]) -> BlackBoxKnowledge:
    """What the recordings say without a model."""
    names = frozenset(word for words in exchangeable_words(recorded) for word in words)
    inert = no_effect(recorded)
    return BlackBoxKnowledge(
        persistent=persistent_kinds(recorded),
        counters=counter_forms(recorded, inert.replies),
        names=names,
        start_tells=start_tells(recorded),
        places=place_forms(recorded),
        forms=action_forms(recorded, names, inert.replies),
        inert=inert,
        certain=determined(recorded, inert),
        shared=shared_outcomes(recorded),
        successes=success_forms(recorded, names),
        support=Support(seen=kinds_seen(recorded)),
        refusal=refusal_text(recorded),
    )


def _share(found: Iterable[bool]) -> float | None:
    found = list(found)
    return sum(found) / len(found) if found else None


def _measure(scored: Sequence[tuple[float, bool]], bound: float) -> dict[str, float]:
    kept = [ok for score, ok in scored if score >= bound]
    return {
        "bound": bound,
        "share": _share(score >= bound for score, _ in scored) or 0.0,
        "exact": _share(kept) or 0.0,
    }


async def _predictions(
    config: Config,
    recorded: Sequence[Trajectory],
    folder: Path,
    knowledge: BlackBoxKnowledge,
    retriever: Retriever | None,
    *,
    limit: int,
) -> list[tuple[Evidence | float, bool]]:
    """For held-out transitions, the evidence for a prediction or the support of a recorded outcome, and
    whether it is right."""
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.training.experience_loading import prompt_settings

    k = config.replay.demonstrations(prompted=False)
    settings = prompt_settings(config.experience, k, None, config.environment.name)
    language_model = LocalLanguageModel.load(folder / "model")
    model = BlackBoxExperienceModel(
        language_model,
        name=str(folder),
        settings=settings.model_copy(update={"unsupported": "ignore", "attempts": 1}),
        knowledge=knowledge,
        retriever=retriever,
    )
    share = config.experience.validation
    questions = [
        (trajectory, position)
        for trajectory in with_known_replies(recorded)
        if held_out(trajectory.task.id, share)
        for position in range(len(trajectory))
    ][:limit]

    async def ask(trajectory: Trajectory, position: int) -> tuple[Evidence | float, bool] | None:
        step = trajectory.transitions[position]
        sheet = trajectory.sheet or WorldSheet(facts=())
        try:
            found = await model.predict(
                trajectory.task, sheet, trajectory.transitions[:position], step.state, step.action
            )
        except EpisodeFailedError:
            return None
        outcome = found.outcome
        right = (outcome.next_state.text, outcome.terminated, outcome.success) == (
            step.outcome.next_state.text,
            step.outcome.terminated,
            step.outcome.success,
        )
        return outcome.info.get("evidence", outcome.info["support"]), right

    try:
        answers = await asyncio.gather(*(ask(*question) for question in questions))
    finally:
        await language_model.aclose()
    return [answer for answer in answers if answer is not None]


def refusal_text(recorded: Sequence[Trajectory]) -> str:
    """The reply that most often ends nothing and earns nothing, counted once per task."""
    counts: Counter[str] = Counter()
    for trajectory in recorded:
        counts.update(
            {
                step.outcome.next_state.text
                for step in trajectory.transitions
                if not step.outcome.over and not step.outcome.reward
            }
        )
    return counts.most_common(1)[0][0] if counts else "Nothing happens."


def save_knowledge(
    knowledge: BlackBoxKnowledge, folder: Path, measured: Mapping[str, Any] | None = None
) -> None:
    stored = {
        "persistent": sorted(knowledge.persistent),
        "counters": sorted(knowledge.counters),
        "names": sorted(knowledge.names),
        "start_tells": knowledge.start_tells,
        "places": sorted(knowledge.places),
        "forms": {
            "effective": sorted(knowledge.forms.effective),
            "refused": dict(sorted(knowledge.forms.refused.items())),
            "closed": dict(sorted(knowledge.forms.closed.items())),
        },
        "inert": {"replies": sorted(knowledge.inert.replies), "kinds": sorted(knowledge.inert.kinds)},
        "determined": {
            "lengths": dict(sorted(knowledge.certain.lengths.items())),
            "agreement": dict(sorted(knowledge.certain.agreement.items())),
        },
        "shared": {
            "words": sorted(knowledge.shared.words),
            "lengths": dict(sorted(knowledge.shared.lengths.items())),
            "agreement": dict(sorted(knowledge.shared.agreement.items())),
            "replies": dict(sorted(knowledge.shared.replies.items())),
        },
        "successes": sorted(knowledge.successes),
        "refusal": knowledge.refusal,
        "reasoning": knowledge.reasoning,
        "weights": list(knowledge.support.weights),
        "seen": dict(sorted(knowledge.support.seen.items())),
        "calibration": measured or {},
    }
    write_text(folder / KNOWLEDGE, json.dumps(stored, indent=2) + "\n")


def read_knowledge(folder: Path) -> BlackBoxKnowledge:
    path = folder / KNOWLEDGE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return BlackBoxKnowledge(
            persistent=frozenset(map(str, stored["persistent"])),
            counters=frozenset(map(str, stored["counters"])),
            names=frozenset(map(str, stored["names"])),
            start_tells=bool(stored["start_tells"]),
            places=frozenset(map(str, stored["places"])),
            forms=ActionForms(
                effective=frozenset(map(str, stored["forms"]["effective"])),
                **{
                    name: {str(form): str(text) for form, text in stored["forms"][name].items()}
                    for name in ("refused", "closed")
                },
            ),
            inert=NoEffect(
                **{name: frozenset(map(str, stored["inert"][name])) for name in ("replies", "kinds")}
            ),
            certain=Determined(
                lengths={str(k): int(v) for k, v in stored["determined"]["lengths"].items()},
                agreement={str(k): float(v) for k, v in stored["determined"]["agreement"].items()},
            ),
            shared=SharedOutcomes(
                words=frozenset(map(str, stored["shared"]["words"])),
                lengths={str(k): int(v) for k, v in stored["shared"]["lengths"].items()},
                agreement={str(k): float(v) for k, v in stored["shared"]["agreement"].items()},
                replies={str(k): str(v) for k, v in stored["shared"]["replies"].items()},
            ),
            successes=frozenset(map(str, stored["successes"])),
            refusal=str(stored["refusal"]),
            reasoning=bool(stored["reasoning"]),
            support=Support(
                weights=tuple(map(float, stored["weights"])),
                seen=Counter({str(kind): int(count) for kind, count in stored["seen"].items()}),
            ),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: expected what fine-tuning mined, {error!r}; run it again") from None
