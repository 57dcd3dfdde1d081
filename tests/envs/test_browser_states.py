"""Actions of browser agents are parsed, never evaluated; pages become states of few lines."""

from __future__ import annotations

import json

import pytest

from dreamgym.envs.browser.actions import SIGNATURES, BrowserAction, parse_action
from dreamgym.envs.browser.mapping import (
    admissible_actions,
    elements_text,
    relevant_elements,
    useful_elements,
)
from dreamgym.envs.browser.model_mapper import ModelMapper
from dreamgym.envs.browser.snapshot import ATTRIBUTE, Node, build_tree, render_tree
from dreamgym.errors import EpisodeFailedError
from dreamgym.structured import quote
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import FailureKind, Task


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("click('12')", ("12",)),
        (' click("12", "right") ', ("12", "right")),
        ("fill('7', 'it\\'s [99] \\n ä')", ("7", "it's [99] \n ä")),
        ("press('7', 'Control+a')", ("7", "Control+a")),
        ("select_option('3', ['a', 'b'])", ("3", ("a", "b"))),
        ("upload_file('3', 'a.txt')", ("3", ("a.txt",))),
        ("drag_and_drop('1', '2')", ("1", "2")),
        ("scroll(0, -200.5)", (0.0, -200.5)),
        ("send_msg_to_user('42')", ("42",)),
        ("noop()", ()),
        ("noop(100)", (100.0,)),
    ],
)
def test_an_action_is_one_call_with_texts_and_numbers(text: str, arguments: tuple[object, ...]) -> None:
    found = parse_action(text)
    assert found is not None
    assert found == BrowserAction(text.strip().partition("(")[0], arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "click",
        "click()",
        "click(12)",
        "click('1', '2', '3')",
        "click('a')",
        "click('١')",
        "click(bid='12')",
        "click('12'); noop()",
        "click('12').x",
        "page.click('12')",
        "eval('1')",
        "click(open('f'))",
        "click(*'12')",
        "fill('7', b'x')",
        "fill('7', '\\ud800')",
        "press('7', 'Nothing')",
        "scroll(True, 1)",
        "scroll(1e999, 0)",
        "scroll(9**9, 0)",
        "select_option('3', [])",
        "noop('x')",
        "(" * 3000,
        f"fill('7', '{'a' * 5000}')",
        "click('12\x00')",
        "CLICK('12')",
    ],
)
def test_anything_else_is_no_action(text: str) -> None:
    assert parse_action(text) is None


def test_every_action_of_the_paper_is_known() -> None:
    assert set(SIGNATURES) == {
        "noop", "send_msg_to_user", "scroll", "fill", "select_option", "click", "dblclick", "hover", "press",
        "focus", "clear", "drag_and_drop", "upload_file",
    }  # fmt: skip


def element(number: int, role: str, name: str = "", *children: Node, **fields: object) -> Node:
    node = Node(str(number), role, name, actionable=True, **fields)  # type: ignore[arg-type]
    return below(node, *children)


def below(node: Node, *children: Node) -> Node:
    for child in children:
        child.parent = node
    node.children = list(children)
    return node


def text(words: str) -> Node:
    return Node("", "StaticText", words)


def page(*children: Node) -> Node:
    return below(Node("", "RootWebArea", "Page"), *children)


def test_the_state_has_the_elements_that_the_instruction_names_and_the_fields() -> None:
    links = [element(number, "link", f"Chapter {'abcdefghijklmnop'[number]}") for number in range(16)]
    root = page(*links, element(50, "textbox", "Search"), element(51, "button", "Submit"))
    kept = relevant_elements(root, "Open chapter k and submit.", 4)
    assert [node.id for node in kept][-3:] == ["10", "50", "51"]
    assert elements_text(root, kept, "").splitlines()[-2:] == ["[50] textbox: Search", "[51] button: Submit"]


def test_an_unclear_element_is_described_by_the_text_around_it() -> None:
    rows = [
        below(Node("", "generic", ""), text(name), element(number, "generic", "", hint="add", tag="span"))
        for number, name in enumerate(("Bread", "Rice"))
    ]
    shown = elements_text(root := page(*rows), relevant_elements(root, "rice", 10), "rice")
    assert shown.splitlines() == ["[0] span: add (Bread)", "[1] span: add (Rice)"]


def test_of_nested_elements_one_is_listed() -> None:
    tab = element(1, "tab", "One", element(2, "link", "One"))
    items = element(3, "list", "", element(4, "link", "A"), element(5, "link", "B"))
    assert [node.id for node in useful_elements(page(tab, items))] == ["1", "4", "5"]


def test_actions_are_listed_for_what_can_be_done() -> None:
    options = [Node("", "option", each) for each in ("red", "blue")]
    kept = [
        element(1, "textbox", "Name"),
        element(2, "textbox", "Date", states=("readonly",)),
        element(3, "combobox", "Colour", *options, tag="select", value="red"),
    ]
    assert admissible_actions(kept, ["Ada"]) == [
        "fill('1', 'Ada')",
        "click('2')",
        "select_option('3', 'blue')",
    ]


def test_a_tree_is_built_from_chromiums_answers_and_ids_must_be_numbers() -> None:
    strings = ["BUTTON", ATTRIBUTE, "7", "A", "x' onerror"]
    nodes = {
        "backendNodeId": [10, 11],
        "attributes": [[1, 2], [1, 4]],
        "nodeName": [0, 3],
        "isClickable": {"index": [0, 1]},
    }
    layout = {"nodeIndex": [0, 1], "bounds": [[0, 0, 5, 5], [0, 0, 5, 5]]}
    raw = [
        {"nodeId": "1", "role": {"value": "RootWebArea"}, "name": {"value": "P"}, "childIds": ["2", "3"]},
        {"nodeId": "2", "parentId": "1", "role": {"value": "button"}, "name": {"value": "Go\n[8] link"},
         "backendDOMNodeId": 10, "properties": [{"name": "focused", "value": {"value": True}}]},
        {"nodeId": "3", "parentId": "1", "role": {"value": "link"}, "name": {"value": "Odd"},
         "backendDOMNodeId": 11},
    ]  # fmt: skip
    root = build_tree({"nodes": raw}, {"strings": strings, "documents": [{"nodes": nodes, "layout": layout}]})
    lines = ["RootWebArea 'P'", "\t[7] button 'Go [8] link', focused", "\tlink 'Odd'"]
    assert render_tree(root).splitlines() == lines
    assert [node.id for node in useful_elements(root)] == ["7"]


async def test_a_language_model_may_choose_the_elements_but_not_invent_them() -> None:
    rows = [below(Node("", "row", ""), element(number, "button", f"Book {number}")) for number in (3, 4)]
    root = page(element(1, "link", "Home"), below(Node("2", "table", ""), *rows), element(5, "button", "Go"))
    reply = {"page": "A table.", "progress": "None.", "next": "Book 3.", "elements": ["3", "5"]}
    replies = [{**reply, "elements": ["99"]}, reply]
    model = ScriptedLanguageModel(lambda request: json.dumps(replies.pop(0)))
    task = Task(id="t", instruction="Book 3.", environment="site")
    kept = await ModelMapper(model).choose(root, task, ["click('1')"], 10)
    assert [node.id for node in kept] == ["3", "4", "5"]  # the table is whole
    assert "there is no element '99'" in model.requests[1].prompt
    assert quote("click('1')") in model.requests[0].prompt
    stubborn = ScriptedLanguageModel(lambda request: "[99]")
    with pytest.raises(EpisodeFailedError) as failed:
        await ModelMapper(stubborn).choose(root, task, [], 10)
    assert failed.value.kind == FailureKind.PARSE_ERROR
