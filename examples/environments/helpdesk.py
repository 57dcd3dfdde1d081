"""A help desk with a ticket database behind tool calls: `--env examples/environments/helpdesk.py:HelpDesk`.

Ids, amounts, statuses and the refund policy differ from task to task and are found only by calls. There are
no hints for experience models: no facts, no annotator, no goal check, no expert.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import dreamgym as dg

FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kim", "Leo")
LAST = ("Byrne", "Cole", "Diaz", "Evans", "Fox", "Grant", "Hale", "Iqbal", "Jones", "Klein", "Lund", "Moss")
ITEMS = ("lamp", "chair", "kettle", "radio", "mirror", "carpet", "clock", "table", "fan", "heater")
STATES = ("late", "damaged", "lost")
REFUNDS = ("full", "part")
TASKS = {"train": 2_400, "validation": 400, "test": 600}
CALLS = {
    "list_customers": r"list_customers",
    "search_tickets": r'search_tickets customer="([^"]*)"',
    "get_ticket": r"get_ticket id=(\d+)",
    "lookup_order": r"lookup_order id=(\d+)",
    "get_policy": r"get_policy state=(\w+)",
    "refund": r"refund order=(\d+) amount=(\d+)",
    "set_status": r"set_status id=(\d+) status=(\w+)",
}


@dataclass(frozen=True)
class Ticket:
    id: str
    customer: str
    item: str
    order: str
    state: str
    amounts: tuple[str, str]
    """The full and the partial refund."""


@dataclass(frozen=True)
class Desk:
    """The facts of a task."""

    tickets: tuple[Ticket, ...]
    policy: tuple[str, ...]
    """The refund for each of `STATES`."""
    wanted: Ticket

    @staticmethod
    def of(seed: int) -> Desk:
        rng = random.Random(f"helpdesk:{seed}")
        names = zip(rng.sample(FIRST, 2), rng.sample(LAST, 2), strict=True)
        owners = [f"{first} {last}" for first, last in names]
        owners.append(owners[0])
        numbers, items = rng.sample(range(1000, 10000), 6), rng.sample(ITEMS, 3)
        tickets = []
        for place, owner in enumerate(owners):
            part = rng.randint(10, 45)
            amounts = (str(part + rng.randint(5, 50)), str(part))
            ids = str(numbers[place]), str(numbers[3 + place])
            tickets.append(Ticket(ids[0], owner, items[place], ids[1], rng.choice(STATES), amounts))
        policy = tuple(rng.choice(REFUNDS) for _ in STATES)
        return Desk(tuple(sorted(tickets, key=lambda ticket: ticket.id)), policy, rng.choice(tickets))

    def instruction(self) -> str:
        return f"Customer {self.wanted.customer} wants the refund for the {self.wanted.item}."

    def right_amount(self, ticket: Ticket) -> str:
        return ticket.amounts[REFUNDS.index(self.policy[STATES.index(ticket.state)])]


class HelpDesk:
    """Refund an order by the policy and close its ticket. A wrong refund ends the episode."""

    horizon = 15

    def __init__(self, seed: int) -> None:
        self.desk = Desk.of(seed)
        self.closed: set[str] = set()
        self.refunded = False
        self.shown = {"customer": {self.desk.wanted.customer}, "id": set(), "order": set(), "state": set()}

    @staticmethod
    def tasks() -> dict[str, list[dg.Task]]:
        """No database is in two splits."""
        found: dict[str, list[dg.Task]] = {}
        seen: set[tuple[Ticket, ...]] = set()
        seed = 0
        for split, count in TASKS.items():
            found[split] = []
            while len(found[split]) < count:
                desk, number = Desk.of(seed), seed
                seed += 1
                if desk.tickets in seen:
                    continue
                seen.add(desk.tickets)
                found[split].append(
                    dg.Task(
                        id=f"helpdesk-{number}",
                        instruction=desk.instruction(),
                        environment="helpdesk",
                        split=split,
                        parameters={"seed": number},
                    )
                )
        return found

    def start(self) -> str:
        calls = ", ".join(CALLS)
        return f"help desk ready. calls: {calls}. refund by policy, then set the ticket's status to closed."

    def admissible_actions(self) -> list[str]:
        """All calls with values that have been shown."""
        known = {kind: sorted(values) for kind, values in self.shown.items()}
        orders = [ticket for ticket in self.desk.tickets if ticket.order in self.shown["state"]]
        return [
            "list_customers",
            *(f'search_tickets customer="{name}"' for name in known["customer"]),
            *(f"get_ticket id={number}" for number in known["id"]),
            *(f"lookup_order id={number}" for number in known["order"]),
            *(f"get_policy state={state}" for state in sorted({ticket.state for ticket in orders})),
            *(f"refund order={ticket.order} amount={each}" for ticket in orders for each in ticket.amounts),
            *(f"set_status id={number} status=closed" for number in known["id"]),
        ]

    def step(self, action: str) -> tuple[str, float, bool]:
        for name, form in CALLS.items():
            match = re.fullmatch(form, action.strip(), re.ASCII)
            if match:
                reply = getattr(self, name)(*match.groups())
                return reply if isinstance(reply, tuple) else (reply, 0.0, False)
        return "error: unknown call", 0.0, False

    def list_customers(self) -> str:
        names = sorted({ticket.customer for ticket in self.desk.tickets})
        self.shown["customer"].update(names)
        return f"customers={', '.join(names)}"

    def search_tickets(self, customer: str) -> str:
        found = [ticket.id for ticket in self.desk.tickets if ticket.customer == customer]
        self.shown["id"].update(found)
        return f"tickets={', '.join(found)}" if found else "error: unknown customer"

    def get_ticket(self, number: str) -> str:
        ticket = self.ticket(number)
        if ticket is None:
            return "error: unknown ticket"
        self.shown["order"].add(ticket.order)
        status = "closed" if number in self.closed else "open"
        return f"ticket={number} item={ticket.item} order={ticket.order} status={status}"

    def lookup_order(self, number: str) -> str:
        ticket = self.of_order(number)
        if ticket is None:
            return "error: unknown order"
        self.shown["state"].add(number)
        full, part = ticket.amounts
        return f"order={number} state={ticket.state} full={full} part={part}"

    def get_policy(self, state: str) -> str:
        if state not in STATES:
            return "error: unknown state"
        return f"state={state} refund={self.desk.policy[STATES.index(state)]}"

    def refund(self, order: str, amount: str) -> str | tuple[str, float, bool]:
        ticket = self.of_order(order)
        if ticket is None:
            return "error: unknown order"
        if amount not in ticket.amounts:
            return "error: amount must be the full or the part refund"
        if self.refunded:
            return "error: already refunded"
        self.refunded = ticket == self.desk.wanted and amount == self.desk.right_amount(ticket)
        reply = f"refunded order={order} amount={amount}"
        return reply if self.refunded else (f"{reply}. complaint: this was wrong", 0.0, True)

    def set_status(self, number: str, status: str) -> str | tuple[str, float, bool]:
        ticket = self.ticket(number)
        if ticket is None:
            return "error: unknown ticket"
        if status not in ("open", "closed"):
            return "error: status must be open or closed"
        if status == "open":
            self.closed.discard(number)
        elif ticket == self.desk.wanted and not self.refunded:
            return "error: a refund is due"
        else:
            self.closed.add(number)
        won = self.desk.wanted.id in self.closed
        return f"ticket={number} status={status}", float(won), won

    def ticket(self, number: str) -> Ticket | None:
        return next((ticket for ticket in self.desk.tickets if ticket.id == number), None)

    def of_order(self, number: str) -> Ticket | None:
        return next((ticket for ticket in self.desk.tickets if ticket.order == number), None)
